//! Databases of the real Rust port, the `graphile_worker` 0.14.1 of crates.io, whose workers run, or were killed.

#![allow(missing_docs)]

use graphile_worker::{Error, WorkerContext, WorkerOptions};
use graphile_worker_interop::{Db, RustPort, patiently, project};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

/// What our command line wrote, on one line, and whether it succeeded.
struct Said {
    success: bool,
    text: String,
}

impl Said {
    #[track_caller]
    fn has(&self, success: bool, parts: &[&str]) {
        assert_eq!(self.success, success, "{}", self.text);
        for part in parts {
            assert!(self.text.contains(part), "{part:?} is not in {:?}", self.text);
        }
    }
}

async fn ours(db: &Db, arguments: &[&str]) -> Said {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_ours"))
        .args(arguments)
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .env("DATABASE_URL", db.url())
        .env_remove("RUST_LOG")
        .output();
    let output = patiently("our command line to end", output).await.expect("it runs");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    Said { success: output.status.success(), text: text.split_whitespace().collect::<Vec<_>>().join(" ") }
}

fn note(n: i64) -> Value {
    json!({"task": "note", "payload": {"n": n}})
}

fn hold(n: i64) -> Value {
    json!({"task": "hold", "payload": {"n": n}})
}

/// With more members than a job has by itself.
fn with(mut job: Value, more: Value) -> Value {
    let members = job.as_object_mut().expect("an object");
    members.extend(more.as_object().expect("an object").clone());
    job
}

/// The port's worker that holds jobs.
async fn holder(db: &Db) -> String {
    let holder = db.value("select min(locked_by) from graphile_worker.jobs").await;
    let holder = holder.as_str().expect("a worker").to_owned();
    assert!(holder.starts_with("graphile_worker_"), "{holder}");
    holder
}

/// Waits until PostgreSQL has noticed that a killed worker is gone.
async fn sessions_end(db: &Db) {
    db.until(
        "select not exists (
           select from pg_stat_activity
           where datname = current_database() and (query = 'LISTEN \"jobs:insert\"' or query like 'with j%')
         )",
    )
    .await;
}

/// What the port has beside the contract: entries of the ledger, tables with their foreign keys, functions.
async fn of_the_port(db: &Db) -> Value {
    db.value(
        "select json_build_array(
           (select json_agg(id order by id) from graphile_worker.migrations where id > 20),
           (select count(*) from pg_class where relnamespace = 'graphile_worker'::regnamespace
              and relname in ('_private_workers', '_private_job_retirements')),
           (select count(*) from pg_constraint where confrelid = 'graphile_worker._private_jobs'::regclass),
           (select count(*) from pg_proc where pronamespace = 'graphile_worker'::regnamespace
              and proname in ('worker_heartbeat', 'worker_deregister', 'list_stale_workers', 'list_orphan_locked_workers',
                'recover_dead_worker_jobs', 'delete_stale_workers', '_private_return_jobs')))",
    )
    .await
}

/// Jobs without what changes when they are freed.
async fn jobs(db: &Db) -> Value {
    db.value(
        "select json_agg(json_build_object('id', id, 'task', task_id, 'queue', job_queue_id, 'payload', payload::text,
           'priority', priority, 'run_at', run_at, 'max_attempts', max_attempts, 'key', key, 'flags', flags,
           'created_at', created_at, 'revision', revision) order by id)
         from graphile_worker._private_jobs",
    )
    .await
}

/// Runs what there is with our worker, and returns which jobs those were.
async fn ours_runs_once(db: &Db) -> Vec<i64> {
    let ran = Arc::new(Mutex::new(Vec::new()));
    let mut options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
    for task in ["note", "hold", "later"] {
        let ran = ran.clone();
        options = options.define_task(task, move |payload: Value, _: WorkerContext| {
            ran.lock().expect("no panic").push(payload["n"].as_i64().expect("a number"));
            async {}
        });
    }
    options.init().await.expect("a worker").run_once().await.expect("a run");
    let mut ran = ran.lock().expect("no panic").clone();
    ran.sort_unstable();
    ran
}

