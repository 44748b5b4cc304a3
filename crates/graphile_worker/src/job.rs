//! Jobs as they are read, and the options for adding one. `adding` writes them; `db::rows` reads them.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A job. The payload is the stored JSON text; handlers get it deserialized.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Job {
    /// Unique and ascending.
    pub id: i64,
    /// The task.
    #[serde(deserialize_with = "shared_text", serialize_with = "text")]
    pub task_identifier: Arc<str>,
    /// The payload, as stored.
    pub payload: Box<RawValue>,
    /// The id of its named queue.
    pub job_queue_id: Option<i32>,
    /// Lower numbers run first.
    pub priority: i16,
    /// Earliest time to run.
    pub run_at: DateTime<Utc>,
    /// Number of attempts so far, including the running one.
    pub attempts: i16,
    /// Maximum number of attempts.
    pub max_attempts: i16,
    /// Error of the last failed attempt.
    pub last_error: Option<String>,
    /// When it was added.
    pub created_at: DateTime<Utc>,
    /// When it was last changed.
    pub updated_at: DateTime<Utc>,
    /// Its job key.
    pub key: Option<String>,
    /// When a worker locked it.
    pub locked_at: Option<DateTime<Utc>>,
    /// How often it was updated through its key.
    pub revision: i32,
    /// Its flags, as an object whose values are `true`.
    pub flags: Option<serde_json::Value>,
    /// Whether the payload is exactly as stored. In a database without an encoding (`SQL_ASCII`), bytes that are not UTF-8
    /// have been replaced.
    #[serde(skip, default = "yes")]
    pub(crate) is_utf8: bool,
    /// Where its row is, if a short exchange has claimed it.
    #[serde(skip)]
    pub(crate) place: Option<Place>,
    /// When it expires, if that is near: read with the claim.
    #[serde(skip)]
    pub(crate) expiry: Option<Expiry>,
}

/// When a job expires, by the database's clock and by this process's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expiry {
    pub(crate) at: DateTime<Utc>,
    pub(crate) deadline: Instant,
}

/// The place of a row in its table: PostgreSQL's `ctid`. The row has another one after each update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) page: u32,
    pub(crate) item: u16,
}

fn yes() -> bool {
    true
}

/// Without serde's feature for reference counts, which would be on for the whole program.
fn shared_text<'de, D: serde::Deserializer<'de>>(text: D) -> Result<Arc<str>, D::Error> {
    String::deserialize(text).map(Arc::from)
}

fn text<S: serde::Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

impl Job {
    /// The named queue, of which one job at a time may run. A limited queue has a negative id, and its limit decides.
    pub(crate) fn serial_queue(&self) -> Option<i32> {
        self.job_queue_id.filter(|id| *id > 0)
    }

    /// The limited queue (`worker/limits.rs`).
    pub(crate) fn limited_queue(&self) -> Option<i32> {
        self.job_queue_id.filter(|id| *id < 0)
    }

    /// Same as the field [`id`](Job::id).
    pub fn id(&self) -> &i64 {
        &self.id
    }

    /// Same as the field [`task_identifier`](Job::task_identifier).
    pub fn task_identifier(&self) -> &str {
        &self.task_identifier
    }

    /// Whether both are the same job, possibly claimed at different times, and no keyed add has changed it meanwhile.
    pub(crate) fn is_unchanged(&self, other: &Job) -> bool {
        self.id == other.id
            && self.created_at == other.created_at
            && self.task_identifier == other.task_identifier
            && self.revision == other.revision
    }

    /// Whether both are the same claim of a job. The worker moves the lock time of long-running jobs forward
    /// in steps of whole hours (`keep_locks_fresh.sql`).
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
    /// A job for tests.
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
            is_utf8: true,
            place: None,
            expiry: None,
        }
    }
}

