//! The context that a handler gets: the job, ways to add jobs, the application's extensions, and a
//! cancellation token. It also holds the run's state for the worker (`Running`): the timeout, and whether the handler
//! completed the job itself. `worker::execute` runs handlers.

use crate::db::Statements;
use crate::error::Context;
use crate::hooks::{
    BeforeJobRunContext, HookRegistry, JobEventContext, ShutdownReason, WorkerEventContext, WorkerShutdownContext,
};
use crate::job::Job;
use crate::task::Task;
use crate::worker_utils::WorkerUtils;
use crate::{BatchTaskHandler, Error, JobSpec, RawJobSpec, TaskHandler};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use sqlx::{PgPool, Postgres, Transaction};
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// The application's own values, one of each type.
#[derive(Clone, Default)]
pub(crate) struct Extensions(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl Extensions {
    pub(crate) fn insert<T: Send + Sync + 'static>(&mut self, value: T) {
        self.0.insert(TypeId::of::<T>(), Arc::new(value));
    }

    fn get<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.0.get(&TypeId::of::<T>())?.downcast_ref()
    }
}

/// State shared by all jobs, lanes and hooks of a worker.
pub(crate) struct Shared {
    pub(crate) worker_id: Arc<str>,
    pub(crate) utils: WorkerUtils,
    pub(crate) extensions: Extensions,
    pub(crate) statements: Arc<Statements>,
    pub(crate) hooks: Arc<HookRegistry>,
}

impl Shared {
    /// The same state for a worker that registered again under a new id.
    pub(crate) fn with_worker_id(&self, worker_id: Arc<str>) -> Shared {
        let Shared { utils, extensions, statements, hooks, .. } = self;
        Shared {
            worker_id,
            utils: utils.clone(),
            extensions: extensions.clone(),
            statements: statements.clone(),
            hooks: hooks.clone(),
        }
    }

    pub(crate) fn event(&self, error: Option<String>) -> WorkerEventContext {
        WorkerEventContext { worker_id: self.worker_id.clone(), error }
    }

    /// The context of an event of a running job.
    pub(crate) fn job_event(&self, job: &Arc<Job>, duration: Duration, error: Option<String>) -> JobEventContext {
        JobEventContext { worker_id: self.worker_id.clone(), job: job.clone(), error, duration, will_retry: false }
    }

    pub(crate) fn before_run(&self, job: &Arc<Job>) -> BeforeJobRunContext {
        let payload = serde_json::from_str(job.payload.get()).unwrap_or_default();
        BeforeJobRunContext { worker_id: self.worker_id.clone(), job: job.clone(), payload }
    }

    pub(crate) fn shutdown_event(&self, reason: ShutdownReason) -> WorkerShutdownContext {
        WorkerShutdownContext { worker_id: self.worker_id.clone(), reason }
    }
}

/// The open transaction in which the row of a running job is locked, as the job sees it: its claim is not written yet
/// (`worker/deferred`).
#[derive(Debug, Default)]
pub(crate) struct OpenBatch {
    /// Notified when the batch may have to end.
    pub(crate) changed: Notify,
    is_claim_wanted: AtomicBool,
    /// Cancelled when the batch has ended: the claims of the jobs that still run are written.
    pub(crate) ended: CancellationToken,
}

impl OpenBatch {
    /// Ends the batch, and returns when the claims are written.
    async fn write_claims(&self) {
        self.is_claim_wanted.store(true, Ordering::Release);
        self.changed.notify_one();
        self.ended.cancelled().await;
    }

    pub(crate) fn is_claim_wanted(&self) -> bool {
        self.is_claim_wanted.load(Ordering::Acquire)
    }
}

/// A running job: what its handler, its runner and `worker::inflight` share.
pub(crate) struct Running {
    pub(crate) job: Arc<Job>,
    pub(crate) task: Arc<Task>,
    /// The batch in which its claim was not written when it started.
    pub(crate) batch: Option<Arc<OpenBatch>>,
    /// The number of the reply that delivered the job.
    pub(crate) reply: u64,
    pub(crate) started: Instant,
    /// Whether the handler completed the job in its own transaction.
    completed: AtomicBool,
    /// A `Cancelled`, or 0.
    cancelled: AtomicU8,
    cancelled_changed: Notify,
    /// Made on first use: most runs have no timeout, and most handlers do not ask for the token.
    end: OnceLock<Box<RunEnd>>,
}

