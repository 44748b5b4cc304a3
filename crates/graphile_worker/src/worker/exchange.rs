//! The exchange: one round trip that reports ended jobs and claims new ones, and that retries until the database
//! answers.
//!
//! While an exchange is under way, outcomes collect for the next one, as in a group commit: under load an exchange
//! carries hundreds of jobs; an idle worker sends a single job at once. None of this is configurable.
//!
//! Under heavy load, a second lane exchanges in parallel (`second_lane`). Two simultaneous exchanges conflict in one
//! case: one deletes a job that was still free when the other one's claim began. So a job is reported only after every
//! exchange that was under way when the job arrived has ended (`inflight`).
//!
//! Not here: `claim_size` and `next_claim` decide how many jobs to claim and when; `settle` decides what to record.

use super::claim_size::CLAIM_BYTES;
use super::claim_start::{ClaimStart, Position};
use super::head_claims::HeadClaims;
use super::report::{Answer, ClaimRequest, Ended, Lane, Report};
use super::settle::{Attempts, NextRun, Settlement, Unlock};
use crate::Error;
use crate::context::Shared;
use crate::db::rows::JobReader;
use crate::db::session::{self, Session};
use crate::db::{Statements, rows};
use crate::error::Context;
use crate::fast_map::FastMap;
use crate::hooks::FetchError;
use crate::job::{Expiry, Job};
use crate::retry::RetryPauses;
use chrono::{DateTime, TimeDelta, Utc};
use futures_util::TryStreamExt;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{Connection, PgConnection, Postgres, Row};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tracing::{debug, info, warn};

/// The time limit of a query whose answer the worker can do without. Behind a pooler, no other limit applies.
pub(super) const OPTIONAL_QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a worker reloads the ids of its tasks.
const TASK_ID_REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// The longest delay of a job: a hundred years. Longer delays are cut to this.
pub(super) const LATEST_RUN: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The pauses between attempts to reach the database.
const RECONNECT_PAUSES: RetryPauses = RetryPauses::new(Duration::from_millis(50), Duration::from_secs(10));

/// How long a statement waits for a lock. An exchange uses `skip locked`, but PostgreSQL still waits in one case: if a
/// row becomes free just as it is skipped, and another transaction locks it. In a deadlock, the worker must give up
/// long before the other side does (`deadlock_timeout`, 1 second by default). `alter table` may also lock the whole
/// table.
const LOCK_TIMEOUT: (&str, &str) = ("lock_timeout", "100ms");

/// How long a suspended worker may hold what its open transaction has locked, for example the name of a task that it adds, or
/// the jobs of a batch. The server then closes the connection, and the worker reconnects. Set here, because an application's
/// shorter limit must not end a batch earlier.
const IDLE_TIMEOUT: (&str, &str) = ("idle_in_transaction_session_timeout", "10s");

/// A claimed job waits for a slot for a second at most.
const NEAR_EXPIRY: Duration = Duration::from_secs(3);

/// How long the worker waits for an open transaction that is adding one of the worker's tasks.
const ENSURE_TASKS_LOCK_TIMEOUT: &str = "set local lock_timeout = '20ms'";

pub(crate) struct Reply {
    pub(crate) answer: Answer,
    /// All jobs that this worker holds, except those in the report, and all queues; `None` unless the worker had to ask. Some
    /// jobs may be in flight.
    pub(crate) held: Option<(Vec<Job>, Vec<i32>)>,
    /// Must be held until the jobs are in flight.
    pub(crate) under_way: LaneGuard,
}

