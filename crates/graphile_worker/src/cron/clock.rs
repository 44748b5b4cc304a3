//! The clock that decides when items are due: the database's, this machine's, or one that a test sets.

use chrono::{DateTime, Utc};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::Instant;

/// A clock that moves only when it is set, so that tests of recurring jobs do not have to wait.
///
/// ```
/// use graphile_worker::{TestClock, WorkerOptions};
///
/// let clock = TestClock::at("2026-01-01T07:59:00Z".parse().unwrap());
/// let options = WorkerOptions::default().cron_clock(&clock);
/// // With the worker running:
/// clock.set("2026-01-01T08:00:00Z".parse().unwrap());
/// ```
#[derive(Debug, Clone)]
pub struct TestClock(Arc<watch::Sender<DateTime<Utc>>>);

impl TestClock {
    /// Creates a clock that shows this time.
    pub fn at(now: DateTime<Utc>) -> TestClock {
        TestClock(Arc::new(watch::Sender::new(now)))
    }

    /// Sets the time, forward or back.
    pub fn set(&self, now: DateTime<Utc>) {
        self.0.send_replace(now);
    }

    /// Returns the time that the clock shows.
    pub fn now(&self) -> DateTime<Utc> {
        *self.0.borrow()
    }

    /// Returns when the clock shows this time or a later one, or when it is set back to before `checked_at`.
    async fn reaches(&self, time: DateTime<Utc>, checked_at: DateTime<Utc>) {
        // The sender lives as long as this clock.
        let _ = self.0.subscribe().wait_for(|now| *now >= time || *now < checked_at).await;
    }
}

/// The clock that decides when items are due.
#[derive(Clone)]
pub(crate) enum Clock {
    Database,
    Local,
    Test(TestClock),
}

impl Clock {
    /// Returns at that time, or earlier: the caller checks again. The clock showed `now` at `checked_at`.
    pub(super) async fn wait_until(&self, time: DateTime<Utc>, now: DateTime<Utc>, checked_at: Instant) {
        match self {
            Clock::Test(clock) => clock.reaches(time, now).await,
            Clock::Database | Clock::Local => {
                tokio::time::sleep_until(checked_at + (time - now).to_std().unwrap_or_default()).await;
            }
        }
    }
}
