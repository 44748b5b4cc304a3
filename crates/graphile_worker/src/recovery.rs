//! Recovery: a worker may die at any moment. Heartbeats say who lives; a sweep frees what the dead have held.
//!
//! What becomes of a job is for the hooks to decide (`JobRecovery`), and is written by SQL functions
//! (`111-recovery-functions.sql`), which an operator may call, too. A worker that was only slow finds that it was declared
//! dead: its outcomes are refused by the fence of the exchange, and it goes on under another name.

use crate::Error;
use crate::context::Surroundings;
use crate::db::{self, Statements};
use crate::error::Doing;
use crate::exchange::jitter;
use crate::hooks::{
    FailureReason, HookRegistry, JobEventContext, JobFailed, JobInterrupted, JobInterruptedContext, JobQuarantined,
    JobRecoveryContext, JobRecoveryResult, WorkerHeartbeatMissed, WorkerRecovered, WorkerRecoveredContext,
    WorkerRegistered, guarded,
};
use crate::job::Job;
use crate::migrate::last_addition;
use crate::options::Settings;
use crate::task::Tasks;
use chrono::{DateTime, Utc};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection, Row};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, error, info, warn};

/// The flag of jobs whose workers are given more time before they are declared dead.
pub const INFRASTRUCTURE_RESILIENT_FLAG: &str = "infrastructure_resilient";

/// How long the database may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a hook may think about a job, and how long a sweep may take in all.
const HOOK_TIMEOUT: Duration = Duration::from_secs(10);
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// A heartbeat that is lost when the server crashes was worth nothing anyway; and whatever is written after a registration
/// takes that to the disk, too.
const HEARTBEAT_CONNECTION: [(&str, &str); 1] = [("synchronous_commit", "off")];

/// A sweep reads whole tables: what the worker's own connections are told of plans is wrong for it.
const SWEEP_CONNECTION: [(&str, &str); 8] = [
    ("synchronous_commit", "on"),
    ("plan_cache_mode", "auto"),
    ("enable_seqscan", "on"),
    ("enable_bitmapscan", "on"),
    ("enable_sort", "on"),
    ("enable_hashjoin", "on"),
    ("enable_mergejoin", "on"),
    ("statement_timeout", "4min"),
];

/// No setting may be longer: sums of times have to stay times.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How long to wait for the database when it is away.
const PAUSE: Duration = Duration::from_millis(500);

