//! The age of locks: a worker refreshes the locks of long jobs, and releases locks that are hours old.

use crate::support::{Db, Started};
use crate::worker_support::{Held, options, sending, until_no_jobs, until_true};
use graphile_worker::WorkerContext;
use serde_json::Value;
use std::time::Duration;

#[tokio::test]
async fn a_job_that_runs_for_hours_refreshes_its_lock_and_its_queues_lock_and_completes() {
    for in_transaction in [false, true] {
        let db = Db::installed().await;
        let held = Held::default();
        let waits = held.clone();
        let options = options(&db).keep_locks_fresh_after(Duration::from_millis(20));
        let started = Started::new(options.define_task("t", move |_: Value, ctx: WorkerContext| {
            let waits = waits.clone();
            async move {
                waits.run().await;
                if in_transaction {
                    ctx.complete_in(ctx.pg_pool().begin().await.unwrap()).await.unwrap();
                }
            }
        }))
        .await;
        db.add_job("'t', '1', 'q'").await;
        held.begun.notified().await;
        // Not older than four hours: the worker would release such a lock.
        db.run(
            "update graphile_worker._private_jobs set locked_at = locked_at - interval '3 hours';
             update graphile_worker._private_job_queues set locked_at = locked_at - interval '3 hours'",
        )
        .await;
        let fresh = "select (select locked_at > now() - interval '1 hour' from graphile_worker._private_jobs)
                       and (select locked_at > now() - interval '1 hour' from graphile_worker._private_job_queues)";
        until_true("the locks are refreshed", &db, fresh).await;
        held.go_on.notify_one();
        until_no_jobs(&db).await;
        started.stop().await;
    }
}

#[tokio::test]
async fn locks_that_are_hours_old_are_released() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', '1', 'q');
         update graphile_worker._private_jobs set locked_at = now() - interval '5 hours', locked_by = 'dead', attempts = 1;
         update graphile_worker._private_job_queues set locked_at = now() - interval '5 hours', locked_by = 'dead'",
    )
    .await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options.poll_interval(Duration::from_millis(100))).await;
    assert_eq!(ran.recv().await, Some(1));
    started.stop().await;
}