/// How a run is asked to end.
#[derive(Default)]
struct RunEnd {
    cancellation: CancellationToken,
    /// Notified when the handler must return now or be dropped.
    must_end: Notify,
    timeout: RunClock,
}

/// How far the cancellation of a running job has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cancelled {
    /// The job was asked to stop.
    Asked = 1,
    /// The worker ends the job if it does not stop at once.
    ByForce = 2,
}

impl Running {
    pub(crate) fn new(
        job: Arc<Job>,
        task: Arc<Task>,
        batch: Option<Arc<OpenBatch>>,
        reply: u64,
        started: Instant,
    ) -> Running {
        Running {
            job,
            task,
            batch,
            reply,
            started,
            completed: AtomicBool::new(false),
            cancelled: AtomicU8::new(0),
            cancelled_changed: Notify::new(),
            end: OnceLock::new(),
        }
    }

    fn end(&self) -> &RunEnd {
        self.end.get_or_init(Box::default)
    }

    /// Cancelled when the job should stop.
    pub(crate) fn cancellation(&self) -> &CancellationToken {
        &self.end().cancellation
    }

    /// The timeout has passed: the handler must return now, or the worker drops it.
    pub(crate) fn request_end(&self) {
        self.cancellation().cancel();
        self.end().must_end.notify_one();
    }

    /// Starts the timeout, or starts it again from zero.
    pub(crate) fn restart_timeout(&self) {
        self.end().timeout.set(Some(Instant::now()));
    }

    /// Returns when the job has run for this long, pauses not counted.
    pub(crate) async fn has_run_for(&self, timeout: Duration) {
        let clock = &self.end().timeout;
        loop {
            match clock.since() {
                None => clock.changed.notified().await,
                Some(since) if since.elapsed() >= timeout => return,
                Some(since) => tokio::time::sleep(timeout.saturating_sub(since.elapsed())).await,
            }
        }
    }

    /// Asks the job to stop, because it was cancelled.
    pub(crate) fn cancel(&self, how: Cancelled) {
        self.cancelled.fetch_max(how as u8, Ordering::AcqRel);
        self.cancelled_changed.notify_waiters();
        self.cancellation().cancel();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire) >= Cancelled::Asked as u8
    }

    /// Returns when the job is cancelled in this way.
    pub(crate) async fn cancellation_reached(&self, how: Cancelled) {
        loop {
            let mut changed = std::pin::pin!(self.cancelled_changed.notified());
            changed.as_mut().enable();
            if self.cancelled.load(Ordering::Acquire) >= how as u8 {
                return;
            }
            changed.await;
        }
    }

    /// When the job has expired, if it had before it started.
    pub(crate) fn expired_at(&self) -> Option<DateTime<Utc>> {
        self.job.expiry.filter(|expiry| expiry.deadline <= self.started).map(|expiry| expiry.at)
    }

    pub(crate) fn completed_by_handler(&self) -> bool {
        self.completed.load(Ordering::Acquire)
    }
}

/// When the timeout of a run started.
#[derive(Default)]
struct RunClock {
    /// `None` before it starts, and while it is paused, because the job waits for something it cannot influence.
    since: Mutex<Option<Instant>>,
    changed: Notify,
}

impl RunClock {
    fn set(&self, since: Option<Instant>) {
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = since;
        self.changed.notify_one();
    }

    fn since(&self) -> Option<Instant> {
        *self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The context of a running job. Cheap to clone.
#[derive(Clone)]
pub struct WorkerContext {
    running: Arc<Running>,
    shared: Arc<Shared>,
}

impl fmt::Debug for WorkerContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerContext")
            .field("worker_id", &self.worker_id())
            .field("job", self.job())
            .finish_non_exhaustive()
    }
}

impl WorkerContext {
    pub(crate) fn new(running: Arc<Running>, shared: Arc<Shared>) -> WorkerContext {
        WorkerContext { running, shared }
    }

    /// The job.
    pub fn job(&self) -> &Job {
        &self.running.job
    }

    /// The job's payload, as stored.
    pub fn payload(&self) -> &RawValue {
        &self.job().payload
    }

    /// The id of the worker that runs the job.
    pub fn worker_id(&self) -> &str {
        &self.shared.worker_id
    }

