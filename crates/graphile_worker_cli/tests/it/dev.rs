//! `graphile-worker dev`: a database of its own, from nothing to a job that ran.

use crate::support::{Folder, Running, TIMEOUT, failure_of, graphile_worker};
use sqlx::{Connection, PgConnection};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn folder_with_a_task() -> Folder {
    let folder = Folder::new();
    folder.script("tasks/hello", "#!/bin/sh\ncat\n");
    folder
}

/// The connection string and the statement that it prints.
fn greeting(dev: &mut Running) -> (String, String) {
    let url = dev.line(&["export DATABASE_URL='"]).split_once('=').unwrap().1.trim_matches('\'').to_owned();
    let statement = dev.line(&["select graphile_worker.add_job("]).trim().to_owned();
    (url, statement)
}

fn server_runs(folder: &Path) -> bool {
    folder.join(".graphile-worker/server/data/postmaster.pid").exists()
}

#[tokio::test]
async fn dev_starts_from_nothing_runs_pasted_commands_and_stops_postgresql() {
    let folder = folder_with_a_task();
    let mut dev = Running::start(folder.graphile_worker(&["dev"]));
    let (url, statement) = greeting(&mut dev);
    dev.line(&["connected and waiting for jobs", "hello"]);
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut connection).await.unwrap();
    dev.line(&["[job 1 hello] INFO: {\"payload\":{\"name\": \"world\"}}"]);
    // Watch is on.
    folder.script("tasks/late", "#!/bin/sh\necho better late than never\n");
    sqlx::raw_sql("select graphile_worker.add_job('late')").execute(&mut connection).await.unwrap();
    dev.line(&["INFO: better late than never"]);

    // Other commands find it, where nothing else is said.
    let stats = folder.graphile_worker(&["stats", "--json"]).output().unwrap();
    assert!(stats.status.success(), "{stats:?}");

    let (code, line) = failure_of(folder.graphile_worker(&["dev"]));
    assert_eq!(code, 1);
    assert!(line.contains("another `graphile-worker dev` is running in"), "{line}");

    assert!(server_runs(folder.path()));
    dev.signal("INT");
    assert_eq!(dev.end().0, Some(0));
    assert!(!server_runs(folder.path()), "PostgreSQL is stopped");
    assert_eq!(std::fs::read_to_string(folder.path().join(".graphile-worker/.gitignore")).unwrap(), "*\n");
}

