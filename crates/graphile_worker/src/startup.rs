//! Starting while the database is not ready: the first steps of a worker are retried, for a limited time.
//!
//! A worker that runs has other ways to outlast an outage: see `exchange`, `listener` and `recovery`.

use crate::Error;
use crate::exchange::jitter;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long a worker waits for the database to be ready, unless it is set.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Between two attempts: from this, doubling, to the other.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The attempts to start, and how long they go on.
pub(crate) struct Startup {
    timeout: Duration,
    began: Instant,
    pause: Duration,
    is_waiting: bool,
}

impl Startup {
    /// A timeout of zero allows one attempt.
    pub(crate) fn new(timeout: Duration) -> Startup {
        Startup { timeout, began: Instant::now(), pause: SHORTEST_PAUSE, is_waiting: false }
    }

    /// Returns when it is time for another attempt after one that failed with this error; or the error, if waiting would
    /// not cure it or the time is over.
    pub(crate) async fn wait_after(&mut self, error: Error) -> Result<(), Error> {
        if self.timeout.is_zero() || !error.may_pass() {
            return Err(error);
        }
        let waited = self.began.elapsed();
        let left = self.timeout.saturating_sub(waited);
        if left.is_zero() {
            return Err(Error::DatabaseNotReady { waited, source: Box::new(error) });
        }
        if !std::mem::replace(&mut self.is_waiting, true) {
            let error = error.to_string_with_sources();
            warn!(label = "worker", error, at_most = ?self.timeout, "waiting for the database");
        }
        tokio::time::sleep(self.pause.mul_f64(0.5 + jitter()).min(left)).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }

    /// An attempt succeeded.
    pub(crate) fn succeeded(&mut self) {
        if std::mem::take(&mut self.is_waiting) {
            info!(label = "worker", waited_seconds = self.began.elapsed().as_secs(), "the database is ready");
        }
    }
}