    /// Returns the value of this type that was passed to
    /// [`add_extension`](crate::WorkerOptions::add_extension).
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.shared.extensions.get()
    }

    /// Alias of [`extension`](WorkerContext::extension), under the name it has in the Rust port.
    pub fn get_ext<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.extension()
    }

    /// Cancelled when the job should stop: it was cancelled, its timeout has passed, or the worker is shutting down.
    pub fn cancellation_token(&self) -> &CancellationToken {
        self.running.cancellation()
    }

    /// The application's pool. The worker itself uses connections of its own.
    pub fn pg_pool(&self) -> &PgPool {
        self.shared.utils.pool()
    }

    /// Utilities to add and administer jobs.
    pub fn utils(&self) -> &WorkerUtils {
        &self.shared.utils
    }

    /// Adds a job.
    pub async fn add_job<T: TaskHandler>(&self, payload: T, spec: JobSpec) -> Result<Job, Error> {
        self.utils().add_job(payload, spec).await
    }

    /// Adds a job whose task is known only at run time.
    pub async fn add_raw_job(&self, identifier: &str, payload: impl Serialize, spec: JobSpec) -> Result<Job, Error> {
        self.utils().add_raw_job(identifier, payload, spec).await
    }

    /// Adds several jobs of one task, all or none.
    pub async fn add_jobs<T: TaskHandler>(&self, jobs: &[(T, &JobSpec)]) -> Result<Vec<Job>, Error> {
        self.utils().add_jobs(jobs).await
    }

    /// Adds several jobs whose tasks are known only at run time, all or none.
    pub async fn add_raw_jobs<P: Serialize>(&self, jobs: &[RawJobSpec<P>]) -> Result<Vec<Job>, Error> {
        self.utils().add_raw_jobs(jobs).await
    }

    /// Adds one job for several items.
    pub async fn add_batch_job<T: BatchTaskHandler>(&self, items: Vec<T>, spec: JobSpec) -> Result<Job, Error> {
        self.utils().add_batch_job(items, spec).await
    }

    /// Completes this job in the handler's own transaction and commits it, so that the work and its
    /// completion are atomic. The handler then returns `Ok`.
    ///
    /// Fails and rolls back if the job no longer belongs to this worker.
    ///
    /// ```no_run
    /// # use graphile_worker::{TaskError, WorkerContext};
    /// # async fn example(ctx: WorkerContext) -> Result<(), TaskError> {
    /// let mut transaction = ctx.pg_pool().begin().await?;
    /// sqlx::query("update accounts set balance = balance - 1").execute(&mut *transaction).await?;
    /// ctx.complete_in(transaction).await?;
    /// # Ok(()) }
    /// ```
    pub async fn complete_in(&self, mut transaction: Transaction<'_, Postgres>) -> Result<(), Error> {
        let context = || format!("complete job {} in its handler's transaction", self.job().id);
        if let Some(batch) = &self.running.batch {
            // The row is locked, and shows no claim that this transaction could check.
            batch.write_claims().await;
        }
        let deleted = self
            .shared
            .statements
            .complete_in_transaction
            .query()
            .bind(self.job().id)
            .bind(self.worker_id())
            .bind(self.job().locked_at)
            .execute(&mut *transaction)
            .await
            .context(context)?
            .rows_affected();
        if deleted == 0 {
            return Err(Error::NotOwned { job_id: self.job().id });
        }
        crate::db::session::commit(transaction).await.context(context)?;
        self.running.completed.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns when the job's timeout has passed. The worker drops the job if it does not end soon.
    pub async fn timed_out(&self) {
        self.running.end().must_end.notified().await;
    }

    /// Returns when this job is cancelled, with [`WorkerUtils::cancel_jobs`] or the like. The
    /// [`cancellation_token`](WorkerContext::cancellation_token) is then set, too; that also happens when the worker stops.
    pub async fn cancelled(&self) {
        self.running.cancellation_reached(Cancelled::Asked).await;
    }

    /// Stops the timeout while the job waits for something that is not its fault, such as a free process.
    pub fn pause_timeout(&self) {
        self.running.end().timeout.set(None);
    }

    /// Starts the timeout again, from zero.
    pub fn restart_timeout(&self) {
        self.running.restart_timeout();
    }
}
