//! Databases that are not as one expects: odd times in the tables, bytes that are not UTF-8, only to be read, without a
//! connection left.

use crate::support::{
    Folder, Running, empty_database, failure_of, graphile_worker, installed_database, run_sql, texts, value,
};
use graphile_worker_devdb::{ClusterOptions, TestDatabase};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::process::Command;

/// The binary on the database behind this URL.
fn on(url: &str, arguments: &[&str]) -> Command {
    let mut command = graphile_worker(arguments);
    command.env("DATABASE_URL", url).env_remove("COLUMNS").env_remove("NO_COLOR");
    command
}

/// Exit code, standard output, standard error.
fn ran(mut command: Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let (stdout, stderr) = texts(&output);
    (output.status.code().unwrap(), stdout, stderr)
}

/// What operators look at, for people and as JSON.
fn read_everything(url: &str) {
    for arguments in [
        &["list"][..],
        &["list", "--json"],
        &["show", "1"],
        &["why", "1"],
        &["stats"],
        &["queues"],
        &["workers"],
        &["top"],
        &["sweep", "--dry-run"],
        &["uninstall"],
        &["migrate"],
    ] {
        let (code, stdout, stderr) = ran(on(url, arguments));
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
    }
    // Exits with 1 if there is a problem, but says all.
    let (_, stdout, stderr) = ran(on(url, &["doctor"]));
    assert!(stdout.contains("failed jobs") && stderr.is_empty(), "{stdout}{stderr}");
}

#[tokio::test]
async fn operator_commands_work_with_any_timestamp() {
    let database = installed_database().await;
    run_sql(&database, "select graphile_worker.add_job('t', queue_name := 'q' || n) from generate_series(1, 8) as n")
        .await;
    for (n, time) in (1..).zip(["infinity", "-infinity", "4000-01-01 BC", "290000-01-01"]) {
        run_sql(
            &database,
            &format!(
                "update graphile_worker._private_jobs
                 set run_at = '{time}', created_at = '{time}', updated_at = '{time}' where id in ({n}, {n} + 4);
                 update graphile_worker._private_jobs set locked_at = '{time}', locked_by = 'rs-live-odd' where id = {n} + 4;
                 update graphile_worker._private_job_queues set locked_at = '{time}', locked_by = 'rs-live-odd' where id = {n};
                 insert into graphile_worker._rs_workers (worker_id, started_at, last_heartbeat_at, swept_at)
                 values ('rs-live-{n}', '{time}', '{time}', '{time}');
                 insert into graphile_worker._rs_recoveries (job_id, times, last_at) values ({n}, 1, '{time}');
                 insert into graphile_worker._private_known_crontabs values ('tick {n}', '{time}', '{time}')"
            ),
        )
        .await;
    }
    read_everything(database.url());
    for id in 1..=8 {
        for command in ["why", "show"] {
            let (code, stdout, stderr) = ran(on(database.url(), &[command, &id.to_string(), "--json"]));
            assert_eq!(code, 0, "{command} {id}: {stdout}{stderr}");
        }
    }
    let (code, stdout, stderr) = ran(on(database.url(), &["run-now", "1", "2", "3", "4"]));
    assert_eq!(code, 0, "{stdout}{stderr}");
}

