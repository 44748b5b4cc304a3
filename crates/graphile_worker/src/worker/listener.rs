//! The listener: wakes the worker when the database notifies it of new jobs, and after it has reconnected, because a
//! notification may have been lost.
//!
//! It probes its own connection, because a dead connection or a pooler in between causes no error. Behind a pooler that
//! shares server connections it does not listen at all, because its notifications would reach other clients.
//! `next_claim` decides when to claim without a notification.

use super::wake_order;
use crate::context::Shared;
use crate::db::connect::DatabaseConfig;
use crate::db::session;
use crate::hooks::{ListenConnecting, ListenError, ListenSuccess};
use crate::retry::jitter;
use crate::schema::upgrade::{LeaveNotice, notice_in_ledgers};
use sqlx::Acquire;
use sqlx::postgres::{PgListener, PgPoolOptions};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How long a new connection may take until it listens.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// A notification on `worker:migrate` may arrive before the migration is recorded in the ledger. So the listener reads
/// the ledgers at once, and then at this interval for this period. Many notifications cost no more than one.
const LEDGERS_INTERVAL: Duration = Duration::from_secs(1);
const LEDGERS_PERIOD: Duration = Duration::from_secs(10);

/// Where to listen.
#[derive(Debug, Clone)]
pub(crate) struct ListenOn {
    pub(crate) config: DatabaseConfig,
    /// Whether the connection may go through a pooler.
    pub(crate) may_be_pooled: bool,
    /// Whether this is a direct connection, which bypasses the pooler.
    pub(crate) is_direct: bool,
}

impl ListenOn {
    /// The maximum time to find a server, and to detect a pooler.
    fn time_to_find_server(&self) -> Duration {
        let finding = self.config.time_to_find_server();
        // Detecting a pooler takes two more connections.
        if self.may_be_pooled { 2 * (finding + CONNECT_TIMEOUT) } else { finding }
    }
}

/// Listens for new jobs until it is dropped.
pub(crate) struct Listener {
    woken: Arc<Notify>,
    /// Set if a newer release changes the schema in a way that this release cannot work with.
    pub(crate) shutdown_notice: ShutdownNotice,
    checks: Arc<LedgerChecks>,
    task: Option<tokio::task::JoinHandle<()>>,
}

/// What the run loop has to check in the database.
#[derive(Default)]
struct LedgerChecks {
    /// The listener may have missed a notification of a migration.
    may_have_missed: AtomicBool,
    /// The name of a task was deleted, so the ids of tasks may have changed.
    tasks_changed: AtomicBool,
    /// Limits have changed, or the listener may have missed that.
    limits_changed: AtomicBool,
    /// The worker cannot listen, and polls.
    is_poll_only: AtomicBool,
    /// The connection is open and listens.
    is_listening: AtomicBool,
    /// Jobs were cancelled, perhaps some of this worker.
    cancellation_requested: AtomicBool,
    /// Jobs were added that expire.
    expiries_changed: AtomicBool,
    /// Running jobs were replaced, or the listener may have missed that.
    successors_changed: AtomicBool,
    /// Notified if any of these changes.
    changed: Notify,
    /// How many workers listen, about.
    workers: AtomicU32,
    /// New jobs were added since the workers were counted.
    was_notified: AtomicBool,
}

/// Whether the worker has to stop, and why.
#[derive(Clone, Default)]
pub(crate) struct ShutdownNotice {
    notified: CancellationToken,
    notice: Arc<OnceLock<LeaveNotice>>,
}

impl ShutdownNotice {
    /// Makes the worker stop. Only the first notice counts.
    pub(crate) fn notify(&self, notice: LeaveNotice) {
        let _ = self.notice.set(notice);
        self.notified.cancel();
    }

    pub(crate) fn notice(&self) -> Option<&LeaveNotice> {
        self.notice.get()
    }

    /// Returns when there is a notice.
    pub(crate) async fn notified(&self) {
        self.notified.cancelled().await;
    }
}

