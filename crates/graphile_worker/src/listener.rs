//! When to look for jobs: a notification, or the connection that would have brought one was lost and is back.
//! Probes itself, because a connection can be dead, or a pooler between, without any error.

use crate::context::Surroundings;
use crate::exchange::jitter;
use crate::hooks::{ListenConnecting, ListenError, ListenSuccess};
use crate::upgrade::{Notice, notice_in_ledgers};
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

/// A silent connection is asked this often whether it still delivers, and has so long to answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(20);
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How long it may take until a new connection listens.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// An announcement on `worker:migrate` may come before the entry in the ledger that it is about: the ledgers are read at
/// once, and then this often for so long. Many announcements cost no more than one.
const LEDGERS_INTERVAL: Duration = Duration::from_secs(1);
const LEDGERS_PERIOD: Duration = Duration::from_secs(10);

/// Hears of new jobs until it is dropped.
pub(crate) struct Listener {
    woken: Arc<Notify>,
    /// The schema moves on to where this release must not follow.
    pub(crate) must_leave: MustLeave,
    heard: Arc<Heard>,
    task: Option<tokio::task::JoinHandle<()>>,
}

/// What the worker has to find out by asking the database.
#[derive(Default)]
struct Heard {
    /// Something may have been announced that was not heard.
    missed: AtomicBool,
    /// The name of a task was deleted, so that tasks may have other ids.
    tasks_changed: AtomicBool,
}

/// Whether the worker has to leave, and why.
#[derive(Clone, Default)]
pub(crate) struct MustLeave {
    told: CancellationToken,
    notice: Arc<OnceLock<Notice>>,
}

impl MustLeave {
    /// The first notice counts.
    pub(crate) fn tell(&self, notice: Notice) {
        let _ = self.notice.set(notice);
        self.told.cancel();
    }

    pub(crate) fn notice(&self) -> Option<&Notice> {
        self.notice.get()
    }

    /// Returns when it has to.
    pub(crate) async fn told(&self) {
        self.told.cancelled().await;
    }
}

impl Listener {
    /// Listens on a connection of its own.
    pub(crate) fn start(options: PgConnectOptions, surroundings: Arc<Surroundings>) -> Listener {
        let woken = surroundings.utils.added();
        let must_leave = MustLeave::default();
        let heard = Arc::new(Heard::default());
        let listening = listen_for_ever(options, surroundings, woken.clone(), must_leave.clone(), heard.clone());
        Listener { woken, must_leave, heard, task: Some(tokio::spawn(listening)) }
    }

    /// Hears only of what this program adds: for poolers that cannot listen. The worker polls.
    pub(crate) fn deaf(surroundings: &Surroundings) -> Listener {
        Listener {
            woken: surroundings.utils.added(),
            must_leave: MustLeave::default(),
            heard: Arc::default(),
            task: None,
        }
    }

    /// There was no finding out what was missed.
    pub(crate) fn has_missed_something(&self) {
        self.heard.missed.store(true, Ordering::Release);
    }

    /// Whether something may have been announced that was not heard; asked once, answered once.
    pub(crate) fn may_have_missed_something(&self) -> bool {
        self.heard.missed.swap(false, Ordering::AcqRel)
    }

    /// Whether tasks may have other ids than before; asked once, answered once.
    pub(crate) fn tasks_may_have_changed(&self) -> bool {
        self.heard.tasks_changed.swap(false, Ordering::AcqRel)
    }

    /// Whether nothing can be announced to this worker.
    pub(crate) fn is_deaf(&self) -> bool {
        self.task.is_none()
    }

