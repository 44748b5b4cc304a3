//! Shutdown on request: running jobs finish or are interrupted, claimed jobs are released, outcomes are written.

use crate::support::{Db, Started};
use crate::worker_support::{NEVER, assert_queues_are_unlocked, only_job, options, until_a_session_waits_for_a_lock};
use graphile_worker::WorkerContext;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

#[tokio::test]
async fn shutdown_waits_for_running_jobs_and_releases_claimed_ones() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', to_json(n), case when n > 3 then 'q' end) from generate_series(1, 6) n",
    )
    .await;
    let (begun, mut begins) = mpsc::unbounded_channel();
    let options = options(&db).concurrency(2).define_task("t", move |n: i64, ctx: WorkerContext| {
        let begun = begun.clone();
        async move {
            begun.send(n).unwrap();
            ctx.cancellation_token().cancelled().await;
        }
    });
    let started = Started::new(options).await;
    begins.recv().await.unwrap();
    begins.recv().await.unwrap();
    started.stop().await;
    let left = db.rows("select id, attempts, locked_by, last_error from graphile_worker.jobs order by id").await;
    let untouched = |id: i64| json!({"id": id, "attempts": 0, "locked_by": null, "last_error": null});
    assert_eq!(left, (3..=6).map(untouched).collect::<Vec<_>>());
    assert_queues_are_unlocked(&db).await;
}

#[tokio::test]
async fn jobs_that_outlast_the_grace_period_are_released_with_a_delay() {
    for twice in [false, true] {
        let db = Db::installed().await;
        db.add_job("'t', queue_name := 'q'").await;
        let begun = Arc::new(Notify::new());
        let begins = begun.clone();
        let grace = if twice { NEVER } else { Duration::from_millis(50) };
        let options = options(&db)
            .shutdown_grace_period(grace)
            .interrupted_job_retry_delay(Duration::from_secs(100))
            .define_task("t", move |_: Value, _| {
                begins.notify_one();
                std::future::pending::<()>()
            });
        let started = Started::new(options).await;
        begun.notified().await;
        if twice {
            started.worker.request_shutdown();
        }
        started.stop().await;
        let job = only_job(&db).await;
        assert_eq!((&job["attempts"], &job["delay"], &job["locked_by"]), (&json!(0), &json!(100), &Value::Null));
        assert_eq!(job["last_error"], "the worker was shut down before the job finished");
        assert_queues_are_unlocked(&db).await;
    }
}

#[tokio::test]
async fn outcomes_are_written_after_the_grace_period_if_the_table_was_locked_during_it() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 8) n").await;
    let (begun, mut begins) = mpsc::unbounded_channel();
    let finish = Arc::new(Notify::new());
    let finished = finish.clone();
    let options = options(&db).concurrency(4).shutdown_grace_period(Duration::from_millis(300)).define_task(
        "t",
        move |n: i64, _| {
            let (begun, finished) = (begun.clone(), finished.clone());
            async move {
                begun.send(n).unwrap();
                finished.notified().await;
            }
        },
    );
    let started = Started::new(options).await;
    for _ in 0..4 {
        begins.recv().await.unwrap();
    }
    // No session can write: the outcome of the job that ends now has to wait.
    let mut lock = db.connect().await;
    sqlx::raw_sql("begin; lock table graphile_worker._private_jobs in access exclusive mode")
        .execute(&mut lock)
        .await
        .unwrap();
    finish.notify_one();
    until_a_session_waits_for_a_lock(&db).await;
    started.worker.request_shutdown();
    // Longer than the grace period. The worker cannot interrupt the other jobs before its statement has been answered, so no
    // event marks the end of the period. If this is too short, the test only shows less.
    tokio::time::sleep(Duration::from_millis(600)).await;
    sqlx::raw_sql("rollback").execute(&mut lock).await.unwrap();
    started.stop().await;
    let left = db.rows("select attempts, locked_by from graphile_worker.jobs").await;
    assert_eq!(left, vec![json!({"attempts": 0, "locked_by": null}); 7], "one is completed, the others are released");
}

#[tokio::test]
async fn a_worker_stops_when_its_shutdown_signal_completes() {
    let db = Db::installed().await;
    let stop = Arc::new(Notify::new());
    let stopped = stop.clone();
    let options = options(&db).shutdown_signal(async move { stopped.notified().await });
    let started = Started::new(options.define_task("t", |_: Value, _| async {})).await;
    stop.notify_one();
    started.running.await.unwrap().unwrap();
}
