//! Reads the queue for people and dashboards: jobs, counts, queues and workers. Read only, without locks.
//!
//! Everything serializes to JSON under its field names. `limits` reads limits and their use, `explain` finds out why a job does not run, `reasons` has what
//! each reason says, and `doctor` checks the server and the installation.

pub(crate) mod doctor;
pub(crate) mod explain;
pub(crate) mod limits;
pub(crate) mod reasons;

use crate::db::rows::{optional_text, optional_time, text, texts, time};
use crate::db::session;
use crate::error::Context;
use crate::{Error, WorkerUtils};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Default number of jobs that [`WorkerUtils::list_jobs`] returns.
const DEFAULT_LIMIT: u32 = 100;

/// State of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum JobState {
    /// Due: it runs as soon as a worker, and its queue, is free.
    Ready,
    /// Not due yet.
    Scheduled,
    /// Locked by a worker.
    Running,
    /// Failed, and waits for its next attempt.
    Retrying,
    /// Failed permanently: it has no attempts left, or has expired.
    Failed,
    /// Cancelled: it does not run. Its `last_error` has the reason.
    Cancelled,
}

impl JobState {
    /// All states.
    pub const ALL: [JobState; 6] = [
        JobState::Ready,
        JobState::Scheduled,
        JobState::Running,
        JobState::Retrying,
        JobState::Failed,
        JobState::Cancelled,
    ];

    /// Whether the job does not run again by itself.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, JobState::Failed | JobState::Cancelled)
    }

    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Ready => "ready",
            JobState::Scheduled => "scheduled",
            JobState::Running => "running",
            JobState::Retrying => "retrying",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = String;

    fn from_str(name: &str) -> Result<JobState, String> {
        let found = JobState::ALL.into_iter().find(|state| state.as_str() == name);
        found.ok_or_else(|| {
            format!("{name:?} is not a job state, expected one of {}", JobState::ALL.map(|s| s.as_str()).join(", "))
        })
    }
}

/// Which jobs to list, for [`WorkerUtils::list_jobs`]. The default matches all jobs, and so does `None`.
///
/// ```
/// use graphile_worker::{JobFilter, JobState};
///
/// let failed_emails =
///     JobFilter::default().states([JobState::Failed]).task_identifier("send_email".to_owned()).newest_first(true);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use]
pub struct JobFilter {
    states: Vec<JobState>,
    task_identifier: Option<String>,
    queue_name: Option<String>,
    key: Option<String>,
    search: Option<String>,
    after: Option<i64>,
    newest_first: bool,
    limit: Option<u32>,
}

impl JobFilter {
    /// Lists jobs in any of these states (default: in all states). An empty list means all states.
    pub fn states(mut self, states: impl Into<Vec<JobState>>) -> JobFilter {
        self.states = states.into();
        self
    }

    /// Lists jobs of this task (default: of all tasks).
    pub fn task_identifier(mut self, identifier: impl Into<Option<String>>) -> JobFilter {
        self.task_identifier = identifier.into();
        self
    }

    /// Lists jobs of this queue (default: of all queues, and those without one).
    pub fn queue_name(mut self, name: impl Into<Option<String>>) -> JobFilter {
        self.queue_name = name.into();
        self
    }

    /// Lists the job with this key.
    pub fn key(mut self, key: impl Into<Option<String>>) -> JobFilter {
        self.key = key.into();
        self
    }

    /// Lists jobs with this text in the payload, the last error or the key, case-insensitive.
    pub fn search(mut self, text: impl Into<Option<String>>) -> JobFilter {
        self.search = text.into();
        self
    }

    /// Lists jobs after the one with this id, which is the last one of the previous page (default: the first page).
    pub fn after(mut self, id: impl Into<Option<i64>>) -> JobFilter {
        self.after = id.into();
        self
    }

    /// Sets whether to list in descending order of ids (default: ascending).
    pub fn newest_first(mut self, newest_first: bool) -> JobFilter {
        self.newest_first = newest_first;
        self
    }

    /// Sets the maximum number of jobs (default 100).
    pub fn limit(mut self, limit: impl Into<Option<u32>>) -> JobFilter {
        self.limit = limit.into();
        self
    }
}

