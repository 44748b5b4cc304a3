//! Limits on how many jobs run at once: of a task, and of the pool that handlers share.

use crate::support::{Db, Started};
use crate::worker_support::{Held, options, sending, until_no_jobs, until_true};
use graphile_worker::{TaskOptions, WorkerContext, WorkerOptions};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[tokio::test]
async fn a_task_never_exceeds_its_concurrency_limit() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 60)").await;
    let (busy, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let seen = most.clone();
    let worker = options(&db)
        .concurrency(8)
        .define_task("t", move |_: Value, _| {
            let (busy, most) = (busy.clone(), most.clone());
            async move {
                most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                busy.fetch_sub(1, Ordering::SeqCst);
            }
        })
        .task_options("t", TaskOptions::default().max_concurrent(2))
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    assert!(seen.load(Ordering::SeqCst) <= 2);
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_task_at_its_limit_does_not_delay_other_tasks() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('slow') from generate_series(1, 50)").await;
    db.run("select graphile_worker.add_job('slow', queue_name := 'q' || n) from generate_series(1, 50) n").await;
    db.add_job("'t', '1'").await;
    let (options, mut ran) = sending(&db);
    let options = options
        .define_task("slow", |_: Value, _| std::future::pending::<()>())
        .task_options("slow", TaskOptions::default().max_concurrent(1))
        .shutdown_grace_period(Duration::ZERO);
    let started = Started::new(options).await;
    assert_eq!(ran.recv().await, Some(1));
    assert_eq!(
        db.value("select count(*) from graphile_worker.jobs where attempts > 0 and task_identifier = 'slow'").await,
        1,
        "no other job of the task is claimed"
    );
    started.stop().await;
}

#[tokio::test]
async fn tasks_that_exhaust_the_pool_do_not_delay_the_outcomes_of_other_jobs() {
    let db = Db::installed().await;
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_with(db.options()).await.unwrap();
    let held = Held::default();
    let hog = held.clone();
    let options = WorkerOptions::default()
        .pg_pool(pool)
        .listen_os_shutdown_signals(false)
        .concurrency(2)
        .define_task("hog", move |_: Value, ctx: WorkerContext| {
            let hog = hog.clone();
            async move {
                let _connection = ctx.pg_pool().acquire().await.unwrap();
                hog.run().await;
            }
        })
        .define_task("quick", |_: Value, _| async {});
    let started = Started::new(options).await;
    db.add_job("'hog'").await;
    held.begun.notified().await;
    db.add_job("'quick'").await;
    until_true("the quick job is completed", &db, "select count(*) = 1 from graphile_worker.jobs").await;
    held.go_on.notify_one();
    until_no_jobs(&db).await;
    started.stop().await;
}