impl Listener {
    /// Starts to listen on a new connection.
    pub(crate) fn start(on: ListenOn, shared: Arc<Shared>) -> Listener {
        let woken = shared.utils.added();
        let shutdown_notice = ShutdownNotice::default();
        let checks = Arc::new(LedgerChecks::default());
        let listening = listen_forever(on, shared, woken.clone(), shutdown_notice.clone(), checks.clone());
        Listener { woken, shutdown_notice, checks, task: Some(tokio::spawn(listening)) }
    }

    /// Only notified of jobs that this process adds. For workers that poll.
    pub(crate) fn poll_only(shared: &Shared) -> Listener {
        let checks = LedgerChecks { is_poll_only: AtomicBool::new(true), ..LedgerChecks::default() };
        Listener {
            woken: shared.utils.added(),
            shutdown_notice: ShutdownNotice::default(),
            checks: Arc::new(checks),
            task: None,
        }
    }

    /// The ledgers could not be read: `take_missed` returns true once more.
    pub(crate) fn mark_missed(&self) {
        self.checks.may_have_missed.store(true, Ordering::Release);
    }

    /// Whether a notification of a migration may have been missed since the last call.
    pub(crate) fn take_missed(&self) -> bool {
        self.checks.may_have_missed.swap(false, Ordering::AcqRel)
    }

