//! Shutdown requests: which signals and futures stop a worker, and for how long running jobs may continue. The first
//! request lets running jobs finish; the second one interrupts them. `run_loop` does the stopping.

use crate::hooks::ShutdownReason;
use futures_util::FutureExt;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// A future that can be waited for more than once.
pub(crate) type ShutdownSignal = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

pub(crate) fn signal(signal: impl Future<Output = ()> + Send + 'static) -> ShutdownSignal {
    let signal = signal.boxed().shared();
    Arc::new(move || Box::pin(signal.clone()))
}

/// When and how a worker stops, for [`WorkerOptions::worker_shutdown`](crate::WorkerOptions::worker_shutdown). Each
/// setting is also a method of `WorkerOptions`.
///
/// ```
/// # use graphile_worker::{WorkerOptions, WorkerShutdownConfig};
/// # use std::time::Duration;
/// let shutdown = WorkerShutdownConfig::default().grace_period(Duration::from_secs(20));
/// let options = WorkerOptions::default().worker_shutdown(shutdown);
/// # drop(options);
/// ```
#[derive(Clone)]
#[must_use]
pub struct WorkerShutdownConfig {
    pub(crate) listen_os_shutdown_signals: bool,
    pub(crate) grace_period: Duration,
    pub(crate) interrupted_job_retry_delay: Duration,
    pub(crate) shutdown_signal: Option<ShutdownSignal>,
}

impl Default for WorkerShutdownConfig {
    fn default() -> WorkerShutdownConfig {
        WorkerShutdownConfig {
            listen_os_shutdown_signals: true,
            grace_period: Duration::from_secs(5),
            interrupted_job_retry_delay: Duration::from_secs(30),
            shutdown_signal: None,
        }
    }
}

impl WorkerShutdownConfig {
    /// Whether SIGINT, SIGTERM and SIGHUP stop the worker (default: yes).
    ///
    /// When the last such worker of the process has ended, these signals end the process again, as they do without a
    /// worker. On Linux, a handler that was there before the first worker ran stays in charge. If your program installs
    /// its own handlers, use `false` and [`Worker::request_shutdown`](crate::Worker::request_shutdown).
    pub fn listen_os_shutdown_signals(mut self, listen: bool) -> WorkerShutdownConfig {
        self.listen_os_shutdown_signals = listen;
        self
    }

    /// Sets how long running jobs may take to finish after the worker is asked to stop (default 5 seconds).
    pub fn grace_period(mut self, period: Duration) -> WorkerShutdownConfig {
        self.grace_period = period;
        self
    }

    /// Sets how long an interrupted job waits before it runs again (default 30 seconds).
    pub fn interrupted_job_retry_delay(mut self, delay: Duration) -> WorkerShutdownConfig {
        self.interrupted_job_retry_delay = delay;
        self
    }

    /// Stops the worker when this future completes, after its running jobs have finished.
    pub fn shutdown_signal(mut self, signal: impl Future<Output = ()> + Send + 'static) -> WorkerShutdownConfig {
        self.shutdown_signal = Some(self::signal(signal));
        self
    }
}

impl fmt::Debug for WorkerShutdownConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerShutdownConfig")
            .field("listen_os_shutdown_signals", &self.listen_os_shutdown_signals)
            .field("grace_period", &self.grace_period)
            .field("interrupted_job_retry_delay", &self.interrupted_job_retry_delay)
            .field("shutdown_signal", &self.shutdown_signal.is_some())
            .finish()
    }
}

/// The state of a shutdown. Each token is cancelled at most once.
#[derive(Clone, Default)]
pub(crate) struct Shutdown {
    /// The worker is stopping: on request, or because a newer release changes the schema.
    pub(crate) leaving: CancellationToken,
    /// A shutdown was requested.
    pub(crate) asked: CancellationToken,
    /// A shutdown was requested a second time.
    pub(crate) insisted: CancellationToken,
    asked_at: Arc<OnceLock<(Instant, ShutdownReason)>>,
}

impl Shutdown {
    /// Why the worker stops. Without a request, a newer release changes the schema.
    pub(crate) fn reason(&self) -> ShutdownReason {
        self.asked_at.get().map_or(ShutdownReason::SchemaChange, |(_, reason)| *reason)
    }

    /// Requests a shutdown; the second request interrupts running jobs.
    pub(crate) fn ask(&self, reason: ShutdownReason) {
        if self.asked.is_cancelled() {
            self.insisted.cancel();
        } else {
            let _ = self.asked_at.set((Instant::now(), reason));
            self.asked.cancel();
            self.leaving.cancel();
        }
    }

    /// Returns when running jobs have to be interrupted: at `leave_at`, or `grace_period` after the request, or at the
    /// second request. Never returns if `leave_at` is `None`.
    pub(crate) async fn grace_period_over(&self, leave_at: Option<Instant>, grace_period: Duration) {
        let Some(leave_at) = leave_at else { return std::future::pending().await };
        let grace_is_over = async {
            self.asked.cancelled().await;
            let asked_at = self.asked_at.get().map_or_else(Instant::now, |(at, _)| *at);
            tokio::time::sleep_until((asked_at + grace_period).into()).await;
        };
        tokio::select! {
            () = self.insisted.cancelled() => {}
            () = tokio::time::sleep_until(leave_at.into()) => {}
            () = grace_is_over => {}
        }
    }

