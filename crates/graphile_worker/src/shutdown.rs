//! When to stop: the first time asked, the worker lets jobs finish; the second time, it leaves at once.

use std::future::Future;
use std::pin::Pin;
use tokio_util::sync::CancellationToken;
use tracing::info;

/// Both are cancelled at most once, in this order.
#[derive(Clone, Default)]
pub(crate) struct Shutdown {
    pub(crate) asked: CancellationToken,
    pub(crate) insisted: CancellationToken,
}

impl Shutdown {
    pub(crate) fn ask(&self) {
        if self.asked.is_cancelled() {
            self.insisted.cancel();
        } else {
            self.asked.cancel();
        }
    }

    /// Asks at every signal that tells a program to end, and when `custom` is done; until the returned guard is
    /// dropped.
    pub(crate) fn watch(&self, signals: bool, custom: Option<Pin<Box<dyn Future<Output = ()> + Send>>>) -> Watching {
        let mut tasks = Vec::new();
        if signals {
            let shutdown = self.clone();
            tasks.push(tokio::spawn(async move {
                while let Some(name) = next_signal().await {
                    info!(label = "worker", signal = name, "asked to stop");
                    shutdown.ask();
                }
            }));
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

#[cfg(unix)]
async fn next_signal() -> Option<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt()).ok()?;
    let mut terminate = signal(SignalKind::terminate()).ok()?;
    let mut hang_up = signal(SignalKind::hangup()).ok()?;
    tokio::select! {
        _ = interrupt.recv() => Some("SIGINT"),
        _ = terminate.recv() => Some("SIGTERM"),
        _ = hang_up.recv() => Some("SIGHUP"),
    }
}

#[cfg(not(unix))]
async fn next_signal() -> Option<&'static str> {
    tokio::signal::ctrl_c().await.ok().map(|()| "Ctrl-C")
}
