//! `graphile-worker --schema-only`, run as a person would: one line, and an exit code.

use crate::support::{Folder, empty_database, failure, graphile_worker, outcome, run_sql, server, texts};
use std::process::Command;

#[tokio::test]
async fn schema_only_installs_the_schema_and_reports_it() {
    let database = empty_database().await;
    let arguments = ["-c", database.url(), "--schema-only"];
    let place = format!("in the database {:?} on {}", database.name(), server(&database));
    assert_eq!(
        outcome(graphile_worker(&arguments)),
        (Some(0), format!("schema \"graphile_worker\" installed at level 20, {place}"))
    );
    assert_eq!(
        outcome(graphile_worker(&arguments)),
        (Some(0), format!("schema \"graphile_worker\" is up to date at level 20, {place}"))
    );
    run_sql(&database, "select graphile_worker.add_job('t')").await;
}

/// The level is Node's, and stays the same if only something of ours is added: no message names the same level twice.
#[tokio::test]
async fn an_update_that_keeps_the_level_does_not_read_like_an_error() {
    let database = empty_database().await;
    let arguments = ["-c", database.url(), "--schema-only"];
    outcome(graphile_worker(&arguments));
    let lacks_something =
        "delete from graphile_worker._rs_additions where id = (select max(id) from graphile_worker._rs_additions)";
    run_sql(&database, lacks_something).await;
    let (code, line) = outcome(graphile_worker(&arguments));
    assert_eq!(code, Some(0));
    assert!(line.starts_with("schema \"graphile_worker\" updated at level 20, in the database"), "{line}");
    run_sql(&database, lacks_something).await;
    let folder = Folder::new();
    folder.script("tasks/hello", "#!/bin/sh\n");
    let output = folder.graphile_worker(&["-c", database.url(), "--once"]).output().unwrap();
    let (stdout, stderr) = texts(&output);
    let log = stdout + &stderr;
    let line = log.lines().find(|line| line.contains("schema updated")).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("INFO: schema updated"), "{line}");
    assert_eq!((line.matches("20").count(), line.contains("from")), (1, false), "{line}");
}