/// Keeps the second lane from exchanging while the first one asks which jobs the worker holds, and until those are in
/// flight.
pub(crate) enum LaneGuard {
    Alone(#[allow(dead_code)] OwnedRwLockWriteGuard<()>),
    Beside(#[allow(dead_code)] OwnedRwLockReadGuard<()>),
}

/// The state that the two lanes of a worker share.
#[derive(Default)]
pub(crate) struct Lanes {
    /// Locked for reading from the start of an exchange until its jobs are in flight. Locked for writing while the
    /// first lane asks which jobs the worker holds: an exchange under way could change the answer.
    under_way: Arc<RwLock<()>>,
    /// Whether the second lane has lost an answer. The first lane then asks which jobs the worker holds.
    pub(crate) second_lost_an_answer: AtomicBool,
    /// Whether the first lane has lost an answer and has not asked yet. Until then the second lane must not claim: if a
    /// queue were claimed again, the repeated report would free it.
    pub(crate) first_lost_an_answer: AtomicBool,
    /// Transactions whose commit was sent and not answered; only behind a pooler.
    committing: Mutex<HashSet<i64>>,
    /// Jobs that were reported without an answer. If the next report of them is rejected, the first one may have been
    /// recorded.
    in_doubt: Mutex<HashSet<i64>>,
    tasks: Mutex<Arc<KnownTasks>>,
    /// Tasks with a limit. Their jobs are claimed by `exchange_limited`, and not by the other statements.
    limited_tasks: Mutex<Arc<HashSet<i32>>>,
    claim_start: Mutex<ClaimStart>,
    head_claims: Mutex<HeadClaims>,
    /// Whether the last claim has found that no due job has a queue.
    no_queued_wait: AtomicBool,
    /// The tasks whose jobs without a queue the deferred lanes claim, and not the exchanges.
    deferred_tasks: Mutex<Arc<HashSet<Arc<str>>>>,
    /// Whether they do so now: see `inflight/batches`.
    batches_run: Mutex<Arc<AtomicBool>>,
    /// Until when exchanges claim those, too, because the deferred lanes have failed.
    not_deferred_until: Mutex<Option<Instant>>,
    /// Whether a deferred lane has lost the answer to a commit. The first lane then asks which jobs the worker holds.
    pub(super) deferred_lost_an_answer: AtomicBool,
    /// When the next job expires, as far as the worker knows.
    next_expiry: Mutex<Option<Instant>>,
    /// Whether the database has no encoding (`SQL_ASCII`) and contains a text that is not UTF-8: see
    /// `allow_invalid_utf8.sql`.
    has_invalid_utf8: AtomicBool,
    /// Whether an error or payload had characters that the database's encoding lacks. Both are then written in ASCII.
    writes_ascii: AtomicBool,
}

/// An optional text for each job of a report.
pub(super) type Texts<'s> = Vec<Option<Cow<'s, str>>>;

/// The ids of the worker's tasks.
#[derive(Clone, Default)]
struct KnownTasks {
    /// All names ever loaded, because a job may have been claimed before its task was removed.
    names: FastMap<i32, Arc<str>>,
    /// The tasks whose jobs the worker claims.
    ids: Vec<i32>,
}

impl Lanes {
    /// Begins an exchange. Waits while the first lane asks which jobs the worker holds. The guard must be held until
    /// the jobs of the reply are in flight.
    pub(crate) async fn begin(&self) -> OwnedRwLockReadGuard<()> {
        self.under_way.clone().read_owned().await
    }

    /// Sets the tasks whose jobs without a queue the deferred lanes claim.
    pub(super) fn set_deferred_tasks(&self, tasks: HashSet<Arc<str>>) {
        *self.deferred_tasks.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(tasks);
    }

    pub(super) fn set_batches_run(&self, batches_run: Arc<AtomicBool>) {
        *self.batches_run.lock().unwrap_or_else(PoisonError::into_inner) = batches_run;
    }

    /// Lets exchanges claim the jobs of all tasks for this long.
    pub(super) fn claim_without_deferred_lanes(&self, time: Duration) {
        *self.not_deferred_until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now().checked_add(time);
    }

    fn deferred_tasks(&self) -> Arc<HashSet<Arc<str>>> {
        self.deferred_tasks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The ids of the tasks whose jobs without a queue the deferred lanes claim.
    pub(super) fn deferred_task_ids(&self) -> Vec<i32> {
        let (tasks, deferred) = (self.tasks(), self.deferred_tasks());
        let is_deferred = |id: &&i32| tasks.names.get(id).is_some_and(|name| deferred.contains(name));
        self.unlimited(&tasks.ids).iter().filter(is_deferred).copied().collect()
    }

    /// Those of the tasks that have no limit.
    fn unlimited(&self, ids: &[i32]) -> Vec<i32> {
        let limited = self.limited_tasks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ids.iter().filter(|id| !limited.contains(id)).copied().collect()
    }

    /// Sets the tasks that have a limit.
    pub(super) fn set_limited_tasks(&self, tasks: HashSet<i32>) {
        *self.limited_tasks.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(tasks);
    }

    /// Those of the tasks whose jobs without a queue an exchange claims.
    fn not_deferred(&self, ids: &[i32]) -> Vec<i32> {
        let (tasks, deferred) = (self.tasks(), self.deferred_tasks());
        let not_deferred_until = *self.not_deferred_until.lock().unwrap_or_else(PoisonError::into_inner);
        let batches_run = self.batches_run.lock().unwrap_or_else(PoisonError::into_inner).load(Ordering::Acquire);
        if deferred.is_empty() || !batches_run || not_deferred_until.is_some_and(|until| Instant::now() < until) {
            return ids.to_vec();
        }
        let is_deferred = |id: &&i32| tasks.names.get(id).is_some_and(|name| deferred.contains(name));
        ids.iter().filter(|id| !is_deferred(id)).copied().collect()
    }

    /// Sets the time until the next job expires; `None` if none does.
    pub(super) fn set_next_expiry(&self, next: Option<Duration>) {
        let at = next.and_then(|next| Instant::now().checked_add(next));
        *self.next_expiry.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// Whether a job may expire while it waits in this worker, or has.
    fn is_expiry_near(&self) -> bool {
        let next = *self.next_expiry.lock().unwrap_or_else(PoisonError::into_inner);
        next.is_some_and(|at| at < Instant::now() + NEAR_EXPIRY)
    }

    fn committing(&self) -> MutexGuard<'_, HashSet<i64>> {
        self.committing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn in_doubt(&self) -> MutexGuard<'_, HashSet<i64>> {
        self.in_doubt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that no answer to this report arrived.
    pub(super) fn doubt<'e>(&self, ended: impl IntoIterator<Item = &'e Ended>) {
        self.in_doubt().extend(ended.into_iter().map(|ended| ended.job.id));
    }

    fn claim_start(&self) -> MutexGuard<'_, ClaimStart> {
        self.claim_start.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn head_claims(&self) -> MutexGuard<'_, HeadClaims> {
        self.head_claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tasks(&self) -> Arc<KnownTasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_tasks(&self, tasks: KnownTasks) {
        *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(tasks);
    }
}

/// One lane: a connection that only this worker uses. If it is lost, the worker reconnects, for as long as it takes.
pub(crate) struct Exchange {
    pub(super) session: Session,
    pub(super) answer_timeout: Duration,
    pub(super) connection: Option<PgConnection>,
    pub(super) statements: Arc<Statements>,
    pub(super) shared: Arc<Shared>,
    pub(super) lanes: Arc<Lanes>,
    /// The worker's tasks, and when to reload their ids.
    tasks: Vec<Arc<str>>,
    load_tasks_at: Instant,
    /// When to try again to add missing task names, which an open transaction may be adding.
    ensure_at: Instant,
    jobs_wait: bool,
    /// Whether the ids of the tasks have changed.
    tasks_loaded: bool,
    /// Whether this lane has retried because of each of two problems with encodings.
    adapted: [bool; 2],
    /// Whether the answer to an exchange is missing, so that the worker may hold jobs that it does not know.
    uncertain: bool,
}

impl Exchange {
    /// Opens a connection for the first lane before the lane exists, while the schema is migrated. Returns it, and
    /// whether it goes through a pooler.
    pub(crate) async fn connect_ahead(session: &Session, worker_id: &str) -> Result<(PgConnection, bool), Error> {
        let mut session = session_of_first_lane(session, worker_id);
        let connected = session.connect_and_detect().await;
        let connection = connected.context(|| format!("connect to {}", session.config().server()))?;
        Ok((connection, session.is_pooled()))
    }

    /// Opens the first lane, on the connection of `connect_ahead`, if that still works.
    pub(crate) async fn open(
        connected_ahead: Option<PgConnection>,
        session: &Session,
        statements: Arc<Statements>,
        shared: Arc<Shared>,
        tasks: Vec<Arc<str>>,
        answer_timeout: Duration,
    ) -> Result<Exchange, Error> {
        let mut exchange = Exchange {
            session: session_of_first_lane(session, &shared.worker_id),
            answer_timeout,
            connection: None,
            statements,
            shared,
            lanes: Arc::default(),
            tasks,
            load_tasks_at: Instant::now(),
            ensure_at: Instant::now(),
            jobs_wait: false,
            tasks_loaded: false,
            adapted: [false; 2],
            uncertain: false,
        };
        if let Some(mut connection) = connected_ahead
            && exchange.load_task_ids(&mut connection).await.is_ok()
        {
            exchange.connection = Some(connection);
            return Ok(exchange);
        }
        let mut connection = exchange.connect().await?;
        exchange.load_task_ids(&mut connection).await?;
        exchange.connection = Some(connection);
        Ok(exchange)
    }

    /// Creates the second lane, which connects on first use.
    pub(crate) fn second_lane(&self) -> Exchange {
        let name = connection_name(&self.shared.worker_id, Lane::Second);
        Exchange {
            session: self.session.clone().named(&name),
            answer_timeout: self.answer_timeout,
            connection: None,
            statements: self.statements.clone(),
            shared: self.shared.clone(),
            lanes: self.lanes.clone(),
            tasks: Vec::new(),
            load_tasks_at: self.load_tasks_at,
            ensure_at: self.ensure_at,
            jobs_wait: false,
            tasks_loaded: false,
            adapted: [false; 2],
            uncertain: false,
        }
    }

    /// Creates a deferred lane, which connects on first use.
    pub(super) fn deferred_lane(&self, name: &str, settings: &[(&'static str, &'static str)]) -> Exchange {
        let lane = self.second_lane();
        Exchange { session: lane.session.named(name).with(settings), ..lane }
    }

    pub(super) fn is_pooled(&self) -> bool {
        self.session.is_pooled()
    }

    pub(crate) fn lanes(&self) -> Arc<Lanes> {
        self.lanes.clone()
    }

    pub(super) async fn connect(&mut self) -> Result<PgConnection, Error> {
        let context = || "connect to the database".to_owned();
        let has_invalid_utf8 = self.lanes.has_invalid_utf8.load(Ordering::Acquire);
        if has_invalid_utf8 && self.session.is_pooled() {
            self.session.set_preamble(self.statements.allow_invalid_utf8_in_transaction.sql());
        }
        let mut connection = self.session.connect().await.context(context)?;
        if has_invalid_utf8 && !self.session.is_pooled() {
            let statement = self.statements.allow_invalid_utf8.sql();
            sqlx::raw_sql(statement).execute(&mut connection).await.context(context)?;
        }
        Ok(connection)
    }

    /// Loads the ids of the worker's tasks. Adds names that do not exist, unless an open transaction is adding them:
    /// then they have no jobs yet, and the worker looks them up again before each claim.
    async fn load_task_ids(&mut self, connection: &mut PgConnection) -> Result<(), Error> {
        let context = || "look up the tasks".to_owned();
        let names: Vec<String> = self.tasks.iter().map(|identifier| identifier.to_string()).collect();
        let mut rows = self.task_ids(connection, &names).await.context(context)?;
        if rows.len() < names.len() && self.ensure_at <= Instant::now() {
            self.ensure_at = Instant::now() + TASK_ID_REFRESH_INTERVAL;
            self.ensure_tasks(connection, &names).await?;
            rows = self.task_ids(connection, &names).await.context(context)?;
        }
        let mut tasks = KnownTasks { ids: Vec::new(), ..(*self.lanes.tasks()).clone() };
        for row in &rows {
            let identifier: &str = row.try_get("identifier").context(context)?;
            self.jobs_wait = row.try_get("jobs_wait").context(context)?;
            if let Some(known) = self.tasks.iter().find(|known| &***known == identifier) {
                let id = row.try_get("id").context(context)?;
                tasks.names.insert(id, known.clone());
                tasks.ids.push(id);
            }
        }
        self.tasks_loaded |= tasks.ids != self.lanes.tasks().ids;
        self.lanes.set_tasks(tasks);
        let are_all_known = rows.len() == names.len();
        self.load_tasks_at = Instant::now() + if are_all_known { TASK_ID_REFRESH_INTERVAL } else { Duration::ZERO };
        Ok(())
    }

    /// Adds the tasks that do not exist, without waiting for a transaction that is adding them.
    async fn ensure_tasks(&self, connection: &mut PgConnection, names: &[String]) -> Result<(), Error> {
        let context = || "add the tasks".to_owned();
        let mut transaction = self.session.begin(connection).await.context(context)?;
        sqlx::raw_sql(ENSURE_TASKS_LOCK_TIMEOUT).execute(&mut *transaction).await.context(context)?;
        let query = self.statements.ensure_tasks.query().persistent(false).bind(names);
        let added = query.execute(&mut *transaction).await.context(context);
        let ended =
            if added.is_ok() { session::commit(transaction).await } else { session::rollback(transaction).await };
        ended.context(context)?;
        match added {
            Err(error) if error.is_lock_timeout() => {
                debug!(
                    label = "worker",
                    "an open transaction is adding a task of this worker: continuing without it for now"
                );
                Ok(())
            }
            added => added.map(drop),
        }
    }

    /// Changes the worker's tasks: stops claiming jobs of removed tasks, and looks up new ones.
    pub(crate) fn set_tasks(&mut self, identifiers: Vec<Arc<str>>) {
        let mut tasks = (*self.lanes.tasks()).clone();
        tasks.ids.retain(|id| tasks.names.get(id).is_some_and(|name| identifiers.contains(name)));
        self.lanes.set_tasks(tasks);
        self.tasks = identifiers;
        self.ensure_at = Instant::now();
        self.reload_task_ids();
    }

    /// Reloads the ids before the next claim. They may have changed: an unused name may be deleted, and has another id
    /// when it is added again.
    pub(crate) fn reload_task_ids(&mut self) {
        self.load_tasks_at = Instant::now();
    }

    async fn task_ids(&self, connection: &mut PgConnection, names: &[String]) -> sqlx::Result<Vec<PgRow>> {
        let query = self.statements.task_ids.query().persistent(false).bind(names);
        self.session.fetch_all(connection, query).await
    }

    /// Whether the ids of the tasks have changed since this was last called.
    pub(crate) fn take_tasks_loaded(&mut self) -> bool {
        std::mem::take(&mut self.tasks_loaded)
    }

    /// Whether any job was waiting when the task ids were last loaded.
    pub(crate) fn jobs_wait(&self) -> bool {
        self.jobs_wait
    }

    /// Reports and claims. Retries until the database answers, however long that takes. Returns only errors that a
    /// retry cannot fix.
    pub(crate) async fn exchange(&mut self, report: &Report, request: &ClaimRequest) -> Result<Reply, Error> {
        let mut pauses = RECONNECT_PAUSES;
        let mut is_lost = false;
        loop {
            let patience = self.patience();
            let attempt = tokio::time::timeout(patience, self.try_exchange(report, request)).await;
            let error = match attempt {
                Ok(Ok(reply)) => {
                    if is_lost {
                        info!(label = "worker", worker_id = &*self.shared.worker_id, "the database is back");
                    }
                    return Ok(reply);
                }
                Ok(Err(error)) if error.is_contention() => {
                    debug!(
                        label = "worker",
                        error = error.to_string_with_sources(),
                        "conflict with another transaction; retrying"
                    );
                    continue;
                }
                Ok(Err(error)) if self.adapt_to_encoding(&error) => {
                    debug!(
                        label = "worker",
                        error = error.to_string_with_sources(),
                        "a text cannot be converted to or from the encoding of the database; retrying in another way"
                    );
                    continue;
                }
                Ok(Err(error)) if !error.is_retryable() && !error.is_login_rejected() => return Err(error),
                Ok(Err(error)) => error.to_string_with_sources(),
                Err(_) => Error::NoAnswer { after: patience }.to_string(),
            };
            self.lanes.first_lost_an_answer.store(true, Ordering::Release);
            self.lanes.doubt(&report.ended);
            self.shared.hooks.emit(FetchError, || self.shared.event(Some(error.clone()))).await;
            if !is_lost {
                warn!(
                    label = "worker",
                    worker_id = &*self.shared.worker_id,
                    error,
                    "lost the database: retrying until it is back"
                );
                is_lost = true;
            }
            tokio::time::sleep(pauses.next()).await;
        }
    }

    /// Whether to retry after this error, because a text could not be converted between UTF-8 and the database's encoding.
    /// From now on, such texts are read or written in another way. Once for each lane: another one may have found out first.
    pub(super) fn adapt_to_encoding(&mut self, error: &Error) -> bool {
        let ways = [("22021", &self.lanes.has_invalid_utf8), ("22P05", &self.lanes.writes_ascii)];
        let found = ways.into_iter().zip(&mut self.adapted).find(|((code, _), _)| error.has_code(&[code]));
        found.is_some_and(|((_, way), adapted)| {
            way.store(true, Ordering::Release);
            !std::mem::replace(adapted, true)
        })
    }

    /// How long an exchange may take, including a reconnect if the connection is lost.
    fn patience(&self) -> Duration {
        let connecting = if self.connection.is_some() { Duration::ZERO } else { self.session.time_to_connect() };
        self.answer_timeout + connecting
    }

    async fn try_exchange(&mut self, report: &Report, request: &ClaimRequest) -> Result<Reply, Error> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                // After a failover, another server may answer. It may lack claims that this worker knows, even if no
                // exchange was under way.
                self.uncertain = true;
                self.connect().await?
            }
        };
        if request.jobs > 0 && self.load_tasks_at <= Instant::now() {
            self.load_task_ids(&mut connection).await?;
        }
        let lanes = self.lanes.clone();
        // Uncertain until the answer arrives, also if this future is dropped before.
        let first_is_lost = std::mem::replace(&mut self.uncertain, true);
        let mut held = None;
        let mut second_is_lost = lanes.second_lost_an_answer.load(Ordering::Acquire);
        let deferred_is_lost = lanes.deferred_lost_an_answer.load(Ordering::Acquire);
        let under_way = if first_is_lost || second_is_lost || deferred_is_lost {
            let alone = lanes.under_way.clone().write_owned().await;
            second_is_lost = lanes.second_lost_an_answer.load(Ordering::Acquire);
            self.end_earlier_exchanges(&mut connection, first_is_lost, second_is_lost).await?;
            lanes.deferred_lost_an_answer.store(false, Ordering::Release);
            let (mut jobs, queues) = self.held(&mut connection).await?;
            let reported: HashMap<i64, &Job> = report.ended.iter().map(|ended| (ended.job.id, &*ended.job)).collect();
            jobs.retain(|job| !reported.get(&job.id).is_some_and(|reported| reported.is_same_claim(job)));
            held = Some((jobs, queues));
            lanes.second_lost_an_answer.store(false, Ordering::Release);
            LaneGuard::Alone(alone)
        } else {
            LaneGuard::Beside(lanes.begin().await)
        };
        // A lost exchange may have freed a queue and claimed its next job: do not free that queue again.
        let taken: HashSet<Option<i32>> = held.iter().flat_map(|(jobs, _)| jobs).map(|job| job.job_queue_id).collect();
        let free = report.free_queues.iter().copied().filter(|queue| !taken.contains(&Some(*queue)));
        let exchanged = self.exchange_over(connection, report, &free.collect::<Vec<_>>(), request).await;
        if let Ok(answer) = &exchanged {
            lanes.first_lost_an_answer.store(false, Ordering::Release);
            self.warn_of_rejected(report, answer, first_is_lost || second_is_lost);
        }
        // The held jobs are not in flight yet, so the next attempt has to ask for them again.
        self.uncertain |= exchanged.is_err() && (first_is_lost || second_is_lost || deferred_is_lost);
        Ok(Reply { answer: exchanged?, held, under_way })
    }

