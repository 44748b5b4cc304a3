//! When items fire, by UTC.

use crate::{at, firings, item};

#[test]
fn restricted_days_and_weekdays_are_either_or() {
    let fired = firings("0 0 13 * 5 task", "2026-02-07T00:00:00Z", 4);
    assert_eq!(fired, ["2026-02-13T00:00:00Z", "2026-02-20T00:00:00Z", "2026-02-27T00:00:00Z", "2026-03-06T00:00:00Z"]);
    let fired = firings("0 0 15 * 5 task", "2026-02-07T00:00:00Z", 2);
    assert_eq!(fired, ["2026-02-13T00:00:00Z", "2026-02-15T00:00:00Z"]);
}

#[test]
fn days_that_are_all_listed_do_not_count_as_restricted() {
    for days in ["*", "*/1", "1-31"] {
        let fired = firings(&format!("0 0 {days} * 5 task"), "2026-02-07T00:00:00Z", 2);
        assert_eq!(fired, ["2026-02-13T00:00:00Z", "2026-02-20T00:00:00Z"], "{days}");
    }
    for weekdays in ["*", "*/1", "1-7", "0-6"] {
        let fired = firings(&format!("0 0 13 * {weekdays} task"), "2026-02-07T00:00:00Z", 2);
        assert_eq!(fired, ["2026-02-13T00:00:00Z", "2026-03-13T00:00:00Z"], "{weekdays}");
    }
}

#[test]
fn leap_days_are_found_across_a_century() {
    assert_eq!(firings("0 0 29 2 * task", "2026-01-01T00:00:00Z", 1), ["2028-02-29T00:00:00Z"]);
    assert_eq!(firings("0 0 29 2 * task", "1896-02-29T00:00:00Z", 1), ["1904-02-29T00:00:00Z"]);
    assert_eq!(item("0 0 29 2 * task").previous_before(at("1904-02-29T00:00:00Z")), Some(at("1896-02-29T00:00:00Z")));
}

#[test]
fn a_schedule_that_never_fires_is_not_an_error() {
    let never = item("0 0 31 2,4 * task");
    assert_eq!(never.next_after(at("2026-01-01T00:00:00Z")), None);
    assert_eq!(never.previous_before(at("2026-01-01T00:00:00Z")), None);
    assert!(!never.matches(at("2026-02-28T00:00:00Z")));
}

#[test]
fn next_is_strictly_after_and_previous_strictly_before() {
    let minutely = item("* * * * * task");
    for (instant, previous, next) in [
        ("2026-01-01T00:00:00Z", "2025-12-31T23:59:00Z", "2026-01-01T00:01:00Z"),
        ("2026-01-01T00:00:00.001Z", "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"),
        ("1969-12-31T23:59:59.5Z", "1969-12-31T23:59:00Z", "1970-01-01T00:00:00Z"),
    ] {
        assert_eq!(minutely.next_after(at(instant)), Some(at(next)));
        assert_eq!(minutely.previous_before(at(instant)), Some(at(previous)));
    }
}

#[test]
fn item_matches_the_whole_minute() {
    let weekly = item("30 4 * * 1 task");
    assert!(weekly.matches(at("2026-01-05T04:30:00Z")));
    assert!(weekly.matches(at("2026-01-05T04:30:59.999Z")));
    assert!(!weekly.matches(at("2026-01-05T04:31:00Z")));
    assert!(!weekly.matches(at("2026-01-06T04:30:00Z")));
}

#[test]
fn newest_missed_times_come_first() {
    let item = item("0 */6 * * * task");
    let from = at("2026-01-01T06:00:00Z");
    let missed: Vec<_> =
        item.fire_times_before(at("2026-01-02T00:00:00Z")).take_while(|fired| *fired >= from).collect();
    assert_eq!(missed, [at("2026-01-01T18:00:00Z"), at("2026-01-01T12:00:00Z"), at("2026-01-01T06:00:00Z")]);
}

#[test]
fn ends_of_time_are_reached_without_a_panic() {
    use chrono::{DateTime, Utc};
    for line in [
        "* * * * * a",
        "* * * * * * a",
        "0 0 29 2 * a",
        "* * * * * a ?tz=Asia/Tokyo",
        "5 4 * * 1 a ?tz=America/New_York",
    ] {
        let item = item(line);
        for end in [DateTime::<Utc>::MIN_UTC, DateTime::<Utc>::MAX_UTC] {
            let _ = (item.next_after(end), item.previous_before(end), item.matches(end));
        }
        assert_eq!(item.next_after(DateTime::<Utc>::MAX_UTC), None);
        assert_eq!(item.previous_before(DateTime::<Utc>::MIN_UTC), None);
    }
}
