//! Cancelling jobs of scripts and programs while they run.

use crate::helpers::{Project, is_alive, options};
use crate::support::{Db, Started, until};
use graphile_worker::{CancelOptions, JobState, WorkerUtils};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

async fn cancel(db: &Db, force: bool) {
    let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
    let running: Value = db.value("select json_agg(id) from graphile_worker.jobs where locked_at is not null").await;
    let ids: Vec<i64> = serde_json::from_value(running).unwrap();
    let options = CancelOptions::default().reason("a test".to_owned()).force(force);
    let asked = utils.cancel_jobs(&ids, options).await.unwrap();
    assert!(asked.iter().all(|job| job.outcome == graphile_worker::CancelOutcome::Stopping), "{asked:?}");
}

/// Adds a program in shell; in it, `$OUT` is the project's folder.
fn script(project: &Project, name: &str, body: &str) -> PathBuf {
    let out = project.0.clone();
    let path = project.tasks().join(name);
    std::fs::write(&path, format!("#!/bin/sh\nOUT='{}'\n{body}\n", out.display())).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    out
}

async fn until_cancelled(db: &Db, count: i64) {
    let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
    until("the jobs are cancelled", async || (utils.stats().await.unwrap().cancelled == count).then_some(())).await;
    let errors = db.value("select json_agg(distinct last_error) from graphile_worker.jobs").await;
    assert_eq!(errors, json!(["Cancelled: a test"]));
    let jobs = utils.list_jobs(&Default::default()).await.unwrap();
    assert!(jobs.iter().all(|job| job.state == JobState::Cancelled && job.attempts == job.max_attempts));
}

#[tokio::test]
async fn a_cancelled_script_gets_its_abort_signal_at_once() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "waits.js",
        "module.exports = async (_, { abortSignal, abortPromise }) => {
           note('began', 'js');
           await abortPromise.catch(() => note('aborted', ['js', abortSignal.aborted]));
           throw new Error('half-way');
         };",
    );
    let python =
        "note('began', 'py')\n  X helpers.abort_event.wait()\n  note('aborted', 'Y')\n  raise ValueError('half-way')";
    let thread = python.replace("X ", "").replace('Y', "thread");
    let coroutine = python.replace('X', "await").replace('Y', "async");
    project.task("waits_py.py", &format!("def task(payload, helpers):\n  {thread}"));
    project.task("waits_async.py", &format!("async def task(payload, helpers):\n  {coroutine}"));
    // The worker would wait for half of this time if it were stopping.
    let options = options(&db, &project).shutdown_grace_period(std::time::Duration::from_secs(3600));
    let started = Started::new(options).await;
    for task in ["waits", "waits_py", "waits_async"] {
        db.add_job(&format!("'{task}'")).await;
    }
    project.noted("began", 3).await;
    cancel(&db, false).await;
    let aborted = project.noted("aborted", 3).await;
    assert!(aborted.contains(&json!(["js", true])), "{aborted:?}");
    until_cancelled(&db, 3).await;
    started.stop().await;
}

#[tokio::test]
async fn a_script_that_ignores_its_abort_signal_is_ended_by_force() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "stubborn.js",
        "module.exports = () => { note('began', process.pid); return new Promise(() => setInterval(() => {}, 1000)); };",
    );
    let started = Started::new(options(&db, &project)).await;
    db.add_job("'stubborn'").await;
    let pid = project.noted("began", 1).await.remove(0);
    cancel(&db, true).await;
    until_cancelled(&db, 1).await;
    until("its host has ended", async || (!is_alive(&pid)).then_some(())).await;
    started.stop().await;
}

#[tokio::test]
async fn a_cancelled_program_gets_sigterm_and_may_tidy_up() {
    let db = Db::installed().await;
    let project = Project::new();
    let out = script(
        &project,
        "tidies",
        "trap 'echo tidy > \"$OUT/tidy\"; exit 1' TERM; echo $$ > \"$OUT/began\"; while :; do sleep 0.02; done",
    );
    let started = Started::new(options(&db, &project)).await;
    db.add_job("'tidies'").await;
    until("it runs", async || out.join("began").exists().then_some(())).await;
    cancel(&db, false).await;
    until_cancelled(&db, 1).await;
    assert!(out.join("tidy").exists());
    started.stop().await;
}

#[tokio::test]
async fn a_program_that_ignores_sigterm_is_killed_by_force_only() {
    let db = Db::installed().await;
    let project = Project::new();
    let out = script(
        &project,
        "stubborn",
        "trap 'echo asked >> \"$OUT/asked\"' TERM; echo $$ > \"$OUT/began\"; while :; do sleep 0.02; done",
    );
    let started = Started::new(options(&db, &project)).await;
    db.add_job("'stubborn'").await;
    until("it runs", async || out.join("began").exists().then_some(())).await;
    let pid: Value = std::fs::read_to_string(out.join("began")).unwrap().trim().parse::<i64>().unwrap().into();
    cancel(&db, false).await;
    until("it was asked", async || out.join("asked").exists().then_some(())).await;
    assert!(is_alive(&pid));
    cancel(&db, true).await;
    until_cancelled(&db, 1).await;
    assert!(!is_alive(&pid));
    started.stop().await;
}
