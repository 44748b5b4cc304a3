//! The signals that stop the program: SIGINT, SIGTERM and SIGHUP. Every command listens for them from its start,
//! because process 1 of a container gets no default handlers. `run` decides what they mean to a worker.

use crate::failure::Failure;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listeners that live until the program exits, so that no signal is missed.
pub(crate) struct Signals([(Signal, u8, &'static str); 3]);

impl Signals {
    pub(crate) fn listen() -> Result<Signals, Failure> {
        let listen = |kind: SignalKind| signal(kind).map_err(|error| format!("could not listen for signals: {error}"));
        Ok(Signals([
            (listen(SignalKind::interrupt())?, 2, "SIGINT"),
            (listen(SignalKind::terminate())?, 15, "SIGTERM"),
            (listen(SignalKind::hangup())?, 1, "SIGHUP"),
        ]))
    }

    /// Waits for the next signal, and returns its number and name.
    pub(crate) async fn next(&mut self) -> (u8, &'static str) {
        let [interrupt, terminate, hang_up] = &mut self.0;
        tokio::select! {
            _ = interrupt.0.recv() => (interrupt.1, interrupt.2),
            _ = terminate.0.recv() => (terminate.1, terminate.2),
            _ = hang_up.0.recv() => (hang_up.1, hang_up.2),
        }
    }

    /// Runs the future to its end, or drops it and fails when a signal arrives.
    pub(crate) async fn unless_signalled<T>(
        &mut self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            result = work => result,
            (number, _) = self.next() => Err(Failure::Signal(number)),
        }
    }
}