/// What to do if a job with the same key exists (default [`Replace`](JobKeyMode::Replace)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum JobKeyMode {
    /// Replaces all attributes of a waiting job, including `run_at`.
    #[default]
    Replace,
    /// Replaces all attributes of a waiting job except `run_at`. If the job has failed before, `run_at` is
    /// replaced, too.
    PreserveRunAt,
    /// Keeps the existing job unchanged in any state, even if it is running or has failed permanently. The
    /// new event may be lost.
    UnsafeDedupe,
}

impl JobKeyMode {
    /// The name in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            JobKeyMode::Replace => "replace",
            JobKeyMode::PreserveRunAt => "preserve_run_at",
            JobKeyMode::UnsafeDedupe => "unsafe_dedupe",
        }
    }
}

impl fmt::Display for JobKeyMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for JobKeyMode {
    type Err = InvalidJobKeyMode;

    fn from_str(name: &str) -> Result<JobKeyMode, InvalidJobKeyMode> {
        [JobKeyMode::Replace, JobKeyMode::PreserveRunAt, JobKeyMode::UnsafeDedupe]
            .into_iter()
            .find(|mode| mode.as_str() == name)
            .ok_or_else(|| InvalidJobKeyMode(name.to_owned()))
    }
}

impl<'de> Deserialize<'de> for JobKeyMode {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<JobKeyMode, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The name of a [`JobKeyMode`] that does not exist. The message is that of the SQL function `add_job`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Invalid job_key_mode value '{0}', expected 'replace', 'preserve_run_at' or 'unsafe_dedupe'.")]
pub struct InvalidJobKeyMode(String);

/// How to schedule a job. The database chooses the default for every field that is `None`.
///
/// ```
/// use graphile_worker::{JobKeyMode, JobSpec};
///
/// let spec = JobSpec::builder().queue_name("user:123").job_key("welcome:123").priority(-10).build();
/// assert_eq!(spec.job_key_mode, None);
///
/// let same = JobSpec {
///     queue_name: Some("user:123".to_owned()),
///     job_key: Some("welcome:123".to_owned()),
///     priority: Some(-10),
///     ..JobSpec::default()
/// };
/// assert_eq!(same, spec);
/// ```
// Not `#[non_exhaustive]`, unlike other options: it is data that hooks read and change, and programs written for the Rust
// port construct it as a literal that ends in `..Default::default()`, which a new field does not break.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobSpec {
    /// The queue whose jobs run one at a time (default: none).
    #[serde(alias = "queueName")]
    pub queue_name: Option<String>,
    /// Earliest time to run (default: now).
    #[serde(alias = "runAt")]
    pub run_at: Option<DateTime<Utc>>,
    /// Maximum number of attempts (default: the task's own, or else 25).
    #[serde(alias = "maxAttempts")]
    pub max_attempts: Option<i16>,
    /// Key for updating or removing the job later (default: none).
    #[serde(alias = "jobKey")]
    pub job_key: Option<String>,
    /// What to do if a job with this key exists (default: replace it).
    #[serde(alias = "jobKeyMode")]
    pub job_key_mode: Option<JobKeyMode>,
    /// Lower numbers run first (default 0).
    pub priority: Option<i16>,
    /// Flags. A worker can be configured to skip jobs by flag (default: none).
    pub flags: Option<Vec<String>>,
    /// The job fails if it has not started by then (default: never). If a job with the key exists, it keeps its expiry unless you
    /// set another.
    #[serde(alias = "expiresAt")]
    pub expires_at: Option<DateTime<Utc>>,
}

impl JobSpec {
    /// Creates a builder.
    pub fn builder() -> JobSpecBuilder {
        JobSpecBuilder::new()
    }
}

/// Builds a [`JobSpec`].
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct JobSpecBuilder(JobSpec);

impl JobSpecBuilder {
    /// Creates a builder without any options.
    pub fn new() -> JobSpecBuilder {
        JobSpecBuilder::default()
    }

