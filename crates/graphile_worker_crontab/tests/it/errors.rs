//! The words of the errors, whole.

use crate::complaint;
use graphile_worker_crontab::parse_crontab;

fn says(crontab: &str, expected: &[&str]) {
    assert_eq!(complaint(crontab), expected.join("\n"));
}

#[test]
fn value_outside_is_underlined() {
    says(
        "# weekly\n\n61 4 * * 1 send_weekly_email\n",
        &["crontab line 3, column 1: minute is `61`, expected 0–59", "  61 4 * * 1 send_weekly_email", "  ^^"],
    );
}

#[test]
fn part_of_a_list_is_underlined_alone() {
    says(
        "\t0 1,5-3,9 * * *\ttask\r\n",
        &[
            "crontab line 1, column 6: hour range is `5-3`: its end must be greater than its start",
            "  0 1,5-3,9 * * * task",
            "      ^^^",
        ],
    );
}

#[test]
fn all_errors_of_a_file_are_reported_at_once() {
    says(
        "60 * * 13 * one ?max=0&prio=2 {a\n* * * * * two\nnonsense\n",
        &[
            "crontab line 1, column 1: minute is `60`, expected 0–59",
            "  60 * * 13 * one ?max=0&prio=2 {a",
            "  ^^",
            "crontab line 1, column 8: month is `13`, expected 1–12 or jan–dec",
            "  60 * * 13 * one ?max=0&prio=2 {a",
            "         ^^",
            "crontab line 1, column 22: max is `0`, expected a number from 1 to 32767",
            "  60 * * 13 * one ?max=0&prio=2 {a",
            "                       ^",
            "crontab line 1, column 24: unknown option `prio`, expected one of id, fill, fillLimit, max, queue, priority, jobKey, jobKeyMode, tz",
            "  60 * * 13 * one ?max=0&prio=2 {a",
            "                         ^^^^",
            "crontab line 1, column 31: payload is not closed: missing `}` at the end of the line",
            "  60 * * 13 * one ?max=0&prio=2 {a",
            "                                ^",
            "crontab line 3, column 1: 0 schedule fields before `nonsense`, expected 5 (minute, hour, day of the month, month and day of the week) and then the task",
            "  nonsense",
            "  ^^^^^^^^",
        ],
    );
}

#[test]
fn too_few_fields_are_counted() {
    says(
        "30 4 * * send_weekly_email ?max=2",
        &[
            "crontab line 1, column 10: 4 schedule fields before `send_weekly_email`, expected 5 (minute, hour, day of the month, month and day of the week) and then the task",
            "  30 4 * * send_weekly_email ?max=2",
            "           ^^^^^^^^^^^^^^^^^",
        ],
    );
    says(
        "* * *",
        &[
            "crontab line 1, column 5: 3 schedule fields, expected 5 (minute, hour, day of the month, month and day of the week) and then the task",
            "  * * *",
            "      ^",
        ],
    );
    says(
        "30 4 * * 1",
        &["crontab line 1, column 11: the task is missing after the schedule", "  30 4 * * 1", "            ^"],
    );
}

#[test]
fn a_word_in_place_of_a_field_is_reported() {
    says(
        "30 four * * 1 task",
        &[
            "crontab line 1, column 4: hour is `four`, expected 0–23, `*`, `*/n`, a range `a-b`, or a comma-separated list of these",
            "  30 four * * 1 task",
            "     ^^^^",
        ],
    );
}

#[test]
fn repeated_identifier_names_both_lines() {
    says(
        "0 1 * * * email\n\n0 2 * * * email {a: 1}",
        &[
            "crontab line 3, column 11: identifier `email` is already used in line 1: give one of the items another with `?id=…`",
            "  0 2 * * * email {a: 1}",
            "            ^^^^^",
        ],
    );
    says(
        "0 1 * * * a ?id=x\n0 2 * * * b ?max=2&id=x",
        &[
            "crontab line 2, column 23: identifier `x` is already used in line 1: give one of the items another with `?id=…`",
            "  0 2 * * * b ?max=2&id=x",
            "                        ^",
        ],
    );
}

#[test]
fn options_without_a_question_mark_are_reported() {
    says(
        "0 1 * * * email fill=2d",
        &[
            "crontab line 1, column 17: options are `fill=2d`, expected a `?` before them",
            "  0 1 * * * email fill=2d",
            "                  ^^^^^^^",
        ],
    );
    says(
        "0 1 * * * email?fill=2d",
        &["crontab line 1, column 16: missing space before `?`", "  0 1 * * * email?fill=2d", "                 ^"],
    );
    says(
        "0 1 * * * email ? {}",
        &["crontab line 1, column 17: missing options after `?`", "  0 1 * * * email ? {}", "                  ^"],
    );
    says(
        "0 1 * * * email ?max=1 & id=x",
        &[
            "crontab line 1, column 24: unexpected `&`, expected `?options`, `{payload}` or the end of the line",
            "  0 1 * * * email ?max=1 & id=x",
            "                         ^",
        ],
    );
}

