//! A job that crashes its host: the other jobs of the host lose neither an attempt nor their place in the queue, and the
//! error names the job that caused the crash.

use crate::helpers::{Project, failed, gone, jobs, options, run_once};
use crate::support::{Db, Log, Started, until};
use graphile_worker::{TaskOptions, WorkerOptions};
use graphile_worker_scripts::{HostOptions, TasksDir};
use serde_json::{Value, json};
use std::time::Duration;

/// A worker with one host for all jobs of a language.
fn one_host(db: &Db, project: &Project) -> WorkerOptions {
    options(db, project).task_source(TasksDir::new(project.tasks()).host_options(HostOptions::default().max_hosts(1)))
}

async fn run_all(worker: WorkerOptions) {
    worker.init().await.unwrap().run_once().await.unwrap();
}

/// `crash` crashes the host with this statement once three jobs of `beside` run in it. These wait for the crash; after a
/// crash, they finish at once.
fn javascript(project: &Project, crash: &str) {
    let wait = "await new Promise((resolve) => setTimeout(resolve, 5))";
    project.task(
        "crash.js",
        &format!(
            "module.exports = async () => {{
               while (!require('fs').existsSync(OUT + '/beside') || require('fs').readFileSync(OUT + '/beside', 'utf8').split('\\n').length < 4) {wait};
               note('crash', process.pid);
               {crash}
             }};"
        ),
    );
    project.task(
        "beside.js",
        &format!(
            "module.exports = async ({{ n }}) => {{
               note('beside', process.pid);
               while (!require('fs').existsSync(OUT + '/crash')) {wait};
               note('done', n);
             }};"
        ),
    );
}

/// Adds one job that crashes the host, and three other jobs with one attempt each.
async fn add_four(db: &Db) {
    for n in 1..=3 {
        db.add_job(&format!("'beside', '{{\"n\": {n}}}', max_attempts := 1")).await;
    }
    db.add_job("'crash', priority := 1, max_attempts := 1").await;
}

fn done(project: &Project) -> Vec<u64> {
    let mut done: Vec<u64> = project.notes("done").iter().map(|n| n.as_u64().unwrap()).collect();
    done.sort_unstable();
    done
}

#[tokio::test]
async fn other_jobs_of_a_crashed_host_finish_with_their_only_attempt() {
    let db = Db::installed().await;
    let project = Project::new();
    javascript(&project, "process.kill(process.pid, 'SIGKILL'); await new Promise(() => {});");
    add_four(&db).await;
    run_all(one_host(&db, &project)).await;
    assert_eq!(done(&project), [1, 2, 3]);
    // It started last, so it is the first to run alone. After that, the other jobs are no longer suspects.
    assert_eq!(project.notes("crash").len(), 2);
    let left = jobs(&db).await;
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!((&left[0]["task_identifier"], &left[0]["attempts"]), (&json!("crash"), &json!(1)));
    assert_eq!(
        left[0]["last_error"],
        "the host process of this task was killed by signal 9 while this job ran alone in it"
    );
}

#[tokio::test]
async fn a_python_job_that_crashes_its_host_is_identified() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "crash.py",
        "def task(payload, helpers):
  while not os.path.exists(OUT + '/beside') or len(open(OUT + '/beside').readlines()) < 3: time.sleep(0.005)
  note('crash', os.getpid())
  os.kill(os.getpid(), 9)",
    );
    // Threads run in parallel: each job waits for a crash of another process, so that it cannot finish before its own host
    // crashes.
    project.task(
        "beside.py",
        "def crashed_elsewhere():
  return os.path.exists(OUT + '/crash') and any(int(pid) != os.getpid() for pid in open(OUT + '/crash').read().split())
def task(payload, helpers):
  note('beside', os.getpid())
  while not crashed_elsewhere(): time.sleep(0.005)
  note('done', payload['n'])",
    );
    add_four(&db).await;
    run_all(one_host(&db, &project)).await;
    assert_eq!(done(&project), [1, 2, 3]);
    let errors = failed(&db, 1).await;
    assert_eq!(errors, ["the host process of this task was killed by signal 9 while this job ran alone in it"]);
}

