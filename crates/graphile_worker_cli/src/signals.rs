//! The signals that tell the program to end. They are listened to from the first moment on: as process 1 of a container
//! it would not hear of them otherwise.

use crate::failure::Failure;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Kept from one to the next, so that none is missed in between.
pub(crate) struct Signals([(Signal, u8, &'static str); 3]);

impl Signals {
    pub(crate) fn listen() -> Result<Signals, Failure> {
        let listen = |kind: SignalKind| signal(kind).map_err(|error| format!("could not listen to signals: {error}"));
        Ok(Signals([
            (listen(SignalKind::interrupt())?, 2, "SIGINT"),
            (listen(SignalKind::terminate())?, 15, "SIGTERM"),
            (listen(SignalKind::hangup())?, 1, "SIGHUP"),
        ]))
    }

    /// The number and the name of the next one.
    pub(crate) async fn next(&mut self) -> (u8, &'static str) {
        let [interrupt, terminate, hang_up] = &mut self.0;
        tokio::select! {
            _ = interrupt.0.recv() => (interrupt.1, interrupt.2),
            _ = terminate.0.recv() => (terminate.1, terminate.2),
            _ = hang_up.0.recv() => (hang_up.1, hang_up.2),
        }
    }

    /// What this comes to, unless a signal comes first: then the program ends, with nothing half done.
    pub(crate) async fn unless_told<T>(
        &mut self,
        doing: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            done = doing => done,
            (number, _) = self.next() => Err(Failure::Signal(number)),
        }
    }
}
