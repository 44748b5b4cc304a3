//! A job as it is read, and what is said about one when it is added.

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use std::sync::Arc;

/// A job. Its payload is the JSON text as it was stored; a handler gets it decoded.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Job {
    /// Unique and ascending.
    pub id: i64,
    /// The task that runs it.
    pub task_identifier: Arc<str>,
    /// The payload, as stored.
    pub payload: Box<RawValue>,
    /// The queue it belongs to, by id.
    pub job_queue_id: Option<i32>,
    /// Lower runs first.
    pub priority: i16,
    /// Not before this time.
    pub run_at: DateTime<Utc>,
    /// How often it was tried, the running attempt included.
    pub attempts: i16,
    /// How often it may be tried.
    pub max_attempts: i16,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    /// When it was added.
    pub created_at: DateTime<Utc>,
    /// When it was last changed.
    pub updated_at: DateTime<Utc>,
    /// Its job key.
    pub key: Option<String>,
    /// Since when a worker holds it.
    pub locked_at: Option<DateTime<Utc>>,
    /// How often it was changed through its key.
    pub revision: i32,
    /// Its flags: an object that maps each to `true`.
    pub flags: Option<serde_json::Value>,
}

impl Job {
    /// Whether both are one and the same claim of a job. The lock of a job that runs for long is kept fresh by whole hours
    /// (`keep_locks_fresh.sql`).
    pub(crate) fn is_same_claim(&self, other: &Job) -> bool {
        let are_hours_apart = |(one, other): (DateTime<Utc>, DateTime<Utc>)| {
            (one - other).num_microseconds().is_some_and(|apart| apart % 3_600_000_000 == 0)
        };
        let same_lock = self.locked_at.zip(other.locked_at).map_or(self.locked_at == other.locked_at, are_hours_apart);
        self.id == other.id && same_lock
    }
}

#[cfg(test)]
impl Job {
    /// For tests.
    pub(crate) fn example(id: i64) -> Job {
        let time = DateTime::from_timestamp(1_000_000, 0).expect("a time");
        Job {
            id,
            task_identifier: "t".into(),
            payload: RawValue::from_string("{}".to_owned()).expect("JSON"),
            job_queue_id: None,
            priority: 0,
            run_at: time,
            attempts: 1,
            max_attempts: 25,
            last_error: None,
            created_at: time,
            updated_at: time,
            key: None,
            locked_at: None,
            revision: 0,
            flags: None,
        }
    }
}

/// What happens when a job with the same key exists already (default [`Replace`](JobKeyMode::Replace)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum JobKeyMode {
    /// A waiting job gets everything new, its time included.
    #[default]
    Replace,
    /// A waiting job gets everything new but keeps its time, unless it has failed before.
    PreserveRunAt,
    /// The existing job stays as it is, whatever state it is in: the new event may come to nothing.
    UnsafeDedupe,
}

impl JobKeyMode {
    /// The name it has in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            JobKeyMode::Replace => "replace",
            JobKeyMode::PreserveRunAt => "preserve_run_at",
            JobKeyMode::UnsafeDedupe => "unsafe_dedupe",
        }
    }
}

/// How a job is to be scheduled; what is `None` is left to the database.
///
/// ```
/// use graphile_worker::{JobKeyMode, JobSpec};
///
/// let spec = JobSpec::builder().queue_name("user:123").job_key("welcome:123").priority(-10).build();
/// assert_eq!(spec.job_key_mode, None);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct JobSpec {
    /// The queue whose jobs run one at a time (default: none).
    pub queue_name: Option<String>,
    /// Not before this time (default: now).
    pub run_at: Option<DateTime<Utc>>,
    /// How often it may be tried (default 25, or the task's own).
    pub max_attempts: Option<i16>,
    /// A key by which it can be changed or removed later (default: none).
    pub job_key: Option<String>,
    /// What happens when the key is taken (default: replace).
    pub job_key_mode: Option<JobKeyMode>,
    /// Lower runs first (default 0).
    pub priority: Option<i16>,
    /// Flags that a worker may be told not to run (default: none).
    pub flags: Option<Vec<String>>,
}

impl JobSpec {
    /// Begins a spec.
    pub fn builder() -> JobSpecBuilder {
        JobSpecBuilder::new()
    }
}

/// Builds a [`JobSpec`].
#[derive(Debug, Clone, Default)]
pub struct JobSpecBuilder(JobSpec);

impl JobSpecBuilder {
    /// A spec that leaves everything to the database.
    pub fn new() -> JobSpecBuilder {
        JobSpecBuilder::default()
    }

    /// The queue whose jobs run one at a time.
    pub fn queue_name(mut self, name: impl Into<String>) -> JobSpecBuilder {
        self.0.queue_name = Some(name.into());
        self
    }

    /// Not before this time.
    pub fn run_at(mut self, run_at: DateTime<Utc>) -> JobSpecBuilder {
        self.0.run_at = Some(run_at);
        self
    }

    /// How often it may be tried.
    pub fn max_attempts(mut self, max_attempts: i16) -> JobSpecBuilder {
        self.0.max_attempts = Some(max_attempts);
        self
    }

    /// A key by which it can be changed or removed later.
    pub fn job_key(mut self, key: impl Into<String>) -> JobSpecBuilder {
        self.0.job_key = Some(key.into());
        self
    }

    /// What happens when the key is taken.
    pub fn job_key_mode(mut self, mode: JobKeyMode) -> JobSpecBuilder {
        self.0.job_key_mode = Some(mode);
        self
    }

    /// Lower runs first.
    pub fn priority(mut self, priority: i16) -> JobSpecBuilder {
        self.0.priority = Some(priority);
        self
    }

    /// Flags that a worker may be told not to run.
    pub fn flags(mut self, flags: Vec<String>) -> JobSpecBuilder {
        self.0.flags = Some(flags);
        self
    }

    /// The spec.
    pub fn build(self) -> JobSpec {
        self.0
    }
}

/// A job whose task is known only at run time, for [`add_raw_jobs`](crate::WorkerUtils::add_raw_jobs).
#[derive(Debug, Clone, PartialEq)]
pub struct RawJobSpec<P = serde_json::Value> {
    /// The task.
    pub identifier: String,
    /// The payload: anything that can be written as JSON. A [`RawValue`] goes in as it is, every digit of its numbers included.
    pub payload: P,
    /// How it is to be scheduled.
    pub spec: JobSpec,
}