#[tokio::test]
async fn its_examples_name_a_task_that_can_run_and_work_when_they_are_pasted() {
    let folder = Folder::new();
    folder.write("tasks/README.md", "read me");
    folder.script("tasks/a_broken", "#!/no/such/interpreter\n");
    folder.script("tasks/b_text", "no program\n");
    folder.script("tasks/c", "#!/usr/bin/env no-such-program\n");
    folder.script("tasks/mail/send.sh", "#!/usr/bin/env -S sh\ncat\n");
    let mut dev = Running::start(folder.graphile_worker(&["dev"]));
    let (url, statement) = greeting(&mut dev);
    assert_eq!(statement, r#"select graphile_worker.add_job('mail/send', '{"name": "world"}');"#);
    dev.line(&[r#"graphile-worker add mail/send '{"name": "world"}'"#]);
    dev.line(&["connected and waiting for jobs"]);
    let mut add = folder.graphile_worker(&["add", "mail/send", r#"{"name": "world"}"#]);
    assert!(add.env("DATABASE_URL", url).status().unwrap().success());
    dev.line(&["[job 1 mail/send] INFO: {\"payload\":{\"name\": \"world\"}}"]);
    dev.signal("TERM");
    assert_eq!(dev.end().0, Some(0));
}

#[tokio::test]
async fn tasks_find_the_private_database_and_no_other() {
    let folder = Folder::new();
    folder.script(
        "tasks/look",
        "#!/bin/sh\necho \"url $DATABASE_URL\"\necho \"at $PGHOST:$PGDATABASE:${PGPASSWORD-none}\"\n",
    );
    let mut command = folder.graphile_worker(&["dev"]);
    command.env("DATABASE_URL", "postgres://elsewhere/db").env("PGHOST", "elsewhere").env("PGPASSWORD", "secret");
    let mut dev = Running::start(command);
    let (url, _) = greeting(&mut dev);
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("select graphile_worker.add_job('look')").execute(&mut connection).await.unwrap();
    dev.line(&[&format!("INFO: url {url}")]);
    dev.line(&["INFO: at /", ":postgres:none"]);
    dev.signal("TERM");
    assert_eq!(dev.end().0, Some(0));
}

#[tokio::test]
async fn data_is_kept_until_it_is_reset() {
    let folder = folder_with_a_task();
    let add = "select graphile_worker.add_job('nobodys')";
    for (arguments, waiting) in [(&["dev"][..], 1), (&["dev"], 2), (&["dev", "--reset", "-j", "2"], 1)] {
        let mut dev = Running::start(folder.graphile_worker(arguments));
        let (url, _) = greeting(&mut dev);
        dev.line(&["connected and waiting for jobs"]);
        let mut connection = PgConnection::connect(&url).await.unwrap();
        sqlx::raw_sql(add).execute(&mut connection).await.unwrap();
        let count: i64 =
            sqlx::query_scalar("select count(*) from graphile_worker.jobs").fetch_one(&mut connection).await.unwrap();
        assert_eq!(count, waiting);
        dev.signal("TERM");
        assert_eq!(dev.end().0, Some(0));
    }
}

#[tokio::test]
async fn a_killed_dev_leaves_no_server_behind() {
    let folder = folder_with_a_task();
    let mut dev = Running::start(folder.graphile_worker(&["dev"]));
    dev.line(&["connected and waiting for jobs"]);
    dev.signal("KILL");
    assert_eq!(dev.end().0, None);
    let deadline = Instant::now() + TIMEOUT;
    while server_runs(folder.path()) {
        assert!(Instant::now() < deadline, "the server is still running");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn a_missing_tasks_folder_or_initdb_is_reported_before_anything_is_created() {
    let folder = Folder::new();
    let (code, line) = failure_of(folder.graphile_worker(&["dev"]));
    assert_eq!(code, 1);
    assert!(line.contains("the tasks folder tasks does not exist"), "{line}");
    assert!(!folder.path().join(".graphile-worker").exists());

    let folder = folder_with_a_task();
    let mut command = folder.graphile_worker(&["dev"]);
    command.env("PGBIN", folder.path());
    let (code, line) = failure_of(command);
    assert_eq!(code, 1);
    assert!(line.contains("does not contain initdb"), "{line}");
}

/// If the tests run as root, `dev` has to work as another user, too.
#[test]
fn an_ordinary_user_can_use_it() {
    let id = Command::new("id").arg("-u").output().unwrap();
    if String::from_utf8_lossy(&id.stdout).trim() != "0" {
        return;
    }
    let folder = folder_with_a_task();
    let given = Command::new("chown").args(["-R", "nobody"]).arg(folder.path()).status().unwrap();
    assert!(given.success());
    // The binary may be in a folder that other users cannot enter. Copied by another process: a child of a test that runs
    // at the same time would inherit the open copy, and a program that is open for writing cannot be run.
    let binary = folder.path().join("graphile-worker");
    let copied = Command::new("cp").arg(graphile_worker(&[]).get_program()).arg(&binary).status().unwrap();
    assert!(copied.success());
    let mut command = Command::new("setpriv");
    command.args(["--reuid=nobody", "--clear-groups"]).arg(&binary).arg("dev").current_dir(folder.path());
    let mut dev = Running::start(command);
    dev.line(&["connected and waiting for jobs", "hello"]);
    dev.signal("INT");
    assert_eq!(dev.end().0, Some(0));
}
