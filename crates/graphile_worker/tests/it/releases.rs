//! Released jobs, which a worker has claimed and not started: they are as they were before the claim, and other workers are
//! notified.

use crate::support::{Db, Started, until};
use graphile_worker::{FetchStart, WorkerContext, WorkerOptions};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// No worker finds a job by polling while a test runs.
const NEVER: Duration = Duration::from_secs(600);

fn options(db: &Db) -> WorkerOptions {
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
    options.concurrency(2).poll_interval(NEVER)
}

/// Events that ran, and a gate that the event 0 waits for.
struct Events {
    ran: mpsc::UnboundedReceiver<Vec<i64>>,
    sender: mpsc::UnboundedSender<Vec<i64>>,
    gate: Arc<Notify>,
}

impl Events {
    fn new() -> Events {
        let (sender, ran) = mpsc::unbounded_channel();
        Events { ran, sender, gate: Arc::new(Notify::new()) }
    }

    async fn worker(&self, db: &Db) -> Started {
        let (sender, gate) = (self.sender.clone(), self.gate.clone());
        let task = move |events: Vec<i64>, _: WorkerContext| {
            let (sender, gate) = (sender.clone(), gate.clone());
            async move {
                sender.send(events.clone()).unwrap();
                if events == [0] {
                    gate.notified().await;
                }
            }
        };
        Started::new(options(db).define_task("t", task)).await
    }
}

/// The first job of a queue runs; the second, with the key `k` and the event 1, is claimed and waits behind it.
async fn one_runs_and_one_is_claimed(db: &Db, events: &mut Events) -> Started {
    db.add_job("'t', '[0]', 'q'").await;
    db.add_job("'t', '[1]', 'q', job_key := 'k'").await;
    let started = events.worker(db).await;
    assert_eq!(events.ran.recv().await, Some(vec![0]));
    until("both are claimed", async || {
        (db.value("select count(*) from graphile_worker.jobs where locked_by is not null").await == 2).then_some(())
    })
    .await;
    started
}