    /// Returns when there may be something new.
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

async fn listen_for_ever(
    options: PgConnectOptions,
    surroundings: Arc<Surroundings>,
    woken: Arc<Notify>,
    must_leave: MustLeave,
    heard: Arc<Heard>,
) {
    let (worker_id, hooks) = (&surroundings.worker_id, &surroundings.hooks);
    let mut pause = Duration::ZERO;
    let mut complained = false;
    loop {
        tokio::time::sleep(pause.mul_f64(0.5 + jitter())).await;
        hooks.emit(ListenConnecting, || surroundings.event(None)).await;
        let error = match tokio::time::timeout(CONNECT_TIMEOUT, connect(&options, worker_id)).await {
            Ok(Ok(mut listener)) => {
                if complained {
                    info!(label = "worker", worker_id = &**worker_id, "listening for jobs again");
                    complained = false;
                }
                let since = Instant::now();
                // Something may have been added, or announced, while nobody listened.
                heard.missed.store(true, Ordering::Release);
                heard.tasks_changed.store(true, Ordering::Release);
                woken.notify_one();
                hooks.emit(ListenSuccess, || surroundings.event(None)).await;
                let error = listen(&mut listener, &surroundings, &woken, &must_leave, &heard).await;
                // One that was closed as soon as it was made is not made again at once.
                pause = if since.elapsed() > Duration::from_secs(1) { Duration::ZERO } else { longer(pause) };
                error
            }
            Ok(Err(error)) => {
                pause = longer(pause);
                error.to_string()
            }
            Err(_) => {
                pause = longer(pause);
                "it does not begin to listen".to_owned()
            }
        };
        hooks.emit(ListenError, || surroundings.event(Some(error.clone()))).await;
        if !complained && !pause.is_zero() {
            warn!(
                label = "worker",
                worker_id = &**worker_id,
                error,
                "cannot listen for jobs: polling until it works again"
            );
            complained = true;
        } else {
            debug!(label = "worker", worker_id = &**worker_id, error, "lost the connection that listens for jobs");
        }
    }
}

fn longer(pause: Duration) -> Duration {
    (pause * 2).clamp(Duration::from_millis(10), LONGEST_PAUSE)
}

async fn connect(options: &PgConnectOptions, worker_id: &str) -> sqlx::Result<PgListener> {
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(options.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    // A lost connection is ours to notice and make anew.
    listener.eager_reconnect(false);
    listener.listen_all(["jobs:insert", "worker:migrate", "worker:tasks", &probe_channel(worker_id)]).await?;
    Ok(listener)
}

fn probe_channel(worker_id: &str) -> String {
    format!("worker:probe:{worker_id}")
}

/// Listens until the connection fails; says why it did.
async fn listen(
    listener: &mut PgListener,
    surroundings: &Surroundings,
    woken: &Notify,
    must_leave: &MustLeave,
    heard: &Heard,
) -> String {
    let worker_id = &surroundings.worker_id;
    // What this worker releases is for others: it has no use for it.
    let own = format!("\"worker\":\"{worker_id}\"");
    let mut probing = false;
    let mut silent_since = Instant::now();
    let mut announced = Announced::default();
    loop {
        let patience = if probing { PROBE_TIMEOUT } else { PROBE_INTERVAL };
        let received = tokio::select! {
            received = listener.try_recv() => Some(received),
            () = tokio::time::sleep_until((silent_since + patience).into()) => None,
            () = announced.time_to_read_the_ledgers() => {
                announced.ledgers_are_read();
                if let Some(Some(notice)) = notice_in_ledgers(&mut *listener, &surroundings.statements).await {
                    must_leave.tell(notice);
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
                    "jobs:insert" => woken.notify_one(),
                    "worker:tasks" if notification.payload() == surroundings.statements.schema.name() => {
                        heard.tasks_changed.store(true, Ordering::Release);
                        woken.notify_one();
                    }
                    // Whatever it says: any role that can connect can send it.
                    "worker:migrate" => announced.again(),
                    _ => {}
                }
            }
            Some(Ok(None)) => return "the connection was closed".to_owned(),
            Some(Err(error)) => return error.to_string(),
            None if probing => return "it does not deliver what is sent to it".to_owned(),
            None => {
                let probe =
                    sqlx::query("select pg_notify($1, '')").bind(probe_channel(worker_id)).execute(&mut *listener);
                match tokio::time::timeout(PROBE_TIMEOUT, probe).await {
                    Ok(Ok(_)) => probing = true,
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return "it does not answer".to_owned(),
                }
            }
        }
    }
}

/// When to read the ledgers because of announcements.
#[derive(Default)]
struct Announced {
    read_until: Option<Instant>,
    read_at: Option<Instant>,
}

impl Announced {
    fn again(&mut self) {
        self.read_until = Some(Instant::now() + LEDGERS_PERIOD);
    }

    async fn time_to_read_the_ledgers(&self) {
        match (self.read_until, self.read_at) {
            (None, _) => std::future::pending().await,
            (Some(_), None) => {}
            (Some(_), Some(read_at)) => tokio::time::sleep_until((read_at + LEDGERS_INTERVAL).into()).await,
        }
    }

    fn ledgers_are_read(&mut self) {
        let now = Instant::now();
        self.read_at = Some(now);
        self.read_until = self.read_until.filter(|until| now < *until);
    }
}