/// A job without its payload.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct JobSummary {
    /// Unique and ascending.
    pub id: i64,
    /// The task.
    pub task_identifier: String,
    /// Its queue.
    pub queue_name: Option<String>,
    /// Its state.
    pub state: JobState,
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
    /// The worker that locked it.
    pub locked_by: Option<String>,
    /// How often it was updated through its key.
    pub revision: i32,
    /// Its flags.
    pub flags: Vec<String>,
    /// The running jobs that it replaces: it waits until they have ended.
    pub replaces: Vec<i64>,
}

/// A job with all details.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct JobDetails {
    /// The job.
    #[serde(flatten)]
    pub job: JobSummary,
    /// Its payload, as stored.
    pub payload: Box<RawValue>,
    /// When a worker locked its queue.
    pub queue_locked_at: Option<DateTime<Utc>>,
    /// The worker that locked its queue.
    pub queue_locked_by: Option<String>,
    /// Whether limits decide when it starts: it is in a lane.
    pub is_in_lane: bool,
    /// The names of its limits, without those of groups.
    pub limits: Vec<String>,
    /// How often it was recovered because its worker died.
    pub recoveries: i32,
    /// When it was last recovered.
    pub last_recovered_at: Option<DateTime<Utc>>,
}

/// Number of jobs by state.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct QueueStats {
    /// Due.
    pub ready: i64,
    /// Not due yet.
    pub scheduled: i64,
    /// Locked by a worker.
    pub running: i64,
    /// Failed, and waiting for their next attempt.
    pub retrying: i64,
    /// Failed permanently.
    pub failed: i64,
    /// Cancelled.
    pub cancelled: i64,
    /// When the oldest due job became due.
    pub oldest_due_at: Option<DateTime<Utc>>,
    /// Seconds since then.
    pub lag_seconds: Option<f64>,
    /// The same per task, sorted by name. Only tasks with jobs.
    pub tasks: Vec<TaskStats>,
}

impl QueueStats {
    /// Number of all jobs.
    pub fn total(&self) -> i64 {
        self.ready + self.scheduled + self.running + self.retrying + self.failed + self.cancelled
    }
}

/// Number of jobs of a task, by state.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TaskStats {
    /// The task.
    pub task_identifier: String,
    /// Due.
    pub ready: i64,
    /// Not due yet.
    pub scheduled: i64,
    /// Locked by a worker.
    pub running: i64,
    /// Failed, and waiting for their next attempt.
    pub retrying: i64,
    /// Failed permanently.
    pub failed: i64,
    /// Cancelled.
    pub cancelled: i64,
    /// When the oldest due job became due.
    pub oldest_due_at: Option<DateTime<Utc>>,
    /// Seconds since then.
    pub lag_seconds: Option<f64>,
}

/// A queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct QueueSummary {
    /// Its name.
    pub queue_name: String,
    /// Number of waiting jobs, including those that are not due yet.
    pub waiting: i64,
    /// Number of due jobs.
    pub ready: i64,
    /// When the oldest due job became due.
    pub oldest_due_at: Option<DateTime<Utc>>,
    /// When a worker locked it.
    pub locked_at: Option<DateTime<Utc>>,
    /// The worker that locked it.
    pub locked_by: Option<String>,
    /// A running job.
    pub running_job_id: Option<i64>,
    /// Number of running jobs.
    pub running: i64,
    /// How many of its jobs may run at the same time: 1 without a limit.
    pub concurrency: i32,
    /// The name of its limit, which may be that of a pattern.
    pub limit: Option<String>,
    /// Whether it is paused.
    pub is_paused: bool,
}

/// Number of jobs added and deleted since the table's statistics were last reset. Two samples make a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct JobCounters {
    /// Time of the sample.
    pub at: DateTime<Utc>,
    /// Jobs added.
    pub added: i64,
    /// Jobs deleted: done or removed.
    pub removed: i64,
}

/// Whether a worker is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WorkerState {
    /// Its heartbeat is fresh, or it is connected.
    Alive,
    /// Registered, and its heartbeat is late: it was killed, stopped or disconnected, or is slow.
    Silent,
    /// Registered, and its last heartbeat is older than the threshold.
    Stale,
    /// Declared dead, and still holds locks; the next sweep releases them.
    Dead,
    /// Holds locks, but is not registered (Node's, the Rust port's, or ours without recovery), so that its state is unknown.
    Unknown,
}

