//! Records: what happened and when. Each worker process appends one JSON line per event to a file of its own, outside
//! the database under test. The times of all processes are comparable (CLOCK_MONOTONIC).
//! Judging the records is `check`'s job.

use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Nanoseconds of CLOCK_MONOTONIC: the same clock in all processes of a machine.
pub(crate) type Nanos = u64;

pub(crate) const MILLISECOND: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000_000_000;

pub(crate) fn now() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * SECOND + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// A stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) from: Nanos,
    pub(crate) to: Nanos,
}

/// One event of a worker process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub(crate) enum Line {
    /// A handler was called.
    Begin(Begin),
    /// The handler returned or was dropped. `run` is that of its `Begin`.
    End { at: Nanos, run: u64, outcome: Outcome },
    /// This process has declared these workers dead and committed that.
    DeclaredDead { at: Nanos, workers: Vec<String> },
    /// This process did not get any CPU for a while.
    Stalled { from: Nanos, to: Nanos },
    /// The worker is ready for jobs. `clock` is the time of day as the process sees it, in seconds since 1970.
    Ready {
        at: Nanos,
        #[serde(default)]
        clock: i64,
    },
    /// One of Node's workers will claim jobs under this id.
    NodeId { worker: String },
    /// `Worker::run` returned.
    Stopped { at: Nanos, error: Option<String> },
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) at: Nanos,
    /// Counts the runs of this process.
    pub(crate) run: u64,
    /// The id under which the worker claimed the job.
    pub(crate) worker: String,
    /// The process id of the host that runs a script.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<i32>,
    pub(crate) task: String,
    pub(crate) job: i64,
    pub(crate) attempt: i16,
    /// The job's `last_error` when it was claimed.
    pub(crate) last_error: Option<String>,
    /// The queue that the job was added to.
    pub(crate) queue: Option<String>,
    /// The queue that its row names; negative if the job is under a limit.
    pub(crate) queue_id: Option<i32>,
    /// The position in the queue.
    pub(crate) seq: Option<u64>,
    /// The events of a keyed job.
    pub(crate) events: Vec<u64>,
    /// The tick of a cron job.
    pub(crate) tick: Option<chrono::DateTime<chrono::Utc>>,
    /// The flag that the job was added with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) flag: Option<String>,
    /// When it was claimed, in microseconds since 1970 by the database's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) claimed: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Ok,
    Failed,
    FailedForGood,
    Snoozed,
    /// The worker dropped the handler before it returned.
    Dropped,
}

/// The file of one process.
pub(crate) struct Journal(Mutex<File>);

impl Journal {
    pub(crate) fn open(path: &Path) -> std::io::Result<Journal> {
        Ok(Journal(Mutex::new(OpenOptions::new().create(true).append(true).open(path)?)))
    }

    /// Appends the line with one write, so that a kill leaves whole lines.
    pub(crate) fn write(&self, line: &impl Serialize) {
        let mut text = serde_json::to_string(line).expect("a line is JSON");
        text.push('\n');
        lock(&self.0).write_all(text.as_bytes()).expect("the journal is writable");
    }
}

/// The journal of the process with this number.
pub(crate) fn journal_path(folder: &Path, process: u32) -> PathBuf {
    folder.join(format!("worker-{process}.jsonl"))
}

/// All lines of a process. A line that a kill cut off is skipped.
pub(crate) fn read_journal(folder: &Path, process: u32) -> Vec<Line> {
    let text = std::fs::read_to_string(journal_path(folder, process)).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Locks a mutex, whatever happened to its last owner.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
