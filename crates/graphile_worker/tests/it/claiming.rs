//! Which jobs a worker claims, in which order, and how many at once.

use crate::support::{Db, Started};
use crate::worker_support::{all_sent, options, run_once, sending, utils};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

/// The payloads of the jobs of task `t`, in the order in which they ran.
pub(crate) async fn order_of_one_run(db: &Db, concurrency: usize) -> Vec<i64> {
    let (sender, order) = mpsc::unbounded_channel();
    let worker = options(db)
        .concurrency(concurrency)
        .define_task("t", move |n: i64, _| {
            sender.send(n).unwrap();
            async {}
        })
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    drop(worker);
    all_sent(order).await
}

#[tokio::test]
async fn jobs_run_in_order_of_priority_then_time_then_id() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', '3', priority := 1);
         select graphile_worker.add_job('t', '4', priority := 1);
         select graphile_worker.add_job('t', '2', priority := 1, run_at := now() - interval '1 hour');
         select graphile_worker.add_job('t', '1', priority := -5, queue_name := 'q');
         select graphile_worker.add_job('t', '5', priority := 2, queue_name := 'q');
         select graphile_worker.add_job('t', '6', priority := 3, queue_name := 'r')",
    )
    .await;
    let seen = order_of_one_run(&db, 1).await;
    assert_eq!(seen, [1, 2, 3, 4, 5, 6]);
}

#[tokio::test]
async fn jobs_with_the_same_run_at_run_in_order_of_their_ids_wherever_their_rows_are() {
    let db = Db::installed().await;
    // The rows of the later ids lie where those of the earlier ones were.
    db.run(
        "select graphile_worker.add_job('t', to_json(n), run_at := '2020-01-01') from generate_series(-200, -1) as n;
         delete from graphile_worker._private_jobs",
    )
    .await;
    db.run("vacuum graphile_worker._private_jobs").await;
    db.run(
        "select setval(pg_get_serial_sequence('graphile_worker._private_jobs', 'id'), 1000);
         select graphile_worker.add_job('t', to_json(n), run_at := '2020-01-01') from generate_series(201, 400) as n;
         select setval(pg_get_serial_sequence('graphile_worker._private_jobs', 'id'), 500);
         select graphile_worker.add_job('t', to_json(n), run_at := '2020-01-01') from generate_series(1, 200) as n",
    )
    .await;
    assert_eq!(order_of_one_run(&db, 1).await, (1..=400).collect::<Vec<_>>());
}

#[tokio::test]
async fn jobs_of_unknown_tasks_are_not_claimed() {
    let db = Db::installed().await;
    db.add_job("'unknown'").await;
    db.add_job("'unknown', queue_name := 'q'").await;
    db.add_job("'t', queue_name := 'q'").await;
    run_once(&db, |_, _| async {}).await;
    let left = db.rows("select task_identifier, attempts, locked_by from graphile_worker.jobs").await;
    assert_eq!(left, vec![json!({"task_identifier": "unknown", "attempts": 0, "locked_by": null}); 2]);
}

#[tokio::test]
async fn a_job_with_an_infinite_run_at_does_not_affect_other_jobs() {
    let db = Db::installed().await;
    db.add_job("'t', '1', run_at := 'infinity'").await;
    db.add_job("'t', '2', run_at := '-infinity'").await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    assert_eq!(ran.recv().await, Some(2));
    db.add_job("'t', '3'").await;
    assert_eq!(ran.recv().await, Some(3));
    started.stop().await;
    assert_eq!(utils(&db).complete_jobs(&[1]).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_worker_that_ran_many_small_jobs_claims_large_jobs_a_few_at_a_time() {
    // Payloads stored as they are, or compressed to a hundredth.
    for storage in ["external", "extended"] {
        let db = Db::installed().await;
        db.run(&format!("alter table graphile_worker._private_jobs alter column payload set storage {storage}")).await;
        db.run("select graphile_worker.add_job('t', '1') from generate_series(1, 4000)").await;
        db.run("select graphile_worker.add_job('t', to_json(repeat('x', 500000))) from generate_series(1, 150)").await;
        let pool = db.pool.clone();
        let (most, large) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (most_seen, large_seen) = (most.clone(), large.clone());
        run_once(&db, move |payload: Value, _| {
            let (pool, most, large) = (pool.clone(), most_seen.clone(), large_seen.clone());
            async move {
                if payload.is_string() && large.fetch_add(1, Ordering::SeqCst) % 10 == 0 {
                    let claimed: i64 = sqlx::query_scalar(
                        "select coalesce(sum(octet_length(payload::text)), 0) from graphile_worker._private_jobs
                         where locked_at is not null",
                    )
                    .fetch_one(&pool)
                    .await?;
                    most.fetch_max(usize::try_from(claimed).expect("a sum of sizes"), Ordering::SeqCst);
                }
                Ok::<(), sqlx::Error>(())
            }
        })
        .await;
        assert_eq!(large.load(Ordering::SeqCst), 150);
        let most = most.load(Ordering::SeqCst);
        assert!(most < 40_000_000, "{storage}: {most} bytes of payloads claimed at once");
    }
}
