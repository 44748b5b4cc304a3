//! Tasks that come from outside of the program's code, such as a folder of files, and that may change while the worker
//! runs. The crate `graphile_worker_scripts` is one such source.
//!
//! A source is opened when the worker starts and reports every change of its tasks. Its tasks are made with
//! [`JobDefinition::external`](crate::JobDefinition::external).

use crate::{DatabaseConfig, Error, JobDefinition};
use futures_util::future::BoxFuture;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A place that tasks come from, for [`WorkerOptions::task_source`](crate::WorkerOptions::task_source).
pub trait TaskSource: Send + Sync + 'static {
    /// Opens the source for a worker and loads its tasks.
    fn open(self: Box<Self>, setup: TaskSourceSetup) -> BoxFuture<'static, Result<Arc<dyn OpenTaskSource>, Error>>;
}

/// What a source has to know of the worker that opens it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TaskSourceSetup {
    /// The worker's database. Its [`url`](DatabaseConfig::url) is what tasks connect to.
    pub database: DatabaseConfig,
    /// The name of the worker's schema.
    pub schema: String,
    /// How many jobs the worker runs at the same time.
    pub concurrency: usize,
    /// How many connections a pool of the tasks may have.
    pub max_pool_size: u32,
    /// How long running jobs may take to end when the worker stops.
    pub shutdown_grace_period: Duration,
    /// The names of the tasks that are defined in code. They win over those of the source.
    pub in_code: BTreeSet<String>,
    /// Whether the source watches for changes ([`WorkerOptions::watch`](crate::WorkerOptions::watch)).
    pub watch: bool,
}

/// A source that a worker has opened. It ends when it is dropped.
pub trait OpenTaskSource: Send + Sync + 'static {
    /// The tasks that can run now.
    fn tasks(&self) -> Vec<JobDefinition>;

    /// The names of tasks that exist and cannot run yet.
    fn missing(&self) -> BTreeSet<String>;

    /// Returns when [`tasks`](OpenTaskSource::tasks) has changed. Never returns if it cannot change. The worker calls it again
    /// and again while it runs, and may drop the future at any time.
    fn changed(&self) -> BoxFuture<'_, ()>;

    /// Ends everything that still runs for jobs, after the grace period; at once when `forced` is cancelled. The worker
    /// releases the jobs only then.
    fn end_jobs<'s>(&'s self, forced: &'s CancellationToken) -> BoxFuture<'s, ()>;

    /// Ends the source's processes when the worker has stopped.
    fn stop(&self) -> BoxFuture<'_, ()>;

    /// Kills everything that runs for jobs, for a process that exits without waiting for its worker.
    fn kill(&self);
}

/// How often files are polled for changes.
pub const FILE_POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Whether a polled value has changed and was the same at the last two polls, so that a file that is just being written is not
/// read half. `next` holds the value of the last poll if it differs from `before`.
pub fn is_stable<T: Clone + PartialEq>(before: &T, next: &mut Option<T>, now: &T) -> bool {
    if now == before {
        *next = None;
        return false;
    }
    if next.as_ref() == Some(now) {
        *next = None;
        return true;
    }
    *next = Some(now.clone());
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_being_written_is_not_read_half() {
        let mut next = None;
        let seen: Vec<bool> =
            ["a", "ab", "abc", "abc", "abc"].iter().map(|now| is_stable(&"a", &mut next, now)).collect();
        assert_eq!(seen, [false, false, false, true, false]);
    }
}