#[test]
fn misspelt_option_is_recognised() {
    says(
        "0 1 * * * email ?fil=2d",
        &[
            "crontab line 1, column 18: unknown option `fil`, did you mean `fill`?",
            "  0 1 * * * email ?fil=2d",
            "                   ^^^",
        ],
    );
}

#[test]
fn a_payload_that_is_not_a_json5_object_is_reported() {
    says(
        "0 1 * * * email [1, 2]",
        &[
            "crontab line 1, column 17: payload is `[1, 2]`, expected an object like `{key: 'value'}`",
            "  0 1 * * * email [1, 2]",
            "                  ^^^^^^",
        ],
    );
    says(
        "0 1 * * * email {é: 1, b 2}",
        &[
            "crontab line 1, column 26: payload is not JSON5 at `2`: expected colon",
            "  0 1 * * * email {é: 1, b 2}",
            "                           ^",
        ],
    );
    says(
        "0 1 * * * email {a: 'b}",
        &["crontab line 1, column 23: payload is incomplete", "  0 1 * * * email {a: 'b}", "                        ^"],
    );
    says(
        "0 1 * * * email {a: 1} ?max=2",
        &[
            "crontab line 1, column 24: options must come before the payload",
            "  0 1 * * * email {a: 1} ?max=2",
            "                         ^^^^^^",
        ],
    );
}

#[test]
fn unknown_shorthand_lists_the_known_ones() {
    says(
        "@reboot task",
        &[
            "crontab line 1, column 1: schedule is `@reboot`, expected one of @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually",
            "  @reboot task",
            "  ^^^^^^^",
        ],
    );
}

#[test]
fn long_lines_are_shown_in_part() {
    let line = format!("0 1 * * * email {{text: '{}', b 2, c: '{}'}}", "x".repeat(300), "y".repeat(300));
    says(
        &line,
        &[
            "crontab line 1, column 330: payload is not JSON5 at `2`: expected colon",
            &format!("  …{}', b 2, c: '{}…", "x".repeat(45), "y".repeat(43)),
            &format!("  {}^", " ".repeat(51)),
        ],
    );
}

#[test]
fn errors_are_also_available_one_by_one() {
    let error = parse_crontab("x\n* * * * * a\n* * * * * a").unwrap_err();
    let places: Vec<(usize, usize)> = error.errors.iter().map(|error| (error.line, error.column)).collect();
    assert_eq!(places, [(1, 1), (3, 11)]);
    assert!(error.errors[1].message.starts_with("identifier `a` is already used in line 2"));
}

#[test]
fn text_of_very_many_errors_ends_with_their_number() {
    let error = parse_crontab(&"x\n".repeat(1000)).unwrap_err();
    assert_eq!(error.errors.len(), 1000);
    let text = error.to_string();
    assert_eq!(text.lines().count(), 301);
    assert!(text.ends_with("\nand 900 more"));
}

#[test]
fn a_suspicious_item_is_a_warning_with_its_place() {
    let warned = |text: &str| -> Vec<String> {
        graphile_worker_crontab::crontab_warnings(text).iter().map(ToString::to_string).collect()
    };
    let text = "*/90 * * * * a\n0 */24,3 * * * b\n0 0 1-3/7 * * c\n0 0 31 feb * d\n0 0 31 4,6,9,11 * e\n";
    let warnings = warned(text);
    assert_eq!(warnings.len(), 5, "{warnings:#?}");
    assert_eq!(
        warnings[0],
        "crontab line 1, column 1: step 90 exceeds the range 0–59 of the minute: it only fires at 0, not every 90\n  */90 * * * * a\n  ^^^^"
    );
    assert!(warnings[1].starts_with("crontab line 2, column 3: step 24 exceeds the range 0–23 of the hour"));
    assert!(warnings[2].contains("the range 1–3 of the day of the month"));
    assert!(warnings[3].starts_with("crontab line 4, column 1: it never fires"), "{}", warnings[3]);
    for fine in [
        "*/59 * * * * a",
        "0 0 29 2 * a",
        "0 0 31 2 mon a",
        "@daily a",
        "# */90",
        "61 * * * * broken",
        "*/30 * * * * * a",
    ] {
        assert_eq!(warned(fine), Vec::<String>::new(), "{fine}");
    }
}
