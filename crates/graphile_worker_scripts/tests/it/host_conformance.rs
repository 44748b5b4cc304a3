//! Checks that hosts follow `docs/host-protocol.md`: the built-in hosts, and a custom host that the environment names. Also
//! runs the built-in hosts' own tests, which are written in JavaScript and Python.

use crate::support::{Db, Log, PATIENCE, Started, until};
use graphile_worker::WorkerOptions;
use graphile_worker_scripts::{HostOptions, TasksDir};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts").join(name)
}

async fn conforms(options: HostOptions, tasks: PathBuf, extension: &str) {
    let db = Db::installed().await;
    let (log, _guard) = Log::start();
    let add = async |job: &str| db.add_job(job).await;
    for job in ["'nothing'", "'fails'", "'speaks'", "'adds', '{\"a\": [1, \"é\"]}'", "'batch', '[1, 2, 3]'"] {
        add(job).await;
    }
    for _ in 0..200 {
        add("'nothing'").await;
    }
    let options = WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .concurrency(16)
        .shutdown_grace_period(Duration::from_secs(3600))
        .task_source(TasksDir::new(tasks).host_options(options));
    let started = Started::new(options).await;
    let sql = "select t.identifier, j.payload::text as payload, j.last_error, j.attempts
        from graphile_worker._private_jobs j join graphile_worker._private_tasks t on t.id = j.task_id
        where j.locked_at is null order by t.identifier";
    let left = until("only three jobs are left", async || {
        Some(db.rows(sql).await).filter(|rows| {
            let failed = rows.iter().filter(|row| row["attempts"] != 0).count();
            rows.len() == 3 && failed == 2
        })
    })
    .await;
    let texts =
        |field: &str| left.iter().map(|row| row[field].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>();
    assert_eq!(texts("identifier"), ["added", "batch", "fails"]);
    let payload: Value = serde_json::from_str(&texts("payload")[0]).unwrap();
    assert_eq!(payload, json!({"a": [1, "é"]}), "`adds` adds a job with its own payload");
    assert_eq!(texts("payload")[1], "[1,3]", "only the items that failed are left");
    assert!(texts("last_error")[1].starts_with("2 of 3 items failed, the first with: odd"), "{left:?}");
    assert_eq!(texts("last_error")[2].lines().next(), Some("boom"), "the message comes first");
    assert!(log.line("hello").is_some_and(|line| line.contains("task_identifier=\"speaks\"")), "{}", log.text());
    let broken = log.line(&format!("file=broken.{extension} problem="));
    assert!(broken.is_some(), "the file that does not load is not in\n{}", log.text());

    add("'waits'").await;
    until("`waits` runs", async || log.line("task_identifier=\"waits\"")).await;
    let stopping = tokio::time::timeout(PATIENCE, started.stop()).await;
    stopping.expect("`waits` must end when it is aborted, and the host when the socket is closed");
    let waits = "select attempts, last_error from graphile_worker.jobs where task_identifier = 'waits'";
    assert_eq!(db.rows(waits).await, [] as [Value; 0], "`waits` is done");
}

#[tokio::test]
async fn hosts_conform_javascript() {
    conforms(HostOptions::default(), folder("javascript"), "js").await;
}

#[tokio::test]
async fn hosts_conform_python() {
    conforms(HostOptions::default(), folder("python"), "py").await;
}

/// See `docs/host-protocol.md`.
#[tokio::test]
async fn hosts_conform_custom() {
    let Ok(command) = std::env::var("HOST_COMMAND") else { return };
    let [tasks, extension] = ["HOST_TASKS", "HOST_EXTENSION"].map(|name| {
        std::env::var(name).unwrap_or_else(|_| panic!("HOST_COMMAND is set, so {name} must be set as well"))
    });
    let options = HostOptions::default().language("the host", [extension.as_str()], command.split_whitespace());
    conforms(options, tasks.into(), &extension).await;
}

fn passes(command: &mut Command) {
    let output = command.current_dir(folder("")).output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).join("\n");
    assert!(output.status.success(), "{text}");
}

#[test]
fn the_javascript_host_passes_its_own_tests() {
    passes(Command::new("node").args(["--test", "node_host.test.mjs"]));
}

#[test]
fn the_python_host_passes_its_own_tests() {
    passes(Command::new("python3").args(["-B", "-m", "unittest", "python_host_test"]));
}
