//! Named queues: one job at a time, in order, whatever happens to other queues.

use crate::claiming::order_of_one_run;
use crate::support::Db;
use crate::worker_support::{Held, all_sent, assert_queues_are_unlocked, options, until_true};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

#[tokio::test]
async fn thousands_of_queues_behind_the_jobs_of_a_locked_queue_all_run() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', '0', 'held') from generate_series(1, 3000);
         update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'another worker';
         select graphile_worker.add_job('t', to_json(n), 'q' || n) from generate_series(1, 2500) as n",
    )
    .await;
    let mut seen = order_of_one_run(&db, 2).await;
    seen.sort_unstable();
    assert_eq!(seen, (1..=2500).collect::<Vec<_>>());
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 3000);
}

#[tokio::test]
async fn a_queue_runs_one_job_at_a_time_in_order_and_is_unlocked_afterwards() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'q') from generate_series(1, 200) as n").await;
    let (sender, order) = mpsc::unbounded_channel();
    let busy = Arc::new(AtomicUsize::new(0));
    let worker = options(&db)
        .concurrency(8)
        .define_task("t", move |n: i64, _| {
            let (sender, busy) = (sender.clone(), busy.clone());
            async move {
                assert_eq!(busy.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                tokio::task::yield_now().await;
                sender.send(n).unwrap();
                busy.fetch_sub(1, Ordering::SeqCst);
            }
        })
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    drop(worker);
    let seen = all_sent(order).await;
    assert_eq!(seen, (1..=200).collect::<Vec<_>>());
    assert_queues_are_unlocked(&db).await;
}

#[tokio::test]
async fn released_jobs_of_a_queue_keep_their_order() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'q') from generate_series(1, 12) n").await;
    let (sender, order) = mpsc::unbounded_channel();
    let held = Held::default();
    let first = held.clone();
    let worker = options(&db)
        .define_task("t", move |n: i64, _| {
            sender.send(n).unwrap();
            let first = first.clone();
            async move {
                if n == 1 {
                    first.run().await;
                }
            }
        })
        .init()
        .await
        .unwrap();
    let claimed =
        |jobs: &str| format!("select count(*) {jobs} from graphile_worker._private_jobs where locked_by is not null");
    let release = async {
        held.begun.notified().await;
        until_true("later jobs of the queue are claimed", &db, &claimed("> 1")).await;
        until_true("they are released", &db, &claimed("= 1")).await;
        held.go_on.notify_one();
    };
    let (ran, ()) = tokio::join!(worker.run_once(), release);
    ran.unwrap();
    drop(worker);
    assert_eq!(all_sent(order).await, (1..=12).collect::<Vec<_>>());
}