/// Whether and how workers that died are noticed, and what becomes of their jobs. Setting anything switches it on.
///
/// The heartbeat has a thread of its own: a handler that blocks its thread, even if it blocks the whole runtime for long,
/// does not make the worker look dead, and its job does not run elsewhere meanwhile. A handler that blocks for ever
/// therefore keeps its job until the process ends. A worker whose heartbeats do not reach the database in time begins no further
/// jobs until one does.
///
/// ```
/// use graphile_worker::{WorkerOptions, WorkerRecoveryConfig};
/// use std::time::Duration;
///
/// let recovery = WorkerRecoveryConfig::default().enabled(true).sweep_threshold(Duration::from_secs(60));
/// let options = WorkerOptions::default().worker_recovery(recovery.heartbeat_interval(Duration::from_secs(10)));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerRecoveryConfig {
    /// Whether the worker registers and sweeps (default: no).
    pub enabled: bool,
    /// How often a worker says that it lives (default 30 seconds).
    pub heartbeat_interval: Duration,
    /// How often somebody looks for dead workers (default 60 seconds).
    pub sweep_interval: Duration,
    /// Since when a worker has not been heard of that is dead (default 5 minutes).
    pub sweep_threshold: Duration,
    /// How long its jobs wait before they run again (default 30 seconds).
    pub recovery_delay: Duration,
    /// How many times the threshold counts for workers that hold a resilient job (default 3).
    pub resilient_sweep_threshold_multiplier: u32,
    /// The flags that make a job resilient (default: [`INFRASTRUCTURE_RESILIENT_FLAG`]).
    pub resilient_job_flags: Vec<String>,
    /// How often a job may be recovered: from this time on its attempt is not refunded any more, because it may be what
    /// kills its workers (default 5).
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
    /// Switches it on or off.
    pub fn enabled(mut self, enabled: bool) -> WorkerRecoveryConfig {
        self.enabled = enabled;
        self
    }

    setters! {
        /// How often a worker says that it lives.
        heartbeat_interval: Duration;
        /// How often somebody looks for dead workers.
        sweep_interval: Duration;
        /// Since when a worker has not been heard of that is dead. At least twice the interval of heartbeats.
        sweep_threshold: Duration;
        /// How long the jobs of a dead worker wait before they run again.
        recovery_delay: Duration;
        /// How many times the threshold counts for workers that hold a resilient job.
        resilient_sweep_threshold_multiplier: u32;
        /// The flags that make a job resilient.
        resilient_job_flags: Vec<String>;
        /// How often a job may be recovered, until that counts as a failed attempt.
        max_recoveries: u32;
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let refuse = |setting, problem: String| Err(Error::InvalidOption { setting, problem });
        if !self.enabled {
            return Ok(());
        }
        for (setting, interval) in
            [("heartbeat_interval", self.heartbeat_interval), ("sweep_interval", self.sweep_interval)]
        {
            if interval.is_zero() {
                return refuse(setting, "is zero, expected more".to_owned());
            }
        }
        for (setting, length) in [
            ("heartbeat_interval", self.heartbeat_interval),
            ("sweep_interval", self.sweep_interval),
            ("sweep_threshold", self.sweep_threshold),
            ("recovery_delay", self.recovery_delay),
        ] {
            if length > LONGEST {
                return refuse(setting, format!("is {length:?}, expected at most a year"));
            }
        }
        if self.sweep_threshold < self.heartbeat_interval * 2 {
            let (threshold, interval) = (self.sweep_threshold, self.heartbeat_interval);
            return refuse(
                "sweep_threshold",
                format!(
                    "is {threshold:?}, expected at least twice the heartbeat_interval of {interval:?}: a worker that lives would be taken for dead"
                ),
            );
        }
        if self.resilient_sweep_threshold_multiplier == 0 || self.max_recoveries == 0 {
            return refuse(
                "worker_recovery",
                "has a multiplier or max_recoveries of 0, expected at least 1".to_owned(),
            );
        }
        Ok(())
    }

    /// How long ago the last sweep of anybody must be. Turns come a little earlier and later.
    fn time_between_sweeps(&self) -> Duration {
        self.sweep_interval.mul_f64(0.8)
    }

    /// How old its own heartbeat may be for a worker to claim jobs, in seconds.
    pub(crate) fn freshness(&self) -> Option<f64> {
        self.enabled.then(|| (self.sweep_threshold + self.heartbeat_interval).as_secs_f64() / 2.0)
    }
}

/// What one sweep does differently.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SweepStaleWorkersOptions {
    /// Instead of the configuration's threshold.
    pub sweep_threshold: Option<Duration>,
    /// Instead of the configuration's delay.
    pub recovery_delay: Option<Duration>,
    /// Only says who is dead.
    pub dry_run: bool,
}

/// What a sweep found and did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SweepStaleWorkersResult {
    /// The workers that are dead.
    pub worker_ids: Vec<String>,
    /// How many jobs were freed.
    pub recovered_count: u64,
    /// Whether nothing was looked at because somebody else was just sweeping.
    pub somebody_else_sweeps: bool,
}

/// A worker that has registered.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActiveWorker {
    /// Its id.
    pub worker_id: String,
    /// The release that it is of.
    pub version: Option<String>,
    /// The last step of our own ledger that this release knows.
    pub level: Option<i32>,
    /// The tasks that it runs.
    pub tasks: Vec<String>,
    /// When it has registered.
    pub started_at: DateTime<Utc>,
    /// When it was last heard of.
    pub last_heartbeat_at: DateTime<Utc>,
    /// Whether that is longer ago than was asked for.
    pub is_stale: bool,
}

