//! Deferred lanes: two connections that run the jobs of repeatable tasks in batches. A batch is a transaction that locks the
//! rows of its jobs and stays open while they run, for a moment. At its end, one statement deletes the rows of finished
//! jobs, writes those of failed ones, and writes the claims of jobs that still run. So a short job costs no claim.
//!
//! The lanes take turns: one batch runs while the other lane ends the batch before and claims the next. They connect on first
//! use. They have a thread of their own, so that a handler that blocks its thread does not keep the rows locked.
//!
//! Not here: `inflight/batches` decides when a batch is due, how large it is, and when it ends.

use super::claim_size::CLAIM_BYTES;
use super::exchange::{Exchange, Lanes, attempts, seconds, time};
use super::inflight::{BatchClaim, BatchEnd, BatchRequest, Hold, Inflight, LANES};
use super::report::{Ended, Report};
use super::settings::Settings;
use super::settle::{Settlement, Unlock};
use crate::Error;
use crate::context::{OpenBatch, Shared};
use crate::error::Context;
use crate::flags::FlagFilter;
use crate::hooks::{FetchEmpty, FetchStart, JobComplete};
use crate::job::Job;
use crate::retry::RetryPauses;
use chrono::Utc;
use sqlx::{Connection, PgConnection, Row};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, warn};

/// How long exchanges claim the jobs of repeatable tasks after a deferred lane has failed to.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

const RECONNECT_PAUSES: RetryPauses = RetryPauses::new(Duration::from_millis(50), Duration::from_secs(5));

/// A batch does not wait for the disk. A crash of the server may lose the last ones, within `wal_writer_delay`: their jobs
/// then run again, which does no harm.
const SETTINGS: [(&str, &str); 1] = [("synchronous_commit", "off")];

/// Read committed, whatever the database's default is: a claim must see what was committed before it.
const BEGIN: &str = "begin isolation level read committed";
const COMMIT: &str = "commit";
const COMMIT_AND_BEGIN: &str = "commit; begin isolation level read committed";

/// The thread of the lanes. Dropping this ends it.
pub(super) struct DeferredLanes {
    stop: CancellationToken,
    _abort: DropGuard,
    ended: CancellationToken,
}

