//! The options of a line.

use crate::{complaint, item};
use graphile_worker_crontab::{CrontabFill, CrontabJobKeyMode, CrontabOptions, Tz};

fn options(text: &str) -> CrontabOptions {
    item(&format!("* * * * * task ?{text}")).options
}

fn refusal(text: &str) -> String {
    complaint(&format!("* * * * * task ?{text}")).lines().next().unwrap().to_owned()
}

#[test]
fn every_option_is_read() {
    let all = "id=my-id_2&fill=4w3d2h1m&fillLimit=5&max=32767&queue=a:b-c&priority=-32768&jobKey=k&jobKeyMode=preserve_run_at&tz=Europe/Paris";
    let expected = CrontabOptions {
        id: Some("my-id_2".to_owned()),
        fill: Some(CrontabFill::new(4, 3, 2, 1, 0)),
        fill_limit: Some(5),
        max_attempts: Some(32767),
        queue: Some("a:b-c".to_owned()),
        priority: Some(-32768),
        job_key: Some("k".to_owned()),
        job_key_mode: Some(CrontabJobKeyMode::PreserveRunAt),
        tz: Some(Tz::Europe__Paris),
    };
    assert_eq!(options(all), expected);
    assert_eq!(options("jobKey=k&jobKeyMode=replace").job_key_mode, Some(CrontabJobKeyMode::Replace));
    assert_eq!(options("jobKey=k").job_key_mode, None);
}

#[test]
fn periods_add_up() {
    assert_eq!(options("fill=4w3d2h1m").fill.unwrap().as_duration().num_minutes(), 44761);
    assert_eq!(options("fill=1h1h30s").fill, Some(CrontabFill::new(0, 0, 2, 0, 30)));
    assert_eq!(options("fill=0s").fill, Some(CrontabFill::default()));
    for wrong in ["fill=", "fill=5", "fill=d", "fill=5x", "fill=5d3", "fill=-5d", "fill=1.5h", "fill=5D"] {
        assert!(refusal(wrong).contains("expected a period like `4w3d2h1m`"), "{wrong}");
    }
    assert!(refusal("fill=4294967296s").contains("expected numbers up to 4294967295"));
    assert!(refusal("fill=4294967295s1s").contains("expected numbers up to 4294967295"));
    let longest = CrontabFill::new(u32::MAX, u32::MAX, u32::MAX, u32::MAX, u32::MAX);
    assert_eq!(longest.as_duration().num_seconds(), i64::from(u32::MAX) * 694_861);
}

#[test]
fn query_strings_are_decoded_as_node_does() {
    for (text, key) in [
        ("a+b", "a b"),
        ("a%20b%2Bc%26d%3De%25", "a b+c&d=e%"),
        ("%C3%A9%F0%9F%90%98", "é🐘"),
        ("a=b=c", "a=b=c"),
        ("100%", "100%"),
        ("%zz%4", "%zz%4"),
        ("%41%zz", "A%zz"),
        ("%ff", "\u{fffd}"),
        ("é%ff", "\u{fffd}\u{fffd}"),
        ("é", "é"),
    ] {
        assert_eq!(options(&format!("jobKey={text}")).job_key.as_deref(), Some(key), "{text}");
    }
    assert_eq!(options("&&%69d=x&").id.as_deref(), Some("x"));
    assert_eq!(options("&"), CrontabOptions::default());
}

#[test]
fn text_after_a_thousand_pairs_is_ignored_as_node_does() {
    assert_eq!(options(&format!("{}max=5", "&".repeat(999))).max_attempts, Some(5));
    assert_eq!(options(&format!("{}max=5", "&".repeat(1000))).max_attempts, None);
}

