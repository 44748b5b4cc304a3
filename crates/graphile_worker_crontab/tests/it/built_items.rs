//! Schedules and items that are made by code.

use crate::{at, item};
use chrono::Weekday;
use graphile_worker_crontab::{Crontab, CrontabFill, CrontabJobKeyMode, Schedule, Tz};
use serde_json::{Value, json};

fn object(value: Value) -> Option<serde_json::Map<String, Value>> {
    value.as_object().cloned()
}

#[test]
fn schedules_are_built_by_methods_that_name_them() {
    for (schedule, fields) in [
        (Ok(Schedule::every_minute()), "* * * * *"),
        (Schedule::every_n_minutes(20), "*/20 * * * *"),
        (Schedule::every_n_minutes(1), "* * * * *"),
        (Schedule::hourly_at(5), "5 * * * *"),
        (Schedule::daily_at(4, 30), "30 4 * * *"),
        (Schedule::weekly_on(Weekday::Sun, 4, 30), "30 4 * * 0"),
        (Schedule::monthly_on(31, 0, 0), "0 0 31 * *"),
        (Schedule::yearly_on(2, 29, 0, 0), "0 0 29 2 *"),
    ] {
        assert_eq!(schedule.unwrap().to_string(), fields);
    }
}

#[test]
fn numbers_out_of_range_are_rejected_with_the_range() {
    for (schedule, sentence) in [
        (Schedule::every_n_minutes(0), "the step of the minutes is 0, expected 1–59"),
        (Schedule::every_n_minutes(60), "the step of the minutes is 60, expected 1–59"),
        (Schedule::hourly_at(60), "the minute is 60, expected 0–59"),
        (Schedule::daily_at(24, 0), "the hour is 24, expected 0–23"),
        (Schedule::monthly_on(0, 0, 0), "the day of the month is 0, expected 1–31"),
        (Schedule::yearly_on(13, 1, 0, 0), "the month is 13, expected 1–12"),
        (Schedule::yearly_on(2, 30, 0, 0), "the day of the month is 30, expected 1–29 in month 2"),
        (Schedule::yearly_on(4, 31, 0, 0), "the day of the month is 31, expected 1–30 in month 4"),
    ] {
        assert_eq!(schedule.unwrap_err().to_string(), sentence);
    }
}

#[test]
fn an_item_built_in_code_prints_as_a_line_with_the_same_meaning() {
    let mut made = Crontab::new(Schedule::daily_at(4, 30).unwrap(), "email");
    made.options.id = Some("e1".to_owned());
    made.options.fill = Some(CrontabFill::hours(5));
    made.options.fill_limit = Some(1);
    made.options.job_key = Some("a b&c=%+é\u{a0}".to_owned());
    made.options.job_key_mode = Some(CrontabJobKeyMode::PreserveRunAt);
    made.options.tz = Some(Tz::Etc__GMTPlus5);
    made.payload = object(json!({"a": "x\u{2028}\n}", "b": [1.5, null]}));
    made.check().unwrap();
    let line = made.to_string();
    assert_eq!(
        line,
        "30 4 * * * email ?id=e1&fill=5h&fillLimit=1&jobKey=a%20b%26c%3D%25%2B%C3%A9%C2%A0&jobKeyMode=preserve_run_at&tz=Etc/GMT%2B5 \
         {\"a\":\"x\\u2028\\n}\",\"b\":[1.5,null]}"
    );
    assert_eq!(item(&line), made);
    assert!(made.matches(at("2026-01-01T09:30:59Z")));
}

#[test]
fn an_item_that_no_line_can_express_is_rejected() {
    let mut made = Crontab::new(Schedule::every_minute(), "email");
    made.check().unwrap();
    made.options.id = Some("a b".to_owned());
    made.options.queue = Some(String::new());
    made.options.max_attempts = Some(0);
    made.options.fill_limit = Some(3);
    made.options.job_key = Some("a\nb".to_owned());
    made.payload = object(json!({"a": "\0"}));
    assert_eq!(
        made.check().unwrap_err().problems,
        [
            "id is `a b`, expected a letter or `_`, then letters, digits, `_` or `-`",
            "queue is ``, expected letters, digits, `_`, `-` or `:`",
            r"jobKey is `a\nb`: line breaks are not allowed",
            "max is `0`, expected a number from 1 to 32767",
            "option `fillLimit` requires `fill`, which is not set",
            "payload contains a NUL character, which the database does not accept",
        ]
    );
    let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
    made = Crontab::new(Schedule::every_minute(), "email");
    made.payload = object(json!({"a": deep}));
    assert!(made.check().unwrap_err().to_string().contains("nested more than 100 levels deep"));
}
