//! The fields of a schedule.

use graphile_worker_crontab::Schedule;

fn schedule(fields: &str) -> Schedule {
    fields.parse().unwrap_or_else(|error| panic!("{fields}: {error}"))
}

fn refusal(fields: &str) -> String {
    fields.parse::<Schedule>().expect_err(fields).to_string()
}

#[test]
fn lists_ranges_and_steps_are_sets() {
    for (fields, same) in [
        ("1,2,3 * * * *", "1-3 * * * *"),
        ("3,1,2,2 * * * *", "1-3 * * * *"),
        ("*/15 * * * *", "0,15,30,45 * * * *"),
        ("* */10 * * *", "* 0,10,20 * * *"),
        ("* * */10 * *", "* * 1,11,21,31 * *"),
        ("* * * */5 *", "* * * 1,6,11 *"),
        ("* * * * */2", "* * * * 0,2,4,6"),
        ("*/99999999999999999999 * * * *", "0 * * * *"),
        ("007,0000000000000000000000000000059 * * * *", "7,59 * * * *"),
        ("0-59 0-23 1-31 1-12 0-6", "* * * * *"),
        ("*,5 */1 * * *", "* * * * *"),
        ("10-30/10,50 * * * *", "10,20,30,50 * * * *"),
        ("10-12/60 * * * *", "10 * * * *"),
    ] {
        assert_eq!(schedule(fields), schedule(same), "{fields}");
    }
}

#[test]
fn seven_is_sunday_too() {
    for (fields, same) in [
        ("* * * * 7", "* * * * 0"),
        ("* * * * 5-7", "* * * * 0,5,6"),
        ("* * * * 1-7", "* * * * *"),
        ("* * * * 0-7", "* * * * *"),
    ] {
        assert_eq!(schedule(fields), schedule(same), "{fields}");
    }
    assert_eq!(refusal("* * * * 7-8"), "day of the week is `8` in `7-8`, expected 0–7 or sun–sat");
}

#[test]
fn months_and_weekdays_have_names_in_any_case() {
    for (fields, same) in [
        ("* * * jan *", "* * * 1 *"),
        ("* * * JAN,Feb-apr,12 *", "* * * 1-4,12 *"),
        ("* * * * mon-fri", "* * * * 1-5"),
        ("* * * * sun-sat", "* * * * *"),
        ("* * * * fri-sun", "* * * * 5-7"),
        ("* * * * Tue-6/2", "* * * * 2,4,6"),
    ] {
        assert_eq!(schedule(fields), schedule(same), "{fields}");
    }
    for fields in ["* * * mon *", "* * * * jan", "* * jan * *", "* * * * monday", "* * * nov-feb *", "* * * * sun-sun"]
    {
        refusal(fields);
    }
}

#[test]
fn values_out_of_range_and_descending_ranges_are_rejected() {
    assert_eq!(refusal("60 * * * *"), "minute is `60`, expected 0–59");
    assert_eq!(refusal("* 24 * * *"), "hour is `24`, expected 0–23");
    assert_eq!(refusal("* * 0 * *"), "day of the month is `0`, expected 1–31");
    assert_eq!(refusal("* * * 13 *"), "month is `13`, expected 1–12 or jan–dec");
    assert_eq!(
        refusal("60 0 0 1 0 8"),
        "second is `60`, expected 0–59; month is `0`, expected 1–12 or jan–dec; day of the week is `8`, expected 0–7 or sun–sat"
    );
    assert_eq!(refusal("5-5 * * * *"), "minute range is `5-5`: its end must be greater than its start");
    assert_eq!(refusal("5-1 * * * *"), "minute range is `5-1`: its end must be greater than its start");
    assert_eq!(refusal("*/0 * * * *"), "step of the minute is `0`, expected at least 1");
    assert_eq!(refusal("1,,2 * * * *"), "minute has an empty list element, expected 0–59");
    assert_eq!(
        refusal("5/15 * * * *"),
        "minute is `5/15`, expected `*` or a range before the step, as in `*/5` or `10-30/5`"
    );
    for fields in
        ["-1 * * * *", "1-2-3 * * * *", "*-5 * * * *", "** * * * *", "*/2/3 * * * *", "1/2-3 * * * *", "é * * * *"]
    {
        refusal(fields);
    }
    assert_eq!(
        refusal("* * * *"),
        "`* * * *` has 4 fields, expected 5, or 6 with seconds: minute, hour, day of the month, month and day of the week"
    );
}

#[test]
fn fields_are_printed_in_their_shortest_form() {
    for (fields, printed) in [
        ("0,15,30,45 0-23 1,11,21,31 1-3 1-5", "*/15 * */10 1-3 1-5"),
        ("1,2 5 1 1 0", "1,2 5 1 1 0"),
        ("0 0,12 * * 7", "0 */12 * * 0"),
        ("0-2,5,8-10,59 * * * *", "0-2,5,8-10,59 * * * *"),
        ("0 */5 * * * *", "0 */5 * * * *"),
    ] {
        assert_eq!(schedule(fields).to_string(), printed);
        assert_eq!(schedule(printed), schedule(fields));
    }
    assert_eq!(format!("{:?}", schedule("@daily")), "Schedule(0 0 * * *)");
}
