//! Cancelling jobs from Rust: waiting jobs at once, running ones through their workers. `113-cancellation-functions.sql` has
//! the rules; `worker/maintenance` and `worker/inflight` stop running jobs.

use crate::db::Parameter;
use crate::db::executor::UtilsExecutor;
use crate::db::executor::sealed::DriverRow;
use crate::hooks::{JobCancelled, JobEventContext};
use crate::inspect::JobFilter;
use crate::text::counted;
use crate::{Error, WorkerUtils};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How many jobs that match a filter are cancelled in one transaction.
const CHUNK: u32 = 1000;

/// How to cancel jobs, for [`WorkerUtils::cancel_jobs`].
///
/// ```
/// use graphile_worker::CancelOptions;
///
/// let at_once = CancelOptions::default().reason("the customer has left".to_owned()).force(true);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use]
pub struct CancelOptions {
    pub(crate) reason: Option<String>,
    pub(crate) force: bool,
}

impl CancelOptions {
    /// Sets the reason, which the jobs show as their last error (default: none).
    pub fn reason(mut self, reason: impl Into<Option<String>>) -> CancelOptions {
        self.reason = reason.into();
        self
    }

    /// Sets whether the worker ends a running job that does not stop in time (default: no). It drops the handler of a task
    /// in Rust after 100 milliseconds, and kills a program after 3 seconds. Code that blocks its thread cannot be ended.
    pub fn force(mut self, force: bool) -> CancelOptions {
        self.force = force;
        self
    }
}

/// What became of a job that was to be cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CancelOutcome {
    /// It was waiting, and will not run.
    Cancelled,
    /// It is running, and its worker was asked to stop it. It is not retried. If it succeeds all the same, it counts as done.
    Stopping,
    /// It is running in a worker that cannot stop it: Node's, or one of an older release. It is not retried.
    Unstoppable,
    /// It had failed permanently, or was cancelled, before.
    Failed,
    /// It does not exist: it is done, was removed, or never existed.
    Unknown,
}

impl CancelOutcome {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            CancelOutcome::Cancelled => "cancelled",
            CancelOutcome::Stopping => "stopping",
            CancelOutcome::Unstoppable => "unstoppable",
            CancelOutcome::Failed => "failed",
            CancelOutcome::Unknown => "unknown",
        }
    }

    fn named(name: &str) -> CancelOutcome {
        match name {
            "cancelled" => CancelOutcome::Cancelled,
            "stopping" => CancelOutcome::Stopping,
            "unstoppable" => CancelOutcome::Unstoppable,
            "failed" => CancelOutcome::Failed,
            _ => CancelOutcome::Unknown,
        }
    }
}

impl fmt::Display for CancelOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A job that was to be cancelled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Cancellation {
    /// Its id.
    pub id: i64,
    /// What became of it.
    pub outcome: CancelOutcome,
    /// The worker that runs it.
    pub worker_id: Option<String>,
}

impl<E: UtilsExecutor> WorkerUtils<E> {
    /// Cancels jobs. Returns what became of each, in the order of their ids.
    ///
    /// A waiting job is cancelled at once. A running one is asked to stop: its
    /// [`cancellation_token`](crate::WorkerContext::cancellation_token) is set. In scripts, `abortSignal` or `abort_event` is
    /// set; programs get SIGTERM. A cancelled job keeps its row, with the reason as its last error, and never runs again,
    /// unless you run it again yourself ([`reschedule_jobs`](WorkerUtils::reschedule_jobs)).
    ///
    /// ```no_run
    /// # use graphile_worker::{CancelOptions, CancelOutcome};
    /// # async fn example(utils: graphile_worker::WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// let options = CancelOptions::default().reason("wrong address".to_owned());
    /// for job in utils.cancel_jobs(&[4711], options).await? {
    ///     if job.outcome == CancelOutcome::Stopping {
    ///         println!("worker {:?} stops job {}", job.worker_id, job.id);
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn cancel_jobs(&self, ids: &[i64], options: CancelOptions) -> Result<Vec<Cancellation>, Error> {
        let context = || format!("cancel {}", counted(ids.len()));
        let statements = self.statements()?;
        let parameters =
            vec![Parameter::Ids(ids.to_vec()), Parameter::Text(options.reason), Parameter::Bool(options.force)];
        let rows = self.executor().fetch_all(&statements.cancel_jobs, parameters, &context).await?;
        let cancellation = |row: &E::Row| {
            Ok(Cancellation {
                id: row.integer("job_id", &context)?,
                outcome: CancelOutcome::named(&row.optional_text("outcome", &context)?.unwrap_or_default()),
                worker_id: row.optional_text("worker_id", &context)?,
            })
        };
        let cancelled: Vec<Cancellation> = rows.iter().map(cancellation).collect::<Result<_, Error>>()?;
        self.emit_cancelled(&cancelled).await?;
        Ok(cancelled)
    }

    /// The workers emit it for the jobs that they stop.
    async fn emit_cancelled(&self, cancelled: &[Cancellation]) -> Result<(), Error> {
        let waiting = cancelled.iter().filter(|job| job.outcome == CancelOutcome::Cancelled);
        let waiting: Vec<i64> = waiting.map(|job| job.id).collect();
        if waiting.is_empty() || !self.hooks().has::<JobCancelled>() {
            return Ok(());
        }
        let context = || "read the cancelled jobs".to_owned();
        let jobs = self.executor().jobs(&self.statements()?.jobs_by_id, vec![Parameter::Ids(waiting)], context).await?;
        for job in jobs {
            let event = || JobEventContext {
                worker_id: "worker-utils".into(),
                error: job.last_error.clone(),
                job: Arc::new(job.clone()),
                duration: Duration::ZERO,
                will_retry: false,
            };
            self.hooks().emit(JobCancelled, event).await;
        }
        Ok(())
    }
}

impl WorkerUtils {
    /// Cancels all jobs that match the filter, in chunks of 1,000, each in a transaction of its own. Jobs that have already
    /// failed permanently stay as they are. The limit and the order of the filter have no effect.
    ///
    /// ```no_run
    /// # use graphile_worker::{CancelOptions, JobFilter};
    /// # async fn example(utils: graphile_worker::WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// let newsletters = JobFilter::default().task_identifier("newsletter".to_owned());
    /// utils.cancel_matching_jobs(&newsletters, CancelOptions::default()).await?;
    /// # Ok(()) }
    /// ```
    pub async fn cancel_matching_jobs(
        &self,
        filter: &JobFilter,
        options: CancelOptions,
    ) -> Result<Vec<Cancellation>, Error> {
        let mut all = Vec::new();
        let mut filter = filter.clone().newest_first(false).limit(CHUNK);
        loop {
            let jobs = self.list_jobs(&filter).await?;
            let Some(last) = jobs.last().map(|job| job.id) else { return Ok(all) };
            let ids: Vec<i64> = jobs.iter().filter(|job| !job.state.is_final()).map(|job| job.id).collect();
            if !ids.is_empty() {
                all.extend(self.cancel_jobs(&ids, options.clone()).await?);
            }
            filter = filter.after(last);
        }
    }
}