#[tokio::test]
async fn operator_commands_work_with_invalid_bytes_and_can_fail_the_job() {
    let beside = empty_database().await;
    let name = format!("{}_sql_ascii", beside.name());
    let create = format!("create database {name} encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C' template template0");
    run_sql(&beside, &create).await;
    let url = format!("{}/{name}", beside.url().rsplit_once('/').unwrap().0);
    let mut connection = PgConnection::connect_with(&beside.options().database(&name)).await.unwrap();
    graphile_worker::migrate(&mut connection, "graphile_worker").await.unwrap();
    graphile_worker::allow_invalid_utf8(&mut connection).await.unwrap();
    let jobs = r#"
        select graphile_worker.add_job('t', ('"caf' || E'\xe9' || '"')::json, queue_name := E'q\xe9');
        select graphile_worker.add_job('t', job_key := E'k\xe9', flags := array[E'f\xe9']);
        update graphile_worker._private_jobs set last_error = E'\xff' where id = 2"#;
    sqlx::raw_sql(AssertSqlSafe(jobs)).execute(&mut connection).await.unwrap();
    read_everything(&url);
    let (_, stdout, _) = ran(on(&url, &["show", "1"]));
    assert!(stdout.contains("caf\u{fffd}") && stdout.contains("q\u{fffd}"), "{stdout}");
    for arguments in [&["fail", "1", "2"][..], &["run-now", "1"], &["complete", "1", "2"]] {
        let (code, stdout, stderr) = ran(on(&url, arguments));
        assert_eq!(code, 0, "{arguments:?}: {stdout}{stderr}");
    }
    connection.close().await.unwrap();
    run_sql(&beside, &format!("drop database {name}")).await;
}

async fn read_only_database() -> TestDatabase {
    let database = installed_database().await;
    run_sql(&database, &format!("alter database {} set default_transaction_read_only = on", database.name())).await;
    database
}