impl WorkerState {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            WorkerState::Alive => "alive",
            WorkerState::Silent => "silent",
            WorkerState::Stale => "stale",
            WorkerState::Dead => "dead",
            WorkerState::Unknown => "unknown",
        }
    }

    pub(crate) fn named(name: &str) -> WorkerState {
        match name {
            "alive" => WorkerState::Alive,
            "silent" => WorkerState::Silent,
            "stale" => WorkerState::Stale,
            "dead" => WorkerState::Dead,
            _ => WorkerState::Unknown,
        }
    }
}

impl fmt::Display for WorkerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A worker that is registered or connected, or holds locks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WorkerSummary {
    /// Its id.
    pub worker_id: String,
    /// Whether it is alive.
    pub state: WorkerState,
    /// Its release, if registered.
    pub version: Option<String>,
    /// Its machine, if registered.
    pub host: Option<String>,
    /// Its process id on that machine.
    pub pid: Option<i32>,
    /// How many jobs it runs at the same time.
    pub slots: Option<i32>,
    /// The tasks it runs, if it has published them.
    pub tasks: Option<Vec<String>>,
    /// When it registered.
    pub started_at: Option<DateTime<Utc>>,
    /// Time of its last heartbeat.
    pub last_heartbeat_at: Option<DateTime<Utc>>,
    /// Seconds since then.
    pub heartbeat_seconds: Option<f64>,
    /// Whether a connection with its name is open; `None` if it connects through a pooler, where connections have no name.
    pub is_connected: Option<bool>,
    /// How many jobs it holds.
    pub jobs: i64,
    /// Number of queues it holds.
    pub queues: i64,
    /// When it took its oldest lock.
    pub holds_since: Option<DateTime<Utc>>,
    /// Whether it is a worker of the Rust port, the `graphile_worker` of crates.io, by its id.
    pub of_rust_port: bool,
}

/// Last execution of a crontab item.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CronExecution {
    /// Its identifier: the item's `id`, or its task.
    pub identifier: String,
    /// When a worker first registered it.
    pub known_since: DateTime<Utc>,
    /// When it last fired; `None` if it has not fired yet.
    pub last_execution: Option<DateTime<Utc>>,
}

impl WorkerUtils {
    /// Returns the last execution of these crontab items. Items that no worker has registered are left out.
    pub async fn cron_executions(&self, identifiers: &[String]) -> Result<Vec<CronExecution>, Error> {
        let query = self.statements()?.cron_executions.query().bind(identifiers);
        let execution = |row: &PgRow| {
            Ok(CronExecution {
                identifier: row.try_get("identifier")?,
                known_since: time(row, "known_since")?,
                last_execution: optional_time(row, "last_execution")?,
            })
        };
        read(self.fetch_all(query).await, execution, || "read the last executions of crontab items".to_owned())
    }

    /// Lists jobs, without their payloads.
    ///
    /// ```no_run
    /// # use graphile_worker::{JobFilter, JobState, WorkerUtils};
    /// # async fn example(utils: WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// let failed = JobFilter::default().states([JobState::Failed]);
    /// for job in utils.list_jobs(&failed).await? {
    ///     println!("{} {}: {}", job.id, job.task_identifier, job.last_error.unwrap_or_default());
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn list_jobs(&self, filter: &JobFilter) -> Result<Vec<JobSummary>, Error> {
        let states = filter.states.iter().map(|state| state.as_str()).collect::<Vec<_>>();
        let query = self
            .statements()?
            .list_jobs
            .query()
            .bind((!states.is_empty()).then_some(states))
            .bind(&filter.task_identifier)
            .bind(&filter.queue_name)
            .bind(&filter.key)
            .bind(&filter.search)
            .bind(filter.after)
            .bind(filter.newest_first)
            .bind(i64::from(filter.limit.unwrap_or(DEFAULT_LIMIT)))
            // Planned each time, for its parameters.
            .persistent(false);
        read(self.fetch_all(query).await, summary, || "list jobs".to_owned())
    }

