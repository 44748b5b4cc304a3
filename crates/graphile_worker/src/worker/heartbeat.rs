//! Heartbeats: a worker registers, shows on a thread of its own that it is alive, and takes turns at sweeping.
//!
//! Not here: `recovery/heartbeat` decides what a worker may do after its heartbeats; `recovery/sweep` is one sweep.

use super::settings::Settings;
use crate::context::Shared;
use crate::db::session::Session;
use crate::error::{Context, Error};
use crate::hooks::{WorkerHeartbeatMissed, WorkerRegistered, catch_panic};
use crate::recovery::heartbeat::{HeartbeatHistory, StartLease};
use crate::recovery::sweep::Sweep;
use crate::recovery::{SweepStaleWorkersOptions, WorkerRecoveryConfig};
use crate::retry::jitter;
use crate::schema::migrate;
use crate::schema::steps::last_addition;
use crate::task::Tasks;
use sqlx::{Connection, PgConnection, Row};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info, warn};

/// How long the database may take to answer a heartbeat.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a sweep may take in all.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// A heartbeat is not worth a wait for the disk: after a server crash, the next one replaces it. The first write after
/// a registration flushes the registration too.
const HEARTBEAT_CONNECTION: [(&str, &str); 1] = [("synchronous_commit", "off")];

/// A sweep reads whole tables, so it undoes the planner settings and the short timeout of the worker's other
/// connections.
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

/// The pause before a failed heartbeat is retried, with jitter.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// The heartbeats and sweeps of a running worker. Dropping this ends both.
///
/// The heartbeat has its own thread and runtime, so that a handler that blocks its thread does not delay it. Hooks run
/// on the application's runtime, and so do sweeps, which call hooks.
pub(crate) struct Heartbeat {
    /// Cancelled when another worker has declared this one dead.
    pub(crate) declared_dead: CancellationToken,
    start_lease: Arc<StartLease>,
    stop: DropGuard,
    /// Cancelled when the thread has ended.
    ended: CancellationToken,
    sweeping: tokio::task::JoinHandle<()>,
    session: Session,
    shared: Arc<Shared>,
}

impl Heartbeat {
    /// Registers the worker, before it claims anything, and starts the heartbeat.
    pub(crate) async fn start(
        settings: &Settings,
        shared: Arc<Shared>,
        tasks: watch::Receiver<Arc<Tasks>>,
    ) -> Result<Heartbeat, Error> {
        let name = format!("graphile_worker {} heartbeat", shared.worker_id);
        let session = settings.session.clone().named(&name).with(&HEARTBEAT_CONNECTION);
        let (declared_dead, stop, ended) =
            (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let freshness = settings.recovery.freshness().map(Duration::from_secs_f64);
        let start_lease = Arc::new(StartLease::new(freshness, std::time::Instant::now()));
        let health = Arc::new(Mutex::new(HeartbeatHistory::registered()));
        let heartbeat = HeartbeatThread {
            connection: None,
            tasks,
            stored_settings: StoredSettings::new(settings),
            session: session.clone(),
            shared: shared.clone(),
            config: settings.recovery.clone(),
            start_lease: start_lease.clone(),
            application: tokio::runtime::Handle::current(),
            declared_dead: declared_dead.clone(),
            stop: stop.clone(),
            health: health.clone(),
        };
        let guard = stop.clone().drop_guard();
        heartbeat.start_thread(ended.clone()).await?;
        info!(label = "recovery", worker_id = &*shared.worker_id, "registered");
        catch_panic("WorkerRegistered", shared.hooks.emit(WorkerRegistered, || shared.event(None))).await;
        let sweeping = SweepLoop {
            session: session.clone().with(&SWEEP_CONNECTION),
            health,
            shared: shared.clone(),
            config: settings.recovery.clone(),
        };
        let sweeping = tokio::spawn(sweeping.sweep_until(stop, declared_dead.clone()));
        Ok(Heartbeat { declared_dead, start_lease, stop: guard, ended, sweeping, session, shared })
    }

    /// Whether the worker may start jobs.
    pub(crate) fn start_lease(&self) -> Arc<StartLease> {
        self.start_lease.clone()
    }

    /// Stops the heartbeat and deletes the worker's registration. To be called once the outcomes of all its jobs are
    /// recorded.
    pub(crate) async fn end(self) {
        drop(self.stop);
        let ending = async {
            self.ended.cancelled().await;
            let _ = self.sweeping.await;
        };
        let _ = tokio::time::timeout(HEARTBEAT_TIMEOUT, ending).await;
        let unregistering = async {
            let mut connection = self.session.connect().await?;
            let query = self.shared.statements.recovery_leave.query().persistent(false);
            self.session.fetch_all(&mut connection, query.bind(&*self.shared.worker_id)).await?;
            connection.close().await
        };
        match tokio::time::timeout(HEARTBEAT_TIMEOUT, unregistering).await {
            Ok(Ok(())) => {}
            // A sweep will delete the registration.
            Ok(Err(error)) => debug!(label = "recovery", %error, "could not unregister"),
            Err(_) => debug!(label = "recovery", "could not unregister in time"),
        }
    }
}

fn names(tasks: &Tasks) -> Vec<String> {
    tasks.keys().map(|task| task.to_string()).collect()
}

/// The settings of a worker that can keep a job from running, stored for `why`.
struct StoredSettings {
    slots: usize,
    /// `None` if a function decides.
    forbidden_flags: Option<Vec<String>>,
    accepted_flags: Option<Vec<String>>,
    /// `None` if jobs may have any flags.
    allowed_flags: Option<Vec<String>>,
    sweep_threshold: Duration,
    poll_interval: Duration,
    listens: bool,
    is_pooled: bool,
}

impl StoredSettings {
    fn new(settings: &Settings) -> StoredSettings {
        StoredSettings {
            slots: settings.concurrency,
            forbidden_flags: settings.flags.forbidden.listed(),
            accepted_flags: settings.flags.accepted.listed(),
            allowed_flags: settings.flags.allowed.clone(),
            sweep_threshold: settings.recovery.sweep_threshold,
            poll_interval: settings.poll_interval,
            listens: settings.listen.is_some(),
            is_pooled: settings.session.is_pooled(),
        }
    }