    /// Whether the ids of tasks may have changed since the last call.
    pub(crate) fn take_limits_changed(&self) -> bool {
        self.checks.limits_changed.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn take_tasks_changed(&self) -> bool {
        self.checks.tasks_changed.swap(false, Ordering::AcqRel)
    }

    /// Whether the worker polls, because it cannot listen or is configured not to.
    pub(crate) fn is_poll_only(&self) -> bool {
        self.checks.is_poll_only.load(Ordering::Acquire)
    }

    /// Whether the worker is notified now of what happens.
    pub(crate) fn is_listening(&self) -> bool {
        self.checks.is_listening.load(Ordering::Acquire)
    }

    /// Whether jobs were cancelled since this was last called.
    pub(crate) fn take_cancellation_requested(&self) -> bool {
        self.checks.cancellation_requested.swap(false, Ordering::AcqRel)
    }

    /// Whether the next `take_cancellation_requested` returns true.
    pub(crate) fn is_cancellation_requested(&self) -> bool {
        self.checks.cancellation_requested.load(Ordering::Acquire)
    }

    /// The cancelled jobs could not be read: `take_cancellation_requested` returns true once more.
    pub(crate) fn mark_cancellation_requested(&self) {
        self.checks.cancellation_requested.store(true, Ordering::Release);
    }

    /// Whether jobs that expire were added since this was last called.
    pub(crate) fn take_expiries_changed(&self) -> bool {
        self.checks.expiries_changed.swap(false, Ordering::AcqRel)
    }

    /// Whether running jobs were replaced since this was last called.
    pub(crate) fn take_successors_changed(&self) -> bool {
        self.checks.successors_changed.swap(false, Ordering::AcqRel)
    }

    /// Returns when jobs are cancelled or replaced, or jobs that expire are added.
    pub(crate) async fn something_changed(&self) {
        self.checks.changed.notified().await;
    }

    /// Whether new jobs were added since this was last called.
    pub(crate) fn take_notified(&self) -> bool {
        self.checks.was_notified.swap(false, Ordering::AcqRel)
    }

    /// Sets how many workers listen, which decides how soon this one claims (`wake_order`).
    pub(crate) fn set_workers(&self, workers: u32) {
        self.checks.workers.store(workers, Ordering::Release);
    }

    /// Returns when there may be new jobs, or something to check.
    pub(crate) async fn wait(&self) {
        self.woken.notified().await;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn listen_forever(
    on: ListenOn,
    shared: Arc<Shared>,
    woken: Arc<Notify>,
    shutdown_notice: ShutdownNotice,
    checks: Arc<LedgerChecks>,
) {
    let (worker_id, hooks) = (&shared.worker_id, &shared.hooks);
    let mut pause = Duration::ZERO;
    let mut warned = false;
    loop {
        tokio::time::sleep(pause.mul_f64(0.5 + jitter())).await;
        hooks.emit(ListenConnecting, || shared.event(None)).await;
        let patience = CONNECT_TIMEOUT + on.time_to_find_server();
        let error = match tokio::time::timeout(patience, connect(&on, worker_id)).await {
            Ok(Ok(None)) => {
                checks.is_poll_only.store(true, Ordering::Release);
                return log_poll_only(&on, worker_id);
            }
            Ok(Ok(Some(mut listener))) => {
                if warned {
                    info!(label = "worker", worker_id = &**worker_id, "listening for jobs again");
                    warned = false;
                }
                let since = Instant::now();
                // Notifications may have been missed before the connection listened.
                checks.may_have_missed.store(true, Ordering::Release);
                checks.tasks_changed.store(true, Ordering::Release);
                checks.limits_changed.store(true, Ordering::Release);
                checks.cancellation_requested.store(true, Ordering::Release);
                checks.expiries_changed.store(true, Ordering::Release);
                checks.successors_changed.store(true, Ordering::Release);
                checks.is_listening.store(true, Ordering::Release);
                woken.notify_one();
                hooks.emit(ListenSuccess, || shared.event(None)).await;
                let error = listen(&mut listener, &on.config, &shared, &woken, &shutdown_notice, &checks).await;
                checks.is_listening.store(false, Ordering::Release);
                // If the connection was closed as soon as it was opened, do not reconnect at once.
                pause = if since.elapsed() > Duration::from_secs(1) { Duration::ZERO } else { next_pause(pause) };
                error
            }
            Ok(Err(error)) => {
                pause = next_pause(pause);
                error.to_string()
            }
            Err(_) => {
                pause = next_pause(pause);
                format!("the connection did not start to listen within {patience:?}")
            }
        };
        hooks.emit(ListenError, || shared.event(Some(error.clone()))).await;
        if !warned && !pause.is_zero() {
            warn!(
                label = "worker",
                worker_id = &**worker_id,
                error,
                "cannot listen for jobs: polling until it works again"
            );
            warned = true;
        } else {
            debug!(label = "worker", worker_id = &**worker_id, error, "the listener lost its connection");
        }
    }
}

fn next_pause(pause: Duration) -> Duration {
    (pause * 2).clamp(Duration::from_millis(10), LONGEST_PAUSE)
}

fn log_poll_only(on: &ListenOn, worker_id: &str) {
    if on.is_direct {
        warn!(
            label = "worker",
            worker_id,
            "the direct connection also goes through a pooler that shares server connections: polling for jobs"
        );
    } else {
        info!(
            label = "worker",
            worker_id,
            "the pooler shares server connections, so the worker cannot listen: polling for jobs. \
             Set a direct connection to start jobs at once"
        );
    }
}

/// Returns `None` if a pooler shares server connections.
async fn connect(on: &ListenOn, worker_id: &str) -> sqlx::Result<Option<PgListener>> {
    if on.may_be_pooled && !session::keeps_sessions(&on.config).await? {
        return Ok(None);
    }
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(on.config.current_options().await?);
    let mut listener = PgListener::connect_with(&pool).await?;
    // `listen_forever` reconnects, not sqlx.
    listener.eager_reconnect(false);
    listener
        .listen_all([
            "jobs:insert",
            "jobs:cancel",
            "jobs:expire",
            "jobs:replace",
            "worker:migrate",
            "worker:tasks",
            "worker:limits",
            &probe_channel(worker_id),
        ])
        .await?;
    Ok(Some(listener))
}

fn probe_channel(worker_id: &str) -> String {
    format!("worker:probe:{worker_id}")
}

/// Listens until the connection fails. Returns why it failed.
async fn listen(
    listener: &mut PgListener,
    config: &DatabaseConfig,
    shared: &Shared,
    woken: &Notify,
    shutdown_notice: &ShutdownNotice,
    checks: &LedgerChecks,
) -> String {
    let (worker_id, probe) = (&shared.worker_id, config.probe());
    // The jobs that this worker releases are for other workers.
    let own = format!("\"worker\":\"{worker_id}\"");
    let mut probing = false;
    let mut silent_since = Instant::now();
    let mut ledger_reads = LedgerReads::default();
    let mut wake_up = WakeUp::default();
    loop {
        let patience = if probing { probe.timeout } else { probe.interval };
        let received = tokio::select! {
            received = listener.try_recv() => Some(received),
            () = tokio::time::sleep_until((silent_since + patience).into()) => None,
            () = wake_up.is_due() => {
                wake_up.at = None;
                woken.notify_one();
                continue;
            }
            () = ledger_reads.is_due() => {
                ledger_reads.finished();
                if let Ok(connection) = listener.acquire().await
                    && let Some(Some(notice)) = notice_in_ledgers(connection, &shared.statements).await
                {
                    shutdown_notice.notify(notice);
                }
                continue;
            }
        };
        silent_since = Instant::now();
        match received {
            Some(Ok(Some(notification))) => {
                probing = false;
                match notification.channel() {
                    "jobs:insert" if notification.payload().contains(&own) => {}
                    "jobs:insert" => {
                        checks.was_notified.store(true, Ordering::Release);
                        let workers = checks.workers.load(Ordering::Acquire);
                        match wake_order::delay(notification.payload(), worker_id, workers) {
                            Duration::ZERO => woken.notify_one(),
                            delay => wake_up.plan(Instant::now() + delay),
                        }
                    }
                    "worker:limits" if notification.payload() == shared.statements.schema.name() => {
                        checks.limits_changed.store(true, Ordering::Release);
                        woken.notify_one();
                    }
                    // Any role that can connect can send it: the worker reads which jobs are cancelled.
                    "jobs:cancel" if notification.payload() == shared.statements.schema.name() => {
                        checks.cancellation_requested.store(true, Ordering::Release);
                        checks.changed.notify_one();
                    }
                    "jobs:expire" if notification.payload() == shared.statements.schema.name() => {
                        checks.expiries_changed.store(true, Ordering::Release);
                        checks.changed.notify_one();
                    }
                    "jobs:replace" if notification.payload() == shared.statements.schema.name() => {
                        checks.successors_changed.store(true, Ordering::Release);
                        checks.changed.notify_one();
                    }
                    "worker:tasks" if notification.payload() == shared.statements.schema.name() => {
                        checks.tasks_changed.store(true, Ordering::Release);
                        woken.notify_one();
                    }
                    // The payload is ignored: any role that can connect can send it.
                    "worker:migrate" => ledger_reads.begin(),
                    _ => {}
                }
            }
            Some(Ok(None)) => return "the connection was closed".to_owned(),
            Some(Err(error)) => return error.to_string(),
            None if probing => return "the connection does not deliver notifications".to_owned(),
            None => {
                let probing_it = async {
                    // A server that has become read-only still delivers, but new jobs are added on another one.
                    config.check(listener.acquire().await?).await?;
                    let notify = sqlx::query("select pg_catalog.pg_notify($1, '')").persistent(false);
                    notify.bind(probe_channel(worker_id)).execute(&mut *listener).await
                };
                match tokio::time::timeout(probe.timeout, probing_it).await {
                    Ok(Ok(_)) => probing = true,
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return "the connection does not answer".to_owned(),
                }
            }
        }
    }
}

/// When to wake the worker for new jobs.
#[derive(Default)]
struct WakeUp {
    at: Option<Instant>,
}

impl WakeUp {
    /// Plans to wake the worker then. If it is woken earlier, it also finds these jobs, because they are committed.
    fn plan(&mut self, at: Instant) {
        self.at = Some(self.at.map_or(at, |planned| planned.min(at)));
    }

    /// Returns when the worker has to be woken.
    async fn is_due(&self) {
        match self.at {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }
}

/// When to read the ledgers after a notification on `worker:migrate`.
#[derive(Default)]
struct LedgerReads {
    read_until: Option<Instant>,
    read_at: Option<Instant>,
}

impl LedgerReads {
    fn begin(&mut self) {
        self.read_until = Some(Instant::now() + LEDGERS_PERIOD);
    }

    /// Returns when the ledgers have to be read.
    async fn is_due(&self) {
        match (self.read_until, self.read_at) {
            (None, _) => std::future::pending().await,
            (Some(_), None) => {}
            (Some(_), Some(read_at)) => tokio::time::sleep_until((read_at + LEDGERS_INTERVAL).into()).await,
        }
    }

    fn finished(&mut self) {
        let now = Instant::now();
        self.read_at = Some(now);
        self.read_until = self.read_until.filter(|until| now < *until);
    }
}
