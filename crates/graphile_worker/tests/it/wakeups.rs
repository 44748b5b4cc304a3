//! When an idle worker claims: on a notification, when a job is due, and by polling.

use crate::support::{Db, Started, until};
use crate::worker_support::{Held, LISTENERS, options, sending, until_worker_listens};
use serde_json::Value;
use std::collections::HashSet;
use std::time::Duration;

#[tokio::test]
async fn a_new_job_wakes_an_idle_worker() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    for n in 1..=3 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n));
    }
    started.stop().await;
}

#[tokio::test]
async fn an_idle_worker_wakes_when_a_scheduled_job_is_due() {
    let db = Db::installed().await;
    db.add_job("'t', '1', run_at := now() + interval '300 milliseconds'").await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    assert_eq!(ran.recv().await, Some(1));
    db.add_job("'t', '2', run_at := now() + interval '300 milliseconds', queue_name := 'q'").await;
    assert_eq!(ran.recv().await, Some(2));
    started.stop().await;
}

#[tokio::test]
async fn a_job_that_becomes_due_while_another_runs_is_started() {
    let db = Db::installed().await;
    db.add_job("'for_ever'").await;
    db.add_job("'t', '1', run_at := now() + interval '500 milliseconds'").await;
    let (options, mut ran) = sending(&db);
    let options = options
        .define_task("for_ever", |_: Value, _| std::future::pending::<()>())
        .use_notifications(false)
        .shutdown_grace_period(Duration::ZERO);
    let started = Started::new(options).await;
    assert_eq!(ran.recv().await, Some(1));
    started.stop().await;
}

/// In a large fleet, most workers claim a little later. The only one that can run the jobs must not rely on the others.
#[tokio::test]
async fn in_a_large_fleet_each_job_starts_although_most_workers_are_busy_or_have_other_tasks() {
    let db = Db::installed().await;
    let mut fleet = Vec::new();
    for _ in 0..10 {
        fleet.push(Started::new(options(&db).define_task("other", |_: Value, _| async {})).await);
    }
    let held = Held::default();
    let busy = options(&db).define_task("t", {
        let held = held.clone();
        move |_: Value, _| held.clone().run()
    });
    fleet.push(Started::new(busy.concurrency(1)).await);
    db.add_job("'t', '0'").await;
    held.begun.notified().await;
    let (options, mut ran) = sending(&db);
    fleet.push(Started::new(options).await);
    for n in 1..=30 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n));
    }
    held.go_on.notify_one();
    for worker in fleet {
        worker.stop().await;
    }
}

/// A server may log every statement: an idle worker must not fill its disk.
#[tokio::test]
async fn an_idle_worker_polls_with_a_short_statement_and_claims_only_due_jobs() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options.poll_interval(Duration::from_millis(10))).await;
    let last_statement = format!(
        "select query from pg_stat_activity
         where datname = current_database() and application_name = 'graphile_worker {}'",
        started.worker.worker_id()
    );
    let polls = async || {
        until("the worker polls", async || {
            let statements = db.rows(&last_statement).await;
            let statement = statements.first()?["query"].as_str()?.to_owned();
            (statement.contains("priorities") && !statement.contains("contended")).then_some(statement)
        })
        .await
    };
    let statement = polls().await;
    assert!(statement.len() < 1200, "{} bytes: {statement}", statement.len());
    for (n, run_at) in [(1, "now()"), (2, "'-infinity'"), (3, "now() + interval '30 milliseconds'")] {
        polls().await;
        // Without a notification.
        db.run(&format!(
            "insert into graphile_worker._private_jobs (task_id, payload, run_at)
             select id, to_json({n}), {run_at} from graphile_worker._private_tasks where identifier = 't'"
        ))
        .await;
        assert_eq!(ran.recv().await, Some(n), "{run_at}");
    }
    db.run("insert into graphile_worker._private_jobs (task_id, run_at) select id, 'infinity' from graphile_worker._private_tasks")
        .await;
    polls().await;
    started.stop().await;
}

#[tokio::test]
async fn a_listening_connection_that_was_killed_is_replaced() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    for n in 1..=3 {
        until_worker_listens(&db).await;
        db.run(&format!("select pg_terminate_backend(pid) {LISTENERS}")).await;
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n));
    }
    started.stop().await;
}

#[tokio::test]
async fn no_job_is_lost_or_runs_twice_when_connections_are_killed() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 3000) as n").await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    let kill = format!(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity
         where datname = current_database() and application_name like 'graphile_worker {}%'",
        started.worker.worker_id()
    );
    let mut killed = 0;
    let mut seen = HashSet::new();
    for received in 1..=3000 {
        assert!(seen.insert(ran.recv().await.unwrap()), "no job ran twice");
        if received % 500 == 0 {
            killed += db.value(&kill).await.as_i64().unwrap();
        }
    }
    assert!(killed > 0, "no connection was killed");
    started.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_worker_without_notifications_and_prepared_statements_runs_jobs() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let options =
        options.use_notifications(false).use_prepared_statements(false).poll_interval(Duration::from_millis(20));
    let started = Started::new(options).await;
    for n in 1..=20 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n));
    }
    started.stop().await;
}
