//! When items fire by the clock of a zone, above all when that clock is changed.

use crate::{at, firings, item};

#[test]
fn local_time_moves_with_the_season() {
    let line = "0 9 * * * task ?tz=Europe/Paris";
    assert_eq!(firings(line, "2026-01-15T00:00:00Z", 1), ["2026-01-15T08:00:00Z"]);
    assert_eq!(firings(line, "2026-07-15T00:00:00Z", 1), ["2026-07-15T07:00:00Z"]);
    assert!(item(line).matches(at("2026-07-15T07:00:30Z")));
}

#[test]
fn the_weekday_is_that_of_the_time_zone() {
    assert_eq!(firings("0 1 * * mon task ?tz=Asia/Tokyo", "2026-01-01T00:00:00Z", 1), ["2026-01-04T16:00:00Z"]);
}

#[test]
fn skipped_time_fires_at_the_first_instant_after_the_gap() {
    // Paris, 29 March 2026: 02:00 becomes 03:00 at 01:00 UTC.
    let fired = firings("30 2 * * * task ?tz=Europe/Paris", "2026-03-28T00:00:00Z", 3);
    assert_eq!(fired, ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]);
    // New York, 8 March 2026: 02:00 becomes 03:00 at 07:00 UTC.
    let fired = firings("30 2 * * * task ?tz=America/New_York", "2026-03-08T00:00:00Z", 2);
    assert_eq!(fired, ["2026-03-08T07:00:00Z", "2026-03-09T06:30:00Z"]);
}

#[test]
fn several_skipped_times_and_a_regular_one_are_one_firing() {
    let fired = firings("0,20,40 2,3 * * * task ?tz=Europe/Paris", "2026-03-29T00:00:00Z", 4);
    assert_eq!(fired, ["2026-03-29T01:00:00Z", "2026-03-29T01:20:00Z", "2026-03-29T01:40:00Z", "2026-03-30T00:00:00Z"]);
}

#[test]
fn a_skipped_time_of_an_hourly_item_fires_after_the_gap_too() {
    let fired = firings("30 * * * * task ?tz=Europe/Paris", "2026-03-29T00:00:00Z", 3);
    assert_eq!(fired, ["2026-03-29T00:30:00Z", "2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"]);
}

#[test]
fn repeated_time_fires_the_first_time_only() {
    // Paris, 25 October 2026: 03:00 becomes 02:00 at 01:00 UTC.
    let fired = firings("30 2 * * * task ?tz=Europe/Paris", "2026-10-24T12:00:00Z", 2);
    assert_eq!(fired, ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]);
    // Asked from within the second pass, where 02:30 is still to come on the clock.
    assert_eq!(firings("30 2 * * * task ?tz=Europe/Paris", "2026-10-25T01:10:00Z", 1), ["2026-10-26T01:30:00Z"]);
    assert!(!item("30 2 * * * task ?tz=Europe/Paris").matches(at("2026-10-25T01:30:00Z")));
    let fired = firings("30 1 * * * task ?tz=America/New_York", "2026-11-01T00:00:00Z", 2);
    assert_eq!(fired, ["2026-11-01T05:30:00Z", "2026-11-02T06:30:00Z"]);
}

#[test]
fn item_with_the_hour_left_open_fires_in_both_passes() {
    let hourly = firings("30 * * * * task ?tz=Europe/Paris", "2026-10-24T23:00:00Z", 5);
    assert_eq!(
        hourly,
        [
            "2026-10-24T23:30:00Z",
            "2026-10-25T00:30:00Z",
            "2026-10-25T01:30:00Z",
            "2026-10-25T02:30:00Z",
            "2026-10-25T03:30:00Z"
        ]
    );
    let item = item("*/5 0-23 * * * task ?tz=Europe/Paris");
    let from = at("2026-10-24T22:00:00Z");
    let times: Vec<_> = item.fire_times(from).take(80).collect();
    assert!(times.windows(2).all(|pair| (pair[1] - pair[0]).num_minutes() == 5));
    let back: Vec<_> = item.fire_times_before(times[79]).take(79).collect();
    assert!(back.iter().eq(times[..79].iter().rev()));
}

#[test]
fn half_hour_changes_of_lord_howe() {
    // 4 October 2026: 02:00 becomes 02:30 at 15:30 UTC of the 3rd.
    let fired = firings("15 2 * * * task ?tz=Australia/Lord_Howe", "2026-10-03T00:00:00Z", 2);
    assert_eq!(fired, ["2026-10-03T15:30:00Z", "2026-10-04T15:15:00Z"]);
    // 5 April 2026: 02:00 becomes 01:30 at 15:00 UTC of the 4th.
    let fired = firings("45 1 * * * task ?tz=Australia/Lord_Howe", "2026-04-04T00:00:00Z", 2);
    assert_eq!(fired, ["2026-04-04T14:45:00Z", "2026-04-05T15:15:00Z"]);
    let fired = firings("45 * * * * task ?tz=Australia/Lord_Howe", "2026-04-04T14:00:00Z", 3);
    assert_eq!(fired, ["2026-04-04T14:45:00Z", "2026-04-04T15:15:00Z", "2026-04-04T16:15:00Z"]);
}

#[test]
fn the_day_that_apia_skipped_fires_at_the_start_of_the_next_day() {
    // There was no 30 December 2011: it became the 31st at 10:00 UTC of the 30th.
    let fired = firings("0 8 30 12 * task ?tz=Pacific/Apia", "2011-01-01T00:00:00Z", 2);
    assert_eq!(fired, ["2011-12-30T10:00:00Z", "2012-12-29T18:00:00Z"]);
    let daily = firings("0 0 * * * task ?tz=Pacific/Apia", "2011-12-29T00:00:00Z", 3);
    assert_eq!(daily, ["2011-12-29T10:00:00Z", "2011-12-30T10:00:00Z", "2011-12-31T10:00:00Z"]);
    let noon = firings("0 12 * * * task ?tz=Pacific/Apia", "2011-12-29T00:00:00Z", 3);
    assert_eq!(noon, ["2011-12-29T22:00:00Z", "2011-12-30T10:00:00Z", "2011-12-30T22:00:00Z"]);
}

#[test]
fn clocks_that_were_off_by_seconds_fire_by_them() {
    // Until 1911, Paris was 9 minutes and 21 seconds ahead.
    let line = "0 12 * * * task ?tz=Europe/Paris";
    assert_eq!(firings(line, "1900-01-01T00:00:00Z", 1), ["1900-01-01T11:50:39Z"]);
    assert!(item(line).matches(at("1900-01-01T11:50:00Z")));
    assert_eq!(firings(line, "9999-07-01T00:00:00Z", 1).len(), 1);
}