    /// Returns a job with its payload and all details; `None` if it does not exist.
    pub async fn find_job(&self, id: i64) -> Result<Option<JobDetails>, Error> {
        let query = self.statements()?.find_job.query().bind(id);
        let jobs = read(self.fetch_all(query).await, details, || format!("read job {id}"))?;
        Ok(jobs.into_iter().next())
    }

    /// Counts jobs by state and task. Reads the whole table.
    pub async fn stats(&self) -> Result<QueueStats, Error> {
        let query = self.statements()?.stats.query();
        let tasks = read(self.fetch_all(query).await, task_stats, || "count jobs".to_owned())?;
        Ok(sum(tasks))
    }

    /// Returns the number of jobs ever added and deleted. Statistics may lag by a second, and can be reset.
    pub async fn job_counters(&self) -> Result<JobCounters, Error> {
        let row = self.fetch_one(self.statements()?.job_counters.query()).await;
        let read = |row: PgRow| {
            Ok(JobCounters { at: time(&row, "at")?, added: row.try_get("added")?, removed: row.try_get("removed")? })
        };
        row.and_then(read).context(|| "read the statistics of jobs".to_owned())
    }

    /// Lists at most `limit` queues: those with a running job first, then those with the most waiting jobs.
    pub async fn list_queues(&self, limit: u32) -> Result<Vec<QueueSummary>, Error> {
        let query = self.statements()?.list_queues.query().bind(i64::from(limit));
        read(self.fetch_all(query).await, queue, || "list queues".to_owned())
    }

    /// Lists all visible workers. A worker is stale if its last heartbeat is older than `stale_after`. A
    /// worker is invisible if it does not register, holds nothing and connects under another name: an idle
    /// worker of Node's.
    pub async fn list_workers(&self, stale_after: Duration) -> Result<Vec<WorkerSummary>, Error> {
        let context = || "list workers".to_owned();
        self.list_workers_on(&mut *self.pool().acquire().await.context(context)?, stale_after).await
    }

    pub(crate) async fn list_workers_on(
        &self,
        connection: &mut PgConnection,
        stale_after: Duration,
    ) -> Result<Vec<WorkerSummary>, Error> {
        let statements = self.statements()?;
        let query = statements.list_workers.query().bind(stale_after.as_secs_f64());
        let rows = session::fetch_all_safely_on(connection, statements.is_pooled, query).await;
        read(rows, worker, || "list workers".to_owned())
    }
}

pub(crate) fn read<T>(
    rows: sqlx::Result<Vec<PgRow>>,
    item: impl Fn(&PgRow) -> sqlx::Result<T>,
    context: impl Fn() -> String,
) -> Result<Vec<T>, Error> {
    rows.and_then(|rows| rows.iter().map(item).collect()).context(context)
}

pub(crate) fn summary(row: &PgRow) -> sqlx::Result<JobSummary> {
    let state: String = row.try_get("state")?;
    Ok(JobSummary {
        id: row.try_get("id")?,
        task_identifier: text(row, "task_identifier")?,
        queue_name: optional_text(row, "queue_name")?,
        state: state.parse().map_err(|problem: String| sqlx::Error::Decode(problem.into()))?,
        priority: row.try_get("priority")?,
        run_at: time(row, "run_at")?,
        attempts: row.try_get("attempts")?,
        max_attempts: row.try_get("max_attempts")?,
        last_error: optional_text(row, "last_error")?,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
        key: optional_text(row, "key")?,
        locked_at: optional_time(row, "locked_at")?,
        locked_by: optional_text(row, "locked_by")?,
        revision: row.try_get("revision")?,
        flags: texts(row, "flags")?,
        replaces: row.try_get("replaces")?,
    })
}

fn details(row: &PgRow) -> sqlx::Result<JobDetails> {
    let payload = text(row, "payload")?;
    Ok(JobDetails {
        job: summary(row)?,
        payload: RawValue::from_string(payload).map_err(|error| sqlx::Error::Decode(error.into()))?,
        queue_locked_at: optional_time(row, "queue_locked_at")?,
        queue_locked_by: optional_text(row, "queue_locked_by")?,
        is_in_lane: row.try_get("is_in_lane")?,
        limits: texts(row, "limits")?,
        recoveries: row.try_get("recoveries")?,
        last_recovered_at: optional_time(row, "last_recovered_at")?,
    })
}

