//! Maintenance: what a worker does periodically besides running jobs. It refreshes the locks of long-running jobs,
//! reads which of its jobs are cancelled, lets jobs start if the jobs that they replace have ended, releases locks that are
//! older than 4 hours, checks whether a newer release changes the schema, counts the workers, and warns of rows that stay locked.
//!
//! Recovery of dead workers is not here: see `recovery`.

use super::exchange::Exchange;
use super::inflight::{CancelledClaim, Inflight};
use super::limits::{LimitStates, StateChange, changes};
use super::listener::{Listener, ShutdownNotice};
use super::report::{Ended, Report};
use crate::context::Cancelled;
use crate::db::rows::{self, time};
use crate::hooks::{HookRegistry, LimitReached};
use crate::job::Job;
use crate::retry::jittered;
use crate::schema::upgrade::notice_in_ledgers;
use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::time::{Duration, Instant};
use tracing::{debug, info, warn};

/// How often an idle worker releases locks that are older than 4 hours.
const STALE_LOCKS_INTERVAL: Duration = Duration::from_secs(10 * 60);

/// How often a worker checks for jobs that have run so long that their locks need refreshing.
const FRESH_LOCKS_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// How often a worker that polls checks whether a newer release changes the schema.
const LEDGERS_INTERVAL: Duration = Duration::from_secs(60);

/// How often a worker reads the limits, besides when it is notified of a change.
const LIMITS_INTERVAL: Duration = Duration::from_secs(10);

/// How long after the end of a pause a worker reads the limits, so that it is over by the database's clock, too.
const CHANGE_DELAY: Duration = Duration::from_millis(10);

/// How often a worker reads which limits are reached, if it has a hook for that.
const REACHED_INTERVAL: Duration = Duration::from_secs(1);

/// How often a worker puts waiting jobs where the limits want them, if there are limits.
const SETTLE_INTERVAL: Duration = Duration::from_secs(2);

/// How often a worker counts the workers, at most; only if jobs were added meanwhile.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// The delay before a worker reads again which of its jobs are cancelled, if it could not.
const CANCELLATIONS_RETRY: Duration = Duration::from_secs(1);

/// The minimum interval between two sweeps for expired jobs.
const EXPIRIES_INTERVAL: Duration = Duration::from_secs(1);

/// How often a worker checks whether replaced jobs have ended, while jobs wait for that. It checks at once if they have ended in
/// this worker.
const SUCCESSORS_INTERVAL: Duration = Duration::from_secs(1);

/// When each kind of maintenance is due.
pub(super) struct Maintenance {
    poll_interval: Duration,
    /// When the worker last read which of its jobs are cancelled.
    cancellations_read_at: Instant,
    /// When to look for expired jobs; `None` if no job expires, as far as this worker knows.
    expiries_at: Option<Instant>,
    /// When to check whether replaced jobs have ended; `None` if no job waits for that, as far as this worker knows.
    successors_at: Option<Instant>,
    keep_locks_fresh_after: Duration,
    fresh_locks_at: Instant,
    stale_locks_at: Instant,
    ledgers_at: Instant,
    count_at: Instant,
    limits_at: Instant,
    settle_at: Option<Instant>,
    /// Whether any limit has a breaker.
    have_breakers: bool,
    /// The states of limits at the last read.
    limit_states: Option<LimitStates>,
    reached_at: Instant,
    has_warned_of_blocked: bool,
}

impl Maintenance {
    pub(super) fn new(keep_locks_fresh_after: Duration, poll_interval: Duration) -> Maintenance {
        let now = Instant::now();
        Maintenance {
            poll_interval,
            cancellations_read_at: now,
            expiries_at: Some(now),
            successors_at: Some(now),
            keep_locks_fresh_after,
            fresh_locks_at: now,
            stale_locks_at: now,
            ledgers_at: now + LEDGERS_INTERVAL,
            count_at: now,
            limits_at: now,
            settle_at: None,
            have_breakers: false,
            limit_states: None,
            reached_at: now,
            has_warned_of_blocked: false,
        }
    }