#[tokio::test]
async fn takes_the_connection_from_the_environment_and_the_schema_from_a_flag() {
    let database = empty_database().await;
    let mut command = graphile_worker(&["--schema-only", "--schema", "My \"jobs\""]);
    command.env("DATABASE_URL", database.url());
    let (code, line) = outcome(command);
    assert_eq!(code, Some(0));
    assert!(line.starts_with(r#"schema "My \"jobs\"" installed at level 20"#), "{line}");
    run_sql(&database, "select \"My \"\"jobs\"\"\".add_job('t')").await;
}

#[tokio::test]
async fn eight_processes_at_once_all_succeed_and_one_installs() {
    let database = empty_database().await;
    let processes: Vec<_> = (0..8)
        .map(|_| {
            let mut command = graphile_worker(&["-c", database.url(), "--schema-only"]);
            command.stdout(std::process::Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let outputs: Vec<_> = processes.into_iter().map(|process| process.wait_with_output().unwrap()).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    let installed = outputs.iter().filter(|output| String::from_utf8_lossy(&output.stdout).contains(" installed "));
    assert_eq!(installed.count(), 1, "{outputs:?}");
}

#[test]
fn usage_errors_are_explained_with_exit_code_2() {
    for (arguments, message) in [
        (&["--schema-only"][..], "no database given: use -c URL, or set DATABASE_URL or PGDATABASE"),
        (&["--schema-only", "--frobnicate"], "unexpected argument '--frobnicate' found"),
        (&["--schema-only", "postgres://user:secret@host/db"], "unexpected connection string: pass it with -c"),
        (&["--schemaonly"], "unexpected argument '--schemaonly' found; did you mean '--schema-only'?"),
        (&["--schema-only", "-c"], "a value is required for '--connection <URL>' but none was supplied"),
        (&["--schema-only", "-c", "http://user:secret@host/db:x"], "the connection string after -c is invalid: "),
        (
            &["--schema-only", "-c", "postgres://user:secret@host:port/db"],
            "the connection string after -c is invalid: ",
        ),
    ] {
        let (code, line) = failure(arguments);
        assert_eq!(code, 2, "{line}");
        assert!(line.starts_with(&format!("graphile-worker: {message}")), "{line}");
    }
}

#[tokio::test]
async fn errors_of_the_database_are_explained_with_exit_code_1() {
    let database = empty_database().await;
    let wrong_password = format!("postgres://postgres:secret@{}/{}", server(&database), database.name());
    let no_such_database = database.url().replace(database.name(), "nowhere");
    for (url, schema, message) in [
        (
            "postgres://u:secret@127.0.0.1:1/db",
            "s",
            "could not connect to 127.0.0.1:1: error communicating with database: Connection refused",
        ),
        (wrong_password.as_str(), "s", "password authentication failed for user \"postgres\""),
        (no_such_database.as_str(), "s", "database \"nowhere\" does not exist"),
        (database.url(), "", "the schema name \"\" is empty"),
        (database.url(), "pg_mine", "could not create the schema of \"pg_mine\": unacceptable schema name \"pg_mine\""),
    ] {
        let (code, line) = failure(&["--schema-only", "-s", schema, "-c", url]);
        assert_eq!(code, 1, "{line}");
        assert!(line.contains(message), "{line}");
    }
}

#[tokio::test]
async fn a_schema_of_a_newer_release_is_rejected() {
    let database = empty_database().await;
    assert_eq!(outcome(graphile_worker(&["-c", database.url(), "--schema-only"])).0, Some(0));
    run_sql(&database, "insert into graphile_worker.migrations (id, breaking) values (23, true)").await;
    let (code, line) = failure(&["-c", database.url(), "--schema-only"]);
    assert_eq!(code, 1);
    assert!(line.contains("has the breaking migration 23 of Node's graphile-worker"), "{line}");
}

#[tokio::test]
async fn a_url_without_a_user_means_the_one_who_runs_it() {
    let database = empty_database().await;
    let (code, line) = failure(&["--schema-only", "-c", &format!("postgres://{}/db", server(&database))]);
    let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
    assert_eq!(code, 1);
    assert!(line.contains(&format!("user \"{}\"", user.trim())), "{line}");
}

#[test]
fn help_and_version_exit_with_code_0() {
    for flag in ["--help", "--version", "-h", "-V"] {
        assert!(graphile_worker(&[flag]).output().unwrap().status.success());
    }
}

#[tokio::test]
async fn objects_of_the_rust_port_are_removed_on_request() {
    let database = empty_database().await;
    outcome(graphile_worker(&["-c", database.url(), "--schema-only"]));
    run_sql(
        &database,
        "create table graphile_worker._private_workers (id text primary key, last_heartbeat_at timestamptz not null);
         create function graphile_worker.list_orphan_locked_workers(interval) returns table (worker_id text) language sql as 'select null::text';
         insert into graphile_worker.migrations (id) values (21), (22);
         select graphile_worker.add_job('t');
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'graphile_worker_1';
         insert into graphile_worker._private_workers values ('graphile_worker_1', now())",
    )
    .await;
    let guide = include_str!("../../../../docs/moving-from-the-rust-port.md");
    assert!(guide.contains("graphile-worker migrate --from-rust-port\n"));
    let arguments = ["migrate", "-c", database.url(), "--from-rust-port"];
    let refusal = failure(&arguments);
    assert!(refusal.1.contains("workers of the Rust port") && refusal.1.contains("Stop them"), "{refusal:?}");
    // By default, the port sends no heartbeats.
    run_sql(&database, "delete from graphile_worker._private_workers").await;
    let refusal = failure(&arguments);
    assert!(refusal.1.contains("graphile_worker_1 holds 1 job: 1") && refusal.1.contains("--force"), "{refusal:?}");
    let (code, line) = outcome(graphile_worker(&[&arguments[..], &["--force"]].concat()));
    assert_eq!(code, Some(0), "{line}");
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(line.contains("objects of the Rust port removed, 1 job of its workers released"), "{line}");
    run_sql(&database, "insert into graphile_worker.migrations (id) values (21)").await;
}
