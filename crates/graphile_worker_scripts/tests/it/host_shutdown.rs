//! What happens to hosts and their jobs when the worker stops, is dropped, or is killed.

use crate::helpers::{Project, failed, gone, is_alive, jobs, options};
use crate::support::{Db, Log, Started, until};
use graphile_worker::{TaskOptions, WorkerOptions};
use graphile_worker_scripts::TasksDir;
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test]
async fn running_jobs_are_aborted_and_hosts_end_when_the_worker_stops() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "waits.js",
        "module.exports = async (_, { abortSignal, abortPromise }) => {
           note('began', process.pid);
           await abortPromise.catch((error) => note('aborted', [error.name, abortSignal.aborted]));
         };",
    );
    project.task("waits_py.py", "def task(payload, helpers):\n  note('began', os.getpid())\n  helpers.abort_event.wait()\n  note('aborted', 'thread')");
    project.task("waits_async.py", "async def task(payload, helpers):\n  note('began', os.getpid())\n  await helpers.abort_event.wait()\n  note('aborted', 'async')");
    for task in ["waits", "waits_py", "waits_async"] {
        db.add_job(&format!("'{task}'")).await;
    }
    let started = Started::new(options(&db, &project)).await;
    let began = project.noted("began", 3).await;
    started.stop().await;
    let aborted = project.notes("aborted");
    assert!(aborted.contains(&json!(["AbortError", true])), "{aborted:?}");
    assert!(aborted.contains(&json!("thread")) && aborted.contains(&json!("async")), "{aborted:?}");
    assert_eq!(jobs(&db).await, [] as [Value; 0], "the jobs finished within the grace period");
    for pid in &began {
        assert!(!is_alive(pid), "hosts have ended when the worker has stopped");
    }
}

#[tokio::test]
async fn a_job_that_finishes_early_in_the_grace_period_is_not_aborted() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "waits.js",
        "module.exports = async (_, { abortSignal }) => {
           abortSignal.addEventListener('abort', () => note('aborted', 0));
           note('began', 0);
           while (!require('fs').existsSync(OUT + '/go')) await new Promise((resolve) => setTimeout(resolve, 5));
         };",
    );
    db.add_job("'waits'").await;
    let (log, _guard) = Log::start();
    let grace_period = Duration::from_secs(60);
    let started = Started::new(options(&db, &project).shutdown_grace_period(grace_period)).await;
    project.noted("began", 1).await;
    started.worker.request_shutdown();
    until("the worker lets jobs finish", async || log.line("waiting for running jobs to finish")).await;
    std::fs::write(project.0.join("go"), "").unwrap();
    started.running.await.unwrap().unwrap();
    assert_eq!(project.notes("aborted"), [] as [Value; 0]);
    assert_eq!(jobs(&db).await, [] as [Value; 0], "it is done");
}

#[tokio::test]
async fn a_job_is_released_only_after_its_host_has_ended() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("hangs.js", "module.exports = () => { note('pid', process.pid); for (;;); };");
    db.add_job("'hangs', queue_name := 'q'").await;
    let options = options(&db, &project).shutdown_grace_period(Duration::from_millis(100));
    let started = Started::new(options).await;
    let pid = project.noted("pid", 1).await.remove(0);
    started.worker.request_shutdown();
    // As soon as the queue is unlocked, another worker may start its next job.
    let sql = "select count(*) from graphile_worker._private_job_queues where locked_by is null";
    until("the queue is unlocked", async || (db.value(sql).await == 1).then_some(())).await;
    assert!(!is_alive(&pid));
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_retired_host_has_ended_when_the_worker_has_stopped() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "ignores_abort.js",
        "module.exports = () => { note('pid', process.pid); return new Promise(() => {}); };",
    );
    project.task(
        "waits.js",
        "module.exports = (_, { abortPromise }) => { note('pid', process.pid); return abortPromise.catch(() => {}); };",
    );
    project.task("fine.js", "module.exports = () => note('fine', process.pid);");
    let limited = TaskOptions::default().timeout(Duration::from_millis(100));
    let started = Started::new(options(&db, &project).task_options("ignores_abort", limited).watch(true)).await;
    db.add_job("'waits'").await;
    let pid = project.noted("pid", 1).await.remove(0);
    db.add_job("'ignores_abort', max_attempts := 1").await;
    failed(&db, 1).await;
    until("another host runs jobs", async || {
        db.add_job("'fine'").await;
        project.notes("fine").iter().any(|other| *other != pid).then_some(())
    })
    .await;
    // Loading a file removes ended hosts from the pool.
    project.task("fine.js", "module.exports = () => note('loaded', process.pid);");
    until("the new version runs", async || {
        db.add_job("'fine'").await;
        (!project.notes("loaded").is_empty()).then_some(())
    })
    .await;
    assert!(is_alive(&pid));
    started.stop().await;
    assert!(!is_alive(&pid));
}

/// The worker process of the test below. It runs until it is killed.
#[tokio::test]
async fn worker_process_with_hosts() {
    let Ok(url) = std::env::var("GW_TEST_HOSTS_URL") else { return };
    let folder = std::env::var("GW_TEST_HOSTS_FOLDER").unwrap();
    let options = WorkerOptions::default().database_url(&url).concurrency(4);
    let worker = options.task_source(TasksDir::new(folder)).init().await.unwrap();
    worker.run().await.unwrap();
}

/// Kills the process when it is dropped, also if the test fails.
struct KillOnDrop(std::process::Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn hosts_and_programs_end_if_the_worker_is_killed() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("hangs.js", "module.exports = () => { note('pid', process.pid); for (;;); };");
    project.task("hangs_py.py", "async def task(payload, helpers):\n  note('pid', os.getpid())\n  while True: pass");
    project.task("child.js", "module.exports = () => new Promise(() => { note('pid', require('child_process').spawn('sleep', ['1000']).pid); });");
    // A program that has read its payload is registered with the watchdog that kills it.
    let program = "cat > /dev/null; echo $$ >> pid; sleep 1000 & echo $! >> pid; wait";
    project.file("tasks/program", &format!("#!/bin/sh\ncd '{}'; {program}\n", project.0.display()));
    let runnable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(project.tasks().join("program"), runnable).unwrap();
    db.add_job("'child', queue_name := 'a'").await;
    let worker = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "host_shutdown::worker_process_with_hosts", "--nocapture"])
        .env("GW_TEST_HOSTS_URL", db.url())
        .env("GW_TEST_HOSTS_FOLDER", project.tasks())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let worker = KillOnDrop(worker);
    project.noted("pid", 1).await;
    db.add_job("'hangs_py'").await;
    project.noted("pid", 2).await;
    db.add_job("'hangs'").await;
    project.noted("pid", 3).await;
    db.add_job("'program'").await;
    let pids = project.noted("pid", 5).await;
    assert!(pids.iter().all(is_alive));
    drop(worker);
    for pid in &pids {
        gone(pid).await;
    }
}