async fn until_released(db: &Db) {
    until("it is released", async || {
        (db.value("select count(*) from graphile_worker.jobs where locked_by is not null").await == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_job_that_was_replaced_before_it_began_runs_although_it_waited_too_long_for_its_queue() {
    let db = Db::installed().await;
    let mut events = Events::new();
    let started = one_runs_and_one_is_claimed(&db, &mut events).await;
    db.add_job("'t', '[2]', 'q', job_key := 'k'").await;
    until_released(&db).await;
    assert_eq!(db.value("select attempts from graphile_worker._private_jobs where payload::text = '[1]'").await, 0);
    events.gate.notify_one();
    assert_eq!(events.ran.recv().await, Some(vec![1]));
    assert_eq!(events.ran.recv().await, Some(vec![2]));
    started.stop().await;
}

#[tokio::test]
async fn a_job_that_was_replaced_before_it_began_runs_although_its_worker_stops() {
    let db = Db::installed().await;
    let mut events = Events::new();
    let started = one_runs_and_one_is_claimed(&db, &mut events).await;
    db.add_job("'t', '[2]', 'q', job_key := 'k'").await;
    started.worker.request_shutdown();
    until_released(&db).await;
    events.gate.notify_one();
    started.running.await.unwrap().unwrap();
    let started = events.worker(&db).await;
    assert_eq!(events.ran.recv().await, Some(vec![1]));
    assert_eq!(events.ran.recv().await, Some(vec![2]));
    started.stop().await;
}

#[tokio::test]
async fn a_job_that_was_removed_before_it_began_is_gone_when_it_is_released() {
    let db = Db::installed().await;
    let mut events = Events::new();
    let started = one_runs_and_one_is_claimed(&db, &mut events).await;
    db.run("select graphile_worker.remove_job('k')").await;
    until("it is gone", async || {
        (db.value("select count(*) from graphile_worker._private_jobs").await == 1).then_some(())
    })
    .await;
    events.gate.notify_one();
    started.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
    assert!(events.ran.try_recv().is_err(), "it did not run");
}

#[tokio::test]
async fn a_removed_job_is_not_retried_after_a_failure_or_a_snooze() {
    let db = Db::installed().await;
    let (began, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let waits = (began.clone(), gate.clone());
    let task = move |snoozes: bool, _: WorkerContext| {
        let (began, gate) = waits.clone();
        async move {
            began.notify_one();
            gate.notified().await;
            match snoozes {
                true => Ok(graphile_worker::TaskOutcome::Snooze(Duration::ZERO)),
                false => Err("oops"),
            }
        }
    };
    let started = Started::new(options(&db).define_task("t", task)).await;
    for snoozes in ["true", "false"] {
        db.add_job(&format!("'t', '{snoozes}', job_key := 'k'")).await;
        began.notified().await;
        db.run("select graphile_worker.remove_job('k')").await;
        gate.notify_one();
        let job = until("it is written", async || {
            let jobs = "select attempts = max_attempts as used, run_at < 'infinity' as finite from graphile_worker.jobs
                        where locked_by is null";
            db.rows(jobs).await.pop()
        })
        .await;
        assert_eq!(job, json!({"used": true, "finite": true}));
        db.run("delete from graphile_worker._private_jobs").await;
    }
    started.stop().await;
}

#[tokio::test]
async fn an_idle_worker_is_notified_that_a_queue_is_unlocked() {
    let db = Db::installed().await;
    let (began, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let waits = (began.clone(), gate.clone());
    let of_one = Started::new(options(&db).define_task("one", move |_: Value, _| {
        let (began, gate) = waits.clone();
        async move {
            began.notify_one();
            gate.notified().await;
        }
    }))
    .await;
    db.add_job("'one', queue_name := 'q'").await;
    began.notified().await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let of_two = Started::new(options(&db).define_task("two", move |n: i64, _: WorkerContext| {
        let _ = sender.send(n);
        async {}
    }))
    .await;
    db.add_job("'two', '1'").await;
    db.add_job("'two', '2', 'q'").await;
    assert_eq!(ran.recv().await, Some(1));
    gate.notify_one();
    assert_eq!(ran.recv().await, Some(2));
    of_one.stop().await;
    of_two.stop().await;
}

#[tokio::test]
async fn an_idle_worker_is_notified_of_jobs_that_a_stopping_worker_releases() {
    let db = Db::installed().await;
    let mut events = Events::new();
    let leaving = one_runs_and_one_is_claimed(&db, &mut events).await;
    let staying = events.worker(&db).await;
    db.add_job("'t', '[5]'").await;
    assert_eq!(events.ran.recv().await, Some(vec![5]));
    leaving.worker.request_shutdown();
    until_released(&db).await;
    events.gate.notify_one();
    assert_eq!(events.ran.recv().await, Some(vec![1]));
    leaving.running.await.unwrap().unwrap();
    staying.stop().await;
}

#[tokio::test]
async fn a_worker_retries_to_claim_jobs_that_others_had_locked_for_a_moment() {
    let db = Db::installed().await;
    db.add_job("'t', '[1]'").await;
    let mut other = db.connect().await;
    sqlx::raw_sql("begin; select from graphile_worker._private_jobs for update").execute(&mut other).await.unwrap();
    let mut events = Events::new();
    let started = events.worker(&db).await;
    db.add_job("'t', '[2]'").await;
    assert_eq!(events.ran.recv().await, Some(vec![2]));
    // This sends no notification.
    sqlx::raw_sql("rollback").execute(&mut other).await.unwrap();
    assert_eq!(events.ran.recv().await, Some(vec![1]));
    started.stop().await;
}

#[tokio::test]
async fn jobs_of_a_queue_that_another_worker_has_locked_cause_no_extra_claims() {
    let db = Db::installed().await;
    db.add_job("'t', '[1]', 'held'").await;
    db.run("update graphile_worker._private_job_queues set locked_by = 'another', locked_at = now()").await;
    let claims = Arc::new(AtomicUsize::new(0));
    let counted = claims.clone();
    let (sender, mut ran) = mpsc::unbounded_channel();
    let task = move |events: Vec<i64>, _: WorkerContext| {
        let _ = sender.send(events);
        async {}
    };
    let options = options(&db).define_task("t", task).on(FetchStart, move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        async {}
    });
    let started = Started::new(options).await;
    for _ in 0..5 {
        db.add_job("'t', '[1]', 'held'").await;
    }
    db.add_job("'t', '[2]', run_at := now() + interval '1 second'").await;
    assert_eq!(ran.recv().await, Some(vec![2]));
    let claims = claims.load(Ordering::SeqCst);
    assert!(claims < 30, "{claims} claims for seven wake-ups");
    started.stop().await;
}
