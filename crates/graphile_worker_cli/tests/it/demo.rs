//! `make demo`, for a shorter time: it shows what it should, and ends.

use crate::support::example;

#[test]
fn the_demo_shows_successes_failures_retries_and_a_crontab_and_ends_by_itself() {
    let output = example("demo", &["9"]).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for part in [
        "sending to user@example.com",
        "welcoming you",
        "28 letters",
        "has the account for itself",
        "WARN: the service is not available",
        "worked at attempt 2",
        "report 'sales': 12 in all",
        "tick, due at",
        "ERROR: job failed for good",
        "× hopeless: exited with code 1: there is no such account",
    ] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
    assert!(!text.contains("accounts/sync: "), "jobs of one queue did not overlap:\n{text}");
}