/// The workers that have registered, the oldest first.
pub(crate) async fn active_workers(
    connection: &mut PgConnection,
    statements: &Statements,
    stale_after: Duration,
) -> Result<Vec<ActiveWorker>, Error> {
    let rows =
        sqlx::query(statements.recovery_workers.sql()).bind(stale_after.as_secs_f64()).fetch_all(connection).await;
    let worker = |row: &sqlx::postgres::PgRow| {
        Ok(ActiveWorker {
            worker_id: row.try_get("worker_id")?,
            version: row.try_get("version")?,
            level: row.try_get("level")?,
            tasks: row.try_get::<Option<_>, _>("tasks")?.unwrap_or_default(),
            started_at: db::time(row, "started_at")?,
            last_heartbeat_at: db::time(row, "last_heartbeat_at")?,
            is_stale: row.try_get("is_stale")?,
        })
    };
    rows.and_then(|rows| rows.iter().map(worker).collect()).doing(|| "list workers".to_owned())
}

/// A sweep, and by whom.
pub(crate) struct Sweep<'s> {
    pub(crate) statements: &'s Statements,
    pub(crate) hooks: &'s HookRegistry,
    pub(crate) worker_id: Arc<str>,
    pub(crate) config: &'s WorkerRecoveryConfig,
    pub(crate) options: SweepStaleWorkersOptions,
}

/// What was decided on the jobs of dead workers, a column each.
#[derive(Default)]
struct Decisions {
    ids: Vec<i64>,
    decisions: Vec<&'static str>,
    run_ats: Vec<Option<DateTime<Utc>>>,
    attempts: Vec<Option<i32>>,
}

impl Decisions {
    fn push(&mut self, id: i64, decision: JobRecoveryResult) {
        let (name, run_at, attempts) = match decision {
            JobRecoveryResult::Skip => return,
            JobRecoveryResult::Default => ("default", None, None),
            JobRecoveryResult::FailWithBackoff => ("fail", None, None),
            JobRecoveryResult::Reschedule { run_at, attempts } => {
                let (first, last) = (DateTime::<Utc>::UNIX_EPOCH, DateTime::<Utc>::UNIX_EPOCH + LONGEST * 8000);
                ("reschedule", Some(run_at.clamp(first, last)), attempts.map(i32::from))
            }
        };
        self.ids.push(id);
        self.decisions.push(name);
        self.run_ats.push(run_at);
        self.attempts.push(attempts);
    }
}

