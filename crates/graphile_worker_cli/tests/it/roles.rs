//! `grant`, and the commands as the roles that it makes.

use crate::support::{Folder, failure_of, graphile_worker, installed_database, one_line, run_sql, texts, value};
use graphile_worker_devdb::TestDatabase;
use serde_json::json;
use std::process::Command;

async fn role(database: &TestDatabase, name: &str) -> (String, String) {
    let role = format!("{name}_{}", std::process::id());
    run_sql(database, &format!("create role {role} login password 'secret'")).await;
    let (_, rest) = database.url().split_once('@').unwrap();
    let url = format!("postgres://{role}:secret@{rest}");
    (role, url)
}

fn on(url: &str, arguments: &[&str]) -> Command {
    let mut command = graphile_worker(arguments);
    command.env("DATABASE_URL", url);
    command
}

/// What a command prints that succeeds.
fn said(url: &str, arguments: &[&str]) -> String {
    let output = on(url, arguments).output().unwrap();
    let (stdout, stderr) = texts(&output);
    assert!(output.status.success(), "{arguments:?}: {stdout}{stderr}");
    one_line(&stdout)
}

#[tokio::test]
async fn grant_prints_sql_without_a_database_and_applies_it_with_one() {
    let database = installed_database().await;
    let (role, url) = role(&database, "adder").await;
    let output = graphile_worker(&["grant", &role, "--add"]).output().unwrap();
    let sql = texts(&output).0;
    assert!(sql.starts_with("begin;\n") && sql.ends_with("commit;\n"), "{sql}");
    assert!(on(&url, &["add", "t"]).output().unwrap().status.code() == Some(1));
    run_sql(&database, &sql).await;
    assert!(said(&url, &["add", "t", "{\"a\": 1}"]).starts_with("job 1 added: t"));
    let (code, line) = failure_of(on(&url, &["list"]));
    assert!(code == 1 && line.contains("grant ROLE --read --apply"), "{line}");
    assert!(said(&url, &["doctor"]).contains("can only add jobs"));
    let applied = said(database.url(), &["grant", &role, "--read", "--apply"]);
    assert_eq!(applied, format!("role \"{role}\" can read jobs in schema \"graphile_worker\""));
    assert!(said(&url, &["list"]).contains("ready"));
    said(database.url(), &["grant", &role, "--revoke", "--apply"]);
    assert!(on(&url, &["add", "t"]).output().unwrap().status.code() == Some(1));
    run_sql(&database, &format!("drop role {role}")).await;
    for arguments in [&["grant", "web"][..], &["grant", "--add"], &["grant", "web", "--add", "--revoke"]] {
        assert_eq!(graphile_worker(arguments).output().unwrap().status.code(), Some(2), "{arguments:?}");
    }
    let (_, line) = failure_of(graphile_worker(&["grant", "public", "--add"]));
    assert!(line.contains("must be the name of a role"), "{line}");
    let (code, line) = failure_of(on(database.url(), &["grant", "nobody there", "--add", "--apply"]));
    assert!(code == 1 && line.contains("does not exist"), "{line}");
}

#[tokio::test]
async fn a_reader_can_read_everything_and_doctor_finds_no_problem() {
    let database = installed_database().await;
    let (role, url) = role(&database, "looker").await;
    said(database.url(), &["grant", &role, "--read", "--apply"]);
    assert!(said(&url, &["doctor"]).contains("can read everything, but change nothing"));
    said(database.url(), &["add", "t", "{\"a\": 1}"]);
    for arguments in
        [&["list"][..], &["show", "1"], &["why", "1"], &["stats"], &["queues"], &["workers"], &["top", "--once"]]
    {
        said(&url, arguments);
    }
    for arguments in [&["complete", "1"][..], &["add", "t"], &["run-now", "1"], &["fail", "1"]] {
        let (code, line) = failure_of(on(&url, arguments));
        assert!(code == 1 && !line.contains("panicked"), "{line}");
    }
    assert_eq!(value(&database, "select count(*) from graphile_worker._private_jobs").await, 1);
    said(database.url(), &["grant", &role, "--revoke", "--apply"]);
    run_sql(&database, &format!("drop role {role}")).await;
}

#[tokio::test]
async fn a_runner_runs_jobs_that_an_adder_adds() {
    let database = installed_database().await;
    let ((runner, run_url), (adder, add_url)) = (role(&database, "runs").await, role(&database, "adds").await);
    said(database.url(), &["grant", &runner, "--run", "--apply"]);
    said(database.url(), &["grant", &adder, "--add", "--apply"]);
    let folder = Folder::new();
    folder.script("tasks/hello", "#!/bin/sh\n");
    said(&add_url, &["add", "hello"]);
    let mut once = folder.graphile_worker(&["--once"]);
    let output = once.env("DATABASE_URL", &run_url).output().unwrap();
    assert!(output.status.success(), "{:?}", texts(&output));
    assert_eq!(value(&database, "select count(*) from graphile_worker._private_jobs").await, json!(0));
    for role in [runner, adder] {
        said(database.url(), &["grant", &role, "--revoke", "--apply"]);
        run_sql(&database, &format!("drop role {role}")).await;
    }
}

/// Rights and policies that the owner has made without `grant`.
#[tokio::test]
async fn row_security_policies_of_the_operator_are_respected() {
    let database = installed_database().await;
    let (role, url) = role(&database, "tenant").await;
    said(database.url(), &["add", "mine", "{\"a\": 1}"]);
    said(database.url(), &["add", "theirs"]);
    run_sql(
        &database,
        &format!(
            "grant usage on schema graphile_worker to {role};
             grant select on all tables in schema graphile_worker to {role};
             create policy tasks on graphile_worker._private_tasks for select to {role} using (true);
             create policy queues on graphile_worker._private_job_queues for select to {role} using (true);
             create policy mine on graphile_worker._private_jobs for select to {role}
               using (task_id = (select id from graphile_worker._private_tasks where identifier = 'mine'))"
        ),
    )
    .await;
    // What the policy lets through is shown, and nothing else.
    let list = said(&url, &["list"]);
    assert!(list.contains("mine") && !list.contains("theirs"), "{list}");
    assert!(said(&url, &["show", "1"]).contains("\"a\": 1"));
    for arguments in [&["why", "1"][..], &["stats"], &["queues"], &["workers"], &["top", "--once"]] {
        let text = said(&url, arguments);
        assert!(!text.contains("theirs"), "{arguments:?}: {text}");
    }
    let (code, line) = failure_of(on(&url, &["complete", "1"]));
    assert!(code == 1 && !line.contains("panicked"), "{line}");
    assert_eq!(value(&database, "select count(*) from graphile_worker._private_jobs").await, json!(2));
    run_sql(&database, &format!("drop owned by {role}; drop role {role}")).await;
}