    /// Returns when fresh locks or, if `checks_schema`, a check of the schema is due.
    pub(super) async fn is_due(&self, checks_schema: bool) {
        let at = if checks_schema { self.fresh_locks_at.min(self.ledgers_at) } else { self.fresh_locks_at };
        tokio::time::sleep_until(at.into()).await;
    }

    /// Returns when the worker has to read which of its jobs are cancelled: again, if it could not, and if it does not listen,
    /// at each poll, as long as it has jobs.
    pub(super) async fn cancellations_due(&self, listener: &Listener, inflight: &Inflight) {
        let pause = match listener.is_cancellation_requested() {
            true => Some(CANCELLATIONS_RETRY),
            false => (!listener.is_listening() && inflight.has_jobs()).then_some(self.poll_interval),
        };
        match pause.and_then(|pause| self.cancellations_read_at.checked_add(pause)) {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }

    /// The jobs of this worker that are cancelled, if that may have changed.
    pub(super) async fn cancelled_jobs(
        &mut self,
        exchange: &mut Exchange,
        listener: &Listener,
        inflight: &Inflight,
    ) -> Option<Vec<CancelledClaim>> {
        let is_poll_due = !listener.is_listening() && self.cancellations_read_at.elapsed() >= self.poll_interval;
        let is_due = listener.take_cancellation_requested() || (is_poll_due && inflight.has_jobs());
        if !is_due {
            return None;
        }
        self.cancellations_read_at = Instant::now();
        let cancelled = exchange.cancelled_jobs().await;
        if cancelled.is_none() {
            listener.mark_cancellation_requested();
        }
        cancelled
    }

    /// Returns when jobs may have expired.
    pub(super) async fn expiries_due(&self) {
        match self.expiries_at {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Fails the jobs that have expired, and returns them. Costs nothing as long as no job expires: a worker looks when it
    /// starts, when it is notified and, if it does not listen, at each poll.
    pub(super) async fn expire_jobs(&mut self, exchange: &mut Exchange, listener: &Listener) -> Vec<Job> {
        let now = Instant::now();
        if !listener.take_expiries_changed() && self.expiries_at.is_none_or(|at| at > now) {
            return Vec::new();
        }
        let (expired, next) = exchange.expire_jobs().await;
        let poll = (!listener.is_listening()).then_some(self.poll_interval);
        let pause = next.into_iter().chain(poll).min().map(|pause| pause.max(EXPIRIES_INTERVAL));
        self.expiries_at = pause.and_then(|pause| now.checked_add(pause));
        expired
    }

    /// Returns when replaced jobs may have ended.
    pub(super) async fn successors_due(&self) {
        match self.successors_at {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Lets jobs start if the jobs that they replace have ended. Costs nothing while no running job is being replaced: a worker
    /// checks when it starts, when it is notified and, if it does not listen, at each poll. Returns whether any may start.
    pub(super) async fn release_successors(
        &mut self,
        exchange: &mut Exchange,
        listener: &Listener,
        inflight: &Inflight,
    ) -> bool {
        let now = Instant::now();
        let is_notified = listener.take_successors_changed() | inflight.take_cancelled_recorded();
        if !is_notified && self.successors_at.is_none_or(|at| at > now) {
            return false;
        }
        let (released, others_wait) = exchange.release_successors().await;
        let pause = others_wait.then(|| jittered(SUCCESSORS_INTERVAL));
        let poll = (!listener.is_listening()).then_some(self.poll_interval.max(SUCCESSORS_INTERVAL));
        self.successors_at = pause.into_iter().chain(poll).min().and_then(|pause| now.checked_add(pause));
        released
    }

    /// Refreshes the locks of long-running jobs, so that no worker releases them as older than 4 hours.
    pub(super) async fn keep_locks_fresh(&mut self, exchange: &mut Exchange, inflight: &Inflight) {
        if self.fresh_locks_at > Instant::now() {
            return;
        }
        self.fresh_locks_at = Instant::now() + FRESH_LOCKS_INTERVAL.min(self.keep_locks_fresh_after);
        exchange.keep_locks_fresh(inflight.running_for(self.keep_locks_fresh_after)).await;
    }

    /// Releases locks that are older than 4 hours.
    pub(super) async fn release_stale_locks(&mut self, exchange: &mut Exchange) {
        if self.stale_locks_at > Instant::now() {
            return;
        }
        self.stale_locks_at = Instant::now() + jittered(STALE_LOCKS_INTERVAL);
        exchange.release_stale_locks().await;
    }

    /// Counts the workers, if jobs were added since.
    pub(super) async fn count_workers(&mut self, exchange: &mut Exchange, listener: &Listener) {
        if self.count_at > Instant::now() || !listener.take_notified() {
            return;
        }
        self.count_at = Instant::now() + jittered(COUNT_INTERVAL);
        if let Some(workers) = exchange.count_workers().await {
            listener.set_workers(workers);
        }
    }

    /// Reads the limits if they may have changed, and puts waiting jobs where they want them.
    /// Returns the changes, if hooks need them.
    pub(super) async fn follow_limits(
        &mut self,
        exchange: &mut Exchange,
        listener: &Listener,
        inflight: &Inflight,
    ) -> Vec<StateChange> {
        let now = Instant::now();
        let mut changed = Vec::new();
        if listener.take_limits_changed() || self.limits_at <= now {
            match exchange.limits().await {
                Some(mut limits) => {
                    self.limits_at = now + jittered(LIMITS_INTERVAL);
                    let next_change = limits.next_change.map(|change| change.max(now) + CHANGE_DELAY);
                    self.limits_at = next_change.map_or(self.limits_at, |change| change.min(self.limits_at));
                    self.have_breakers = limits.have_breakers;
                    let states = std::mem::take(&mut limits.states);
                    // The states at the worker's start are not changes.
                    changed = self.limit_states.as_ref().map(|known| changes(known, &states)).unwrap_or_default();
                    self.limit_states = Some(states);
                    self.settle_at = limits.any_exist.then(|| self.settle_at.unwrap_or(now));
                    inflight.set_limits(limits);
                }
                None => self.limits_at = now + Duration::from_secs(1),
            }
        }
        if self.settle_at.is_some_and(|at| at <= now) {
            self.settle_at = Some(now + jittered(SETTLE_INTERVAL));
            exchange.settle_limits().await;
        }
        changed
    }

    /// The report may have closed a limit, and the jobs under it that this worker holds must not start. So the worker reads the
    /// limits: the notification arrives later, or not at all.
    pub(super) fn limited_jobs_reported(&mut self, report: &Report) {
        let may_close = |ended: &Ended| {
            ended.settlement.closed_for().is_some() || self.have_breakers && ended.settlement.has_failed()
        };
        if report.is_limited && report.ended.iter().any(may_close) {
            self.limits_at = Instant::now();
        }
    }

    /// Returns when limits should be read for their hooks.
    pub(super) async fn limit_hooks_due(&self, hooks: &HookRegistry) {
        let states = hooks.follow_limits().then_some(self.limits_at);
        let reached = hooks.has::<LimitReached>().then_some(self.reached_at);
        match states.into_iter().chain(reached).min() {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }

    /// The limits that due jobs wait for, if a hook needs them. If the read takes long, repeats it rarely.
    pub(super) async fn reached_limits(
        &mut self,
        exchange: &mut Exchange,
        hooks: &HookRegistry,
    ) -> Vec<(String, Option<DateTime<Utc>>)> {
        let now = Instant::now();
        if !hooks.has::<LimitReached>() || self.reached_at > now {
            return Vec::new();
        }
        let reached = if self.settle_at.is_some() { exchange.reached_limits().await } else { None };
        self.reached_at = Instant::now() + REACHED_INTERVAL.max(now.elapsed() * 20);
        reached.unwrap_or_default()
    }

    /// Checks whether a newer release changes the schema, if the worker polls or may have missed a notification.
    pub(super) async fn check_schema(&mut self, exchange: &mut Exchange, listener: &Listener) {
        let is_due = listener.is_poll_only() && self.ledgers_at <= Instant::now();
        if !is_due && !listener.take_missed() {
            return;
        }
        self.ledgers_at = Instant::now() + jittered(LEDGERS_INTERVAL);
        if !exchange.check_ledgers(&listener.shutdown_notice).await {
            listener.mark_missed();
        }
    }

    /// Warns once if an open transaction keeps the rows of ended jobs locked. Most such locks last only as long as
    /// another worker's claim.
    pub(super) fn warn_of_blocked_rows(&mut self, is_blocked: bool, inflight: &Inflight, worker_id: &str) {
        if !is_blocked {
            self.has_warned_of_blocked = false;
        } else if !self.has_warned_of_blocked && inflight.is_blocked_for_long() {
            self.has_warned_of_blocked = true;
            warn!(
                label = "worker",
                worker_id,
                jobs = ?inflight.blocked(),
                "another transaction has locked the rows of ended jobs: their outcomes are recorded when it ends"
            );
        }
    }
}

impl Exchange {
    /// Refreshes the locks of these jobs and queues.
    async fn keep_locks_fresh(&mut self, (jobs, queues): (Vec<i64>, Vec<i32>)) {
        let Some(connection) = self.connection.as_mut().filter(|_| !jobs.is_empty()) else { return };
        let query = self.statements.keep_locks_fresh.query().persistent(false);
        let query = query.bind(&*self.shared.worker_id).bind(jobs).bind(queues);
        let keeping = self.session.fetch_all(connection, query);
        match tokio::time::timeout(self.answer_timeout, keeping).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(label = "worker", %error, "could not refresh locks; retrying"),
            // The answer may arrive when another one is expected.
            Err(_) => self.connection = None,
        }
    }

    /// Releases locks that are older than 4 hours, which workers that died without recovery have left.
    async fn release_stale_locks(&mut self) {
        let Some(connection) = self.connection.as_mut() else { return };
        let query = self.statements.clear_stale_locks.query().persistent(false);
        let query = self.session.fetch_one(connection, query);
        let Ok(released) = tokio::time::timeout(self.answer_timeout, query).await else {
            // The answer may arrive when another one is expected.
            self.connection = None;
            return;
        };
        let counts = released.and_then(|row| Ok((row.try_get::<i64, _>("jobs")?, row.try_get::<i64, _>("queues")?)));
        if let Ok((jobs, queues)) = counts
            && jobs + queues > 0
        {
            let worker_id = &*self.shared.worker_id;
            info!(label = "worker", worker_id, jobs, queues, "released locks older than 4 hours");
        }
    }

    /// The jobs of this worker that are cancelled; `None` if they could not be read.
    async fn cancelled_jobs(&mut self) -> Option<Vec<CancelledClaim>> {
        let query = self.statements.cancellations.query().bind(&*self.shared.worker_id);
        let (session, connection) = (&self.session, &mut self.connection);
        let reading = async {
            match connection {
                Some(connection) => session.fetch_all(connection, query).await,
                // The exchange reconnects when it has something to do, and all slots may be busy.
                None => session.fetch_all(&mut session.connect().await?, query).await,
            }
        };
        let Ok(read) = tokio::time::timeout(self.answer_timeout, reading).await else {
            // The answer may arrive when another one is expected.
            self.connection = None;
            return None;
        };
        let rows = read.inspect_err(|error| debug!(label = "worker", %error, "could not read cancellations; retrying"));
        let claim = |row: PgRow| {
            let how = if row.try_get("force")? { Cancelled::ByForce } else { Cancelled::Asked };
            Ok(CancelledClaim { job_id: row.try_get("job_id")?, locked_at: time(&row, "locked_at")?, how })
        };
        rows.ok()?.into_iter().map(claim).collect::<sqlx::Result<_>>().ok()
    }

    /// Fails the jobs that have expired. Returns them, and the time until the next look is due.
    async fn expire_jobs(&mut self) -> (Vec<Job>, Option<Duration>) {
        let mut expired = Vec::new();
        let mut next = self.next_expiry().await;
        if next.is_some_and(|next| next.is_zero())
            && let Some(connection) = self.connection.as_mut()
        {
            let query = self.statements.expire_due_jobs.query().persistent(false);
            match tokio::time::timeout(self.answer_timeout, self.session.fetch_all(connection, query)).await {
                Ok(Ok(rows)) => expired = rows.iter().filter_map(|row| rows::job(row).ok()).collect(),
                Ok(Err(error)) => debug!(label = "worker", %error, "could not look for expired jobs; retrying"),
                // The answer may arrive when another one is expected.
                Err(_) => self.connection = None,
            }
            next = self.next_expiry().await;
        }
        self.lanes.set_next_expiry(next);
        (expired, next)
    }

    /// The time until an expiry has to be looked at; `None` if there is none. If that is unknown, soon.
    async fn next_expiry(&mut self) -> Option<Duration> {
        let Some(connection) = self.connection.as_mut() else { return Some(EXPIRIES_INTERVAL) };
        let query = self.session.fetch_one(connection, self.statements.next_expiry.query());
        let Ok(next) = tokio::time::timeout(self.answer_timeout, query).await else {
            self.connection = None;
            return Some(EXPIRIES_INTERVAL);
        };
        let seconds = next.and_then(|row| row.try_get::<Option<f64>, _>("seconds"));
        let seconds =
            seconds.inspect_err(|error| debug!(label = "worker", %error, "could not read expiries; retrying"));
        match seconds {
            Ok(seconds) => {
                seconds.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
            }
            Err(_) => Some(EXPIRIES_INTERVAL),
        }
    }

    /// Lets jobs start if the jobs that they replace have ended. Returns whether there were any, and whether others wait.
    async fn release_successors(&mut self) -> (bool, bool) {
        let Some(connection) = self.connection.as_mut() else { return (false, true) };
        let query = self.statements.release_successors.query().persistent(false);
        let Ok(released) = tokio::time::timeout(self.answer_timeout, self.session.fetch_one(connection, query)).await
        else {
            // The answer may arrive when another one is expected.
            self.connection = None;
            return (false, true);
        };
        let released =
            released.and_then(|row| Ok((row.try_get::<i64, _>("released")? > 0, row.try_get("others_wait")?)));
        released
            .inspect_err(|error| debug!(label = "worker", %error, "could not look for replaced jobs; retrying"))
            .unwrap_or((false, true))
    }

    /// How many workers are connected to this database, about.
    async fn count_workers(&mut self) -> Option<u32> {
        let connection = self.connection.as_mut()?;
        let query = self.session.fetch_one(connection, self.statements.count_workers.query().persistent(false));
        let Ok(counted) = tokio::time::timeout(self.answer_timeout, query).await else {
            // The answer may arrive when another one is expected.
            self.connection = None;
            return None;
        };
        u32::try_from(counted.ok()?.try_get::<i64, _>("workers").ok()?).ok()
    }

    /// Makes the worker stop if a newer release has changed the schema, or is about to. Returns false if the ledgers
    /// could not be read.
    async fn check_ledgers(&mut self, shutdown_notice: &ShutdownNotice) -> bool {
        let Some(connection) = self.connection.as_mut() else { return false };
        match notice_in_ledgers(connection, &self.statements).await {
            Some(Some(notice)) => shutdown_notice.notify(notice),
            Some(None) => {}
            None => return false,
        }
        true
    }
}