fn task_stats(row: &PgRow) -> sqlx::Result<TaskStats> {
    Ok(TaskStats {
        task_identifier: text(row, "task_identifier")?,
        ready: row.try_get("ready")?,
        scheduled: row.try_get("scheduled")?,
        running: row.try_get("running")?,
        retrying: row.try_get("retrying")?,
        failed: row.try_get("failed")?,
        cancelled: row.try_get("cancelled")?,
        oldest_due_at: optional_time(row, "oldest_due_at")?,
        lag_seconds: row.try_get("lag_seconds")?,
    })
}

fn sum(tasks: Vec<TaskStats>) -> QueueStats {
    let all = |count: fn(&TaskStats) -> i64| tasks.iter().map(count).sum();
    QueueStats {
        ready: all(|task| task.ready),
        scheduled: all(|task| task.scheduled),
        running: all(|task| task.running),
        retrying: all(|task| task.retrying),
        failed: all(|task| task.failed),
        cancelled: all(|task| task.cancelled),
        oldest_due_at: tasks.iter().filter_map(|task| task.oldest_due_at).min(),
        lag_seconds: tasks.iter().filter_map(|task| task.lag_seconds).max_by(f64::total_cmp),
        tasks,
    }
}

fn queue(row: &PgRow) -> sqlx::Result<QueueSummary> {
    Ok(QueueSummary {
        queue_name: text(row, "queue_name")?,
        waiting: row.try_get("waiting")?,
        ready: row.try_get("ready")?,
        oldest_due_at: optional_time(row, "oldest_due_at")?,
        locked_at: optional_time(row, "locked_at")?,
        locked_by: optional_text(row, "locked_by")?,
        running_job_id: row.try_get("running_job_id")?,
        running: row.try_get("running")?,
        concurrency: row.try_get("concurrency")?,
        limit: optional_text(row, "limit_name")?,
        is_paused: row.try_get("is_paused")?,
    })
}

fn worker(row: &PgRow) -> sqlx::Result<WorkerSummary> {
    let state: String = row.try_get("state")?;
    let worker_id = text(row, "worker_id")?;
    Ok(WorkerSummary {
        of_rust_port: is_of_rust_port(&worker_id),
        worker_id,
        state: WorkerState::named(&state),
        version: optional_text(row, "version")?,
        host: optional_text(row, "host")?,
        pid: row.try_get("pid")?,
        slots: row.try_get("slots")?,
        tasks: row.try_get("tasks")?,
        started_at: optional_time(row, "started_at")?,
        last_heartbeat_at: optional_time(row, "last_heartbeat_at")?,
        heartbeat_seconds: row.try_get("heartbeat_seconds")?,
        is_connected: row.try_get("is_connected")?,
        jobs: row.try_get("jobs")?,
        queues: row.try_get("queues")?,
        holds_since: optional_time(row, "holds_since")?,
    })
}

/// Short form of a worker id for tables and logs: the first eight of its random characters.
///
/// ```
/// assert_eq!(graphile_worker::short_worker_id("rs-live-5ad1f3e100112233445566"), "5ad1f3e1");
/// assert_eq!(graphile_worker::short_worker_id("the one in the cellar"), "the one in the cellar");
/// ```
pub fn short_worker_id(worker_id: &str) -> &str {
    const SHORT: usize = 8;
    let random = ["rs-live-", "rs-worker-", "worker-"].into_iter().find_map(|kind| worker_id.strip_prefix(kind));
    let is_random = |rest: &&str| rest.len() >= 2 * SHORT && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
    random.filter(is_random).map_or(worker_id, |random| &random[..SHORT])
}

/// Whether a worker is one of the Rust port, the `graphile_worker` of crates.io: its ids are `graphile_worker_` and random digits.
pub(crate) fn is_of_rust_port(worker_id: &str) -> bool {
    let is_random = |rest: &str| rest.len() == 18 && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
    worker_id.strip_prefix("graphile_worker_").is_some_and(is_random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_parses_from_its_name() {
        for state in JobState::ALL {
            assert_eq!(state.as_str().parse(), Ok(state));
        }
        let problem = "lost".parse::<JobState>().expect_err("not a state");
        assert_eq!(
            problem,
            "\"lost\" is not a job state, expected one of ready, scheduled, running, retrying, failed, cancelled"
        );
    }
}