    /// Requests a shutdown at each termination signal, and when `custom` completes, until the returned guard is
    /// dropped.
    pub(crate) fn watch(&self, signals: bool, custom: Option<Pin<Box<dyn Future<Output = ()> + Send>>>) -> SignalWatch {
        let mut tasks = Vec::new();
        // Before the handlers are installed: it finds out what signals did without them.
        let listening = signals.then(Listening::begin);
        if signals {
            let shutdown = self.clone();
            match Signals::new() {
                Ok(mut signals) => tasks.push(tokio::spawn(async move {
                    loop {
                        let signal = signals.next().await;
                        info!(label = "worker", signal, "shutdown requested");
                        shutdown.ask(ShutdownReason::Signal);
                    }
                })),
                Err(error) => warn!(label = "worker", %error, "could not listen for signals"),
            }
        }
        if let Some(custom) = custom {
            let shutdown = self.clone();
            tasks.push(tokio::spawn(async move {
                custom.await;
                shutdown.ask(ShutdownReason::Graceful);
            }));
        }
        SignalWatch { tasks, _listening: listening }
    }
}

pub(crate) struct SignalWatch {
    tasks: Vec<tokio::task::JoinHandle<()>>,
    _listening: Option<Listening>,
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// A worker of this process that listens for signals. While there is none, signals end the process as they did before the
/// first worker: tokio leaves its handlers installed, and the process would ignore the signals.
struct Listening;

#[cfg(unix)]
static LISTENERS: std::sync::LazyLock<Listeners> = std::sync::LazyLock::new(Listeners::new);

#[cfg(unix)]
struct Listeners {
    count: std::sync::Mutex<usize>,
    /// Read by the handlers themselves, so that a signal works even if no runtime is left.
    none: Arc<std::sync::atomic::AtomicBool>,
}

#[cfg(unix)]
impl Listeners {
    fn new() -> Listeners {
        use signal_hook::flag::{register_conditional_default, register_conditional_shutdown};
        let listeners = Listeners { count: std::sync::Mutex::default(), none: Arc::default() };
        // Only Linux has this file. Elsewhere, handlers that the program has installed before are not noticed.
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        for signal in SIGNALS.map(|(kind, _)| kind.as_raw_value()) {
            let none = listeners.none.clone();
            let registered = match std::process::id() {
                _ if !has_default_action(&status, signal) => continue,
                // For process 1 of a container, the default action is to ignore the signal.
                1 => register_conditional_shutdown(signal, 128 + signal, none),
                _ => register_conditional_default(signal, none),
            };
            if let Err(error) = registered {
                warn!(label = "worker", %error, signal, "cannot restore the default action of a signal");
            }
        }
        listeners
    }

    /// Counts workers that begin (1) or end (-1) to listen.
    fn change(&self, by: isize) {
        let mut count = self.count.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *count = count.saturating_add_signed(by);
        self.none.store(*count == 0, std::sync::atomic::Ordering::SeqCst);
    }
}

/// Whether the process neither catches nor ignores the signal, by its `/proc/self/status`.
#[cfg(unix)]
fn has_default_action(status: &str, signal: i32) -> bool {
    let masks = status.lines().filter_map(|line| line.strip_prefix("SigCgt:").or(line.strip_prefix("SigIgn:")));
    let mut masks = masks.filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    !masks.any(|mask| mask & (1 << (signal - 1)) != 0)
}

#[cfg(unix)]
impl Listening {
    fn begin() -> Listening {
        LISTENERS.change(1);
        Listening
    }
}

#[cfg(unix)]
impl Drop for Listening {
    fn drop(&mut self) {
        LISTENERS.change(-1);
    }
}

#[cfg(not(unix))]
impl Listening {
    fn begin() -> Listening {
        Listening
    }
}

/// The termination signals. Kept between two calls of `next`, so that none is missed.
#[cfg(unix)]
struct Signals([(tokio::signal::unix::Signal, &'static str); 3]);

#[cfg(unix)]
const SIGNALS: [(tokio::signal::unix::SignalKind, &str); 3] = {
    use tokio::signal::unix::SignalKind;
    [(SignalKind::interrupt(), "SIGINT"), (SignalKind::terminate(), "SIGTERM"), (SignalKind::hangup(), "SIGHUP")]
};

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        let [interrupt, terminate, hang_up] =
            SIGNALS.map(|(kind, name)| tokio::signal::unix::signal(kind).map(|signal| (signal, name)));
        Ok(Signals([interrupt?, terminate?, hang_up?]))
    }

    async fn next(&mut self) -> &'static str {
        let [interrupt, terminate, hang_up] = &mut self.0;
        tokio::select! {
            _ = interrupt.0.recv() => interrupt.1,
            _ = terminate.0.recv() => terminate.1,
            _ = hang_up.0.recv() => hang_up.1,
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals)
    }

    async fn next(&mut self) -> &'static str {
        match tokio::signal::ctrl_c().await {
            Ok(()) => "Ctrl-C",
            Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::has_default_action;

    #[test]
    fn signals_that_are_caught_or_ignored_have_no_default_action() {
        // SIGHUP is ignored, as by `nohup`; SIGTERM is caught.
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000001\nSigCgt:\t0000000000004000\n";
        assert!(has_default_action(status, 2));
        assert!(!has_default_action(status, 1));
        assert!(!has_default_action(status, 15));
        assert!(has_default_action("", 15), "not known");
    }
}