impl Sweep<'_> {
    /// Frees what dead workers hold, in one transaction; nothing where somebody else is at it.
    pub(crate) async fn sweep(&self, connection: &mut PgConnection) -> Result<SweepStaleWorkersResult, Error> {
        let doing = || "recover jobs of dead workers".to_owned();
        let statements = self.statements;
        let mut transaction = connection.begin().await.doing(doing)?;
        let is_ours: bool =
            sqlx::query_scalar(statements.recovery_lock.sql()).fetch_one(&mut *transaction).await.doing(doing)?;
        if !is_ours {
            transaction.rollback().await.doing(doing)?;
            return Ok(SweepStaleWorkersResult { somebody_else_sweeps: true, ..Default::default() });
        }
        let threshold = self.options.sweep_threshold.unwrap_or(self.config.sweep_threshold);
        let worker_ids: Vec<String> = sqlx::query_scalar(statements.recovery_dead_workers.sql())
            .bind(threshold.as_secs_f64())
            .bind(i32::try_from(self.config.resilient_sweep_threshold_multiplier).unwrap_or(i32::MAX))
            .bind(&self.config.resilient_job_flags)
            .fetch_all(&mut *transaction)
            .await
            .doing(doing)?;
        if worker_ids.is_empty() || self.options.dry_run {
            transaction.rollback().await.doing(doing)?;
            return Ok(SweepStaleWorkersResult { worker_ids, ..Default::default() });
        }
        let rows = sqlx::query(statements.recovery_jobs.sql())
            .bind(&worker_ids)
            .fetch_all(&mut *transaction)
            .await
            .doing(doing)?;
        let held: Vec<(Arc<Job>, Arc<str>)> = rows
            .iter()
            .map(|row| Ok((Arc::new(db::job(row, None)?), row.try_get::<String, _>("locked_by")?.into())))
            .collect::<sqlx::Result<_>>()
            .doing(doing)?;
        let mut decisions = Decisions::default();
        for (job, previous) in &held {
            decisions.push(job.id, self.decide(job, previous).await);
        }
        let delay = self.options.recovery_delay.unwrap_or(self.config.recovery_delay);
        let recovered: HashMap<i64, bool> = sqlx::query_as(statements.recovery_recover.sql())
            .bind(&worker_ids)
            .bind(decisions.ids)
            .bind(decisions.decisions)
            .bind(decisions.run_ats)
            .bind(decisions.attempts)
            .bind(delay.as_secs_f64())
            .bind(i32::try_from(self.config.max_recoveries).unwrap_or(i32::MAX))
            .fetch_all(&mut *transaction)
            .await
            .doing(doing)?
            .into_iter()
            .collect();
        sqlx::query(statements.recovery_forget.sql())
            .bind(&worker_ids)
            .execute(&mut *transaction)
            .await
            .doing(doing)?;
        transaction.commit().await.doing(doing)?;
        self.tell(&worker_ids, held, &recovered).await;
        let recovered_count = recovered.len() as u64;
        Ok(SweepStaleWorkersResult { worker_ids, recovered_count, somebody_else_sweeps: false })
    }

    /// The first hook that does not leave it to the default has decided.
    async fn decide(&self, job: &Arc<Job>, previous: &Arc<str>) -> JobRecoveryResult {
        let context = || JobRecoveryContext {
            worker_id: self.worker_id.clone(),
            previous_worker_id: previous.clone(),
            job: job.clone(),
            reason: FailureReason::WorkerCrashed,
        };
        let asking = tokio::time::timeout(HOOK_TIMEOUT, guarded("JobRecovery", self.hooks.recover(context))).await;
        asking.ok().flatten().unwrap_or_else(|| {
            warn!(label = "recovery", job_id = job.id, "a hook has not decided on the job: it is recovered as usual");
            JobRecoveryResult::Default
        })
    }

    async fn tell(&self, worker_ids: &[String], held: Vec<(Arc<Job>, Arc<str>)>, recovered: &HashMap<i64, bool>) {
        for (job, previous) in held {
            let Some(quarantined) = recovered.get(&job.id) else { continue };
            let context = || JobInterruptedContext {
                worker_id: self.worker_id.clone(),
                previous_worker_id: previous.clone(),
                job: job.clone(),
                reason: FailureReason::WorkerCrashed,
            };
            let (job_id, task_identifier) = (job.id, &*job.task_identifier);
            if *quarantined {
                error!(
                    label = "recovery",
                    job_id,
                    task_identifier,
                    from = &*previous,
                    "job quarantined: its workers keep dying with it"
                );
                guarded("JobQuarantined", self.hooks.emit(JobQuarantined, context)).await;
                if job.attempts >= job.max_attempts {
                    let event = || JobEventContext {
                        worker_id: self.worker_id.clone(),
                        job: job.clone(),
                        error: Some("its workers keep dying with it".to_owned()),
                    };
                    guarded("JobFailed", self.hooks.emit(JobFailed, event)).await;
                }
            } else {
                warn!(
                    label = "recovery",
                    job_id,
                    task_identifier,
                    from = &*previous,
                    "job recovered from a dead worker"
                );
            }
            guarded("JobInterrupted", self.hooks.emit(JobInterrupted, context)).await;
        }
        info!(label = "recovery", ?worker_ids, recovered = recovered.len(), "dead workers swept");
        let context = || WorkerRecoveredContext {
            worker_id: self.worker_id.clone(),
            worker_ids: worker_ids.to_vec(),
            recovered_count: recovered.len() as u64,
        };
        guarded("WorkerRecovered", self.hooks.emit(WorkerRecovered, context)).await;
    }
}

/// Whether a worker may begin a job: only while its last heartbeat is so recent that no sweep has declared it dead.
///
/// To wait until it may begin again, create the future `beaten.notified()` and enable it before asking `may_begin`.
#[derive(Default)]
pub(crate) struct Pulse {
    /// `None` if recovery is off: such a worker is never declared dead.
    lease: Option<Lease>,
    /// Notified, with `notify_waiters`, after each successful heartbeat.
    pub(crate) beaten: Notify,
}

struct Lease {
    length: Duration,
    /// When the last successful heartbeat was sent. The database noted it at this moment or later.
    since: Mutex<std::time::Instant>,
}

impl Pulse {
    fn new(length: Option<Duration>, sent: std::time::Instant) -> Pulse {
        let lease = length.map(|length| Lease { length, since: Mutex::new(sent) });
        Pulse { lease, beaten: Notify::new() }
    }

