//! The second lane: under load, a second connection that reports and claims while the first one is at it. It connects
//! when it is first needed, so that a worker with slow jobs never has it.
//!
//! It leaves to the first lane whatever needs care: the order within queues, jobs that go back, limits of tasks, and
//! finding out what became of an exchange whose answer was lost.

use crate::Error;
use crate::context::Surroundings;
use crate::exchange::{Exchange, Lane, Lanes, Report, Wants};
use crate::hand::Hand;
use crate::hooks::FetchStart;
use crate::options::Settings;
use chrono::Utc;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::OwnedRwLockReadGuard;
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// After a failure: the server may have no connection to spare.
const REST: Duration = Duration::from_secs(1);

pub(crate) struct SecondLane {
    pub(crate) exchange: Exchange,
    pub(crate) hand: Arc<Hand>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) surroundings: Arc<Surroundings>,
}

impl SecondLane {
    /// Helps until it is told to stop.
    pub(crate) async fn help_until(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            tokio::select! {
                () = self.hand.second_lane_due.notified() => {
                    if self.help().await.is_err() {
                        let _ = tokio::time::timeout(REST, stop.cancelled()).await;
                    }
                }
                () = stop.cancelled() => {}
            }
        }
        self.exchange.close().await;
    }

    async fn help(&mut self) -> Result<(), Error> {
        // Where the function for the flags fails, the first lane will say so.
        let Ok(forbidden_flags) = self.settings.forbidden_flags.current().await else { return Ok(()) };
        let lanes = self.exchange.lanes();
        let under_way = lanes.begin().await;
        let is_lost = |lost: &AtomicBool| lost.load(Ordering::Acquire);
        if is_lost(&lanes.first_lost_an_answer) || is_lost(&lanes.second_lost_an_answer) {
            return Ok(());
        }
        let is_limited = !self.hand.limits().is_empty();
        let Some((report, jobs)) = self.hand.begin(Lane::Second, is_limited) else { return Ok(()) };
        let now = self.settings.use_local_time.then(Utc::now);
        let freshness = self.settings.recovery.freshness();
        let wants = Wants { jobs, forbidden_flags, limits: HashMap::new(), now, freshness };
        let mut sent =
            Sent { report, hand: self.hand.clone(), lanes, state: Sending::NotWritten, _under_way: under_way };
        if jobs > 0 {
            self.surroundings.hooks.emit(FetchStart, || self.surroundings.event(None)).await;
        }
        sent.state = Sending::Lost;
        match self.exchange.exchange_once(&sent.report, &wants).await {
            Ok(answer) => {
                sent.state = Sending::Answered;
                self.hand.measured_round_trip(answer.took);
                let written = self.hand.receive(Lane::Second, std::mem::take(&mut sent.report), answer);
                drop(sent);
                self.surroundings.tell_written(written).await;
                Ok(())
            }
            Err(error) => {
                if !self.exchange.is_uncertain() {
                    sent.state = Sending::NotWritten;
                }
                let text = error.to_string_with_sources();
                debug!(
                    label = "worker",
                    worker_id = &*self.surroundings.worker_id,
                    error = text,
                    "left to the first lane"
                );
                Err(error)
            }
        }
    }
}

/// A report on its way to the database; dropped before it is written, it goes back into the hand.
struct Sent {
    report: Report,
    hand: Arc<Hand>,
    lanes: Arc<Lanes>,
    state: Sending,
    /// Until the report, or what it brought, is in hand.
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
        self.hand.not_written(Lane::Second, std::mem::take(&mut self.report));
    }
}