#[tokio::test]
async fn a_job_that_exits_the_process_is_identified_at_once() {
    let db = Db::installed().await;
    let project = Project::new();
    javascript(&project, "process.exit(3);");
    add_four(&db).await;
    let (log, _guard) = Log::start();
    run_all(one_host(&db, &project)).await;
    assert_eq!((done(&project), project.notes("crash").len()), (vec![1, 2, 3], 1));
    let errors = failed(&db, 1).await;
    assert_eq!(
        errors,
        ["the host process of this task ended with exit code 3 because of this job: the task called process.exit(3)"]
    );
    // The log names the other jobs, and the job that caused the crash.
    let line = log.line("the job runs again").unwrap();
    assert!(line.contains("culprit=\"job 4 (crash)\"") && line.contains("WARN"), "{line}");
}

#[tokio::test]
async fn a_python_job_that_exits_the_process_is_identified_at_once() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "crash.py",
        "import asyncio
async def task(payload, helpers):
  while not os.path.exists(OUT + '/beside') or not open(OUT + '/beside').read().endswith('\\n'): await asyncio.sleep(0.005)
  note('crash', 1)
  sys.exit('so long')",
    );
    project.task(
        "beside.py",
        "def task(payload, helpers):
  note('beside', 1)
  # The first run waits for the second one, so it ends only with its host.
  while len(open(OUT + '/beside').read().split()) == 1: time.sleep(0.005)
  note('done', 1)",
    );
    db.add_job("'beside', max_attempts := 1").await;
    db.add_job("'crash', priority := 1, max_attempts := 1").await;
    run_all(one_host(&db, &project)).await;
    assert_eq!((project.notes("done").len(), project.notes("crash").len()), (1, 1));
    assert_eq!(
        failed(&db, 1).await,
        [
            "the host process of this task ended with exit code 1 because of this job: the task called sys.exit('so long')"
        ]
    );
}

#[tokio::test]
async fn a_long_job_finishes_among_many_jobs_that_crash_their_host() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "crash.js",
        "module.exports = async ({ n }) => {
           note('crash', n);
           setTimeout(() => process.kill(process.pid, 'SIGKILL'), 20);
           await new Promise(() => {});
         };",
    );
    // It takes longer than the time between two crashes.
    project.task(
        "long.js",
        "module.exports = async () => {
           note('long', process.pid);
           await new Promise((resolve) => setTimeout(resolve, 400));
           note('done', 1);
         };",
    );
    db.add_job("'long', max_attempts := 1").await;
    for n in 0..8 {
        db.add_job(&format!("'crash', '{{\"n\": {n}}}', max_attempts := 1")).await;
    }
    run_all(one_host(&db, &project).concurrency(3)).await;
    assert_eq!(done(&project), [1]);
    assert!(project.notes("long").len() <= 3, "{:?}", project.notes("long"));
    assert_eq!(failed(&db, 8).await.len(), 8);
}

#[tokio::test]
async fn a_crash_does_not_change_the_order_of_a_queue() {
    let db = Db::installed().await;
    let project = Project::new();
    javascript(&project, "process.kill(process.pid, 'SIGKILL'); await new Promise(() => {});");
    for n in 1..=5 {
        db.add_job(&format!("'beside', '{{\"n\": {n}}}', queue_name := 'in-order', max_attempts := 1")).await;
    }
    for n in 11..=12 {
        db.add_job(&format!("'beside', '{{\"n\": {n}}}', max_attempts := 1")).await;
    }
    db.add_job("'crash', priority := 1, max_attempts := 1").await;
    run_all(one_host(&db, &project)).await;
    let order: Vec<u64> = project.notes("done").iter().map(|n| n.as_u64().unwrap()).filter(|n| *n < 10).collect();
    assert_eq!(order, [1, 2, 3, 4, 5]);
    assert_eq!(jobs(&db).await.len(), 1);
}

#[tokio::test]
async fn a_job_that_needs_too_much_memory_costs_no_other_job_an_attempt() {
    let db = Db::installed().await;
    let project = Project::new();
    javascript(&project, "globalThis.held = Buffer.alloc(400 << 20, 1); await new Promise(() => {});");
    // They must not finish before the worker checks the memory.
    project.task(
        "beside.js",
        "module.exports = async ({ n }) => {
           note('beside', process.pid);
           if (require('fs').readFileSync(OUT + '/beside', 'utf8').split('\\n').length < 5) await new Promise(() => {});
           note('done', n);
         };",
    );
    add_four(&db).await;
    let hosts = HostOptions::default().max_hosts(1).memory_limit(Some(256 << 20));
    run_all(options(&db, &project).task_source(TasksDir::new(project.tasks()).host_options(hosts))).await;
    assert_eq!(done(&project), [1, 2, 3]);
    let error = failed(&db, 1).await.remove(0);
    assert!(
        error.starts_with("the host process of this task was killed while this job ran alone in it: it used "),
        "{error}"
    );
    assert!(error.ends_with("MiB of memory; the limit is 256 MiB"), "{error}");
}

