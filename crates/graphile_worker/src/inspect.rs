//! What is in the queue: jobs, counts, queues and workers, as people and dashboards look at them. Reads only, locks nothing.
//!
//! All of it can be written as JSON under the names of its fields. Why one job does not run is decided in `why`, whether all
//! is well in `checkup`.

use crate::db::{optional_time, time};
use crate::error::Doing;
use crate::{Error, WorkerUtils};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How many jobs [`WorkerUtils::list_jobs`] returns where nothing else is said.
const DEFAULT_LIMIT: u32 = 100;

/// What a job is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum JobState {
    /// It may run now; if it has a queue, when that is free.
    Ready,
    /// Its time is yet to come.
    Scheduled,
    /// A worker holds it.
    Running,
    /// It has failed, and waits for its next attempt.
    Retrying,
    /// It has used up its attempts, and will not run again by itself.
    Failed,
}

impl JobState {
    /// All of them.
    pub const ALL: [JobState; 5] =
        [JobState::Ready, JobState::Scheduled, JobState::Running, JobState::Retrying, JobState::Failed];

    /// The name it has in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Ready => "ready",
            JobState::Scheduled => "scheduled",
            JobState::Running => "running",
            JobState::Retrying => "retrying",
            JobState::Failed => "failed",
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
            format!("{name:?} is no state of a job, expected {}", JobState::ALL.map(|s| s.as_str()).join(", "))
        })
    }
}

/// Which jobs to list; what is `None` or empty is any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobFilter {
    /// In one of these states.
    pub states: Vec<JobState>,
    /// Of this task.
    pub task_identifier: Option<String>,
    /// Of this queue.
    pub queue_name: Option<String>,
    /// With this job key.
    pub key: Option<String>,
    /// With this text in payload, last error or key, in upper or lower case.
    pub search: Option<String>,
    /// Beginning behind the job with this id: the last one of the page before.
    pub after: Option<i64>,
    /// In descending order of ids (default: ascending).
    pub newest_first: bool,
    /// At most so many (default 100).
    pub limit: Option<u32>,
}

/// A job without its payload, which may be large, and private.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct JobSummary {
    /// Unique and ascending.
    pub id: i64,
    /// The task that runs it.
    pub task_identifier: String,
    /// The queue it belongs to.
    pub queue_name: Option<String>,
    /// What it is doing.
    pub state: JobState,
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
    /// Which worker.
    pub locked_by: Option<String>,
    /// How often it was changed through its key.
    pub revision: i32,
    /// Its flags.
    pub flags: Vec<String>,
}

/// A job with all that is known of it.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct JobDetails {
    /// The job.
    #[serde(flatten)]
    pub job: JobSummary,
    /// Its payload, as stored.
    pub payload: Box<RawValue>,
    /// Since when a worker holds its queue.
    pub queue_locked_at: Option<DateTime<Utc>>,
    /// Which worker.
    pub queue_locked_by: Option<String>,
    /// How often its workers have died with it.
    pub recoveries: i32,
    /// When that happened last.
    pub last_recovered_at: Option<DateTime<Utc>>,
}

/// How many jobs there are.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// That may run now.
    pub ready: i64,
    /// Whose time is yet to come.
    pub scheduled: i64,
    /// That a worker holds.
    pub running: i64,
    /// That have failed and wait for their next attempt.
    pub retrying: i64,
    /// That have failed for good.
    pub failed: i64,
    /// Since when the one that has waited longest may run.
    pub oldest_due_at: Option<DateTime<Utc>>,
    /// How many seconds ago that was.
    pub lag_seconds: Option<f64>,
    /// The same for each task that has jobs, by name.
    pub tasks: Vec<TaskStats>,
}

impl Stats {
    /// All jobs there are.
    pub fn total(&self) -> i64 {
        self.ready + self.scheduled + self.running + self.retrying + self.failed
    }
}

