//! Recovery: heartbeats show which workers are alive, and sweeps release the jobs of dead ones.
//!
//! This file has the settings; `heartbeat` decides what a worker may do after its heartbeats, `sweep` is one sweep. The
//! `JobRecovery` hook decides what happens to each job. SQL functions (`111-recovery-functions.sql`) write the decision;
//! operators can call them too.
//!
//! Not here: `worker/heartbeat` registers the worker and sends its heartbeats. If a worker was only slow, the fence in
//! `exchange.sql` rejects its late outcomes, and `worker/registration` registers it under a new id. `worker/maintenance`
//! releases locks that are 4 hours old, with or without recovery.

pub(crate) mod heartbeat;
pub(crate) mod sweep;

use crate::db::rows;
use crate::error::{Context, Error};
use chrono::{DateTime, Utc};
use sqlx::Row;
use std::time::Duration;

/// The flag of jobs whose workers get more time before they are declared dead.
pub const INFRASTRUCTURE_RESILIENT_FLAG: &str = "infrastructure_resilient";

/// The longest allowed setting, so that sums of settings do not overflow.
const MAX_DURATION: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How workers detect dead workers, and what happens to the jobs of those.
///
/// Recovery is off by default. Without it, the jobs of a worker that is killed stay locked for 4 hours before another
/// worker runs them. With it, they run again after 5 to 7 minutes, if another worker with recovery is running.
/// [`enabled`](WorkerRecoveryConfig::enabled) turns it on, and so does every other method; assigning a field does not.
///
/// ```
/// use graphile_worker::{WorkerOptions, WorkerRecoveryConfig};
///
/// let options = WorkerOptions::default().worker_recovery(WorkerRecoveryConfig::default().enabled(true));
/// ```
///
/// The heartbeat has its own thread. A handler that blocks its thread, or even the whole runtime, does not make the
/// worker look dead, and its job does not run elsewhere meanwhile. A handler that blocks forever therefore keeps its
/// job until the process ends. A worker whose heartbeats do not reach the database in time starts no further jobs until
/// one does.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct WorkerRecoveryConfig {
    /// Whether the worker registers and sweeps (default: no).
    pub enabled: bool,
    /// How often a worker sends a heartbeat (default 30 seconds).
    pub heartbeat_interval: Duration,
    /// How often the workers look for dead workers (default 60 seconds). One worker looks for all of them.
    pub sweep_interval: Duration,
    /// How long after its last heartbeat a worker counts as dead (default 5 minutes; at least two heartbeat intervals).
    pub sweep_threshold: Duration,
    /// How long a dead worker's jobs wait before they run again (default 30 seconds).
    pub recovery_delay: Duration,
    /// Factor by which the threshold is longer for a worker that holds a resilient job (default 3).
    pub resilient_sweep_threshold_multiplier: u32,
    /// The flags that make a job resilient (default: [`INFRASTRUCTURE_RESILIENT_FLAG`]).
    pub resilient_job_flags: Vec<String>,
    /// From this recovery of a job on, the interrupted attempt counts, because the job may be what kills its workers
    /// (default 5). Before that, each recovery refunds the attempt.
    pub max_recoveries: u32,
}

impl Default for WorkerRecoveryConfig {
    fn default() -> WorkerRecoveryConfig {
        WorkerRecoveryConfig {
            enabled: false,
            heartbeat_interval: Duration::from_secs(30),
            sweep_interval: Duration::from_secs(60),
            sweep_threshold: Duration::from_secs(5 * 60),
            recovery_delay: Duration::from_secs(30),
            resilient_sweep_threshold_multiplier: 3,
            resilient_job_flags: vec![INFRASTRUCTURE_RESILIENT_FLAG.to_owned()],
            max_recoveries: 5,
        }
    }
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {
        $(
            $(#[$doc])*
            pub fn $name(mut self, $name: $type) -> WorkerRecoveryConfig {
                self.$name = $name;
                self.enabled = true;
                self
            }
        )*
    };
}

impl WorkerRecoveryConfig {
    /// Turns recovery on or off (default: off).
    pub fn enabled(mut self, enabled: bool) -> WorkerRecoveryConfig {
        self.enabled = enabled;
        self
    }

    setters! {
        /// Sets how often a worker sends a heartbeat (default 30 seconds). Turns recovery on.
        heartbeat_interval: Duration;
        /// Sets how often the workers look for dead workers (default 60 seconds). Turns recovery on.
        sweep_interval: Duration;
        /// Sets how long after its last heartbeat a worker counts as dead (default 5 minutes; at least two heartbeat
        /// intervals). Turns recovery on.
        sweep_threshold: Duration;
        /// Sets how long a dead worker's jobs wait before they run again (default 30 seconds). Turns recovery on.
        recovery_delay: Duration;
        /// Sets the factor by which the threshold is longer for a worker that holds a resilient job (default 3). Turns
        /// recovery on.
        resilient_sweep_threshold_multiplier: u32;
        /// Sets the flags that make a job resilient (default: [`INFRASTRUCTURE_RESILIENT_FLAG`]). Turns recovery on.
        resilient_job_flags: Vec<String>;
        /// Sets from which recovery of a job on the interrupted attempt counts (default 5). Turns recovery on.
        max_recoveries: u32;
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let reject = |setting, problem: String| Err(Error::InvalidOption { setting, problem });
        if !self.enabled {
            return Ok(());
        }
        for (setting, interval) in
            [("heartbeat_interval", self.heartbeat_interval), ("sweep_interval", self.sweep_interval)]
        {
            if interval.is_zero() {
                return reject(setting, "is zero, must be greater than zero".to_owned());
            }
        }
        for (setting, length) in [
            ("heartbeat_interval", self.heartbeat_interval),
            ("sweep_interval", self.sweep_interval),
            ("sweep_threshold", self.sweep_threshold),
            ("recovery_delay", self.recovery_delay),
        ] {
            if length > MAX_DURATION {
                return reject(setting, format!("is {length:?}, must be at most a year"));
            }
        }
        if self.sweep_threshold < self.heartbeat_interval * 2 {
            let (threshold, interval) = (self.sweep_threshold, self.heartbeat_interval);
            let problem = format!(
                "is {threshold:?}, must be at least twice heartbeat_interval ({interval:?}), \
                 or live workers would be declared dead"
            );
            return reject("sweep_threshold", problem);
        }
        for (setting, count) in [
            ("resilient_sweep_threshold_multiplier", self.resilient_sweep_threshold_multiplier),
            ("max_recoveries", self.max_recoveries),
        ] {
            if count == 0 {
                return reject(setting, "is 0, must be at least 1".to_owned());
            }
        }
        Ok(())
    }