impl DeferredLanes {
    /// Starts the lanes beside the first lane.
    pub(super) fn start(
        first_lane: &Exchange,
        inflight: &Arc<Inflight>,
        settings: &Arc<Settings>,
        shared: &Arc<Shared>,
    ) -> std::io::Result<DeferredLanes> {
        let (stop, abort, ended) = (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let application = Handle::current();
        let lanes: Vec<Lane> = (1..=LANES)
            .map(|number| {
                let name = format!("graphile_worker {} deferred {number}", shared.worker_id);
                Lane {
                    exchange: first_lane.deferred_lane(&name, &SETTINGS),
                    name,
                    may_have_earlier: false,
                    is_in_transaction: false,
                    inflight: inflight.clone(),
                    settings: settings.clone(),
                    shared: shared.clone(),
                    application: application.clone(),
                    hooks: JoinSet::new(),
                }
            })
            .collect();
        let (stopped, aborted, has_ended) = (stop.clone(), abort.clone(), ended.clone().drop_guard());
        let fallback = Fallback { lanes: first_lane.lanes(), inflight: inflight.clone() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // Linux shows at most 15 characters of a thread's name.
        std::thread::Builder::new().name("gw-deferred".to_owned()).spawn(move || {
            let _has_ended = has_ended;
            let _fallback = fallback;
            runtime.block_on(async move {
                let running =
                    futures_util::future::join_all(lanes.into_iter().map(|lane| lane.run_until(stopped.clone())));
                tokio::select! {
                    _ = running => {}
                    () = aborted.cancelled() => {}
                }
            });
            // A host name lookup may hang in a thread of the runtime: do not wait for it.
            runtime.shutdown_background();
        })?;
        Ok(DeferredLanes { stop, _abort: abort.drop_guard(), ended })
    }

    pub(super) fn have_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Ends the open batches, within this time.
    pub(super) async fn stop(self, timeout: Duration) {
        self.stop.cancel();
        let _ = tokio::time::timeout(timeout, self.ended.cancelled()).await;
    }
}

/// When the thread ends, for whatever reason, exchanges claim the jobs of all tasks.
struct Fallback {
    lanes: Arc<Lanes>,
    inflight: Arc<Inflight>,
}

impl Drop for Fallback {
    fn drop(&mut self) {
        self.inflight.set_batches(false);
        self.lanes.set_deferred_tasks(HashSet::new());
    }
}

struct Lane {
    exchange: Exchange,
    /// The application name of its connection.
    name: String,
    /// Whether the server may still have an earlier connection of this lane.
    may_have_earlier: bool,
    /// Whether a transaction has begun and locks nothing yet.
    is_in_transaction: bool,
    inflight: Arc<Inflight>,
    settings: Arc<Settings>,
    shared: Arc<Shared>,
    /// The runtime that hooks and functions of the application run on.
    application: Handle,
    hooks: JoinSet<()>,
}

impl Lane {
    async fn run_until(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            tokio::select! {
                () = self.inflight.batch_due() => self.run_batches(&stop).await,
                () = stop.cancelled() => {}
            }
        }
        if let Some(connection) = self.exchange.connection.take() {
            let _ = tokio::time::timeout(FAILURE_PAUSE, connection.close()).await;
        }
        while self.hooks.join_next().await.is_some() {}
    }

    /// Runs one batch after the other, as long as one is due.
    async fn run_batches(&mut self, stop: &CancellationToken) {
        loop {
            // If the flags function fails, the first lane reports it.
            let Some(flags) = self.flags().await else { return };
            let Some(wanted) = self.inflight.begin_batch() else { return self.end_transaction().await };
            self.emit_fetch_start();
            match self.claim(wanted, &flags).await {
                Ok(claim) => {
                    let Some(batch) = self.inflight.open_batch(wanted, claim) else {
                        self.end_transaction().await;
                        self.emit_fetch_empty();
                        continue;
                    };
                    self.hold(&batch, stop).await;
                    self.end(&batch).await;
                }
                Err(error) => {
                    let repeats = error.is_contention() || self.exchange.adapt_to_encoding(&error);
                    self.inflight.batch_failed(wanted, if repeats { Duration::ZERO } else { FAILURE_PAUSE });
                    if repeats {
                        continue;
                    }
                    let text = error.to_string_with_sources();
                    debug!(
                        label = "worker",
                        worker_id = &*self.shared.worker_id,
                        error = text,
                        "a deferred lane failed: the first lane takes over for a moment"
                    );
                    self.exchange.lanes.claim_without_deferred_lanes(2 * FAILURE_PAUSE);
                    self.inflight.wake_exchange();
                    self.inflight.exchange_due.notify_one();
                    let _ = tokio::time::timeout(FAILURE_PAUSE, stop.cancelled()).await;
                    return;
                }
            }
        }
    }

    async fn flags(&self) -> Option<FlagFilter> {
        let settings = self.settings.clone();
        if settings.flags.are_listed() {
            return settings.flags.current().await.ok();
        }
        self.application.spawn(async move { settings.flags.current().await }).await.ok()?.ok()
    }

    /// Keeps the batch open while its jobs run.
    async fn hold(&self, batch: &Arc<OpenBatch>, stop: &CancellationToken) {
        while let Hold::Until(until) = self.inflight.hold(batch) {
            tokio::select! {
                () = batch.changed.notified() => {}
                () = tokio::time::sleep_until(until.into()) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Claims a batch. A connection that was idle may be gone: tries once more with a new one.
    async fn claim(&mut self, wanted: BatchRequest, flags: &FlagFilter) -> Result<BatchClaim, Error> {
        let was_connected = self.exchange.connection.is_some();
        match self.try_claim(wanted, flags).await {
            Err(error) if was_connected && error.is_retryable() => self.try_claim(wanted, flags).await,
            claim => claim,
        }
    }

    async fn try_claim(&mut self, wanted: BatchRequest, flags: &FlagFilter) -> Result<BatchClaim, Error> {
        let began = Instant::now();
        let context = || "claim jobs of repeatable tasks".to_owned();
        let mut connection = self.connected().await?;
        let has_begun = std::mem::take(&mut self.is_in_transaction);
        let task_ids = self.exchange.lanes.deferred_task_ids();
        let now = self.settings.use_local_time.then(Utc::now);
        let statement = &self.shared.statements.deferred_claim;
        let claiming = async {
            if !has_begun {
                sqlx::raw_sql(BEGIN).execute(&mut connection).await?;
            }
            statement
                .query()
                .bind(&*self.shared.worker_id)
                .bind(task_ids)
                .bind(i32::try_from(wanted.jobs).unwrap_or(i32::MAX))
                .bind(&flags.forbidden)
                .bind(&flags.accepted)
                .bind(&flags.allowed)
                .bind(now)
                .bind(self.settings.recovery.freshness())
                .bind(CLAIM_BYTES)
                .bind(wanted.behind.map(|job| job.priority))
                .bind(wanted.behind.map(|job| job.run_at))
                .bind(wanted.behind.map(|job| job.id))
                .fetch_all(&mut connection)
                .await
        };
        let rows = self.in_time(claiming).await?.context(context)?;
        let Some((about, rows)) = rows.split_last() else { return Err(sqlx::Error::RowNotFound).context(context) };
        let written = rows.iter().position(|row| row.try_get("is_written").unwrap_or(false)).unwrap_or(rows.len());
        let next_due: Option<f64> = about.try_get("next_due").context(context)?;
        let mut claim = BatchClaim {
            fresh: self.exchange.jobs(&rows[..written]).context(context)?,
            written: self.exchange.jobs(&rows[written..]).context(context)?,
            contended: about.try_get("contended").context(context)?,
            next_due: next_due.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok()),
            took: began.elapsed(),
        };
        for jobs in [&mut claim.fresh, &mut claim.written] {
            self.in_time(self.exchange.read_expiries(&mut connection, jobs.iter_mut())).await?;
        }
        self.exchange.connection = Some(connection);
        self.may_have_earlier = false;
        Ok(claim)
    }

    /// The connection, which is lost if it is not put back.
    async fn connected(&mut self) -> Result<PgConnection, Error> {
        if let Some(connection) = self.exchange.connection.take() {
            self.may_have_earlier = true;
            return Ok(connection);
        }
        self.is_in_transaction = false;
        let patience = self.exchange.answer_timeout + self.exchange.session.time_to_connect();
        let connecting = async {
            let mut connection = self.exchange.connect().await?;
            while self.may_have_earlier && self.terminate_earlier(&mut connection).await? > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            Ok(connection)
        };
        let connected = tokio::time::timeout(patience, connecting).await;
        let connection = connected.unwrap_or(Err(Error::NoAnswer { after: patience }))?;
        self.may_have_earlier = true;
        Ok(connection)
    }

    /// The server may not have noticed that an earlier connection is gone, and may keep the rows of its batch locked.
    async fn terminate_earlier(&self, connection: &mut PgConnection) -> Result<i64, Error> {
        let query = self.shared.statements.terminate_earlier_connections.query_scalar().persistent(false);
        query.bind(vec![self.name.clone()]).fetch_one(connection).await.context(|| "end an earlier batch".to_owned())
    }

    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, Error> {
        let after = self.exchange.answer_timeout;
        tokio::time::timeout(after, answer).await.map_err(|_| Error::NoAnswer { after })
    }

    /// Ends a transaction that has locked nothing.
    async fn end_transaction(&mut self) {
        let Some(mut connection) = self.exchange.connection.take() else { return };
        let committed = self.in_time(sqlx::raw_sql(COMMIT).execute(&mut connection)).await;
        self.is_in_transaction = false;
        if matches!(committed, Ok(Ok(_))) {
            self.exchange.connection = Some(connection);
        }
    }

    /// Ends a batch. If its connection is lost, the jobs are free at once. Then records what is left of them over a new
    /// connection, however long that takes.
    async fn end(&mut self, batch: &Arc<OpenBatch>) {
        let mut end = self.inflight.end_batch(batch);
        let Some(error) = self.try_end(&end).await.err() else {
            return self.ended(batch, end, Vec::new(), true);
        };
        let has_written = end.has_written;
        if !self.exchange.adapt_to_encoding(&error) {
            self.report_lost(&error);
        }
        let mut pauses = RECONNECT_PAUSES;
        loop {
            match self.resume(&end).await {
                Ok(locked) => {
                    // The others were recorded by the lost commit and are ordinary jobs now, or are lost.
                    let is_recorded = |ended: &mut Ended| locked.contains(&ended.job.id);
                    let recorded = end.ended.extract_if(.., is_recorded).collect();
                    let unrecorded = std::mem::replace(&mut end.ended, recorded);
                    self.exchange.lanes.doubt(&unrecorded);
                    self.ended(batch, end, unrecorded, false);
                    if has_written {
                        self.exchange.lanes.deferred_lost_an_answer.store(true, Ordering::Release);
                    }
                    return self.inflight.wake_claim();
                }
                Err(error) => {
                    self.exchange.adapt_to_encoding(&error);
                    debug!(label = "worker", error = error.to_string_with_sources(), "could not end a batch; retrying");
                    tokio::time::sleep(pauses.next()).await;
                    let more = self.inflight.end_batch(batch);
                    end.ended.extend(more.ended);
                    end.running = more.running;
                }
            }
        }
    }

    fn report_lost(&self, error: &Error) {
        warn!(
            label = "worker",
            worker_id = &*self.shared.worker_id,
            error = error.to_string_with_sources(),
            "lost a connection that kept jobs of repeatable tasks locked: they may run twice"
        );
    }

    /// Records the batch in its own transaction.
    async fn try_end(&mut self, end: &BatchEnd) -> Result<(), Error> {
        let context = || "record a batch".to_owned();
        let mut connection = self.exchange.connection.take().ok_or(sqlx::Error::PoolClosed).context(context)?;
        self.record(&mut connection, end).await?;
        // The next claim follows at once, if one is due.
        let begins = self.inflight.is_batch_due_after_this();
        let text = if begins { COMMIT_AND_BEGIN } else { COMMIT };
        self.in_time(sqlx::raw_sql(text).execute(&mut connection)).await?.context(context)?;
        self.is_in_transaction = begins;
        self.exchange.connection = Some(connection);
        Ok(())
    }

    /// Records what is left of a batch in a new transaction. Returns the jobs that were still free and unchanged.
    async fn resume(&mut self, end: &BatchEnd) -> Result<HashSet<i64>, Error> {
        let context = || "record a lost batch".to_owned();
        let mut connection = self.connected().await?;
        let of_batch = || end.ended.iter().map(|ended| &ended.job).chain(&end.running);
        let locking = async {
            sqlx::raw_sql(BEGIN).execute(&mut connection).await?;
            let query = self.shared.statements.deferred_resume.query().persistent(false);
            query
                .bind(of_batch().map(|job| job.id).collect::<Vec<_>>())
                .bind(of_batch().map(|job| job.updated_at).collect::<Vec<_>>())
                .bind(of_batch().map(|job| i32::from(job.attempts)).collect::<Vec<_>>())
                .fetch_all(&mut connection)
                .await
        };
        let rows = self.in_time(locking).await?.context(context)?;
        let locked: sqlx::Result<HashSet<i64>> = rows.iter().map(|row| row.try_get("id")).collect();
        let locked = locked.context(context)?;
        self.record_of(&mut connection, end, |job| locked.contains(&job.id)).await?;
        self.in_time(sqlx::raw_sql(COMMIT).execute(&mut connection)).await?.context(context)?;
        self.exchange.connection = Some(connection);
        Ok(locked)
    }

    async fn record(&self, connection: &mut PgConnection, end: &BatchEnd) -> Result<(), Error> {
        if end.ended.is_empty() && end.running.is_empty() && !end.frees {
            return Ok(());
        }
        self.record_of(connection, end, |_| true).await
    }

    /// Records those jobs of the batch whose rows are locked.
    async fn record_of(
        &self,
        connection: &mut PgConnection,
        end: &BatchEnd,
        is_locked: impl Fn(&Job) -> bool,
    ) -> Result<(), Error> {
        let ended = || end.ended.iter().filter(|ended| is_locked(&ended.job));
        let done = ended().filter(|ended| ended.settlement == Settlement::Complete).map(|ended| ended.job.id);
        let stay: Vec<(i64, Unlock<'_>)> =
            ended().filter_map(|ended| Some((ended.job.id, ended.settlement.unlock()?))).collect();
        let (errors, payloads) = self.exchange.errors_and_payloads(stay.iter().map(|(_, unlock)| unlock));
        let running: Vec<&Job> = end.running.iter().map(|job| &**job).filter(|job| is_locked(job)).collect();
        let query = self
            .shared
            .statements
            .deferred_end
            .query()
            .bind(&*self.shared.worker_id)
            .bind(done.collect::<Vec<_>>())
            .bind(stay.iter().map(|(id, _)| *id).collect::<Vec<_>>())
            .bind(errors)
            .bind(stay.iter().map(|(_, unlock)| seconds(unlock.run_at)).collect::<Vec<_>>())
            .bind(stay.iter().map(|(_, unlock)| time(unlock.run_at)).collect::<Vec<_>>())
            .bind(stay.iter().map(|(_, unlock)| attempts(unlock.attempts)).collect::<Vec<_>>())
            .bind(payloads)
            .bind(stay.iter().map(|(_, unlock)| unlock.released.is_some()).collect::<Vec<_>>())
            .bind(running.iter().map(|job| job.id).collect::<Vec<_>>())
            .bind(running.first().and_then(|job| job.locked_at))
            .bind(self.settings.use_local_time.then(Utc::now))
            .bind(self.settings.recovery.freshness())
            .bind(end.frees);
        let recording = query.fetch_all(connection);
        self.in_time(recording).await?.context(|| "record a batch".to_owned()).map(drop)
    }

    /// A batch has ended. `is_confirmed` unless its own commit was lost.
    fn ended(&mut self, batch: &Arc<OpenBatch>, end: BatchEnd, unrecorded: Vec<Ended>, is_confirmed: bool) {
        self.inflight.batch_ended(batch, is_confirmed, unrecorded);
        if self.shared.hooks.has::<JobComplete>() && !end.ended.is_empty() {
            let report = Report { ended: end.ended, ..Report::default() };
            let shared = self.shared.clone();
            self.hooks.spawn_on(async move { shared.emit_completed(report).await }, &self.application);
        }
        while self.hooks.try_join_next().is_some() {}
    }

    fn emit_fetch_start(&mut self) {
        if self.shared.hooks.has::<FetchStart>() {
            let shared = self.shared.clone();
            let emitting = async move { shared.hooks.emit(FetchStart, || shared.event(None)).await };
            self.hooks.spawn_on(emitting, &self.application);
        }
    }

    fn emit_fetch_empty(&mut self) {
        if self.shared.hooks.has::<FetchEmpty>() {
            let shared = self.shared.clone();
            let emitting = async move { shared.hooks.emit(FetchEmpty, || shared.event(None)).await };
            self.hooks.spawn_on(emitting, &self.application);
        }
    }
}