    /// The stored JSON, with the limits of the tasks.
    fn json(&self, tasks: &Tasks) -> String {
        let limits = tasks.iter().filter_map(|(name, task)| Some((name.to_string(), task.options.max_concurrent?)));
        let mut settings = serde_json::json!({
            "task_limits": limits.collect::<HashMap<_, _>>(),
            "sweep_threshold": self.sweep_threshold.as_secs_f64(),
            "poll_interval": self.poll_interval.as_secs_f64(),
            "listens": self.listens,
            // Behind a pooler, its connections have no name.
            "pooled": self.is_pooled,
            // Null if a function decides.
            "accepted_flags": self.accepted_flags,
        });
        if let Some(flags) = &self.forbidden_flags {
            settings["forbidden_flags"] = flags.as_slice().into();
        }
        if let Some(flags) = &self.allowed_flags {
            settings["allowed_flags"] = flags.as_slice().into();
        }
        settings.to_string()
    }
}

struct HeartbeatThread {
    connection: Option<PgConnection>,
    /// The tasks. If they change, the worker sends a heartbeat with the new ones at once.
    tasks: watch::Receiver<Arc<Tasks>>,
    stored_settings: StoredSettings,
    session: Session,
    health: Arc<Mutex<HeartbeatHistory>>,
    start_lease: Arc<StartLease>,
    shared: Arc<Shared>,
    config: WorkerRecoveryConfig,
    /// The runtime that hooks run on.
    application: tokio::runtime::Handle,
    declared_dead: CancellationToken,
    stop: CancellationToken,
}

impl HeartbeatThread {
    /// Starts the thread, and returns when the worker is registered. Cancels `ended` when the thread has ended.
    async fn start_thread(self, ended: CancellationToken) -> Result<(), Error> {
        let context = || "start the heartbeat thread".to_owned();
        let (registered, registering) = oneshot::channel();
        // Linux shows at most 15 characters of a thread's name.
        let thread = std::thread::Builder::new().name("gw-heartbeat".to_owned());
        let beat = move || {
            let _ended = ended.drop_guard();
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = registered.send(Err(sqlx::Error::Io(error)).context(context));
                    return;
                }
            };
            runtime.block_on(self.beat_until_stopped(registered));
            // A host name lookup may hang in a thread of the runtime: do not wait for it.
            runtime.shutdown_background();
        };
        thread.spawn(beat).map_err(sqlx::Error::Io).context(context)?;
        registering.await.unwrap_or(Err(Error::Database { context: context(), source: sqlx::Error::WorkerCrashed }))
    }

    async fn beat_until_stopped(mut self, registered: oneshot::Sender<Result<(), Error>>) {
        let stop = self.stop.clone();
        let sending = async {
            let result = self.register().await;
            let is_registered = result.is_ok();
            let _ = registered.send(result);
            if is_registered {
                self.beat_until_declared_dead().await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = sending => {}
        }
    }

    async fn register(&mut self) -> Result<(), Error> {
        let tasks = self.tasks.borrow_and_update().clone();
        let registering = async {
            let mut connection = self.session.connect().await?;
            let sent = std::time::Instant::now();
            let query = self.shared.statements.recovery_register.query().persistent(false);
            let query = query
                .bind(&*self.shared.worker_id)
                .bind(env!("CARGO_PKG_VERSION"))
                .bind(last_addition())
                .bind(self.config.heartbeat_interval.as_secs_f64())
                .bind(names(&tasks))
                .bind(whoami::hostname().ok())
                .bind(i32::try_from(std::process::id()).ok())
                .bind(i32::try_from(self.stored_settings.slots).unwrap_or(i32::MAX))
                .bind(self.stored_settings.json(&tasks));
            self.session.fetch_all(&mut connection, query).await?;
            self.start_lease.beat(sent);
            Ok(connection)
        };
        let patience = HEARTBEAT_TIMEOUT + self.session.time_to_connect();
        let connection = tokio::time::timeout(patience, registering)
            .await
            .map_err(|_| Error::NoAnswer { after: patience })?
            .context(|| "register the worker".to_owned())?;
        self.connection = Some(connection);
        Ok(())
    }

    async fn beat_until_declared_dead(&mut self) {
        let worker_id = self.shared.worker_id.clone();
        let mut wait = self.config.heartbeat_interval;
        let mut missed = false;
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                Ok(()) = async { self.tasks.clone().changed().await }, if !missed => {}
            }
            let heartbeat_sent = self.beat().await;
            let health = || self.health.lock().unwrap_or_else(PoisonError::into_inner);
            health().beat(heartbeat_sent.is_ok(), self.config.heartbeat_interval);
            match heartbeat_sent {
                Ok(Some(sweep_is_due)) => {
                    health().sweep_is_due = sweep_is_due;
                    if std::mem::take(&mut missed) {
                        info!(label = "recovery", worker_id = &*worker_id, "heartbeats succeed again");
                    }
                    wait = self.config.heartbeat_interval;
                }
                Ok(None) => {
                    warn!(
                        label = "recovery",
                        worker_id = &*worker_id,
                        "declared dead while slow or disconnected: its jobs run elsewhere, and its outcomes are rejected"
                    );
                    return self.declared_dead.cancel();
                }
                Err(error) => {
                    self.connection = None;
                    if !std::mem::replace(&mut missed, true) {
                        let text = error.to_string_with_sources();
                        warn!(label = "recovery", worker_id = &*worker_id, error = text, "heartbeat failed; retrying");
                        self.emit_heartbeat_missed(text);
                    }
                    wait = RETRY_PAUSE.mul_f64(0.5 + jitter());
                }
            }
        }
    }

    /// Calls the hooks on the application's runtime, and does not wait for them, because that runtime may be blocked.
    fn emit_heartbeat_missed(&self, error: String) {
        let shared = self.shared.clone();
        self.application.spawn(async move {
            let event = || shared.event(Some(error.clone()));
            catch_panic("WorkerHeartbeatMissed", shared.hooks.emit(WorkerHeartbeatMissed, event)).await;
        });
    }

    async fn connected(&mut self) -> Result<&mut PgConnection, Error> {
        if self.connection.is_none() {
            let connection = self.session.connect().await.context(|| "connect to the database".to_owned())?;
            self.connection = Some(connection);
        }
        self.connection.as_mut().ok_or(Error::NoAnswer { after: HEARTBEAT_TIMEOUT })
    }

    /// Sends a heartbeat. Returns whether a sweep is due, or `None` if the worker was declared dead.
    async fn beat(&mut self) -> Result<Option<bool>, Error> {
        let shared = self.shared.clone();
        let query = shared.statements.recovery_heartbeat.query();
        let patience = HEARTBEAT_TIMEOUT.min(self.config.sweep_threshold / 4);
        let mut tasks = self.tasks.clone();
        let other_tasks = tasks.has_changed().unwrap_or(false).then(|| tasks.borrow_and_update().clone());
        let query = query
            .bind(&*shared.worker_id)
            .bind(self.config.time_between_sweeps().as_secs_f64())
            .bind(other_tasks.as_deref().map(names))
            .bind(other_tasks.as_deref().map(|tasks| self.stored_settings.json(tasks)));
        let session = self.session.clone();
        let connection = self.connected().await?;
        let sent = std::time::Instant::now();
        let heartbeat_sent = tokio::time::timeout(patience, session.fetch_all(connection, query)).await;
        let heartbeat_sent = heartbeat_sent.map_err(|_| Error::NoAnswer { after: patience })?;
        let sweep_is_due =
            |rows: Vec<sqlx::postgres::PgRow>| rows.first().map(|row| row.try_get("sweep_is_due")).transpose();
        let sweep_is_due = heartbeat_sent.and_then(sweep_is_due).context(|| "send a heartbeat".to_owned())?;
        self.tasks = tasks;
        if sweep_is_due.is_some() {
            self.start_lease.beat(sent);
        }
        Ok(sweep_is_due)
    }
}

