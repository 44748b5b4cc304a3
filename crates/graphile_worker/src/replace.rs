//! Replacing a job that may be running: the new job starts when the old one has ended. `119-replace-functions.sql` has the
//! rules; `worker/maintenance` lets the new job start.

use crate::adding::NewJob;
use crate::db::Parameter;
use crate::db::executor::UtilsExecutor;
use crate::db::executor::sealed::DriverRow;
use crate::job::{Job, JobSpec};
use crate::task::TaskHandler;
use crate::{CancelOptions, Error, WorkerUtils};
use serde::Serialize;
use std::fmt;

/// What happened to the job with the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReplaceOutcome {
    /// No job with the key was waiting or running.
    Added,
    /// It was waiting, and the new job replaced it.
    Replaced,
    /// It is running, and its worker was asked to stop it. The new job waits until it has ended.
    Stopping,
    /// It is running in a worker that cannot stop it: Node's, or one of an older release. The new job waits until it has ended.
    Unstoppable,
}

impl ReplaceOutcome {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            ReplaceOutcome::Added => "added",
            ReplaceOutcome::Replaced => "replaced",
            ReplaceOutcome::Stopping => "stopping",
            ReplaceOutcome::Unstoppable => "unstoppable",
        }
    }

    fn named(name: &str) -> ReplaceOutcome {
        match name {
            "replaced" => ReplaceOutcome::Replaced,
            "stopping" => ReplaceOutcome::Stopping,
            "unstoppable" => ReplaceOutcome::Unstoppable,
            _ => ReplaceOutcome::Added,
        }
    }
}

impl fmt::Display for ReplaceOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A job that was added in place of another.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Replacement {
    /// The new job. Its `run_at` is the time at which it is due once the running job has ended.
    pub job: Job,
    /// What happened to the old job.
    pub outcome: ReplaceOutcome,
    /// The running jobs that it waits for.
    pub waits_for: Vec<i64>,
    /// The worker that runs one of them.
    pub worker_id: Option<String>,
}

impl<E: UtilsExecutor> WorkerUtils<E> {
    /// Adds a job in place of the job with this key. The newest payload wins, and two jobs with the key never run at the same
    /// time. If the old job is waiting, this replaces it as [`add_job`](WorkerUtils::add_job) does. If it is running, this
    /// cancels it as [`cancel_jobs`](WorkerUtils::cancel_jobs) does, and the new job starts when it has ended. The key and the
    /// key mode of the spec have no effect.
    ///
    /// ```no_run
    /// # use graphile_worker::{CancelOptions, JobSpec};
    /// # async fn example(utils: graphile_worker::WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// let payload = serde_json::json!({ "version": 8 });
    /// let options = CancelOptions::default().reason("there is a newer version".to_owned());
    /// let new = utils.replace_raw_job("render", payload, "render:7", JobSpec::default(), options).await?;
    /// println!("job {} {}, waits for {:?}", new.job.id, new.outcome, new.waits_for);
    /// # Ok(()) }
    /// ```
    pub async fn replace_raw_job(
        &self,
        identifier: &str,
        payload: impl Serialize,
        key: &str,
        spec: JobSpec,
        options: CancelOptions,
    ) -> Result<Replacement, Error> {
        let spec = JobSpec { job_key: Some(key.to_owned()), job_key_mode: None, ..spec };
        let NewJob { identifier, payload, spec } = self.hooked(identifier, &payload, spec).await?;
        let context = || format!("replace a job of the task {identifier:?}");
        let parameters = vec![
            Parameter::Text(Some(identifier.to_string())),
            Parameter::Text(Some(payload.get().to_owned())),
            Parameter::Text(spec.queue_name),
            Parameter::Time(spec.run_at),
            Parameter::Int(spec.max_attempts.map(i32::from)),
            Parameter::Text(spec.job_key),
            Parameter::Int(spec.priority.map(i32::from)),
            Parameter::TextArray(spec.flags),
            Parameter::Text(options.reason),
            Parameter::Bool(options.force),
            Parameter::Time(spec.expires_at),
        ];
        let rows = self.executor().fetch_all(&self.statements()?.replace_job, parameters, &context).await?;
        self.added().notify_one();
        let row = rows.first();
        let row = row.ok_or_else(|| Error::Database { context: context(), source: sqlx::Error::RowNotFound })?;
        Ok(Replacement {
            job: row.job(&context)?,
            outcome: ReplaceOutcome::named(&row.optional_text("outcome", &context)?.unwrap_or_default()),
            waits_for: row.integers("waits_for", &context)?,
            worker_id: row.optional_text("worker_id", &context)?,
        })
    }

    /// Like [`replace_raw_job`](WorkerUtils::replace_raw_job), for a task of this program.
    pub async fn replace_job<T: TaskHandler>(
        &self,
        payload: T,
        key: &str,
        spec: JobSpec,
        options: CancelOptions,
    ) -> Result<Replacement, Error> {
        let max_attempts = spec.max_attempts.or(T::options().max_attempts);
        let spec = JobSpec { max_attempts, ..spec };
        self.replace_raw_job(T::IDENTIFIER, payload, key, spec, options).await
    }
}
