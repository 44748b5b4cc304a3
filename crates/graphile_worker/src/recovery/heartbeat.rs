//! What a worker's heartbeats allow it to do: to start jobs (`StartLease`), and to sweep (`HeartbeatHistory`). Pure:
//! `worker/heartbeat` sends the heartbeats.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Whether a worker may start a job: only while its last heartbeat is so recent that no sweep can have declared it
/// dead.
///
/// To wait until it may start jobs again, create and enable the future `heartbeat_sent.notified()` before calling
/// `may_start`.
#[derive(Default)]
pub(crate) struct StartLease {
    /// `None` if recovery is off. Such a worker is never declared dead.
    lease: Option<Lease>,
    /// Notified, with `notify_waiters`, after each successful heartbeat.
    pub(crate) heartbeat_sent: Notify,
}

struct Lease {
    length: Duration,
    /// When the last successful heartbeat was sent. The database recorded it at this moment or later.
    since: Mutex<std::time::Instant>,
}

impl StartLease {
    pub(crate) fn new(length: Option<Duration>, sent: std::time::Instant) -> StartLease {
        let lease = length.map(|length| Lease { length, since: Mutex::new(sent) });
        StartLease { lease, heartbeat_sent: Notify::new() }
    }

    pub(crate) fn may_start(&self) -> bool {
        let fresh = |lease: &Lease| lease.since.lock().unwrap_or_else(PoisonError::into_inner).elapsed() < lease.length;
        self.lease.as_ref().is_none_or(fresh)
    }

    pub(crate) fn beat(&self, sent: std::time::Instant) {
        if let Some(lease) = &self.lease {
            *lease.since.lock().unwrap_or_else(PoisonError::into_inner) = sent;
        }
        self.heartbeat_sent.notify_waiters();
    }
}

/// Whether this worker's recent heartbeats arrived in time.
pub(crate) struct HeartbeatHistory {
    /// Since when no heartbeat was missed.
    since: Option<Instant>,
    last_beat: Instant,
    /// Whether a sweep was due at the last heartbeat.
    pub(crate) sweep_is_due: bool,
}

impl HeartbeatHistory {
    /// The history of a worker that has just registered.
    pub(crate) fn registered() -> HeartbeatHistory {
        HeartbeatHistory { since: Some(Instant::now()), last_beat: Instant::now(), sweep_is_due: true }
    }

    pub(crate) fn beat(&mut self, arrived: bool, interval: Duration) {
        let in_time = self.last_beat.elapsed() < interval * 2;
        self.since = arrived.then(|| self.since.filter(|_| in_time).unwrap_or_else(Instant::now));
        self.last_beat = Instant::now();
    }

    /// Whether this worker may sweep. After an outage, or after a pause of this process, all heartbeats look old: the
    /// other workers first get time to send one.
    pub(crate) fn may_sweep(&self, interval: Duration) -> bool {
        let steady = self.since.is_some_and(|since| since.elapsed() >= interval * 2);
        steady && self.last_beat.elapsed() < interval * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_worker_starts_jobs_only_while_its_last_heartbeat_is_fresh() {
        let now = std::time::Instant::now();
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds)).expect("a running clock");
        let start_lease = StartLease::new(Some(Duration::from_secs(60)), ago(59));
        assert!(start_lease.may_start());
        let start_lease = StartLease::new(Some(Duration::from_secs(60)), ago(60));
        let mut heartbeat_sent = std::pin::pin!(start_lease.heartbeat_sent.notified());
        heartbeat_sent.as_mut().enable();
        assert!(!start_lease.may_start());
        start_lease.beat(ago(70));
        assert!(!start_lease.may_start(), "the heartbeat took 70 seconds to arrive");
        start_lease.beat(now);
        assert!(start_lease.may_start());
        heartbeat_sent.await;
        assert!(StartLease::default().may_start(), "a worker without recovery is never declared dead");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_worker_that_was_away_does_not_sweep_until_its_own_heartbeats_are_steady() {
        let interval = Duration::from_secs(30);
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).expect("a running clock");
        let mut health = HeartbeatHistory { since: Some(ago(600)), last_beat: ago(20), sweep_is_due: true };
        assert!(health.may_sweep(interval));
        health.last_beat = ago(300);
        assert!(!health.may_sweep(interval), "it has just woken up");
        health.beat(true, interval);
        assert!(!health.may_sweep(interval), "the other workers may not have sent a heartbeat yet");
        let mut health = HeartbeatHistory { since: Some(ago(600)), last_beat: ago(30), sweep_is_due: true };
        health.beat(false, interval);
        assert!(!health.may_sweep(interval), "the database is away");
        health = HeartbeatHistory { since: Some(ago(600)), last_beat: ago(30), sweep_is_due: true };
        health.beat(true, interval);
        assert!(health.may_sweep(interval));
    }
}
