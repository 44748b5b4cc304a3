//! Whole lines and files: the examples of the documentation, and what separates and skips lines.

use crate::{at, complaint, firings, item};
use chrono::Weekday;
use graphile_worker_crontab::{Crontab, CrontabFill, CrontabOptions, Schedule, parse_crontab};
use serde_json::json;

#[test]
fn weekly_email_is_sent_on_mondays_at_half_past_four() {
    let expected = Crontab::new(Schedule::weekly_on(Weekday::Mon, 4, 30).unwrap(), "send_weekly_email");
    assert_eq!(item("30 4 * * 1 send_weekly_email"), expected);
    let fired = firings("30 4 * * 1 send_weekly_email", "2026-01-01T00:00:00Z", 2);
    assert_eq!(fired, ["2026-01-05T04:30:00Z", "2026-01-12T04:30:00Z"]);
}

#[test]
fn weekly_email_with_options_and_payload() {
    let found = item("30 4 * * 1 send_weekly_email ?fill=2d&max=10 {onboarding:false}");
    let options =
        CrontabOptions { fill: Some(CrontabFill::days(2)), max_attempts: Some(10), ..CrontabOptions::default() };
    assert_eq!(found.options, options);
    assert_eq!(found.payload.map(serde_json::Value::Object), Some(json!({"onboarding": false})));
}

#[test]
fn rollup_runs_every_four_hours_on_the_hour() {
    let hours = firings("0 */4 * * * rollup", "2026-01-01T00:00:00Z", 6);
    let expected = ["04", "08", "12", "16", "20"].map(|hour| format!("2026-01-01T{hour}:00:00Z"));
    assert_eq!(hours[..5], expected);
    assert_eq!(hours[5], "2026-01-02T00:00:00Z");
}

#[test]
fn the_diagram_of_the_documentation_consists_of_comments() {
    let diagram =
        "# ┌───────────── UTC minute (0 - 59)\n# │ ┌─── UTC hour (0 - 23)\n# * * * * * task ?opts {payload}\n";
    assert_eq!(parse_crontab(diagram), Ok(vec![]));
    assert!(complaint("* * * * * task ?opts {payload}").contains("unknown option `opts`"));
}

#[test]
fn blank_lines_comments_and_any_white_space_around_are_skipped() {
    let crontab = "\u{feff}\n   \t\n  # a comment\r\n\u{a0}*\t*\u{3000}*  * * one\u{2003}?max=2  {a: 1} \t\r\n\r\n#\n* * * * * two";
    let items = parse_crontab(crontab).unwrap();
    let tasks: Vec<&str> = items.iter().map(Crontab::identifier).collect();
    assert_eq!(tasks, ["one", "two"]);
    assert_eq!(items[0].options.max_attempts, Some(2));
    assert!(items[0].payload.is_some());
}

#[test]
fn the_next_line_character_is_not_white_space() {
    assert!(complaint("* * * * *\u{85}task").contains("column 9"));
}

#[test]
fn line_break_characters_may_stand_between_fields_and_not_after_the_task() {
    assert_eq!(item("*\r*\u{2028}* * *\u{2029}task").task_identifier, "task");
    assert!(complaint("* * * * * task {a: '\u{2028}'}").contains(r"unexpected line break `\u{2028}`"));
    assert!(complaint("* * * * * task\r{}").contains(r"unexpected line break `\r`"));
}

#[test]
fn task_identifiers_take_colons_slashes_and_hyphens() {
    for task in ["a", "_", "user:email", "reports/daily-sum_2", "mon"] {
        assert_eq!(item(&format!("* * * * * {task}")).task_identifier, task);
    }
    for task in ["1a", "-a", ":a", "a.b", "é", "a?b"] {
        assert!(parse_crontab(&format!("* * * * * {task}")).is_err(), "{task}");
    }
}

#[test]
fn identifier_is_the_id_or_else_the_task() {
    let crontab = "* * * * * email\n* * * * * email ?id=other\n";
    let identifiers: Vec<String> =
        parse_crontab(crontab).unwrap().iter().map(|item| item.identifier().to_owned()).collect();
    assert_eq!(identifiers, ["email", "other"]);
}

#[test]
fn five_fields_and_a_task_take_precedence_over_six_fields() {
    for line in ["* * * * * mon", "* * * * * mon ?max=2", "* * * * * mon {a: 1}", "* * * * * sun-sat/2"] {
        assert!(!item(line).schedule.has_seconds(), "{line}");
    }
    let found = item("* * * * * mon task");
    assert!(found.schedule.has_seconds());
    assert_eq!(found.task_identifier, "task");
}

#[test]
fn the_first_of_six_fields_is_seconds() {
    let fired = firings("*/20 5 4 * * * task", "2026-01-01T04:05:10Z", 3);
    assert_eq!(fired, ["2026-01-01T04:05:20Z", "2026-01-01T04:05:40Z", "2026-01-02T04:05:00Z"]);
    assert!(item("30 * * * * * task").matches(at("2026-01-01T00:00:30.9Z")));
    assert!(!item("30 * * * * * task").matches(at("2026-01-01T00:00:31Z")));
}

#[test]
fn shorthands_stand_for_five_fields() {
    for (shorthand, fields) in [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@ANNUALLY", "0 0 1 1 *"),
    ] {
        let line = format!("{shorthand} task ?max=3 {{a: 1}}");
        assert_eq!(item(&line), item(&format!("{fields} task ?max=3 {{a: 1}}")));
        assert_eq!(shorthand.parse::<Schedule>(), fields.parse());
    }
}

#[test]
fn a_single_item_is_parsed_from_a_text_with_exactly_one() {
    assert_eq!(item("# a comment\n\n* * * * * task\n").task_identifier, "task");
    let none = "# a comment".parse::<Crontab>().unwrap_err().to_string();
    assert_eq!(none, "crontab line 1, column 1: expected one item, found none\n  # a comment\n  ^");
    let two = "* * * * * a\n* * * * * b".parse::<Crontab>().unwrap_err().to_string();
    assert!(two.contains("expected one item, found 2"), "{two}");
}
