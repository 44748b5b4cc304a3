//! What tests of a running worker share: options, small tasks, and waiting for states of the database.

use crate::support::{Db, until};
use graphile_worker::{IntoTaskHandlerResult, WorkerContext, WorkerOptions, WorkerUtils};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// A poll interval so long that a test that depends on polling never ends.
pub(crate) const NEVER: Duration = Duration::from_secs(3600);

pub(crate) fn options(db: &Db) -> WorkerOptions {
    WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .concurrency(4)
        .poll_interval(NEVER)
}

pub(crate) fn utils(db: &Db) -> WorkerUtils {
    WorkerUtils::new(db.pool.clone(), "graphile_worker")
}

/// Runs the jobs that are due with one task, `t`.
pub(crate) async fn run_once<F, Fut, R>(db: &Db, function: F)
where
    F: Fn(Value, WorkerContext) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = R> + Send + 'static,
    R: IntoTaskHandlerResult,
{
    options(db).define_task("t", function).init().await.unwrap().run_once().await.unwrap();
}

/// A worker with a task `t` that sends its payload.
pub(crate) fn sending(db: &Db) -> (WorkerOptions, mpsc::UnboundedReceiver<i64>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let options = options(db).define_task("t", move |n: i64, _| {
        let _ = sender.send(n);
        async {}
    });
    (options, receiver)
}

/// Everything that was sent before the last sender was dropped.
pub(crate) async fn all_sent(mut receiver: mpsc::UnboundedReceiver<i64>) -> Vec<i64> {
    let mut all = Vec::new();
    while let Some(n) = receiver.recv().await {
        all.push(n);
    }
    all
}

/// A handler that reports its start and waits until the test releases it.
#[derive(Clone, Default)]
pub(crate) struct Held {
    pub(crate) begun: Arc<Notify>,
    pub(crate) go_on: Arc<Notify>,
    runs: Arc<AtomicUsize>,
}

impl Held {
    pub(crate) async fn run(self) {
        self.runs.fetch_add(1, Ordering::SeqCst);
        self.begun.notify_one();
        self.go_on.notified().await;
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

/// The only job, with `delay`: the seconds from its last update to its `run_at`.
pub(crate) async fn only_job(db: &Db) -> Value {
    db.row("select *, round(extract(epoch from run_at - updated_at)) as delay from graphile_worker._private_jobs").await
}

/// Waits until the query, which returns one value, returns true.
pub(crate) async fn until_true(what: &str, db: &Db, query: &str) {
    until(what, async || (db.value(query).await == true).then_some(())).await;
}

pub(crate) async fn until_no_jobs(db: &Db) {
    until_true("all jobs are completed", db, "select not exists (select from graphile_worker._private_jobs)").await;
}

/// Sessions of workers that listen for jobs.
pub(crate) const LISTENERS: &str =
    "from pg_stat_activity where datname = current_database() and query like 'LISTEN%' and state = 'idle'";

pub(crate) async fn until_worker_listens(db: &Db) {
    until_true("the worker listens", db, &format!("select exists (select {LISTENERS})")).await;
}

pub(crate) async fn until_a_session_waits_for_a_lock(db: &Db) {
    let waits = "select exists (select from pg_stat_activity
                 where datname = current_database() and wait_event_type = 'Lock')";
    until_true("a session waits for a lock", db, waits).await;
}

/// That no queue is locked.
pub(crate) async fn assert_queues_are_unlocked(db: &Db) {
    let locked = db.rows("select * from graphile_worker._private_job_queues where locked_by is not null").await;
    assert_eq!(locked, Vec::<Value>::new());
}