/// How many jobs of a task there are.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TaskStats {
    /// The task.
    pub task_identifier: String,
    /// That may run now.
    pub ready: i64,
    /// Whose time is yet to come.
    pub scheduled: i64,
    /// That a worker holds.
    pub running: i64,
    /// That have failed and wait for their next attempt.
    pub retrying: i64,
    /// That have failed for good.
    pub failed: i64,
    /// Since when the one that has waited longest may run.
    pub oldest_due_at: Option<DateTime<Utc>>,
    /// How many seconds ago that was.
    pub lag_seconds: Option<f64>,
}

/// A queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct QueueSummary {
    /// Its name.
    pub queue_name: String,
    /// How many of its jobs wait, those of the future included.
    pub waiting: i64,
    /// How many of them are due.
    pub ready: i64,
    /// Since when the one that has waited longest is due.
    pub oldest_due_at: Option<DateTime<Utc>>,
    /// Since when a worker holds it.
    pub locked_at: Option<DateTime<Utc>>,
    /// Which worker.
    pub locked_by: Option<String>,
    /// The job that runs.
    pub running_job_id: Option<i64>,
}

/// How many jobs there have ever been, as the statistics of the table have it: two of them make a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct JobCounters {
    /// When it was read.
    pub at: DateTime<Utc>,
    /// How many have been added.
    pub added: i64,
    /// How many have been deleted: done, or removed.
    pub removed: i64,
}

/// Whether a worker lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WorkerState {
    /// It has been heard of, or is connected.
    Alive,
    /// It has registered, and has not been heard of for too long.
    Stale,
    /// It was declared dead, and still holds something: the next sweep frees it.
    Dead,
    /// It holds something and does not register (Node's, or ours without recovery): nobody can tell.
    Unknown,
}

