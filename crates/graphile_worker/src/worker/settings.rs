//! The settings of a running worker: its options, checked and resolved. `options` has their defaults and documentation.

use super::listener::ListenOn;
use crate::cron::clock::Clock;
use crate::db::session::Session;
use crate::flags::FlagSettings;
use crate::limits::Limit;
use crate::recovery::WorkerRecoveryConfig;
use crate::shutdown::ShutdownSignal;
use std::sync::Mutex;
use std::time::Duration;

pub(crate) struct Settings {
    pub(crate) session: Session,
    pub(crate) answer_timeout: Duration,
    pub(crate) concurrency: usize,
    pub(crate) poll_interval: Duration,
    pub(crate) use_local_time: bool,
    pub(crate) flags: FlagSettings,
    /// The connection to listen on; `None` if the worker polls.
    pub(crate) listen: Option<ListenOn>,
    pub(crate) listen_os_shutdown_signals: bool,
    pub(crate) shutdown_signal: Option<ShutdownSignal>,
    pub(crate) shutdown_grace_period: Duration,
    pub(crate) interrupted_job_retry_delay: Duration,
    pub(crate) startup_timeout: Duration,
    pub(crate) keep_locks_fresh_after: Duration,
    pub(crate) longest_batch: Duration,
    /// Whether a lone job runs in a batch, too.
    pub(crate) always_batch: bool,
    /// The limits that the worker has not set yet.
    pub(crate) limits: Mutex<Vec<Limit>>,
    pub(crate) cron_clock: Clock,
    /// Whether the crontab file may define recurring jobs later, even if there are none now.
    pub(crate) crontab_may_change: bool,
    pub(crate) recovery: WorkerRecoveryConfig,
}

/// A random id. `rs-` marks our workers; `rs-live-` marks those that register. Only these can be declared dead.
pub(crate) fn new_worker_id(recovery: &WorkerRecoveryConfig) -> String {
    use std::hash::{BuildHasher, RandomState};
    let random = || RandomState::new().hash_one(std::process::id());
    let kind = if recovery.enabled { "live" } else { "worker" };
    format!("rs-{kind}-{:016x}{:08x}", random(), random() as u32)
}
