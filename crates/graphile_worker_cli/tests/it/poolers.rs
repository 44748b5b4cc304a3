//! The program through PgBouncer, with its defaults: only the mode differs, and the pool is small.

use crate::support::{
    Folder, Running, empty_database, graphile_worker, one_line, pgbouncer, run_sql, texts, value, wait_until,
};
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use std::process::Command;
use tokio::task::JoinSet;

const TRANSACTION_MODE: [(&str, &str); 2] = [("pool_mode", "transaction"), ("default_pool_size", "2")];

async fn connect(url: &str) -> PgConnection {
    PgConnection::connect_with(&url.parse::<PgConnectOptions>().unwrap().extra_float_digits(None)).await.unwrap()
}

/// Strangers that have prepared statements under our driver's names in each server connection and listen there, and go on
/// using them.
async fn strangers(url: &str) -> JoinSet<()> {
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut connection = connect(url).await;
        sqlx::raw_sql(
            r#"begin; prepare sqlx_s_1 as select 1; prepare sqlx_s_2 as select 2; prepare sqlx_s_3 as select 3;
               listen "jobs:insert""#,
        )
        .execute(&mut connection)
        .await
        .unwrap();
        open.push(connection);
    }
    for mut connection in open {
        sqlx::raw_sql("commit").execute(&mut connection).await.unwrap();
    }
    let mut strangers = JoinSet::new();
    for _ in 0..2 {
        let url = url.to_owned();
        strangers.spawn(async move {
            let mut connection = connect(&url).await;
            loop {
                let _ = sqlx::raw_sql("select pg_sleep(0.003)").execute(&mut connection).await;
                tokio::task::yield_now().await;
            }
        });
    }
    strangers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_commands_work_beside_other_clients() {
    let database = empty_database().await;
    let pooler = pgbouncer(&TRANSACTION_MODE);
    let url = pooler.url(database.name());
    let mut strangers = strangers(&url).await;
    let folder = Folder::new();
    let file = folder.write("jobs.jsonl", "{\"task\": \"t\", \"payload\": 1}\n{\"task\": \"t\", \"payload\": 2}\n");
    let file = file.to_str().unwrap();
    let crontab = folder.write("crontab", "* * * * * t\n");
    let crontab = crontab.to_str().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = folder.graphile_worker(arguments);
        let output = command.env("DATABASE_URL", &url).output().unwrap();
        let (stdout, stderr) = texts(&output);
        assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""), "{arguments:?}: {stdout}");
        stdout
    };
    run(&["migrate"]);
    for round in 0..3 {
        let first = (5 * round + 1).to_string();
        let ids: Vec<String> = (1..=5).map(|n| (5 * round + n).to_string()).collect();
        run(&["add", "t", "{}", "--key", "k", "--queue", "q"]);
        run(&["add", "t", "{}", "--in", "1h"]);
        run(&["add", "t", "{}"]);
        run(&["add", "--file", file]);
        assert_eq!(run(&["list", "--json"]).matches("\"id\"").count(), 5);
        run(&["show", &first]);
        run(&["why", &first]);
        run(&["stats"]);
        run(&["queues"]);
        run(&["workers"]);
        run(&["top", "--json"]);
        run(&["reschedule", &ids[1], "--priority", "3"]);
        run(&["fail", &ids[2], "--reason", "a test"]);
        run(&["run-now", &ids[2]]);
        run(&["complete", &ids[1], &ids[2], &ids[3], &ids[4]]);
        run(&["remove", "k"]);
        run(&["sweep"]);
        let checked = run(&["crontab", "check", crontab]);
        assert!(checked.contains("t: next ") && checked.contains(", not known to any worker yet"), "{checked}");
        run_sql(&database, "insert into graphile_worker._private_job_queues (queue_name, locked_by, locked_at) values ('held', 'w1', now())").await;
        run(&["unlock", "w1"]);
        run(&["cleanup"]);
        assert_eq!(run(&["list", "--json"]), "[]\n");
    }
    assert!(run(&["doctor"]).contains("--direct-connection"));
    run(&["uninstall", "--yes"]);
    strangers.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_runs_scripts_through_a_pooler_and_is_woken_by_its_direct_connection() {
    let database = empty_database().await;
    let pooler = pgbouncer(&TRANSACTION_MODE);
    let url = pooler.url(database.name());
    let folder = Folder::new();
    folder.write(
        "tasks/parent.js",
        "module.exports = async (n, helpers) => { for (let i = 0; i < 5; i++) await helpers.addJob('child', n * 10 + i); };",
    );
    folder.write("tasks/child.py", "def task(payload, helpers):\n  print('child', payload)\n");
    folder.write("graphile.toml", &format!("direct-connection = \"{}\"\n", database.url()));
    let mut strangers = strangers(&url).await;
    for by_flag in [true, false] {
        let direct = ["--direct-connection", database.url()];
        let given: &[&str] = if by_flag { &direct } else { &["--config", "graphile.toml"] };
        let mut command = folder.graphile_worker(&[given, &["-j", "4", "--poll-interval", "3600000"]].concat());
        command.env("DATABASE_URL", &url);
        let mut running = Running::start(command);
        running.line(&["connected through a pooler", "direct_connection"]);
        running.line(&["connected and waiting for jobs"]);
        let arguments = Command::new("ps").args(["-o", "args=", "-p", &running.pid().to_string()]).output().unwrap();
        let arguments = String::from_utf8_lossy(&arguments.stdout).into_owned();
        assert!(!arguments.contains("postgres://"), "no password in {arguments}");
        let listens = "select count(*) from pg_stat_activity where datname = current_database() and query like 'LISTEN%\"worker:probe%'";
        wait_until(&database, listens, json!(1)).await;
        run_sql(&database, "select graphile_worker.add_job('parent', to_json(n)) from generate_series(1, 10) n").await;
        wait_until(&database, "select count(*) from graphile_worker.jobs", json!(0)).await;
        running.signal("TERM");
        let (code, log) = running.end();
        assert_eq!(code, Some(0), "{log}");
        assert_eq!(log.lines().filter(|line| line.contains("child ") && line.contains("INFO")).count(), 50, "{log}");
    }
    strangers.shutdown().await;
    assert_eq!(value(&database, "select count(*) from graphile_worker._rs_workers").await, 0);
}