/// The sweeps of one worker. Separate from the heartbeat, so that a slow hook does not delay it.
struct SweepLoop {
    session: Session,
    health: Arc<Mutex<HeartbeatHistory>>,
    shared: Arc<Shared>,
    config: WorkerRecoveryConfig,
}

impl SweepLoop {
    async fn sweep_until(self, stop: CancellationToken, declared_dead: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = declared_dead.cancelled() => {}
            () = self.sweep_forever() => {}
        }
    }

    async fn sweep_forever(self) {
        // Workers that started together do not sweep together.
        let mut wait = self.config.sweep_interval.mul_f64(0.5 + jitter() / 2.0);
        let mut warned = false;
        let mut of_rust_port = Vec::new();
        loop {
            tokio::time::sleep(wait).await;
            let health = || self.health.lock().unwrap_or_else(PoisonError::into_inner);
            // Only workers whose last heartbeat reported that a sweep is due connect for it. If heartbeats are rarer
            // than sweeps, that report comes too late, and every worker connects.
            let heartbeat_reports_due_sweeps = self.config.heartbeat_interval <= self.config.sweep_interval;
            let recently_swept = heartbeat_reports_due_sweeps && !health().sweep_is_due;
            if !health().may_sweep(self.config.heartbeat_interval) || recently_swept {
                // The next heartbeat may change that.
                wait = wait.min(self.config.heartbeat_interval.mul_f64(0.5 + jitter() / 2.0));
                continue;
            }
            let swept = tokio::time::timeout(SWEEP_TIMEOUT, self.sweep(&mut of_rust_port)).await;
            match swept.unwrap_or(Err(Error::NoAnswer { after: SWEEP_TIMEOUT })) {
                Ok(()) => warned = false,
                Err(error) if !std::mem::replace(&mut warned, true) => {
                    let error = &error as &dyn std::error::Error;
                    warn!(label = "recovery", error, "could not look for dead workers; retrying at the next sweep");
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    debug!(label = "recovery", error, "still could not look for dead workers");
                }
            }
            wait = self.config.sweep_interval.mul_f64(0.9 + jitter() / 5.0);
        }
    }

    /// Sweeps, unless another worker just did. `of_rust_port` are the workers of the Rust port that it has warned of.
    async fn sweep(&self, of_rust_port: &mut Vec<String>) -> Result<(), Error> {
        let shared = &self.shared;
        let context = || "sweep".to_owned();
        let mut connection = self.session.connect().await.context(context)?;
        let query = shared.statements.recovery_swept.query().persistent(false);
        let query = query.bind(&*shared.worker_id).bind(self.config.time_between_sweeps().as_secs_f64());
        let turn = self.session.fetch_all(&mut connection, query).await.context(context)?;
        if !turn.is_empty() {
            let sweep = Sweep {
                statements: &shared.statements,
                hooks: &shared.hooks,
                worker_id: shared.worker_id.clone(),
                config: &self.config,
                options: SweepStaleWorkersOptions::default(),
            };
            sweep.sweep(self.session.begin(&mut connection).await.context(context)?).await?;
            self.look_for_rust_port(&mut connection, of_rust_port).await.context(context)?;
        }
        connection.close().await.context(context)
    }

    /// Warns of live workers of the Rust port that have started since this worker did: beside them it would not have started.
    async fn look_for_rust_port(&self, connection: &mut PgConnection, warned_of: &mut Vec<String>) -> sqlx::Result<()> {
        let port = migrate::look_for_rust_port(connection, &self.shared.statements.schema).await?;
        let workers = port.map(|port| port.live_workers).unwrap_or_default();
        if !workers.is_empty() && workers != *warned_of {
            warn!(
                label = "recovery",
                workers = workers.join(", "),
                "workers of the Rust port, the graphile_worker of crates.io, run in this schema with recovery on: they take \
                 workers of this release for dead and run their jobs a second time; stop them, then run \
                 `graphile-worker migrate --from-rust-port`"
            );
        }
        *warned_of = workers;
        Ok(())
    }
}