impl WorkerState {
    /// The name it has in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            WorkerState::Alive => "alive",
            WorkerState::Stale => "stale",
            WorkerState::Dead => "dead",
            WorkerState::Unknown => "unknown",
        }
    }

    pub(crate) fn named(name: &str) -> WorkerState {
        match name {
            "alive" => WorkerState::Alive,
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

/// A worker that has registered, holds something, or is connected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WorkerSummary {
    /// Its id.
    pub worker_id: String,
    /// Whether it lives.
    pub state: WorkerState,
    /// The release that it is of, where it has registered.
    pub version: Option<String>,
    /// The tasks it knows, where it has said so.
    pub tasks: Option<Vec<String>>,
    /// When it has registered.
    pub started_at: Option<DateTime<Utc>>,
    /// When it was last heard of.
    pub last_heartbeat_at: Option<DateTime<Utc>>,
    /// Whether a connection with its name is there.
    pub is_connected: bool,
    /// How many jobs it holds.
    pub jobs: i64,
    /// How many queues it holds.
    pub queues: i64,
    /// Since when it holds what it has held longest.
    pub holds_since: Option<DateTime<Utc>>,
}

impl WorkerUtils {
    /// Lists jobs, without their payloads.
    ///
    /// ```no_run
    /// # use graphile_worker::{JobFilter, JobState, WorkerUtils};
    /// # async fn example(utils: WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// let failed = JobFilter { states: vec![JobState::Failed], ..JobFilter::default() };
    /// for job in utils.list_jobs(&failed).await? {
    ///     println!("{} {}: {}", job.id, job.task_identifier, job.last_error.unwrap_or_default());
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn list_jobs(&self, filter: &JobFilter) -> Result<Vec<JobSummary>, Error> {
        let states = filter.states.iter().map(|state| state.as_str()).collect::<Vec<_>>();
        let query = sqlx::query(self.statements()?.list_jobs.sql())
            .bind((!states.is_empty()).then_some(states))
            .bind(&filter.task_identifier)
            .bind(&filter.queue_name)
            .bind(&filter.key)
            .bind(&filter.search)
            .bind(filter.after)
            .bind(filter.newest_first)
            .bind(i64::from(filter.limit.unwrap_or(DEFAULT_LIMIT)))
            // Planned anew each time, for the values that it has.
            .persistent(false);
        read(query.fetch_all(self.pool()).await, summary, || "list jobs".to_owned())
    }

    /// A job with its payload and all else that is known of it; `None` where there is none with this id.
    pub async fn find_job(&self, id: i64) -> Result<Option<JobDetails>, Error> {
        let query = sqlx::query(self.statements()?.find_job.sql()).bind(id);
        let jobs = read(query.fetch_all(self.pool()).await, details, || format!("look at job {id}"))?;
        Ok(jobs.into_iter().next())
    }

    /// Counts jobs by state and task. Reads the whole table.
    pub async fn stats(&self) -> Result<Stats, Error> {
        let query = sqlx::query(self.statements()?.stats.sql());
        let tasks = read(query.fetch_all(self.pool()).await, task_stats, || "count jobs".to_owned())?;
        Ok(sum(tasks))
    }

    /// How many jobs have ever been added and deleted. Statistics may be late by a second, and be reset.
    pub async fn job_counters(&self) -> Result<JobCounters, Error> {
        let row = sqlx::query(self.statements()?.job_counters.sql()).fetch_one(self.pool()).await;
        let read = |row: PgRow| {
            Ok(JobCounters { at: time(&row, "at")?, added: row.try_get("added")?, removed: row.try_get("removed")? })
        };
        row.and_then(read).doing(|| "read the statistics of jobs".to_owned())
    }

    /// The queues, those that are held first, then those with the most jobs waiting; at most so many.
    pub async fn list_queues(&self, limit: u32) -> Result<Vec<QueueSummary>, Error> {
        let query = sqlx::query(self.statements()?.list_queues.sql()).bind(i64::from(limit));
        read(query.fetch_all(self.pool()).await, queue, || "list queues".to_owned())
    }

    /// Whoever works here, as far as it can be seen; stale is who has not been heard of for so long. A worker that does not
    /// register, holds nothing and connects under another name cannot be seen: an idle one of Node's.
    pub async fn list_workers(&self, stale_after: Duration) -> Result<Vec<WorkerSummary>, Error> {
        let query = sqlx::query(self.statements()?.list_workers.sql()).bind(stale_after.as_secs_f64());
        read(query.fetch_all(self.pool()).await, worker, || "list workers".to_owned())
    }
}

pub(crate) fn read<T>(
    rows: sqlx::Result<Vec<PgRow>>,
    item: impl Fn(&PgRow) -> sqlx::Result<T>,
    doing: impl Fn() -> String,
) -> Result<Vec<T>, Error> {
    rows.and_then(|rows| rows.iter().map(item).collect()).doing(doing)
}

pub(crate) fn summary(row: &PgRow) -> sqlx::Result<JobSummary> {
    let state: String = row.try_get("state")?;
    Ok(JobSummary {
        id: row.try_get("id")?,
        task_identifier: row.try_get("task_identifier")?,
        queue_name: row.try_get("queue_name")?,
        state: state.parse().map_err(|problem: String| sqlx::Error::Decode(problem.into()))?,
        priority: row.try_get("priority")?,
        run_at: time(row, "run_at")?,
        attempts: row.try_get("attempts")?,
        max_attempts: row.try_get("max_attempts")?,
        last_error: row.try_get("last_error")?,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
        key: row.try_get("key")?,
        locked_at: optional_time(row, "locked_at")?,
        locked_by: row.try_get("locked_by")?,
        revision: row.try_get("revision")?,
        flags: row.try_get("flags")?,
    })
}

fn details(row: &PgRow) -> sqlx::Result<JobDetails> {
    let payload: String = row.try_get("payload")?;
    Ok(JobDetails {
        job: summary(row)?,
        payload: RawValue::from_string(payload).map_err(|error| sqlx::Error::Decode(error.into()))?,
        queue_locked_at: optional_time(row, "queue_locked_at")?,
        queue_locked_by: row.try_get("queue_locked_by")?,
        recoveries: row.try_get("recoveries")?,
        last_recovered_at: optional_time(row, "last_recovered_at")?,
    })
}

fn task_stats(row: &PgRow) -> sqlx::Result<TaskStats> {
    Ok(TaskStats {
        task_identifier: row.try_get("task_identifier")?,
        ready: row.try_get("ready")?,
        scheduled: row.try_get("scheduled")?,
        running: row.try_get("running")?,
        retrying: row.try_get("retrying")?,
        failed: row.try_get("failed")?,
        oldest_due_at: optional_time(row, "oldest_due_at")?,
        lag_seconds: row.try_get("lag_seconds")?,
    })
}

fn sum(tasks: Vec<TaskStats>) -> Stats {
    let all = |count: fn(&TaskStats) -> i64| tasks.iter().map(count).sum();
    Stats {
        ready: all(|task| task.ready),
        scheduled: all(|task| task.scheduled),
        running: all(|task| task.running),
        retrying: all(|task| task.retrying),
        failed: all(|task| task.failed),
        oldest_due_at: tasks.iter().filter_map(|task| task.oldest_due_at).min(),
        lag_seconds: tasks.iter().filter_map(|task| task.lag_seconds).max_by(f64::total_cmp),
        tasks,
    }
}

fn queue(row: &PgRow) -> sqlx::Result<QueueSummary> {
    Ok(QueueSummary {
        queue_name: row.try_get("queue_name")?,
        waiting: row.try_get("waiting")?,
        ready: row.try_get("ready")?,
        oldest_due_at: optional_time(row, "oldest_due_at")?,
        locked_at: optional_time(row, "locked_at")?,
        locked_by: row.try_get("locked_by")?,
        running_job_id: row.try_get("running_job_id")?,
    })
}

fn worker(row: &PgRow) -> sqlx::Result<WorkerSummary> {
    let state: String = row.try_get("state")?;
    Ok(WorkerSummary {
        worker_id: row.try_get("worker_id")?,
        state: WorkerState::named(&state),
        version: row.try_get("version")?,
        tasks: row.try_get("tasks")?,
        started_at: optional_time(row, "started_at")?,
        last_heartbeat_at: optional_time(row, "last_heartbeat_at")?,
        is_connected: row.try_get("is_connected")?,
        jobs: row.try_get("jobs")?,
        queues: row.try_get("queues")?,
        holds_since: optional_time(row, "holds_since")?,
    })
}

/// A length of time as people say it, by its two largest units.
pub(crate) fn spoken(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let units = [(86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")];
    let Some(first) = units.iter().position(|(length, _)| whole >= *length) else {
        return "0s".to_owned();
    };
    let (length, name) = units[first];
    let mut text = format!("{}{name}", whole / length);
    if let Some((smaller, name)) = units.get(first + 1)
        && whole % length / smaller > 0
    {
        text.push_str(&format!(" {}{name}", whole % length / smaller));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_by_the_name_it_is_written_with() {
        for state in JobState::ALL {
            assert_eq!(state.as_str().parse(), Ok(state));
        }
        let problem = "lost".parse::<JobState>().expect_err("no such state");
        assert_eq!(problem, "\"lost\" is no state of a job, expected ready, scheduled, running, retrying, failed");
    }

    #[test]
    fn a_length_of_time_is_said_by_its_two_largest_units() {
        for (seconds, text) in [
            (0.2, "0s"),
            (-5.0, "0s"),
            (59.0, "59s"),
            (60.0, "1m"),
            (61.0, "1m 1s"),
            (3_600.0, "1h"),
            (7_325.0, "2h 2m"),
            (90_061.0, "1d 1h"),
        ] {
            assert_eq!(spoken(seconds), text);
        }
    }
}