    pub(crate) fn may_begin(&self) -> bool {
        let fresh = |lease: &Lease| lease.since.lock().unwrap_or_else(PoisonError::into_inner).elapsed() < lease.length;
        self.lease.as_ref().is_none_or(fresh)
    }

    fn beat(&self, sent: std::time::Instant) {
        if let Some(lease) = &self.lease {
            *lease.since.lock().unwrap_or_else(PoisonError::into_inner) = sent;
        }
        self.beaten.notify_waiters();
    }
}

/// The heartbeat of a running worker, and its turns at sweeping. Dropping it ends both.
///
/// The heartbeat has a thread and a runtime of its own, so that a handler that blocks its thread does not delay it. Hooks and
/// sweeps, which call hooks, run on the application's runtime.
pub(crate) struct Heartbeat {
    /// Cancelled when another worker has declared this one dead.
    pub(crate) declared_dead: CancellationToken,
    pulse: Arc<Pulse>,
    stop: DropGuard,
    /// Cancelled when the thread has ended.
    ended: CancellationToken,
    sweeping: tokio::task::JoinHandle<()>,
    options: PgConnectOptions,
    surroundings: Arc<Surroundings>,
}

impl Heartbeat {
    /// Registers the worker, before it claims anything, and starts the heartbeat.
    pub(crate) async fn start(
        settings: &Settings,
        surroundings: Arc<Surroundings>,
        tasks: watch::Receiver<Arc<Tasks>>,
    ) -> Result<Heartbeat, Error> {
        let name = format!("graphile_worker {} heartbeat", surroundings.worker_id);
        let mut options = settings.connect_options.clone().application_name(&name);
        if settings.prepared_statements {
            options = options.options(HEARTBEAT_CONNECTION);
        }
        let (declared_dead, stop, ended) =
            (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let freshness = settings.recovery.freshness().map(Duration::from_secs_f64);
        let pulse = Arc::new(Pulse::new(freshness, std::time::Instant::now()));
        let health = Health { since: Some(Instant::now()), last_beat: Instant::now(), sweep_is_due: true };
        let health = Arc::new(Mutex::new(health));
        let beating = Beating {
            connection: None,
            persistent: settings.prepared_statements,
            tasks,
            options: options.clone(),
            surroundings: surroundings.clone(),
            config: settings.recovery.clone(),
            pulse: pulse.clone(),
            application: tokio::runtime::Handle::current(),
            declared_dead: declared_dead.clone(),
            stop: stop.clone(),
            health: health.clone(),
        };
        let guard = stop.clone().drop_guard();
        beating.start_thread(ended.clone()).await?;
        info!(label = "recovery", worker_id = &*surroundings.worker_id, "registered");
        guarded("WorkerRegistered", surroundings.hooks.emit(WorkerRegistered, || surroundings.event(None))).await;
        let mut sweep_options = options.clone();
        if settings.prepared_statements {
            sweep_options = sweep_options.options(SWEEP_CONNECTION);
        }
        let sweeping = Sweeping {
            options: sweep_options,
            health,
            surroundings: surroundings.clone(),
            config: settings.recovery.clone(),
        };
        let sweeping = tokio::spawn(sweeping.sweep_until(stop, declared_dead.clone()));
        Ok(Heartbeat { declared_dead, pulse, stop: guard, ended, sweeping, options, surroundings })
    }

    /// Whether the worker may begin jobs.
    pub(crate) fn pulse(&self) -> Arc<Pulse> {
        self.pulse.clone()
    }

    /// Stops the heartbeat and deletes the worker's registration. The worker has written the outcome of everything it held.
    pub(crate) async fn end(self) {
        drop(self.stop);
        let ending = async {
            self.ended.cancelled().await;
            let _ = self.sweeping.await;
        };
        let _ = tokio::time::timeout(ANSWER_TIMEOUT, ending).await;
        let sign_off = async {
            let mut connection = PgConnection::connect_with(&self.options).await?;
            let query = sqlx::query(self.surroundings.statements.recovery_leave.sql()).persistent(false);
            query.bind(&*self.surroundings.worker_id).execute(&mut connection).await?;
            connection.close().await
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, sign_off).await {
            Ok(Ok(())) => {}
            // A sweep will find it.
            Ok(Err(error)) => debug!(label = "recovery", %error, "cannot sign off"),
            Err(_) => debug!(label = "recovery", "cannot sign off in time"),
        }
    }
}

/// How this worker's own heart has beaten.
struct Health {
    /// Since when no heartbeat was missed.
    since: Option<Instant>,
    last_beat: Instant,
    /// Whether nobody had swept for long, when it was last asked.
    sweep_is_due: bool,
}

impl Health {
    fn beat(&mut self, arrived: bool, interval: Duration) {
        let in_time = self.last_beat.elapsed() < interval * 2;
        self.since = arrived.then(|| self.since.filter(|_| in_time).unwrap_or_else(Instant::now));
        self.last_beat = Instant::now();
    }

