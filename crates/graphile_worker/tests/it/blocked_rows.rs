//! Rows that another session has locked: the worker continues with everything else.

use crate::support::{Db, Log, Started, until};
use crate::worker_support::{Held, assert_queues_are_unlocked, options, sending};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::Notify;

#[tokio::test]
async fn a_locked_job_row_does_not_delay_the_outcomes_of_other_jobs() {
    let db = Db::installed().await;
    db.add_job("'t', '{\"waits\": true}', queue_name := 'q'").await;
    let held = Held::default();
    let waits = held.clone();
    let task = move |payload: Value, _| {
        let waits = waits.clone();
        async move {
            if payload["waits"] == true {
                waits.run().await;
            }
        }
    };
    let started = Started::new(options(&db).define_task("t", task)).await;
    held.begun.notified().await;
    let mut blocker = db.connect().await;
    sqlx::raw_sql("begin; select from graphile_worker._private_jobs for update").execute(&mut blocker).await.unwrap();
    held.go_on.notify_one();
    for job in ["'t'", "'t'", "'t', queue_name := 'q'"] {
        db.add_job(job).await;
    }
    let left = async || {
        db.rows("select queue_name, locked_by is not null as locked from graphile_worker.jobs order by id").await
    };
    let only_the_jobs_of_the_queue =
        [json!({"queue_name": "q", "locked": true}), json!({"queue_name": "q", "locked": false})];
    until("the outcomes of the other jobs are written", async || {
        Some(left().await).filter(|left| *left == only_the_jobs_of_the_queue)
    })
    .await;
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    until("the queue continues", async || Some(left().await).filter(Vec::is_empty)).await;
    started.stop().await;
    assert_queues_are_unlocked(&db).await;
}

#[tokio::test]
async fn an_open_transaction_that_adds_a_task_delays_no_other_task() {
    let db = Db::installed().await;
    let mut blocker = db.connect().await;
    sqlx::raw_sql("begin; select graphile_worker.add_job('t', '7')").execute(&mut blocker).await.unwrap();
    let (options, mut sent) = sending(&db);
    let others = Arc::new(Notify::new());
    let other = others.clone();
    let options = options.define_task("other", move |_: Value, _| {
        other.notify_one();
        async {}
    });
    let started = Started::new(options).await;
    db.add_job("'other'").await;
    others.notified().await;
    sqlx::raw_sql("commit").execute(&mut blocker).await.unwrap();
    assert_eq!(sent.recv().await, Some(7));
    started.stop().await;
}

#[tokio::test]
async fn an_open_transaction_that_adds_a_task_again_delays_no_other_task() {
    let db = Db::installed().await;
    let (options, mut sent) = sending(&db);
    let started = Started::new(options.define_task("rare", |_: Value, _| async {})).await;
    db.add_job("'t', '1'").await;
    assert_eq!(sent.recv().await, Some(1));
    // The name has no jobs and is deleted; an open transaction adds it again.
    let mut blocker = db.connect().await;
    sqlx::raw_sql(
        "delete from graphile_worker._private_tasks where identifier = 'rare'; notify \"worker:tasks\", 'graphile_worker';
         begin; select graphile_worker.add_job('rare')",
    )
    .execute(&mut blocker)
    .await
    .unwrap();
    for n in 2..6 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(sent.recv().await, Some(n));
    }
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    started.stop().await;
}

#[tokio::test]
async fn shutdown_waits_for_job_rows_that_another_session_has_locked() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let mut blocker = db.connect().await;
    let held = Held::default();
    let waits = held.clone();
    let task = move |_: Value, _| waits.clone().run();
    let (log, _guard) = Log::start();
    let started = Started::new(options(&db).define_task("t", task)).await;
    held.begun.notified().await;
    sqlx::raw_sql("begin; select from graphile_worker._private_jobs for update").execute(&mut blocker).await.unwrap();
    held.go_on.notify_one();
    until("the worker logs that it waits", async || log.line("their outcomes are recorded when it ends")).await;
    started.worker.request_shutdown();
    until("the worker stops", async || log.line("waiting for running jobs to finish")).await;
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    started.running.await.unwrap().unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}