    /// How long ago the last sweep of any worker must be. A little less than the interval, because sweeps have jitter.
    pub(crate) fn time_between_sweeps(&self) -> Duration {
        self.sweep_interval.mul_f64(0.8)
    }

    /// The maximum age of a worker's last heartbeat at which it may still claim and start jobs, in seconds.
    pub(crate) fn freshness(&self) -> Option<f64> {
        self.enabled.then(|| (self.sweep_threshold + self.heartbeat_interval).as_secs_f64() / 2.0)
    }
}

/// Options of one sweep, for [`WorkerUtils::sweep_stale_workers`](crate::WorkerUtils::sweep_stale_workers).
///
/// ```
/// use graphile_worker::SweepStaleWorkersOptions;
///
/// let options = SweepStaleWorkersOptions::default().dry_run(true);
/// ```
// Not `#[non_exhaustive]`, unlike other options: programs written for the Rust port construct it as a literal with all
// three fields. So it never gets a fourth field; a new setting belongs to `WorkerRecoveryConfig`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use]
pub struct SweepStaleWorkersOptions {
    /// Overrides the configured threshold.
    pub sweep_threshold: Option<Duration>,
    /// Overrides the configured recovery delay.
    pub recovery_delay: Option<Duration>,
    /// Only reports which workers are dead (default: no).
    pub dry_run: bool,
}

impl SweepStaleWorkersOptions {
    /// Sets how long after its last heartbeat a worker counts as dead (default: the configured threshold).
    pub fn sweep_threshold(mut self, threshold: impl Into<Option<Duration>>) -> SweepStaleWorkersOptions {
        self.sweep_threshold = threshold.into();
        self
    }

    /// Sets how long a dead worker's jobs wait before they run again (default: the configured delay).
    pub fn recovery_delay(mut self, delay: impl Into<Option<Duration>>) -> SweepStaleWorkersOptions {
        self.recovery_delay = delay.into();
        self
    }

    /// Sets whether the sweep only reports which workers are dead (default: no).
    pub fn dry_run(mut self, dry_run: bool) -> SweepStaleWorkersOptions {
        self.dry_run = dry_run;
        self
    }
}

/// The result of a sweep.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SweepStaleWorkersResult {
    /// The ids of the dead workers.
    pub worker_ids: Vec<String>,
    /// How many jobs were released.
    pub recovered_count: u64,
    /// Whether this sweep was skipped because another one was in progress.
    pub already_sweeping: bool,
}

/// A registered worker. Only workers with recovery turned on register.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActiveWorker {
    /// Its id.
    pub worker_id: String,
    /// Its release of graphile_worker.
    pub version: Option<String>,
    /// The latest step of our own migration ledger that its release supports.
    pub level: Option<i32>,
    /// The tasks that it runs.
    pub tasks: Vec<String>,
    /// The name of its machine.
    pub host: Option<String>,
    /// Its process id on that machine.
    pub pid: Option<i32>,
    /// How many jobs it runs at the same time.
    pub slots: Option<i32>,
    /// When it registered.
    pub started_at: DateTime<Utc>,
    /// When it sent its last heartbeat.
    pub last_heartbeat_at: DateTime<Utc>,
    /// Whether its last heartbeat is older than the requested threshold.
    pub is_stale: bool,
}

/// The registered workers, oldest first.
pub(crate) fn active_workers(rows: sqlx::Result<Vec<sqlx::postgres::PgRow>>) -> Result<Vec<ActiveWorker>, Error> {
    let worker = |row: &sqlx::postgres::PgRow| {
        Ok(ActiveWorker {
            worker_id: row.try_get("worker_id")?,
            version: row.try_get("version")?,
            level: row.try_get("level")?,
            tasks: row.try_get::<Option<_>, _>("tasks")?.unwrap_or_default(),
            host: row.try_get("host")?,
            pid: row.try_get("pid")?,
            slots: row.try_get("slots")?,
            started_at: rows::time(row, "started_at")?,
            last_heartbeat_at: rows::time(row, "last_heartbeat_at")?,
            is_stale: row.try_get("is_stale")?,
        })
    };
    rows.and_then(|rows| rows.iter().map(worker).collect()).context(|| "list workers".to_owned())
}