#[tokio::test]
async fn a_worker_behind_a_pooler_is_not_reported_as_dead() {
    let (database, pooler) = (empty_database().await, pgbouncer(&TRANSACTION_MODE));
    let url = pooler.url(database.name());
    let folder = Folder::new();
    folder.script("tasks/slow", "#!/bin/sh\nexec sleep 600\n");
    let mut command = folder.graphile_worker(&["--grace-period", "0"]);
    command.env("DATABASE_URL", &url);
    let mut worker = Running::start(command);
    worker.line(&["connected and waiting for jobs"]);
    run_sql(&database, "select graphile_worker.add_job('slow')").await;
    let runs = "select locked_at is not null from graphile_worker._private_jobs";
    wait_until(&database, runs, json!(true)).await;
    for url in [&*url, database.url()] {
        let said = |arguments: &[&str]| {
            let output = graphile_worker(arguments).env("DATABASE_URL", url).output().unwrap();
            let (stdout, stderr) = texts(&output);
            one_line(&(stdout + &stderr))
        };
        let why = said(&["why", "1"]);
        assert!(
            why.contains(&format!("(process {} on ", worker.pid())) && why.contains("has been running it"),
            "{why}"
        );
        assert!(!why.contains("connection") && !why.contains("sweep"), "{why}");
        let workers = said(&["workers"]);
        assert!(workers.contains(" alive ") && !workers.contains("connection"), "{workers}");
        let id = value(&database, "select worker_id from graphile_worker._rs_workers").await;
        let unlock = said(&["unlock", id.as_str().unwrap()]);
        assert!(unlock.contains("is alive, and its jobs would run twice"), "{unlock}");
    }
    worker.signal("TERM");
    assert_eq!(worker.end().0, Some(0));
}

#[test]
fn a_wrong_direct_connection_is_reported_without_what_is_in_it() {
    let mut command = graphile_worker(&["-c", "postgres://h/d"]);
    let output = command.env("GRAPHILE_WORKER_DIRECT_CONNECTION", "http://u:secret@h/d").output().unwrap();
    let (_, stderr) = texts(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("the direct connection is invalid") && !stderr.contains("secret"), "{stderr}");
}
