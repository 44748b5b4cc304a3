//! A worker stops by itself when the schema changes under it: breaking migrations, forged announcements, a dropped schema.

use crate::support::{Db, Started};
use crate::worker_support::{LISTENERS, sending, until_worker_listens};
use std::time::Duration;

#[tokio::test]
async fn a_worker_stops_when_a_breaking_migration_is_announced() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    db.add_job("'t', '1'").await;
    ran.recv().await.unwrap();
    until_worker_listens(&db).await;
    db.run("select pg_notify('worker:migrate', '{\"migrationNumber\":21,\"breaking\":false}')").await;
    db.add_job("'t', '2'").await;
    ran.recv().await.unwrap();
    // As Node does it: the entry and the announcement in one transaction.
    db.run(
        "begin;
         insert into graphile_worker.migrations (id, breaking) values (22, true);
         select pg_notify('worker:migrate', '{\"migrationNumber\":22,\"breaking\":true}');
         commit",
    )
    .await;
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_worker_stops_when_a_breaking_migration_is_recorded_only_after_it_is_announced() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    db.run("select pg_notify('worker:migrate', '{\"migrationNumber\":22,\"breaking\":true}')").await;
    db.add_job("'t', '1'").await;
    assert_eq!(ran.recv().await, Some(1), "nothing is recorded yet");
    db.run("insert into graphile_worker.migrations (id, breaking) values (22, true)").await;
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_worker_stops_when_a_newer_release_waits_to_apply_a_breaking_migration_of_nodes() {
    let db = Db::installed().await;
    let (options, _ran) = sending(&db);
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    db.run(
        "insert into graphile_worker._rs_additions (id, breaking, ts, wanted_until)
           values (-21, true, now() + interval '1 minute', now() + interval '1 minute');
         select pg_notify('worker:migrate', '{\"migrationNumber\":21,\"breaking\":true,\"schema\":\"graphile_worker\"}')",
    )
    .await;
    let worker = started.worker.clone();
    started.running.await.unwrap().unwrap();
    assert!(worker.exit_reason().is_some_and(|why| why.contains("(step 21 of Node's graphile-worker")));
}

#[tokio::test]
async fn forged_announcements_do_not_stop_a_worker() {
    let db = Db::installed().await;
    let role = db.value("select 'forger_' || current_database()").await.as_str().unwrap().to_owned();
    db.run(&format!("drop role if exists {role}; create role {role} login")).await;
    let mut forger = db.connect_as(&role).await;
    assert!(sqlx::query("select from graphile_worker.jobs").execute(&mut forger).await.is_err(), "it has no rights");
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    let forged = [
        r#"{"migrationNumber":21,"breaking":true}"#,
        r#"{"migrationNumber":2147483647,"breaking":true,"schema":"graphile_worker"}"#,
        r#"{"breaking":true}"#,
        r#"{"breaking":false,"schema":"graphile_worker","addition":2147483647,"waits":0}"#,
        r#"{"addition":-21,"waits":1e308}"#,
        r#"{"breaking":"yes"}"#,
        "[]",
        "null",
        "breaking",
        "",
    ];
    for (n, message) in forged.into_iter().enumerate() {
        sqlx::query("select pg_notify('worker:migrate', $1)").bind(message).execute(&mut forger).await.unwrap();
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n as i64), "after {message}");
    }
    assert_eq!(started.worker.exit_reason(), None);
    started.stop().await;
    drop(forger);
    db.run(&format!("drop role {role}")).await;
}

#[tokio::test]
async fn a_worker_that_missed_the_announcement_of_a_breaking_migration_stops_when_it_reconnects() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    db.add_job("'t', '1'").await;
    ran.recv().await.unwrap();
    until_worker_listens(&db).await;
    db.run(&format!(
        "insert into graphile_worker.migrations (id, breaking) values (21, true);
         select pg_terminate_backend(pid) {LISTENERS}"
    ))
    .await;
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_worker_whose_schema_was_dropped_returns_an_error() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options.poll_interval(Duration::from_millis(50))).await;
    db.add_job("'t', '1'").await;
    ran.recv().await.unwrap();
    // The worker polls meanwhile: the two may deadlock, and PostgreSQL may cancel this one.
    while sqlx::raw_sql("drop schema graphile_worker cascade").execute(&db.pool).await.is_err() {}
    let error = started.running.await.unwrap().unwrap_err();
    let messages = [
        "could not exchange jobs with the database",
        "could not look up the tasks",
        "could not look up the jobs and queues of this worker",
    ];
    assert!(messages.contains(&&*error.to_string()), "{error}");
}
