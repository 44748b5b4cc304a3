//! Tasks in other languages for [`graphile_worker`]: JavaScript, TypeScript and Python files, and any executable.
//!
//! [`TasksDir`] is a folder of tasks. Each executable is a task, and so is each JavaScript, TypeScript and Python file:
//! `a/b/send.js` is the task `a/b/send`. Scripts run in processes that stay warm; see [`HostOptions`]. Hosts for other
//! languages speak the protocol of `docs/host-protocol.md`.
//!
//! ```no_run
//! use graphile_worker::WorkerOptions;
//! use graphile_worker_scripts::TasksDir;
//!
//! # async fn example() -> Result<(), graphile_worker::Error> {
//! let worker = WorkerOptions::default().task_source(TasksDir::new("tasks")).init().await?;
//! worker.run().await
//! # }
//! ```

#[cfg(unix)]
mod executable;
mod folder;
mod host;
#[cfg(unix)]
mod output;
#[cfg(unix)]
mod process_group;
mod scan;

use folder::Folder;
use futures_util::future::BoxFuture;
use graphile_worker::Error;
use graphile_worker::task_source::{OpenTaskSource, TaskSource, TaskSourceSetup};
pub use host::HostOptions;
use std::path::PathBuf;
use std::sync::Arc;

/// A folder of tasks, for [`WorkerOptions::task_source`](graphile_worker::WorkerOptions::task_source). The worker logs a
/// warning for each file that is not a task. Tasks defined in code take precedence over files of the same name.
///
/// An executable gets `{"payload": …}` on standard input, and in its environment `GRAPHILE_WORKER_PAYLOAD_FORMAT` (`json`),
/// `GRAPHILE_WORKER_DATABASE_URL`, `GRAPHILE_WORKER_TASK_IDENTIFIER`, `GRAPHILE_WORKER_JOB_ID`, `GRAPHILE_WORKER_JOB_KEY` (if
/// the job has a key), `GRAPHILE_WORKER_JOB_ATTEMPTS`, `GRAPHILE_WORKER_JOB_MAX_ATTEMPTS`, `GRAPHILE_WORKER_JOB_PRIORITY` and
/// `GRAPHILE_WORKER_JOB_RUN_AT`. The worker logs its output line by line. Exit code 0 completes the job. Any other exit code
/// fails it, and `last_error` holds the last lines of standard error.
///
/// After its timeout (default: 4 hours), or when the worker's shutdown grace period ends, the program's process group
/// receives SIGTERM, and SIGKILL 3 seconds later. Processes that have left the group are not stopped.
///
/// Scripts export a function that takes the payload and helpers, as the tasks of Node's worker do. The guide page *Tasks in
/// other languages* has examples.
#[derive(Debug, Clone)]
#[must_use]
pub struct TasksDir {
    path: PathBuf,
    hosts: HostOptions,
}

impl TasksDir {
    /// Uses the tasks in this folder and its subfolders.
    pub fn new(path: impl Into<PathBuf>) -> TasksDir {
        TasksDir { path: path.into(), hosts: HostOptions::default() }
    }

    /// Sets which programs run scripts, how many of them run at once, and how much memory each may use.
    pub fn host_options(mut self, options: HostOptions) -> TasksDir {
        self.hosts = options;
        self
    }
}

impl TaskSource for TasksDir {
    fn open(self: Box<Self>, setup: TaskSourceSetup) -> BoxFuture<'static, Result<Arc<dyn OpenTaskSource>, Error>> {
        Box::pin(async move {
            let folder: Arc<dyn OpenTaskSource> = Arc::new(Folder::open(&self.path, self.hosts, setup).await?);
            Ok(folder)
        })
    }
}
