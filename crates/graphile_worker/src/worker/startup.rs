//! Startup while the database is not ready: retries the first steps of a worker, for a limited time.
//!
//! A running worker survives outages in other ways: see `exchange`, `listener` and `recovery`.

use crate::Error;
use crate::retry::RetryPauses;
use std::time::{Duration, Instant};
use tracing::{info, warn};

const PAUSES: RetryPauses = RetryPauses::new(Duration::from_millis(50), Duration::from_secs(2));

/// The retries of one startup.
pub(crate) struct Startup {
    timeout: Duration,
    began: Instant,
    pauses: RetryPauses,
    is_waiting: bool,
}

impl Startup {
    /// A timeout of zero allows one attempt.
    pub(crate) fn new(timeout: Duration) -> Startup {
        Startup { timeout, began: Instant::now(), pauses: PAUSES, is_waiting: false }
    }

    /// Waits before the next attempt after one that failed with this error. Returns the error if a retry cannot fix it,
    /// or if the timeout is over.
    pub(crate) async fn wait_after(&mut self, error: Error) -> Result<(), Error> {
        if self.timeout.is_zero() || !error.is_transient_at_start() {
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
        tokio::time::sleep(self.pauses.next().min(left)).await;
        Ok(())
    }

    /// An attempt succeeded.
    pub(crate) fn succeeded(&mut self) {
        if std::mem::take(&mut self.is_waiting) {
            info!(label = "worker", waited_seconds = self.began.elapsed().as_secs(), "the database is ready");
        }
    }
}
