//! `graphile-worker crontab check` and `crontab next`.

use crate::support::{Folder, graphile_worker, texts};
use serde_json::{Value, json};

const GOOD: &str = "30 4 * * 1 send_weekly_email ?id=weekly\n# nothing\n0 9 * * mon-fri open_shop ?tz=Europe/Paris\n";
const THREE_MISTAKES: &str = "61 4 * * 1 a\n* * * * * b ?nope=1\n* * * * * c {wrong\n";

#[test]
fn good_crontabs_are_counted() {
    let folder = Folder::new();
    folder.write("crontab", GOOD);
    folder.write("other", "@daily clean_up");
    let output = folder.graphile_worker(&["crontab", "check", "crontab", "other"]).output().unwrap();
    assert!(output.status.success());
    let (stdout, stderr) = texts(&output);
    let lines: Vec<&str> = stdout.lines().map(|line| line.split(" 20").next().unwrap()).collect();
    assert_eq!(
        lines,
        ["crontab: 2 items", "  weekly: next", "  open_shop: next", "other: 1 item", "  clean_up: next"],
        "{stdout}"
    );
    assert_eq!(stderr, "");
}

#[test]
fn suspicious_items_are_warnings_and_not_errors() {
    let folder = Folder::new();
    folder.write("crontab", "*/90 * * * * often\n0 0 31 2 * never\n");
    let output = folder.graphile_worker(&["crontab", "check", "crontab"]).output().unwrap();
    let (stdout, stderr) = texts(&output);
    assert!(output.status.success());
    assert!(stdout.contains("  often: next 20") && stdout.contains("  never: never\n"), "{stdout}");
    for warning in
        ["crontab: warning: crontab line 1, column 1: step 90 exceeds the range", "line 2, column 1: it never fires"]
    {
        assert!(stderr.contains(warning), "{stderr}");
    }
}

#[tokio::test]
async fn a_database_shows_when_items_last_fired() {
    let (database, folder) = (crate::support::installed_database().await, Folder::new());
    crate::support::run_sql(
        &database,
        "insert into graphile_worker._private_known_crontabs values
           ('weekly', now(), '2026-03-23T04:30:00Z'), ('open_shop', now(), null)",
    )
    .await;
    folder.write("crontab", &format!("{GOOD}@daily new\n"));
    let check = |url: &str| {
        let mut command = folder.graphile_worker(&["crontab", "check", "crontab"]);
        let output = command.env("DATABASE_URL", url).output().unwrap();
        assert!(output.status.success());
        texts(&output)
    };
    let (stdout, stderr) = check(database.url());
    let endings = [", last 2026-03-23T04:30:00Z", ", not fired yet", ", not known to any worker yet"];
    for (line, ending) in stdout.lines().skip(1).zip(endings) {
        assert!(line.ends_with(ending), "{stdout}");
    }
    assert_eq!(stderr, "");
    // Without the database the crontab is checked all the same.
    let (stdout, stderr) = check("postgres://user@127.0.0.1:1/db");
    assert!(
        stdout.starts_with("crontab: 3 items\n") && stderr.contains("could not read when the items last fired"),
        "{stdout}{stderr}"
    );
}

#[test]
fn all_errors_of_all_files_are_reported_with_line_and_column() {
    let folder = Folder::new();
    folder.write("one", THREE_MISTAKES);
    folder.write("good", GOOD);
    folder.write("two", "* * * * 9 d");
    for arguments in
        [&["crontab", "check", "one", "good", "two", "none"][..], &["crontab", "next", "one", "two", "none"]]
    {
        let output = folder.graphile_worker(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let (stdout, stderr) = texts(&output);
        assert_eq!(stdout, "");
        for mistake in [
            "one: crontab line 1, column 1: minute is `61`, expected 0–59\n  61 4 * * 1 a\n  ^^\n",
            "one: crontab line 2, column ",
            "one: crontab line 3, column ",
            "two: crontab line 1, column 9: ",
            "none: could not read: No such file or directory",
        ] {
            assert!(stderr.contains(mistake), "{mistake} is not in:\n{stderr}");
        }
    }
}

#[test]
fn the_next_times_are_printed_as_text_and_as_json() {
    let folder = Folder::new();
    folder.write("crontab", GOOD);
    folder.write("never", "0 0 30 2 * leap");
    let from = ["--from", "2026-03-27T12:00:00Z"];
    let people = folder.graphile_worker(&["crontab", "next", "crontab", "never", "--count", "2"]).args(from).output();
    assert_eq!(
        texts(&people.unwrap()).0,
        "crontab: weekly (task send_weekly_email)\n  2026-03-30T04:30:00Z\n  2026-04-06T04:30:00Z\n\
         crontab: open_shop\n  2026-03-30T07:00:00Z\n  2026-03-31T07:00:00Z\n\
         never: leap\n  never\n"
    );
    let machines = folder.graphile_worker(&["crontab", "next", "crontab", "--count=1", "--json"]).args(from).output();
    let machines: Value = serde_json::from_str(&texts(&machines.unwrap()).0).unwrap();
    assert_eq!(
        machines,
        json!([
            {"file": "crontab", "identifier": "weekly", "task": "send_weekly_email", "next": ["2026-03-30T04:30:00Z"]},
            {"file": "crontab", "identifier": "open_shop", "task": "open_shop", "next": ["2026-03-30T07:00:00Z"]},
        ])
    );
}

#[test]
fn ten_times_from_now_on_are_the_default() {
    let folder = Folder::new();
    folder.write("crontab", "* * * * * * tick");
    let output = folder.graphile_worker(&["crontab", "next", "crontab", "--json"]).output().unwrap();
    let firings: Value = serde_json::from_str(&texts(&output).0).unwrap();
    let next = firings[0]["next"].as_array().unwrap();
    assert_eq!(next.len(), 10);
    assert!(next[0].as_str().unwrap() > &*chrono::Utc::now().format("%Y-%m-%d").to_string());
}

#[test]
fn an_invalid_time_and_a_missing_file_are_usage_errors() {
    for arguments in [&["crontab", "next", "f", "--from", "tomorrow"][..], &["crontab", "check"], &["crontab"]] {
        assert_eq!(graphile_worker(arguments).output().unwrap().status.code(), Some(2));
    }
}

#[test]
fn a_closed_pipe_causes_no_panic() {
    use std::process::{Command, Stdio};
    let folder = Folder::new();
    folder.write("crontab", "* * * * * * tick");
    let mut next = folder.graphile_worker(&["crontab", "next", "crontab", "--count", "100000"]);
    let mut process = next.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let head = Command::new("head").arg("-n1").stdin(process.stdout.take().unwrap()).output().unwrap();
    assert_eq!(texts(&head).0, "crontab: tick\n");
    let output = process.wait_with_output().unwrap();
    assert_eq!(texts(&output).1, "");
}
