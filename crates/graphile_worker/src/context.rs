//! What a handler is given: the job, ways to add more, the application's own things, and a token that says
//! when to stop.

use crate::db::Statements;
use crate::error::Doing;
use crate::exchange::Report;
use crate::hooks::{HookRegistry, JobComplete, JobEventContext, WorkerEventContext};
use crate::job::Job;
use crate::worker_utils::WorkerUtils;
use crate::{Error, JobSpec, TaskHandler};
use serde::Serialize;
use serde_json::value::RawValue;
use sqlx::{PgPool, Postgres, Transaction};
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// What all jobs of a worker have in common.
pub(crate) struct Surroundings {
    pub(crate) worker_id: Arc<str>,
    pub(crate) utils: WorkerUtils,
    pub(crate) extensions: Extensions,
    pub(crate) statements: Arc<Statements>,
    pub(crate) hooks: Arc<HookRegistry>,
}

impl Surroundings {
    /// The same for a worker of another name.
    pub(crate) fn of(&self, worker_id: Arc<str>) -> Surroundings {
        let Surroundings { utils, extensions, statements, hooks, .. } = self;
        Surroundings {
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

    pub(crate) fn job_event(&self, job: &Arc<Job>, error: Option<String>) -> JobEventContext {
        JobEventContext { worker_id: self.worker_id.clone(), job: job.clone(), error }
    }

    /// Tells of jobs whose outcome is written.
    pub(crate) async fn tell_written(&self, report: Report) {
        if !self.hooks.has::<JobComplete>() {
            return;
        }
        for ended in report.ended {
            if let Some(result) = ended.result {
                self.hooks.emit(JobComplete, || self.job_event(&ended.job, result.err())).await;
            }
        }
    }
}

/// What is known of a job while it runs.
#[derive(Default)]
struct Marks {
    /// Whether its handler has completed it in a transaction of its own.
    completed: AtomicBool,
    /// Notified when it has to end now, and not only should.
    must_end: Notify,
}

/// What a handler is given. Cheap to clone.
#[derive(Clone)]
pub struct WorkerContext {
    job: Arc<Job>,
    cancellation: CancellationToken,
    marks: Arc<Marks>,
    surroundings: Arc<Surroundings>,
}

impl WorkerContext {
    pub(crate) fn new(
        job: Arc<Job>,
        cancellation: CancellationToken,
        surroundings: Arc<Surroundings>,
    ) -> WorkerContext {
        WorkerContext { job, cancellation, marks: Arc::default(), surroundings }
    }

    /// The job that runs.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Its payload, as stored.
    pub fn payload(&self) -> &RawValue {
        &self.job.payload
    }

    /// The worker that runs it.
    pub fn worker_id(&self) -> &str {
        &self.surroundings.worker_id
    }

    /// The value of this type that was given to [`add_extension`](crate::WorkerOptions::add_extension).
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.surroundings.extensions.get()
    }

    /// Cancelled when this job should stop: its timeout has passed, or the worker is shutting down.
    pub fn cancellation_token(&self) -> &CancellationToken {
        &self.cancellation
    }

    /// The application's pool. The worker has connections of its own and does not depend on it.
    pub fn pg_pool(&self) -> &PgPool {
        self.surroundings.utils.pool()
    }

    /// Adds and administers jobs.
    pub fn utils(&self) -> &WorkerUtils {
        &self.surroundings.utils
    }

    /// Adds a job.
    pub async fn add_job<T: TaskHandler>(&self, payload: T, spec: JobSpec) -> Result<Job, Error> {
        self.utils().add_job(payload, spec).await
    }

    /// Adds a job whose task is known only at run time.
    pub async fn add_raw_job(&self, identifier: &str, payload: impl Serialize, spec: JobSpec) -> Result<Job, Error> {
        self.utils().add_raw_job(identifier, payload, spec).await
    }

    /// Completes this job in the handler's own transaction and commits it: either the work and its completion
    /// both happened, or neither. The handler then returns `Ok`.
    ///
    /// Fails, and rolls back, where the job is no longer this worker's.
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
        let doing = || format!("complete job {} in its handler's transaction", self.job.id);
        let deleted = sqlx::query(self.surroundings.statements.complete_in_transaction.sql())
            .bind(self.job.id)
            .bind(self.worker_id())
            .bind(self.job.locked_at)
            .execute(&mut *transaction)
            .await
            .doing(doing)?
            .rows_affected();
        if deleted == 0 {
            return Err(Error::NotOurs { job_id: self.job.id });
        }
        transaction.commit().await.doing(doing)?;
        self.marks.completed.store(true, Ordering::Release);
        Ok(())
    }

    /// Its timeout has passed: it has to end now, and will be dropped if it does not.
    pub(crate) fn tell_to_end(&self) {
        self.cancellation.cancel();
        self.marks.must_end.notify_one();
    }

    /// Returns when the job has to end now. That the worker is leaving is no reason: it lets jobs finish, and drops
    /// those that have not when its patience is over.
    pub(crate) async fn must_end(&self) {
        self.marks.must_end.notified().await;
    }

    pub(crate) fn completed_by_handler(&self) -> bool {
        self.marks.completed.load(Ordering::Acquire)
    }
}
