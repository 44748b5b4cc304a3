//! The worker: its type and public methods. `start` builds it from options; `registration` runs it under an id, and
//! again under a new one if it was declared dead; `run_loop` exchanges and runs jobs. Each step of the loop has its own
//! file.

pub(crate) mod claim_size;
mod claim_start;
mod deferred;
pub(crate) mod exchange;
pub(crate) mod execute;
mod external_tasks;
mod head_claims;
mod heartbeat;
pub(crate) mod inflight;
pub(crate) mod limited_exchange;
mod limits;
mod listener;
mod maintenance;
pub(crate) mod next_claim;
mod registration;
pub(crate) mod report;
mod run_loop;
pub(crate) mod second_lane;
pub(crate) mod settings;
pub(crate) mod settle;
mod start;
mod startup;
mod wake_order;

use crate::Error;
use crate::context::Shared;
use crate::cron::file::WatchedCrontab;
use crate::hooks::{ShutdownReason, WorkerFatalError, WorkerShutdown, WorkerStop};
use crate::options::WorkerOptions;
use crate::shutdown::Shutdown;
use crate::task::Tasks;
use crate::worker_utils::WorkerUtils;
use external_tasks::ExternalTasks;
use graphile_worker_crontab::Crontab;
use settings::Settings;
use sqlx::PgConnection;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use tokio::sync::{Mutex, watch};
use tracing::{debug, error};

/// Runs jobs. Built by [`WorkerOptions::init`](crate::WorkerOptions::init).
pub struct Worker {
    pub(crate) settings: Arc<Settings>,
    /// The tasks and the crontab items. Both may change while the worker runs.
    pub(crate) tasks: watch::Sender<Arc<Tasks>>,
    pub(crate) crontabs: watch::Sender<Vec<Arc<Crontab>>>,
    /// The crontab's file, if it is watched.
    watched_crontab: Option<Arc<Mutex<WatchedCrontab>>>,
    /// The tasks that are not defined in code.
    external: Option<ExternalTasks>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) shutdown: Shutdown,
    pub(crate) exit_reason: Arc<OnceLock<String>>,
    /// Opened by `init`, for the first run.
    pub(crate) connection: Mutex<Option<PgConnection>>,
}

impl Worker {
    /// The same as [`WorkerOptions::default`].
    pub fn options() -> WorkerOptions {
        WorkerOptions::default()
    }

    async fn stopped_while_starting(&self) -> Result<(), Error> {
        self.emit_shutdown().await;
        self.stopped(Ok(())).await
    }

    async fn failed_to_start(&self, error: Error) -> Result<(), Error> {
        self.emit_fatal_error(&error).await;
        self.stopped(Err(error)).await
    }

    async fn emit_shutdown(&self) {
        let reason = self.shutdown.reason();
        self.shared.hooks.emit(WorkerShutdown, || self.shared.shutdown_event(reason)).await;
    }

    async fn emit_fatal_error(&self, error: &Error) {
        let text = error.to_string_with_sources();
        error!(label = "worker", worker_id = self.worker_id(), error = text, "the worker cannot continue");
        self.shared.hooks.emit(WorkerFatalError, || self.shared.event(Some(text))).await;
    }

    async fn stopped(&self, ended: Result<(), Error>) -> Result<(), Error> {
        let error = ended.as_ref().err().map(Error::to_string_with_sources);
        self.shared.hooks.emit(WorkerStop, || self.shared.event(error)).await;
        debug!(label = "worker", worker_id = self.worker_id(), "stopped");
        ended
    }

    /// Asks the worker to stop. The first call lets running jobs finish, within the [grace
    /// period](WorkerOptions::shutdown_grace_period). The second call interrupts them.
    pub fn request_shutdown(&self) {
        self.shutdown.ask(ShutdownReason::Graceful);
    }

    /// Returns why the worker stopped without being asked to: a newer release changes the schema in a way that this
    /// release cannot work with. `None` otherwise.
    pub fn exit_reason(&self) -> Option<&str> {
        self.exit_reason.get().map(String::as_str)
    }

    /// Kills the running programs of the [source of tasks](WorkerOptions::task_source). For a process that exits without
    /// waiting for its worker.
    pub fn kill_programs(&self) {
        if let Some(external) = &self.external {
            external.source.kill();
        }
    }

    /// Returns the utilities that add and administer jobs.
    pub fn create_utils(&self) -> WorkerUtils {
        self.shared.utils.clone()
    }

    /// Returns the id under which this worker locks jobs. If the worker was declared dead and continues under a new id,
    /// this is still the first one.
    pub fn worker_id(&self) -> &str {
        &self.shared.worker_id
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker")
            .field("worker_id", &self.worker_id())
            .field("tasks", &self.tasks.borrow().keys().collect::<BTreeSet<_>>())
            .finish_non_exhaustive()
    }
}
