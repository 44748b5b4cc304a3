//! When to stop: the first time asked, the worker lets jobs finish; the second time, it leaves at once.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Each is cancelled at most once, in this order.
#[derive(Clone, Default)]
pub(crate) struct Shutdown {
    /// The worker is leaving: it was asked to, or has to because the schema moves on.
    pub(crate) leaving: CancellationToken,
    /// Somebody has asked it to.
    pub(crate) asked: CancellationToken,
    /// Somebody has asked a second time.
    pub(crate) insisted: CancellationToken,
    asked_at: Arc<OnceLock<Instant>>,
}

impl Shutdown {
    pub(crate) fn ask(&self) {
        if self.asked.is_cancelled() {
            self.insisted.cancel();
        } else {
            let _ = self.asked_at.set(Instant::now());
            self.asked.cancel();
            self.leaving.cancel();
        }
    }

    /// Returns when whatever still runs has to be left: at that time, or so long after somebody has asked, or when somebody
    /// insists. Never, if there is no time yet.
    pub(crate) async fn is_over(&self, leave_at: Option<Instant>, grace_period: Duration) {
        let Some(leave_at) = leave_at else { return std::future::pending().await };
        let grace_is_over = async {
            self.asked.cancelled().await;
            let asked_at = self.asked_at.get().copied().unwrap_or_else(Instant::now);
            tokio::time::sleep_until((asked_at + grace_period).into()).await;
        };
        tokio::select! {
            () = self.insisted.cancelled() => {}
            () = tokio::time::sleep_until(leave_at.into()) => {}
            () = grace_is_over => {}
        }
    }

    /// Asks at every signal that tells a program to end, and when `custom` is done; until the returned guard is
    /// dropped.
    pub(crate) fn watch(&self, signals: bool, custom: Option<Pin<Box<dyn Future<Output = ()> + Send>>>) -> Watching {
        let mut tasks = Vec::new();
        if signals {
            let shutdown = self.clone();
            match Signals::new() {
                Ok(mut signals) => tasks.push(tokio::spawn(async move {
                    loop {
                        let signal = signals.next().await;
                        info!(label = "worker", signal, "asked to stop");
                        shutdown.ask();
                    }
                })),
                Err(error) => warn!(label = "worker", %error, "cannot listen to signals"),
            }
        }
        if let Some(custom) = custom {
            let shutdown = self.clone();
            tasks.push(tokio::spawn(async move {
                custom.await;
                shutdown.ask();
            }));
        }
        Watching(tasks)
    }
}

pub(crate) struct Watching(Vec<tokio::task::JoinHandle<()>>);

impl Drop for Watching {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

/// The signals that tell a program to end. Kept from one to the next, so that none is missed in between.
#[cfg(unix)]
struct Signals([(tokio::signal::unix::Signal, &'static str); 3]);

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals([
            (signal(SignalKind::interrupt())?, "SIGINT"),
            (signal(SignalKind::terminate())?, "SIGTERM"),
            (signal(SignalKind::hangup())?, "SIGHUP"),
        ]))
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