#[test]
fn unknown_misspelt_and_repeated_options_are_rejected() {
    assert!(refusal("prio=1").contains("unknown option `prio`, expected one of id, fill, fillLimit, max"));
    for (wrong, meant) in [
        ("fil", "fill"),
        ("filllimit", "fillLimit"),
        ("maxAttempts", "max"),
        ("max_attempts", "max"),
        ("queueName", "queue"),
        ("job_key", "jobKey"),
        ("jobkeymode", "jobKeyMode"),
        ("prioritty", "priority"),
        ("timezone", "tz"),
        ("backfill", "fill"),
        ("ID", "id"),
    ] {
        let said = refusal(&format!("{wrong}=1"));
        assert!(said.ends_with(&format!("unknown option `{wrong}`, did you mean `{meant}`?")), "{said}");
    }
    assert!(refusal("max=1&max=1").contains("option `max` occurs twice"));
    assert!(refusal("=").contains("unknown option ``"));
}

#[test]
fn invalid_values_of_options_are_rejected() {
    for (text, expected) in [
        ("id=1a", "id is `1a`, expected a letter or `_`, then letters, digits, `_` or `-`"),
        ("id", "id is ``, expected a letter"),
        ("id=a:b", "id is `a:b`"),
        ("max=x", "max is `x`, expected a number from 1 to 32767"),
        ("max=+1", "max is ` 1`"),
        ("max=%2B1", "max is `+1`"),
        ("max=-1", "max is `-1`"),
        ("queue=a/b", "queue is `a/b`, expected letters, digits, `_`, `-` or `:`"),
        ("queue=", "queue is ``"),
        ("priority=1.5", "priority is `1.5`, expected a number from -32768 to 32767"),
        ("priority=--1", "priority is `--1`"),
        ("jobKeyMode=unsafe_dedupe", "jobKeyMode is `unsafe_dedupe`, expected `replace` or `preserve_run_at`"),
        ("jobKey=a%0Ab", "line breaks are not allowed"),
        ("fillLimit=0&fill=1d", "fillLimit is `0`, expected a number from 1 to 4294967295"),
        ("fillLimit=3", "option `fillLimit` requires `fill`"),
    ] {
        assert!(refusal(text).contains(expected), "{text}: {}", refusal(text));
    }
    assert_eq!(options("max=007&priority=-0").max_attempts, Some(7));
}

#[test]
fn options_that_the_database_would_reject_at_every_tick_are_rejected() {
    for text in ["max=0", "max=32768", "max=99999999999999999999", "priority=32768", "priority=-32769", "jobKey="] {
        assert!(refusal(text).contains("expected"), "{text}");
    }
    assert!(refusal("jobKey=%00").contains("jobKey contains a NUL character"));
    assert!(refusal(&format!("jobKey={}", "é".repeat(513))).contains("jobKey has 513 characters, expected 1–512"));
    assert!(options(&format!("jobKey={}", "é".repeat(512))).job_key.is_some());
    assert!(refusal(&format!("queue={}", "q".repeat(129))).contains("queue has 129 characters, expected at most 128"));
    let long = complaint(&format!("* * * * * {}", "t".repeat(129)));
    assert!(long.contains("task has 129 characters, expected at most 128"), "{long}");
}

#[test]
fn unknown_zones_name_near_ones() {
    assert!(
        refusal("tz=Europe/Pariss")
            .contains("tz is `Europe/Pariss`, which is not a known time zone: did you mean `Europe/Paris`?")
    );
    assert!(refusal("tz=europe/paris").contains("did you mean `Europe/Paris`?"));
    assert!(refusal("tz=Paris").contains("did you mean `Europe/Paris`?"));
    assert!(refusal("tz=Nowhere").contains("expected an IANA time zone like `Europe/Paris`"));
    assert_eq!(options("tz=Etc/GMT%2B5").tz, Some(Tz::Etc__GMTPlus5));
    assert_eq!(options("tz=Etc/GMT+5").tz, Some(Tz::Etc__GMTPlus5));
    assert_eq!(options("tz=UTC").tz, Some(Tz::UTC));
}
