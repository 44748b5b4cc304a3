//! The second lane: under load, a second connection that reports and claims while the first lane waits for its answer.
//! It connects on first use, so a worker with slow jobs never opens it.
//!
//! It leaves the difficult cases to the first lane: the order within queues, released and failed jobs, task limits, and
//! exchanges whose answer was lost.

use super::exchange::{Exchange, Lanes};
use super::inflight::Inflight;
use super::report::{ClaimRequest, Lane, Report};
use super::settings::Settings;
use crate::Error;
use crate::context::Shared;
use crate::hooks::FetchStart;
use chrono::Utc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::OwnedRwLockReadGuard;
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// The pause after a failure: the server may be out of connections.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct SecondLane {
    pub(crate) exchange: Exchange,
    pub(crate) inflight: Arc<Inflight>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) shared: Arc<Shared>,
}

impl SecondLane {
    /// Helps the first lane until `stop` is cancelled.
    pub(crate) async fn run_until(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            tokio::select! {
                () = self.inflight.second_lane_due.notified() => {
                    if self.help().await.is_err() {
                        let _ = tokio::time::timeout(FAILURE_PAUSE, stop.cancelled()).await;
                    }
                }
                () = stop.cancelled() => {}
            }
        }
        self.exchange.close().await;
    }

    async fn help(&mut self) -> Result<(), Error> {
        // If the flags function fails, the first lane reports it.
        let Ok(flags) = self.settings.flags.current().await else { return Ok(()) };
        let lanes = self.exchange.lanes();
        let under_way = lanes.begin().await;
        let is_lost = |lost: &AtomicBool| lost.load(Ordering::Acquire);
        if is_lost(&lanes.first_lost_an_answer) || is_lost(&lanes.second_lost_an_answer) {
            return Ok(());
        }
        let is_limited = !self.inflight.limits().is_empty();
        let Some((report, jobs)) = self.inflight.begin(Lane::Second, is_limited) else { return Ok(()) };
        let now = self.settings.use_local_time.then(Utc::now);
        let freshness = self.settings.recovery.freshness();
        let request = ClaimRequest { jobs, flags, now, freshness, ..ClaimRequest::default() };
        let mut sent =
            Sent { report, inflight: self.inflight.clone(), lanes, state: Sending::NotWritten, _under_way: under_way };
        if jobs > 0 {
            self.shared.hooks.emit(FetchStart, || self.shared.event(None)).await;
        }
        sent.state = Sending::Lost;
        match self.exchange.exchange_once(&sent.report, &request).await {
            Ok(answer) => {
                sent.state = Sending::Answered;
                self.inflight.record_round_trip(answer.took);
                let recorded = self.inflight.receive(Lane::Second, std::mem::take(&mut sent.report), answer);
                drop(sent);
                self.shared.emit_completed(recorded).await;
                Ok(())
            }
            Err(error) => {
                if !self.exchange.is_uncertain() {
                    sent.state = Sending::NotWritten;
                }
                let text = error.to_string_with_sources();
                debug!(
                    label = "worker",
                    worker_id = &*self.shared.worker_id,
                    error = text,
                    "the second lane failed: the first lane takes over"
                );
                Err(error)
            }
        }
    }
}

/// A report on its way to the database. If it is dropped before an answer arrives, the report returns to `inflight`.
struct Sent {
    report: Report,
    inflight: Arc<Inflight>,
    lanes: Arc<Lanes>,
    state: Sending,
    /// Held until the report or the claimed jobs are in flight.
    _under_way: OwnedRwLockReadGuard<()>,
}

enum Sending {
    NotWritten,
    Lost,
    Answered,
}

impl Drop for Sent {
    fn drop(&mut self) {
        match self.state {
            Sending::Answered => return,
            Sending::NotWritten => {}
            Sending::Lost => self.lanes.second_lost_an_answer.store(true, Ordering::Release),
        }
        self.inflight.not_written(Lane::Second, std::mem::take(&mut self.report));
    }
}