    /// Whether it may judge others. After an outage, or a pause of this process, everybody's heartbeat is old: first
    /// they are given the time to come back.
    fn may_sweep(&self, interval: Duration) -> bool {
        let steady = self.since.is_some_and(|since| since.elapsed() >= interval * 2);
        steady && self.last_beat.elapsed() < interval * 2
    }
}

fn names(tasks: &Tasks) -> Vec<String> {
    tasks.keys().map(|task| task.to_string()).collect()
}

struct Beating {
    connection: Option<PgConnection>,
    persistent: bool,
    /// May be replaced; the next heartbeat says so, which comes at once then.
    tasks: watch::Receiver<Arc<Tasks>>,
    options: PgConnectOptions,
    health: Arc<Mutex<Health>>,
    pulse: Arc<Pulse>,
    surroundings: Arc<Surroundings>,
    config: WorkerRecoveryConfig,
    /// The runtime that hooks run on.
    application: tokio::runtime::Handle,
    declared_dead: CancellationToken,
    stop: CancellationToken,
}

impl Beating {
    /// Starts the thread, and returns when the worker is registered. Cancels `ended` when the thread has ended.
    async fn start_thread(self, ended: CancellationToken) -> Result<(), Error> {
        let doing = || "start the thread of the heartbeat".to_owned();
        let (registered, registering) = oneshot::channel();
        // Linux shows 15 characters of a name.
        let thread = std::thread::Builder::new().name("gw-heartbeat".to_owned());
        let beat = move || {
            let _ended = ended.drop_guard();
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = registered.send(Err(sqlx::Error::Io(error)).doing(doing));
                    return;
                }
            };
            runtime.block_on(self.beat_until_stopped(registered));
            // Looking up a host name may hang for a while in a thread of the runtime: do not wait for it.
            runtime.shutdown_background();
        };
        thread.spawn(beat).map_err(sqlx::Error::Io).doing(doing)?;
        registering.await.unwrap_or(Err(Error::Database { doing: doing(), source: sqlx::Error::WorkerCrashed }))
    }

    async fn beat_until_stopped(mut self, registered: oneshot::Sender<Result<(), Error>>) {
        let stop = self.stop.clone();
        let beating = async {
            let result = self.register().await;
            let is_registered = result.is_ok();
            let _ = registered.send(result);
            if is_registered {
                self.beat_until_declared_dead().await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = beating => {}
        }
    }

    async fn register(&mut self) -> Result<(), Error> {
        let names = names(&self.tasks.borrow_and_update());
        let registering = async {
            let mut connection = PgConnection::connect_with(&self.options).await?;
            let sent = std::time::Instant::now();
            sqlx::query(self.surroundings.statements.recovery_register.sql())
                .persistent(false)
                .bind(&*self.surroundings.worker_id)
                .bind(env!("CARGO_PKG_VERSION"))
                .bind(last_addition())
                .bind(self.config.heartbeat_interval.as_secs_f64())
                .bind(names)
                .execute(&mut connection)
                .await?;
            self.pulse.beat(sent);
            Ok(connection)
        };
        let connection = tokio::time::timeout(ANSWER_TIMEOUT, registering)
            .await
            .map_err(|_| Error::NoAnswer { after: ANSWER_TIMEOUT })?
            .doing(|| "register the worker".to_owned())?;
        self.connection = Some(connection);
        Ok(())
    }

    async fn beat_until_declared_dead(&mut self) {
        let worker_id = self.surroundings.worker_id.clone();
        let mut wait = self.config.heartbeat_interval;
        let mut missed = false;
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                Ok(()) = async { self.tasks.clone().changed().await }, if !missed => {}
            }
            let beaten = self.beat().await;
            let health = || self.health.lock().unwrap_or_else(PoisonError::into_inner);
            health().beat(beaten.is_ok(), self.config.heartbeat_interval);
            match beaten {
                Ok(Some(sweep_is_due)) => {
                    health().sweep_is_due = sweep_is_due;
                    if std::mem::take(&mut missed) {
                        info!(label = "recovery", worker_id = &*worker_id, "heartbeats arrive again");
                    }
                    wait = self.config.heartbeat_interval;
                }
                Ok(None) => {
                    warn!(
                        label = "recovery",
                        worker_id = &*worker_id,
                        "this worker was declared dead while it was slow or cut off: what it ran runs elsewhere, and its outcomes are not written"
                    );
                    return self.declared_dead.cancel();
                }
                Err(error) => {
                    self.connection = None;
                    if !std::mem::replace(&mut missed, true) {
                        let text = error.to_string_with_sources();
                        warn!(label = "recovery", worker_id = &*worker_id, error = text, "a heartbeat was missed");
                        self.tell_missed(text);
                    }
                    wait = PAUSE.mul_f64(0.5 + jitter());
                }
            }
        }
    }

    /// Calls the hooks on the application's runtime, and does not wait for them: that runtime may be blocked.
    fn tell_missed(&self, error: String) {
        let surroundings = self.surroundings.clone();
        self.application.spawn(async move {
            let event = || surroundings.event(Some(error.clone()));
            guarded("WorkerHeartbeatMissed", surroundings.hooks.emit(WorkerHeartbeatMissed, event)).await;
        });
    }

    async fn connected(&mut self) -> Result<&mut PgConnection, Error> {
        if self.connection.is_none() {
            let connecting = tokio::time::timeout(ANSWER_TIMEOUT, PgConnection::connect_with(&self.options)).await;
            let connection = connecting
                .map_err(|_| Error::NoAnswer { after: ANSWER_TIMEOUT })?
                .doing(|| "connect to the database".to_owned())?;
            self.connection = Some(connection);
        }
        self.connection.as_mut().ok_or(Error::NoAnswer { after: ANSWER_TIMEOUT })
    }

    /// Says that the worker lives, and hears whether a sweep is due; nothing where it was declared dead.
    async fn beat(&mut self) -> Result<Option<bool>, Error> {
        let surroundings = self.surroundings.clone();
        let query = sqlx::query(surroundings.statements.recovery_heartbeat.sql()).persistent(self.persistent);
        let patience = ANSWER_TIMEOUT.min(self.config.sweep_threshold / 4);
        let mut tasks = self.tasks.clone();
        let other_tasks = tasks.has_changed().unwrap_or(false).then(|| names(&tasks.borrow_and_update()));
        let query = query
            .bind(&*surroundings.worker_id)
            .bind(self.config.time_between_sweeps().as_secs_f64())
            .bind(other_tasks);
        let connection = self.connected().await?;
        let sent = std::time::Instant::now();
        let beaten = tokio::time::timeout(patience, query.fetch_optional(connection)).await;
        let beaten = beaten.map_err(|_| Error::NoAnswer { after: patience })?;
        let sweep_is_due = |row: Option<sqlx::postgres::PgRow>| row.map(|row| row.try_get("sweep_is_due")).transpose();
        let sweep_is_due = beaten.and_then(sweep_is_due).doing(|| "send a heartbeat".to_owned())?;
        self.tasks = tasks;
        if sweep_is_due.is_some() {
            self.pulse.beat(sent);
        }
        Ok(sweep_is_due)
    }
}