    /// One attempt, for the second lane. If the answer is lost, the first lane finds out what happened.
    pub(crate) async fn exchange_once(&mut self, report: &Report, request: &ClaimRequest) -> Result<Answer, Error> {
        self.uncertain = false;
        let patience = self.patience() / 4;
        let exchanging = async {
            let connection = match self.connection.take() {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            self.uncertain = true;
            self.exchange_over(connection, report, &[], request).await
        };
        // A quarter, because the first lane may have to wait for this exchange.
        let in_time = tokio::time::timeout(patience, exchanging).await;
        let answer = in_time.unwrap_or(Err(Error::NoAnswer { after: patience }));
        match &answer {
            Ok(answer) => self.warn_of_rejected(report, answer, false),
            Err(_) => self.lanes.doubt(&report.ended),
        }
        answer
    }

    /// Warns of outcomes that were rejected because the jobs were taken from this worker. Does not warn after a lost
    /// answer: the exchange before may have recorded them.
    fn warn_of_rejected(&self, report: &Report, answer: &Answer, lost_an_answer: bool) {
        let mut in_doubt = self.lanes.in_doubt();
        if answer.rejected_jobs.is_empty() && in_doubt.is_empty() {
            return;
        }
        let is_released = |ended: &Ended| matches!(ended.settlement, Settlement::Release { .. });
        for ended in report.ended.iter().filter(|ended| !answer.missed_jobs.contains(&ended.job.id)) {
            let was_in_doubt = in_doubt.remove(&ended.job.id);
            let is_rejected = answer.rejected_jobs.contains(&ended.job.id);
            if !is_rejected || was_in_doubt || lost_an_answer || is_released(ended) {
                continue;
            }
            warn!(
                label = "job",
                worker_id = &*self.shared.worker_id,
                job_id = ended.job.id,
                task_identifier = &*ended.job.task_identifier,
                "outcome rejected: the job was taken from this worker while it ran (recovered, unlocked or deleted), \
                 and may run again elsewhere"
            );
        }
    }

    async fn exchange_over(
        &mut self,
        mut connection: PgConnection,
        report: &Report,
        free_queues: &[i32],
        request: &ClaimRequest,
    ) -> Result<Answer, Error> {
        let started = Instant::now();
        let result = if self.session.is_pooled() {
            self.report_and_claim_behind_a_pooler(&mut connection, report, free_queues, request).await
        } else {
            self.report_and_claim(&mut connection, report, free_queues, request).await
        };
        let mut result = result;
        if let Ok(answer) = &mut result {
            // Nothing else has these jobs yet.
            self.read_expiries(&mut connection, answer.jobs.iter_mut().filter_map(Arc::get_mut)).await;
        }
        // A conflict is an answer too: the server has rolled the exchange back.
        if result.as_ref().err().is_none_or(Error::is_contention) {
            self.uncertain = false;
            self.connection = Some(connection);
        }
        Ok(Answer { took: started.elapsed(), ..result? })
    }

    /// Behind a pooler, the worker cannot terminate an abandoned connection, and the server may still execute its
    /// statement. So the exchange is an explicit transaction, which takes effect only if the worker commits it. If the
    /// commit is not answered, the worker looks up its outcome by the transaction id.
    async fn report_and_claim_behind_a_pooler(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        free_queues: &[i32],
        request: &ClaimRequest,
    ) -> Result<Answer, Error> {
        let context = || "exchange jobs with the database".to_owned();
        let mut transaction = self.session.begin(connection).await.context(context)?;
        let exchanging = async {
            let answer = self.report_and_claim(&mut transaction, report, free_queues, request).await?;
            let query = sqlx::raw_sql(self.statements.current_transaction.sql());
            let row = query.fetch_one(&mut *transaction).await;
            Ok((answer, row.and_then(|row| row.try_get(0)).context(context)?))
        };
        let (answer, id): (Answer, i64) = match exchanging.await {
            Ok(answered) => answered,
            Err(error) => {
                session::rollback(transaction).await.context(context)?;
                return Err(error);
            }
        };
        self.lanes.committing().insert(id);
        let committed = session::commit(transaction).await;
        if matches!(committed, Ok(()) | Err(sqlx::Error::Database(_))) {
            self.lanes.committing().remove(&id);
        }
        committed.context(context)?;
        Ok(answer)
    }

    async fn report_and_claim(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        free_queues: &[i32],
        request: &ClaimRequest,
    ) -> Result<Answer, Error> {
        if report.is_limited {
            return self.exchange_limited(connection, report, request).await;
        }
        let no_queued_wait = self.lanes.no_queued_wait.load(Ordering::Acquire);
        let is_simple = report.is_simple() && free_queues.is_empty() && request.limits.is_empty();
        // If the deferred lanes claim the jobs of some of the tasks, the jobs of the others are claimed task by task.
        let unlimited = self.lanes.unlimited(&self.lanes.tasks().ids);
        let unqueued = self.lanes.not_deferred(&unlimited);
        let is_one_order = unqueued.is_empty() || unqueued.len() == unlimited.len();
        let is_only_claim = is_simple && report.is_empty() && request.jobs > 0;
        if is_only_claim
            && is_one_order
            && !unqueued.is_empty()
            && self.lanes.head_claims().begin()
            && let Some(answer) = self.claim_head(connection, &unqueued, request).await?
        {
            return Ok(answer);
        }
        if is_simple && (request.jobs == 0 || (no_queued_wait && is_one_order)) {
            self.exchange_unqueued(connection, report, request).await
        } else {
            self.exchange_any(connection, report, free_queues, request).await
        }
    }

    /// Claims some of the first jobs. Returns `None` if it brings none, although jobs may be due.
    async fn claim_head(
        &self,
        connection: &mut PgConnection,
        task_ids: &[i32],
        request: &ClaimRequest,
    ) -> Result<Option<Answer>, Error> {
        let context = || "claim jobs".to_owned();
        let query = self
            .statements
            .claim_head
            .query()
            .bind(&*self.shared.worker_id)
            .bind(task_ids)
            .bind(i32::try_from(request.jobs).unwrap_or(i32::MAX))
            .bind(request.now)
            .bind(request.freshness)
            .bind(&request.flags.forbidden)
            .bind(&request.flags.accepted)
            .bind(&request.flags.allowed);
        let Claimed { jobs, about, .. } = self.claim(query, connection).await.context(context)?;
        let is_conclusive: bool = about.try_get("is_conclusive").context(context)?;
        let mut head_claims = self.lanes.head_claims();
        match (is_conclusive, jobs.is_empty()) {
            (true, _) => head_claims.was_conclusive(),
            (false, false) => head_claims.was_partial(),
            (false, true) => {
                head_claims.was_in_vain();
                return Ok(None);
            }
        }
        Ok(Some(Answer {
            jobs,
            contended: about.try_get("contended").context(context)?,
            is_partial: !is_conclusive,
            nothing_waits: about.try_get("nothing_waits").context(context)?,
            clock: about.try_get("clock").context(context)?,
            ..Answer::default()
        }))
    }

    /// The short exchange: reports completed jobs without a queue, and claims jobs without a queue.
    async fn exchange_unqueued(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        request: &ClaimRequest,
    ) -> Result<Answer, Error> {
        let context = || "exchange jobs with the database".to_owned();
        let (mut done, mut done_at) = (Vec::new(), Vec::new());
        let most = report.ended.len();
        let (mut placed, mut placed_at) = (Vec::with_capacity(most), Vec::with_capacity(most));
        let mut places = Vec::with_capacity(most);
        for ended in &report.ended {
            match ended.job.place.filter(|_| !ended.is_missed) {
                None => (done.push(ended.job.id), done_at.push(ended.job.locked_at)),
                Some(place) => {
                    places.push(place);
                    (placed.push(ended.job.id), placed_at.push(ended.job.locked_at))
                }
            };
        }
        let started = Instant::now();
        let start = self.lanes.claim_start().next(started);
        let query = self
            .statements
            .exchange_unqueued
            .query()
            .bind(&*self.shared.worker_id)
            .bind(done)
            .bind(done_at)
            .bind(self.lanes.not_deferred(&self.lanes.unlimited(&self.lanes.tasks().ids)))
            .bind(i32::try_from(request.jobs).unwrap_or(i32::MAX))
            .bind(start.map(|start| start.priority))
            .bind(start.map(|start| start.run_at))
            .bind(start.map(|start| start.id))
            .bind(CLAIM_BYTES)
            .bind(request.now)
            .bind(request.freshness)
            .bind(&request.flags.forbidden)
            .bind(&request.flags.accepted)
            .bind(&request.flags.allowed)
            .bind(&self.lanes.tasks().ids)
            .bind(placed)
            .bind(placed_at)
            .bind(rows::array_of_places(places.into_iter()));
        let Claimed { jobs, about, .. } = self.claim(query, connection).await.context(context)?;
        let mut answer = answer(jobs, &about).context(context)?;
        answer.missed_jobs = missed_jobs(&about).context(context)?;
        if request.jobs > 0 {
            let is_full = answer.jobs.len() >= request.jobs;
            let first_job = first_job(&about).context(context)?;
            self.lanes.claim_start().claimed(start, first_job, is_full, started.elapsed(), Instant::now());
            self.lanes.head_claims().read_everything(is_full);
            let queued_wait: bool = about.try_get("queued_wait").context(context)?;
            self.lanes.no_queued_wait.store(!queued_wait, Ordering::Release);
            answer.is_partial = !is_full && (queued_wait || start.is_some());
        }
        Ok(answer)
    }

    /// The exchange that can do everything.
    async fn exchange_any(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        free_queues: &[i32],
        request: &ClaimRequest,
    ) -> Result<Answer, Error> {
        let context = || "exchange jobs with the database".to_owned();
        let done = report.ended.iter().filter(|ended| ended.settlement == Settlement::Complete);
        let (done, done_at): (Vec<_>, Vec<_>) = done.map(|ended| (ended.job.id, ended.job.locked_at)).unzip();
        let unlocked = report.ended.iter().filter_map(|ended| Some((&*ended.job, ended.settlement.unlock()?)));
        let unlocked: Vec<(&Job, Unlock<'_>)> = unlocked.collect();
        let limit = i32::try_from(request.jobs).unwrap_or(i32::MAX);
        let (task_ids, limits) = self.tasks_and_limits(request);
        let unlimited = self.lanes.unlimited(&task_ids);
        let unqueued_task_ids = self.lanes.not_deferred(&unlimited);
        // Task by task, as if there were limits: the tasks of the deferred lanes may have a million jobs in front.
        let is_one_order = unqueued_task_ids.is_empty() || unqueued_task_ids.len() == unlimited.len();
        let limits = limits.or_else(|| (!is_one_order).then(|| vec![None; task_ids.len()]));
        let (errors, payloads) = self.errors_and_payloads(unlocked.iter().map(|(_, unlock)| unlock));
        let query = self
            .statements
            .exchange
            .query()
            .bind(&*self.shared.worker_id)
            .bind(done)
            .bind(done_at)
            .bind(unlocked.iter().map(|(job, _)| job.id).collect::<Vec<_>>())
            .bind(unlocked.iter().map(|(job, _)| job.locked_at).collect::<Vec<_>>())
            .bind(errors)
            .bind(unlocked.iter().map(|(_, unlock)| seconds(unlock.run_at)).collect::<Vec<_>>())
            .bind(unlocked.iter().map(|(_, unlock)| time(unlock.run_at)).collect::<Vec<_>>())
            .bind(unlocked.iter().map(|(_, unlock)| attempts(unlock.attempts)).collect::<Vec<_>>())
            .bind(payloads)
            .bind(free_queues)
            .bind(task_ids)
            .bind(limit)
            .bind(&request.flags.forbidden)
            .bind(request.now)
            .bind(unlocked.iter().map(|(job, _)| job.key.as_deref()).collect::<Vec<_>>())
            .bind(limits)
            .bind(request.freshness)
            .bind(unlocked.iter().map(|(_, unlock)| unlock.released.map(i32::from)).collect::<Vec<_>>())
            .bind(CLAIM_BYTES)
            .bind(&request.flags.accepted)
            .bind(&request.flags.allowed)
            .bind(unqueued_task_ids);
        let Claimed { jobs, rows, about } = self.claim(query, connection).await.context(context)?;
        let mut answer = answer(jobs, &about).context(context)?;
        if request.jobs > 0 {
            let queued_wait: bool = about.try_get("queued_wait").context(context)?;
            self.lanes.no_queued_wait.store(!queued_wait, Ordering::Release);
            self.lanes.head_claims().read_everything(rows >= request.jobs);
            answer.is_partial = about.try_get("is_partial").context(context)?;
        }
        Ok(answer)
    }

    /// The errors and payloads to write, in characters that the database's encoding has.
    pub(super) fn errors_and_payloads<'u, 's: 'u>(
        &self,
        unlocks: impl Iterator<Item = &'u Unlock<'s>>,
    ) -> (Texts<'s>, Texts<'s>) {
        let (mut errors, mut payloads): (Vec<_>, Vec<_>) =
            unlocks.map(|unlock| (unlock.error.map(Cow::Borrowed), unlock.payload.map(Cow::Borrowed))).unzip();
        if self.lanes.writes_ascii.load(Ordering::Acquire) {
            errors.iter_mut().flatten().for_each(|error| *error = ascii_text(error).into());
            payloads.iter_mut().flatten().for_each(|payload| *payload = ascii_json(payload).into());
        }
        (errors, payloads)
    }

    /// Runs a statement that claims jobs. Reads each row when the next one arrives: a thousand rows would not fit into the
    /// processor's caches (bench/RESULTS.md, "The client").
    pub(super) async fn claim(
        &self,
        query: Query<'_, Postgres, PgArguments>,
        connection: &mut PgConnection,
    ) -> sqlx::Result<Claimed> {
        let tasks = self.lanes.tasks();
        let mut reader = JobReader::new(&tasks.names);
        let (mut jobs, mut claimed) = (Vec::new(), 0);
        let mut rows = query.fetch(connection);
        let mut last = rows.try_next().await?.ok_or(sqlx::Error::RowNotFound)?;
        while let Some(row) = rows.try_next().await? {
            claimed += 1;
            jobs.extend(reader.read(&last)?.map(Arc::new));
            last = row;
        }
        Ok(Claimed { jobs, rows: claimed, about: last })
    }

    async fn held(&self, connection: &mut PgConnection) -> Result<(Vec<Job>, Vec<i32>), Error> {
        let context = || "look up the jobs and queues of this worker".to_owned();
        let query = self.statements.held.query().persistent(false).bind(&*self.shared.worker_id);
        let jobs = self.session.fetch_all(connection, query).await.context(context)?;
        let query = self.statements.held_queues.query().persistent(false).bind(&*self.shared.worker_id);
        let queues = self.session.fetch_all(connection, query).await.context(context)?;
        let queues: sqlx::Result<Vec<i32>> = queues.iter().map(|row| row.try_get("id")).collect();
        Ok((self.jobs(&jobs).context(context)?, queues.context(context)?))
    }

    /// Ends abandoned exchanges: the server may not have noticed that their connection is gone, and may still execute
    /// them. Returns when they can no longer write anything.
    async fn end_earlier_exchanges(
        &self,
        connection: &mut PgConnection,
        of_first: bool,
        of_second: bool,
    ) -> Result<(), Error> {
        let context = || "end an earlier exchange".to_owned();
        let committing: Vec<i64> = self.lanes.committing().iter().copied().collect();
        for transaction in committing {
            let statement = &self.statements.transaction_status;
            loop {
                let query = statement.query().persistent(false).bind(transaction);
                let row = self.session.fetch_one(connection, query).await;
                let status: Result<Option<String>, Error> = row.and_then(|row| row.try_get(0)).context(context);
                match status {
                    Ok(status) if status.as_deref() == Some("in progress") => {}
                    Ok(_) => break,
                    // The id is in the future: this is another server after a failover, and the transaction was lost.
                    Err(error) if error.has_code(&["22023"]) => break,
                    Err(error) => return Err(error),
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            self.lanes.committing().remove(&transaction);
        }
        if self.session.is_pooled() {
            // Behind a pooler, server connections belong to the pooler, and transactions without a commit have no
            // effect.
            return Ok(());
        }
        let lanes = [(Lane::First, of_first), (Lane::Second, of_second)].into_iter().filter(|(_, lost)| *lost);
        let names: Vec<String> = lanes.map(|(lane, _)| connection_name(&self.shared.worker_id, lane)).collect();
        loop {
            let left: i64 = self
                .statements
                .terminate_earlier_connections
                .query_scalar()
                .persistent(false)
                .bind(&names)
                .fetch_one(&mut *connection)
                .await
                .context(context)?;
            if left == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The tasks that may run more jobs and, if any task has a limit, how many more jobs of each.
    pub(super) fn tasks_and_limits(&self, request: &ClaimRequest) -> (Vec<i32>, Option<Vec<Option<i32>>>) {
        let tasks = self.lanes.tasks();
        if request.limits.is_empty() {
            return (tasks.ids.clone(), None);
        }
        let limit = |id: &i32| request.limits.get(tasks.names.get(id)?).copied();
        let with_limits = tasks.ids.iter().map(|id| (*id, limit(id)));
        let (ids, limits) = with_limits
            .filter(|(_, limit)| *limit != Some(0))
            .map(|(id, limit)| (id, limit.map(|limit| i32::try_from(limit).unwrap_or(i32::MAX))))
            .unzip();
        (ids, Some(limits))
    }

    pub(super) fn jobs(&self, rows: &[PgRow]) -> sqlx::Result<Vec<Job>> {
        let tasks = self.lanes.tasks();
        let mut reader = JobReader::new(&tasks.names);
        rows.iter().filter_map(|row| reader.read(row).transpose()).collect()
    }

    /// Notes when the claimed jobs expire, if that may be soon: an expired job must not start.
    pub(super) async fn read_expiries<'j>(
        &self,
        connection: &mut PgConnection,
        jobs: impl Iterator<Item = &'j mut Job>,
    ) {
        if !self.lanes.is_expiry_near() {
            return;
        }
        let jobs: Vec<&mut Job> = jobs.collect();
        let ids: Vec<i64> = jobs.iter().filter(|job| job.attempts <= 1).map(|job| job.id).collect();
        if ids.is_empty() {
            return;
        }
        let query = self.statements.expiries_of.query().bind(ids);
        let rows = match self.session.fetch_all(connection, query).await {
            Ok(rows) => rows,
            Err(error) => return debug!(label = "worker", %error, "could not read when the claimed jobs expire"),
        };
        let read = Instant::now();
        let expiries = rows.iter().filter_map(|row| {
            let seconds: f64 = row.try_get("seconds").ok()?;
            let left = Duration::try_from_secs_f64(seconds.max(0.0)).ok()?;
            let expiry = Expiry { at: rows::time(row, "expires_at").ok()?, deadline: read.checked_add(left)? };
            Some((row.try_get("job_id").ok()?, expiry))
        });
        let expiries: HashMap<i64, Expiry> = expiries.collect();
        for job in jobs {
            job.expiry = expiries.get(&job.id).copied();
        }
    }

    /// Whether this worker may hold jobs that it does not know.
    pub(crate) fn is_uncertain(&self) -> bool {
        let lost = [&self.lanes.second_lost_an_answer, &self.lanes.deferred_lost_an_answer];
        self.uncertain || lost.iter().any(|lost| lost.load(Ordering::Acquire))
    }

    /// How long until the next job is due; `Duration::MAX` if there is none. Skips jobs that were due at `claimed`, the
    /// time of the last claim. Returns `None` if the query fails; the next exchange will report the problem.
    pub(crate) async fn next_due(
        &mut self,
        claimed: Option<DateTime<Utc>>,
        now: Option<DateTime<Utc>>,
    ) -> Option<Duration> {
        let mut connection = self.connection.take()?;
        let from = claimed.map(|claimed| claimed + TimeDelta::microseconds(1));
        let query = self.statements.next_run_at.query().bind(self.lanes.tasks().ids.clone()).bind(from).bind(now);
        let query = self.session.fetch_one(&mut connection, query);
        let row = tokio::time::timeout(OPTIONAL_QUERY_TIMEOUT, query).await.ok()?.ok()?;
        self.connection = Some(connection);
        let seconds: Option<f64> = row.try_get("seconds").ok()?;
        let wait = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
        Some(wait.unwrap_or(Duration::MAX))
    }

    /// Whether all task ids are known and need no reload, so that a poll can replace an exchange.
    pub(crate) fn has_all_task_ids(&self) -> bool {
        self.load_tasks_at > Instant::now()
    }

    pub(crate) async fn close(self) {
        if let Some(connection) = self.connection {
            let _ = connection.close().await;
        }
    }
}

/// The session has a unique application name, so that a new connection can find and terminate the previous one.
fn session_of_first_lane(session: &Session, worker_id: &str) -> Session {
    session.clone().named(&connection_name(worker_id, Lane::First)).with(&[LOCK_TIMEOUT, IDLE_TIMEOUT])
}

fn connection_name(worker_id: &str, lane: Lane) -> String {
    match lane {
        Lane::First => format!("graphile_worker {worker_id}"),
        Lane::Second => format!("graphile_worker {worker_id} 2"),
    }
}

/// The rows of a statement that claims jobs.
pub(super) struct Claimed {
    /// Those whose tasks are known.
    pub(super) jobs: Vec<Arc<Job>>,
    /// How many were claimed.
    rows: usize,
    /// The last row, which is about the claim itself.
    pub(super) about: PgRow,
}

fn answer(jobs: Vec<Arc<Job>>, about: &PgRow) -> sqlx::Result<Answer> {
    Ok(Answer {
        jobs,
        blocked_jobs: about.try_get::<Vec<i64>, _>("blocked_jobs")?.into_iter().collect(),
        blocked_queues: about.try_get("blocked_queues")?,
        rejected_jobs: about.try_get("rejected_jobs")?,
        missed_jobs: HashSet::new(),
        contended: about.try_get("contended")?,
        clock: about.try_get("clock")?,
        is_partial: false,
        nothing_waits: false,
        took: Duration::ZERO,
        claim_again_after: None,
        slots: Vec::new(),
    })
}

/// The jobs that a short exchange has not found at their places.
fn missed_jobs(about: &PgRow) -> sqlx::Result<HashSet<i64>> {
    about.try_get("missed_jobs").map(|jobs: Vec<i64>| jobs.into_iter().collect())
}

/// The first job without a queue that a claim has found, by its last row.
fn first_job(about: &PgRow) -> sqlx::Result<Option<Position>> {
    let (priority, run_at) = (about.try_get("first_priority")?, rows::optional_time(about, "first_run_at")?);
    let id: Option<i64> = about.try_get("first_id")?;
    let position = |((priority, run_at), id)| Position { priority, run_at, id };
    Ok(Option::zip(priority, run_at).zip(id).map(position))
}

/// The text with its non-ASCII characters as `\u{…}`.
fn ascii_text(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut ascii, character| {
        if character.is_ascii() {
            ascii.push(character);
        } else {
            ascii.extend(character.escape_unicode());
        }
        ascii
    })
}

/// The same JSON with its non-ASCII characters as `\uXXXX`. They occur only in strings.
fn ascii_json(json: &str) -> String {
    json.chars().fold(String::with_capacity(json.len()), |mut ascii, character| {
        if character.is_ascii() {
            ascii.push(character);
        } else {
            character.encode_utf16(&mut [0; 2]).iter().for_each(|unit| ascii.push_str(&format!("\\u{unit:04x}")));
        }
        ascii
    })
}

pub(super) fn seconds(run_at: NextRun) -> Option<f64> {
    match run_at {
        NextRun::After(wait) => Some(wait.min(LATEST_RUN).as_secs_f64()),
        _ => None,
    }
}

pub(super) fn time(run_at: NextRun) -> Option<DateTime<Utc>> {
    match run_at {
        // Within the range of PostgreSQL's timestamps.
        NextRun::At(time) => Some(time.clamp(DateTime::UNIX_EPOCH, DateTime::UNIX_EPOCH + LATEST_RUN * 80)),
        _ => None,
    }
}

pub(super) fn attempts(attempts: Attempts) -> i32 {
    match attempts {
        Attempts::Refund => -1,
        Attempts::Charge => 0,
        Attempts::Exhaust => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_an_encoding_lacks_are_written_in_ascii() {
        assert_eq!(ascii_text("a \u{1F980}"), "a \\u{1f980}");
        let json = "{\"h\u{e9}\": \"\u{1F980}\"}";
        assert_eq!(ascii_json(json), r#"{"h\u00e9": "\ud83e\udd80"}"#);
        let value = |json: &str| serde_json::from_str::<serde_json::Value>(json).expect("JSON");
        assert_eq!(value(&ascii_json(json)), value(json));
    }
}
