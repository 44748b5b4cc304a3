//! `make demo`, for a shorter time: it shows what it should, ends, and leaves nothing behind however that comes.

use crate::support::{Running, example};
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// There is one folder to run it in.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn the_demo_shows_successes_failures_retries_and_a_crontab_and_ends_by_itself() {
    let _alone = one_at_a_time();
    let parts = [
        "sending to user@example.com",
        "welcoming you",
        "28 letters",
        "has the account to itself",
        "WARN: the service is not available",
        "succeeded on attempt 2",
        "report 'sales': total 12",
        "tick, due at",
        "ERROR: job failed permanently",
        "× hopeless: exited with code 1: there is no such account",
    ];
    let run_for = |seconds: &str| {
        let output = example("demo", &[seconds]).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert_eq!(output.status.code(), Some(0), "{text}");
        text
    };
    let mut text = run_for("9");
    // On a crowded machine, nine seconds may be too few for all of it.
    if !parts.iter().all(|part| text.contains(part)) {
        text = run_for("60");
    }
    for part in parts {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
    assert!(!text.contains("accounts/sync: "), "jobs of one queue did not overlap:\n{text}");
}

/// The only process that it has started and that lives.
fn worker_of(demo: u32) -> String {
    let threads = std::fs::read_dir(format!("/proc/{demo}/task")).unwrap().flatten();
    let children: Vec<String> = threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|children| children.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let [worker] = &children[..] else { panic!("expected one worker, found {children:?}") };
    worker.clone()
}

/// Neither the worker nor the server that it has told of.
fn assert_nothing_is_left(worker: &str, url: &str) {
    let command = std::fs::read_to_string(format!("/proc/{worker}/cmdline")).unwrap_or_default();
    assert!(!command.contains("graphile-worker"), "{worker} runs on: {command}");
    let address = url.rsplit_once('@').unwrap().1.split('/').next().unwrap();
    assert!(std::net::TcpStream::connect(address).is_err(), "the server at {address} runs on");
}

#[test]
fn a_demo_stops_its_worker_and_its_server_on_a_signal() {
    let _alone = one_at_a_time();
    for signal in ["TERM", "HUP", "INT"] {
        let mut demo = Running::start(example("demo", &["600"]));
        let url = demo.line(&["DATABASE_URL="]);
        demo.line(&["> select graphile_worker.add_job("]);
        let worker = worker_of(demo.pid());
        demo.signal(signal);
        let (code, text) = demo.end();
        assert_eq!(code, Some(0), "{text}");
        assert_nothing_is_left(&worker, &url);
    }
}

#[test]
fn a_demo_whose_output_is_closed_ends_without_a_panic() {
    let _alone = one_at_a_time();
    let mut demo = example("demo", &["600"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines().map(Result::unwrap);
    let url = lines.find(|line| line.contains("DATABASE_URL=")).unwrap();
    lines.find(|line| line.contains("> select graphile_worker.add_job(")).unwrap();
    let worker = worker_of(demo.id());
    drop(lines);
    let mut text = String::new();
    demo.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(demo.wait().unwrap().code(), Some(0), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    assert_nothing_is_left(&worker, &url);
}