/// Turns at sweeping. Apart from the heartbeat: a hook that takes its time must not keep that waiting.
struct Sweeping {
    options: PgConnectOptions,
    health: Arc<Mutex<Health>>,
    surroundings: Arc<Surroundings>,
    config: WorkerRecoveryConfig,
}

impl Sweeping {
    async fn sweep_until(self, stop: CancellationToken, declared_dead: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = declared_dead.cancelled() => {}
            () = self.sweep_for_ever() => {}
        }
    }

    async fn sweep_for_ever(self) {
        // Not all at the same moment.
        let mut wait = self.config.sweep_interval.mul_f64(0.5 + jitter() / 2.0);
        let mut complained = false;
        loop {
            tokio::time::sleep(wait).await;
            let health = || self.health.lock().unwrap_or_else(PoisonError::into_inner);
            // Of many workers, only those connect for a sweep that have heard that it is due. Where heartbeats are rare,
            // they hear of it too late.
            let hears_in_time = self.config.heartbeat_interval <= self.config.sweep_interval;
            let somebody_was_faster = hears_in_time && !health().sweep_is_due;
            if !health().may_sweep(self.config.heartbeat_interval) || somebody_was_faster {
                // With the next heartbeat we know more.
                wait = wait.min(self.config.heartbeat_interval.mul_f64(0.5 + jitter() / 2.0));
                continue;
            }
            let swept = tokio::time::timeout(SWEEP_TIMEOUT, self.sweep()).await;
            match swept.unwrap_or(Err(Error::NoAnswer { after: SWEEP_TIMEOUT })) {
                Ok(()) => complained = false,
                Err(error) if !std::mem::replace(&mut complained, true) => {
                    let error = &error as &dyn std::error::Error;
                    warn!(label = "recovery", error, "cannot look for dead workers; trying again at the next turn");
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    debug!(label = "recovery", error, "still cannot look for dead workers");
                }
            }
            wait = self.config.sweep_interval.mul_f64(0.9 + jitter() / 5.0);
        }
    }

    /// Sweeps, if nobody else has a moment ago.
    async fn sweep(&self) -> Result<(), Error> {
        let surroundings = &self.surroundings;
        let doing = || "sweep".to_owned();
        let mut connection = PgConnection::connect_with(&self.options).await.doing(doing)?;
        let turn = sqlx::query(surroundings.statements.recovery_swept.sql())
            .persistent(false)
            .bind(&*surroundings.worker_id)
            .bind(self.config.time_between_sweeps().as_secs_f64())
            .execute(&mut connection)
            .await
            .doing(doing)?;
        if turn.rows_affected() > 0 {
            let sweep = Sweep {
                statements: &surroundings.statements,
                hooks: &surroundings.hooks,
                worker_id: surroundings.worker_id.clone(),
                config: &self.config,
                options: SweepStaleWorkersOptions::default(),
            };
            sweep.sweep(&mut connection).await?;
        }
        connection.close().await.doing(doing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_worker_begins_jobs_only_while_its_last_heartbeat_is_fresh() {
        let now = std::time::Instant::now();
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds)).expect("a running clock");
        let pulse = Pulse::new(Some(Duration::from_secs(60)), ago(59));
        assert!(pulse.may_begin());
        let pulse = Pulse::new(Some(Duration::from_secs(60)), ago(60));
        let mut beaten = std::pin::pin!(pulse.beaten.notified());
        beaten.as_mut().enable();
        assert!(!pulse.may_begin());
        pulse.beat(ago(70));
        assert!(!pulse.may_begin(), "the heartbeat took 70 seconds to arrive");
        pulse.beat(now);
        assert!(pulse.may_begin());
        beaten.await;
        assert!(Pulse::default().may_begin(), "a worker without recovery is never declared dead");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_was_away_judges_nobody_until_its_own_heart_has_beaten_for_a_while() {
        let interval = Duration::from_secs(30);
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).expect("a running clock");
        let mut health = Health { since: Some(ago(600)), last_beat: ago(20), sweep_is_due: true };
        assert!(health.may_sweep(interval));
        health.last_beat = ago(300);
        assert!(!health.may_sweep(interval), "it has just woken up");
        health.beat(true, interval);
        assert!(!health.may_sweep(interval), "the others may not have beaten yet");
        let mut health = Health { since: Some(ago(600)), last_beat: ago(30), sweep_is_due: true };
        health.beat(false, interval);
        assert!(!health.may_sweep(interval), "the database is away");
        health = Health { since: Some(ago(600)), last_beat: ago(30), sweep_is_due: true };
        health.beat(true, interval);
        assert!(health.may_sweep(interval));
    }
}