#[tokio::test]
async fn the_jobs_of_a_killed_port_are_all_kept_and_run_once() {
    let db = Db::empty().await;
    let mut port = RustPort::starts(&db).await;
    RustPort::adds(
        &db,
        &[
            note(1),
            note(2),
            hold(3),
            with(hold(4), json!({"queue": "q"})),
            with(note(5), json!({"queue": "q", "priority": 3})),
            with(hold(6), json!({"key": "k"})),
        ],
    );
    for line in ["ended 1", "ended 2", "began 3", "began 4", "began 6"] {
        port.says(line).await;
    }
    // A task that the port does not have; the second job replaces one that runs.
    let later = |n: i64, more: Value| with(json!({"task": "later", "payload": {"n": n}}), more);
    let flags = json!({"priority": -7, "max_attempts": 3, "flags": ["f"], "key": "another"});
    RustPort::adds(&db, &[later(7, flags), later(8, json!({"key": "k"}))]);
    let worker = holder(&db).await;
    let lines = port.is_killed().await;
    let ended: Vec<&String> = lines.iter().filter(|line| line.starts_with("ended")).collect();
    assert_eq!(ended, ["ended 1", "ended 2"]);
    assert_eq!(of_the_port(&db).await, json!([[21, 22], 2, 1, 7]));
    let before = jobs(&db).await;
    sessions_end(&db).await;

    // A moment ago it was alive.
    ours(&db, &["doctor"]).await.has(false, &["its workers may be alive: they claimed a job"]);
    let parts = ["workers of the Rust port", &format!("{worker} holds 3 jobs"), "--from-rust-port --force"];
    ours(&db, &["migrate", "--from-rust-port"]).await.has(false, &parts);
    assert_eq!(of_the_port(&db).await, json!([[21, 22], 2, 1, 7]));

    db.run(
        "update graphile_worker._private_jobs set locked_at = locked_at - interval '10 minutes' where locked_at is not null",
    )
    .await;
    let dead = format!("its dead workers hold jobs for up to 4 hours: {worker}");
    ours(&db, &["doctor"]).await.has(false, &[&dead]);
    let freed = "objects of the Rust port removed, 3 jobs of its workers released";
    ours(&db, &["migrate", "--from-rust-port"]).await.has(true, &[freed]);
    assert_eq!(of_the_port(&db).await, json!([null, 0, 0, 0]));
    assert_eq!(jobs(&db).await, before);

    assert_eq!(ours_runs_once(&db).await, [3, 4, 5, 7, 8]);
    let left =
        db.value("select json_agg(json_build_array(payload -> 'n', attempts)) from graphile_worker._private_jobs");
    assert_eq!(left.await, json!([[6, 25]]), "only the job that was replaced while it ran");
}

#[tokio::test]
async fn a_job_that_a_live_port_runs_is_not_taken_from_it() {
    let db = Db::empty().await;
    let mut port = RustPort::starts(&db).await;
    RustPort::adds(&db, &[hold(1)]);
    port.says("began 1").await;
    let worker = holder(&db).await;
    // Its job has run for an hour, and it sends no heartbeats.
    db.run("update graphile_worker._private_jobs set locked_at = now() - interval '1 hour'").await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_workers").await, 0);
    let parts = ["sessions that look like theirs are connected", &format!("{worker} holds 1 job: 1")];
    ours(&db, &["migrate", "--from-rust-port"]).await.has(false, &parts);
    // A worker of ours runs beside it, and leaves its job alone.
    assert!(ours_runs_once(&db).await.is_empty());
    ours(&db, &["workers"]).await.has(true, &["unknown, of the Rust port"]);
    assert_eq!(holder(&db).await, worker);
    port.lets_one_end();
    db.until("select not exists (select from graphile_worker.jobs)").await;
    port.is_killed().await;
    sessions_end(&db).await;
    ours(&db, &["migrate", "--from-rust-port"]).await.has(true, &["0 jobs of its workers released"]);
}

#[tokio::test]
async fn ours_does_not_start_beside_a_live_port_with_recovery() {
    let db = Db::empty().await;
    let port = RustPort::starts_with_recovery(&db).await;
    db.until("select exists (select from graphile_worker._private_workers)").await;
    let worker = db.value("select id from graphile_worker._private_workers").await;
    let worker = worker.as_str().expect("an id");
    let error = WorkerOptions::default().pg_pool(db.pool.clone()).init().await.expect_err("a refusal");
    assert!(matches!(&error, Error::RustPortRunning { workers, .. } if workers == &[worker]), "{error}");
    let tasks = project("realistic").join("tasks");
    let once = ["--once", "--tasks", tasks.to_str().expect("text")];
    for arguments in [&once[..], &["migrate", "--from-rust-port"]] {
        ours(&db, arguments).await.has(false, &["workers of the Rust port", worker, "Stop them, then run"]);
    }
    assert_eq!(of_the_port(&db).await, json!([[21, 22], 2, 1, 7]));
    // Killed, it counts as alive for 5 minutes, unless the operator knows better.
    port.is_killed().await;
    sessions_end(&db).await;
    ours(&db, &["migrate", "--from-rust-port"]).await.has(false, &[worker]);
    ours(&db, &["migrate", "--from-rust-port", "--force"]).await.has(true, &["objects of the Rust port removed"]);
    assert_eq!(of_the_port(&db).await, json!([null, 0, 0, 0]));
}

#[tokio::test]
async fn a_port_that_starts_in_a_database_of_ours_is_reported() {
    let db = Db::ours().await;
    let healthy = ours(&db, &["doctor"]).await;
    assert!(!healthy.text.contains("Rust port"), "{}", healthy.text);
    let port = RustPort::starts_with_recovery(&db).await;
    db.until("select exists (select from graphile_worker._private_workers)").await;
    ours(&db, &["doctor"]).await.has(false, &["its workers send heartbeats: graphile_worker_"]);
    port.is_killed().await;
}