#[tokio::test]
async fn a_job_that_hangs_the_host_costs_no_other_job_an_attempt() {
    let db = Db::installed().await;
    let project = Project::new();
    javascript(&project, "for (;;);");
    add_four(&db).await;
    let limited = TaskOptions::default().timeout(Duration::from_millis(1500));
    run_all(one_host(&db, &project).task_options("crash", limited)).await;
    assert_eq!(done(&project), [1, 2, 3]);
    assert_eq!(failed(&db, 1).await, ["timed out after 1.5s"]);
}

#[tokio::test]
async fn the_timeout_restarts_when_a_job_runs_again() {
    let db = Db::installed().await;
    let project = Project::new();
    javascript(
        &project,
        "await new Promise((r) => setTimeout(r, 1600)); process.kill(process.pid, 'SIGKILL'); await new Promise(() => {});",
    );
    // More than half of its timeout has passed at the crash, and it needs more than the other half.
    project.task(
        "beside.js",
        "module.exports = async ({ n }) => {
           note('beside', process.pid);
           if (!require('fs').existsSync(OUT + '/crash')) await new Promise(() => {});
           await new Promise((resolve) => setTimeout(resolve, 1800));
           note('done', n);
         };",
    );
    add_four(&db).await;
    let limited = TaskOptions::default().timeout(Duration::from_secs(3));
    run_all(one_host(&db, &project).task_options("beside", limited)).await;
    assert_eq!(done(&project), [1, 2, 3]);
}

#[tokio::test]
async fn a_job_that_crashed_its_host_before_runs_alone_on_any_worker() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("pid.js", "module.exports = ({ file }) => { note(file, process.pid); if (file === 'crash') process.kill(process.pid, 9); return new Promise((resolve) => { const look = () => require('fs').existsSync(OUT + '/go') ? resolve() : setTimeout(look, 5); look(); }); };");
    // Another worker may have run it before: the row has its error.
    db.add_job("'pid', '{\"file\": \"crash\"}', max_attempts := 2").await;
    run_once(&db, &project).await;
    db.run("update graphile_worker._private_jobs set run_at = now() + interval '1 hour'").await;
    let started = Started::new(one_host(&db, &project)).await;
    db.add_job("'pid', '{\"file\": \"beside\"}', max_attempts := 1").await;
    let beside = project.noted("beside", 1).await.remove(0);
    db.run("update graphile_worker._private_jobs set run_at = now() where locked_at is null").await;
    db.run("select pg_notify('jobs:insert', '{}')").await;
    let crashed = project.noted("crash", 2).await.remove(1);
    assert_ne!(crashed, beside);
    gone(&crashed).await;
    project.file("go", "");
    until("only the job that crashes is left", async || (jobs(&db).await.len() == 1).then_some(())).await;
    started.stop().await;
    assert_eq!(project.notes("beside"), [beside]);
}

#[tokio::test]
async fn a_job_that_waits_to_run_alone_is_released_when_the_worker_stops() {
    let db = Db::installed().await;
    let project = Project::new();
    javascript(
        &project,
        "if (require('fs').readFileSync(OUT + '/crash', 'utf8').split('\\n').length < 3) process.kill(process.pid, 'SIGKILL'); await new Promise((resolve) => setInterval(() => require('fs').existsSync(OUT + '/go') && resolve(), 5));",
    );
    add_four(&db).await;
    let started = Started::new(one_host(&db, &project)).await;
    // It runs alone and does not finish; the other jobs wait.
    project.noted("crash", 2).await;
    let stopping = tokio::spawn(started.stop());
    let free = "select id from graphile_worker._private_jobs where locked_at is null and attempts = 0 and last_error is null and run_at = created_at";
    until("the others are released as they were", async || (db.rows(free).await.len() == 3).then_some(())).await;
    project.file("go", "");
    stopping.await.unwrap();
    assert_eq!(project.notes("done"), [] as [Value; 0]);
    assert_eq!(jobs(&db).await.len(), 3);
}