#[tokio::test]
async fn doctor_reports_a_read_only_database() {
    let database = read_only_database().await;
    let (code, stdout, _) = ran(on(database.url(), &["doctor"]));
    assert_eq!(code, 1, "{stdout}");
    let found = "transactions are read-only: default_transaction_read_only is on";
    let advice = format!("→ Run `alter database \"{}\" reset default_transaction_read_only`.", database.name());
    assert!(stdout.contains(found) && stdout.contains(&advice), "{stdout}");
    assert_eq!(value(&database, "select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_worker_reports_a_read_only_database() {
    let database = read_only_database().await;
    let folder = Folder::new();
    folder.script("tasks/t", "#!/bin/sh\n");
    let advice = format!("run `alter database \"{}\" reset default_transaction_read_only`", database.name());
    let worker = |arguments: &[&str]| {
        let mut command = folder.graphile_worker(arguments);
        command.env("DATABASE_URL", database.url());
        command
    };

    let (code, _, log) = ran(worker(&["--once", "--startup-timeout", "0"]));
    assert_eq!(code, 1, "{log}");
    assert!(log.lines().last().unwrap_or_default().contains(&advice), "{log}");

    let mut waiting = Running::start(worker(&["--once", "--startup-timeout", "600"]));
    waiting.line(&["WARN: waiting for the database", &advice]);
    let writable = database.options().options([("default_transaction_read_only", "off")]);
    let mut connection = PgConnection::connect_with(&writable).await.unwrap();
    let reset = format!("alter database {} reset default_transaction_read_only", database.name());
    sqlx::raw_sql(AssertSqlSafe(reset)).execute(&mut connection).await.unwrap();
    let (code, log) = waiting.end();
    assert_eq!(code, Some(0), "{log}");
}

#[tokio::test]
async fn every_command_reports_that_a_role_has_no_free_connections() {
    let database = installed_database().await;
    let role = format!("one_{}", database.name());
    run_sql(&database, &format!("create role {role} login password 'secret' connection limit 0")).await;
    let url = format!("postgres://{role}:secret@{}", database.url().rsplit_once('@').unwrap().1);
    for arguments in [&["list"][..], &["doctor"], &["--schema-only"]] {
        let (code, line) = failure_of(on(&url, arguments));
        assert_eq!(code, 1, "{line}");
        assert!(
            line.contains("(the role has reached its connection limit, and a worker needs 7 connections"),
            "{line}"
        );
    }
    run_sql(&database, &format!("drop role {role}")).await;
}

#[tokio::test]
async fn doctor_reports_that_the_server_has_no_free_connections() {
    let folder = Folder::new();
    let options = ClusterOptions::new(folder.path().join("db")).durable(false).setting("max_connections", "8");
    let cluster = options.open().unwrap();
    let mut taken = vec![PgConnection::connect_with(&cluster.options("postgres")).await.unwrap()];
    sqlx::raw_sql("create database app").execute(&mut taken[0]).await.unwrap();
    let url = cluster.url("app");
    let (code, stdout, stderr) = ran(on(&url, &["migrate"]));
    assert_eq!(code, 0, "{stdout}{stderr}");
    while let Ok(connection) = PgConnection::connect_with(&cluster.options("postgres")).await {
        taken.push(connection);
    }
    let (code, stdout, stderr) = ran(on(&url, &["doctor"]));
    assert_eq!(code, 1, "{stdout}{stderr}");
    let said = format!("{stdout}{stderr}");
    assert!(said.contains("the server has no free connections") && said.contains("raise max_connections"), "{said}");

    // With one left, it says what it can.
    taken.pop().unwrap().close().await.unwrap();
    let used = "select count(*) from pg_stat_activity where backend_type = 'client backend'";
    loop {
        let used: i64 = sqlx::query_scalar(used).fetch_one(&mut taken[0]).await.unwrap();
        if used < 8 {
            break;
        }
    }
    let (code, stdout, stderr) = ran(on(&url, &["doctor"]));
    assert_eq!(code, 1, "{stdout}{stderr}");
    assert!(stdout.contains("8 of 8") && stdout.contains("max_connections"), "{stdout}");
    drop(taken);
    cluster.stop().unwrap();
}

/// The library's tests plant everything; here are the names that the commands' own SQL uses, as exact copies.
#[tokio::test]
async fn no_command_calls_functions_that_search_path_lists_before_pg_catalog() {
    let database = installed_database().await;
    let mut plant = String::from("create schema app;");
    for (name, arguments, result) in [
        ("now", "", "timestamptz"),
        ("current_database", "", "name"),
        ("row_security_active", "oid", "bool"),
        ("to_regclass", "text", "regclass"),
        ("pg_has_role", "oid, text", "bool"),
        ("getdatabaseencoding", "", "name"),
        ("equal", "oid, oid", "bool"),
        ("equal", "int8, int8", "bool"),
        ("equal", "\"char\", \"char\"", "bool"),
        ("equal", "name, text", "bool"),
        ("equal", "text, text", "bool"),
    ] {
        plant.push_str(&format!(
            "create function app.{name}({arguments}) returns {result} language plpgsql as $$ begin raise 'INTRUDED'; end $$;"
        ));
        if name == "equal" {
            let (left, right) = arguments.split_once(", ").unwrap();
            plant.push_str(&format!(
                "create operator app.= (leftarg = {left}, rightarg = {right}, function = app.equal);"
            ));
        }
    }
    run_sql(&database, "select graphile_worker.add_job('t', queue_name := 'q', max_attempts := 1)").await;
    run_sql(&database, &plant).await;
    run_sql(&database, &format!("alter database {} set search_path = app, pg_catalog, public", database.name())).await;
    for arguments in [
        &["add", "t", "{}"][..],
        &["add", "t", "--in", "1h"],
        &["list"],
        &["show", "1"],
        &["why", "1"],
        &["stats"],
        &["queues"],
        &["workers"],
        &["top"],
        &["sweep", "--dry-run"],
        &["fail", "1"],
        &["run-now", "1"],
        &["cleanup"],
        &["grant", "pg_monitor", "--read", "--apply"],
        &["grant", "pg_monitor", "--revoke", "--apply"],
        &["migrate"],
        &["uninstall"],
    ] {
        let (code, stdout, stderr) = ran(on(database.url(), arguments));
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
    }
    let (_, stdout, _) = ran(on(database.url(), &["doctor"]));
    assert!(stdout.contains("app comes before pg_catalog") && !stdout.contains("INTRUDED"), "{stdout}");
}