    /// Sets the queue. Jobs of one queue run one at a time.
    pub fn queue_name(mut self, name: impl Into<String>) -> JobSpecBuilder {
        self.0.queue_name = Some(name.into());
        self
    }

    /// Sets the earliest time to run.
    pub fn run_at(mut self, run_at: DateTime<Utc>) -> JobSpecBuilder {
        self.0.run_at = Some(run_at);
        self
    }

    /// Sets the maximum number of attempts.
    pub fn max_attempts(mut self, max_attempts: i16) -> JobSpecBuilder {
        self.0.max_attempts = Some(max_attempts);
        self
    }

    /// Sets the key for updating or removing the job later.
    pub fn job_key(mut self, key: impl Into<String>) -> JobSpecBuilder {
        self.0.job_key = Some(key.into());
        self
    }

    /// Sets what to do if a job with the key exists.
    pub fn job_key_mode(mut self, mode: JobKeyMode) -> JobSpecBuilder {
        self.0.job_key_mode = Some(mode);
        self
    }

    /// Sets the priority. Lower numbers run first.
    pub fn priority(mut self, priority: i16) -> JobSpecBuilder {
        self.0.priority = Some(priority);
        self
    }

    /// Sets the flags.
    pub fn flags(mut self, flags: Vec<String>) -> JobSpecBuilder {
        self.0.flags = Some(flags);
        self
    }

    /// Sets when the job expires: it fails if it has not started by then (default: never).
    pub fn expires_at(mut self, time: DateTime<Utc>) -> JobSpecBuilder {
        self.0.expires_at = Some(time);
        self
    }

    /// Lets the job expire after this time, by this machine's clock (default: never).
    pub fn expires_in(self, time: Duration) -> JobSpecBuilder {
        let time = chrono::TimeDelta::from_std(time).ok().and_then(|time| Utc::now().checked_add_signed(time));
        self.expires_at(time.unwrap_or(DateTime::<Utc>::MAX_UTC))
    }

    /// Returns the spec.
    pub fn build(self) -> JobSpec {
        self.0
    }
}

/// A job whose task is known only at run time, for [`add_raw_jobs`](crate::WorkerUtils::add_raw_jobs).
// Constructed as a literal, with all of its three fields: it never gets a fourth.
#[derive(Debug, Clone, PartialEq)]
pub struct RawJobSpec<P = serde_json::Value> {
    /// The task.
    pub identifier: String,
    /// The payload: any serializable value. A [`RawValue`] is stored unchanged, with every digit of its
    /// numbers.
    pub payload: P,
    /// How to schedule the job.
    pub spec: JobSpec,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_survives_json() {
        let job = Job { key: Some("k".to_owned()), ..Job::example(7) };
        let text = serde_json::to_string(&job).expect("JSON");
        let read: Job = serde_json::from_str(&text).expect("a job");
        assert_eq!((read.id, &*read.task_identifier, read.payload.get()), (7, "t", "{}"));
        assert_eq!((read.key.as_deref(), read.run_at, read.is_utf8), (Some("k"), job.run_at, true));
        assert!(!text.contains("is_utf8"), "{text}");
    }

    #[test]
    fn a_spec_is_read_by_the_names_of_sql_and_of_node() {
        let spec: JobSpec =
            serde_json::from_str(r#"{"queueName": "q", "job_key": "k", "jobKeyMode": "preserve_run_at"}"#)
                .expect("a spec");
        let expected = JobSpec::builder().queue_name("q").job_key("k").job_key_mode(JobKeyMode::PreserveRunAt).build();
        assert_eq!(spec, expected);
        let error = serde_json::from_str::<JobSpec>(r#"{"job_key_mode": "sometimes"}"#).expect_err("no such mode");
        assert!(error.to_string().starts_with("Invalid job_key_mode value 'sometimes'"), "{error}");
        assert!(serde_json::from_str::<JobSpec>(r#"{"jobkey": "k"}"#).is_err());
    }
}
