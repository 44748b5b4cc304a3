//! The scheduler of recurring jobs: adds the jobs of crontab items when they are due, once across all workers (Node's
//! too), and backfills those that were missed.
//!
//! `resume_after` decides without a database which ticks to add. The statement that adds the job of a tick also moves
//! the item's `last_execution` forward, so that no other worker adds it again.
//!
//! Not here: `items` defines crontab items in code; the crate `graphile_worker_crontab` computes when they fire.

pub(crate) mod clock;
pub(crate) mod file;
pub(crate) mod items;

use crate::Error;
use crate::context::Shared;
use crate::db::Statement;
use crate::db::session::Session;
use crate::error::Context;
use crate::hooks::{
    CronJobBackfilled, CronJobContext, CronJobScheduled, CronTick, CronTickContext, ScheduledJob, catch_panic,
};
use crate::job::{JobKeyMode, JobSpec};
use crate::retry::{RetryPauses, jitter};
use crate::shutdown::Shutdown;
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use clock::Clock;
use futures_util::FutureExt;
use graphile_worker_crontab::{Crontab, CrontabJobKeyMode};
use serde_json::{Map, Value, json};
use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

/// How late a running worker may add a tick that still counts as on time, for example after a short outage of the
/// database. If the worker has not read the clock for longer, earlier ticks count as missed, as if no worker had run,
/// and are backfilled only if the item has `fill`. Slow statements do not count as absence, because the worker reads
/// the clock after each one.
const MAX_LATENESS: TimeDelta = TimeDelta::minutes(5);

/// How often the worker reads the clock even if nothing is due, because the clock may be set or the machine may sleep.
const MAX_TICK_CHECK_INTERVAL: TimeDelta = TimeDelta::minutes(1);

/// How often workers compare their items.
const ITEM_COMPARE_INTERVAL: TimeDelta = TimeDelta::seconds(30);

/// The maximum number of jobs in one statement.
const LARGEST_BATCH: usize = 500;

/// How long a statement waits for a lock, for example on a job with the item's key; and how long an item that ran into
/// this timeout is skipped, so that it does not delay the others.
const LOCK_TIMEOUT: (&str, &str) = ("lock_timeout", "5s");
const BLOCKED_PAUSE: Duration = Duration::from_secs(60);

/// The pauses between attempts to reach the database. With jitter, the longest is 7.5 seconds.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const PAUSES: RetryPauses = RetryPauses::new(SHORTEST_PAUSE, Duration::from_secs(5));

/// How long a new worker leaves an item to older workers that may still retry a tick of it: the longest retry pause,
/// and the time to reconnect. An item remembers only its last tick, so a later tick must not be added first.
const LEAVE_TO_OLDER_WORKERS: Duration = Duration::from_secs(10);

/// How often a new worker checks whether an older worker has added that tick.
const OLDER_WORKERS_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// How long the current statement may take when the worker stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The items of a worker, and up to which time each one is done.
struct Scheduler {
    items: Vec<Item>,
    /// The crontab, which may be replaced while the worker runs.
    crontabs: watch::Receiver<Vec<Arc<Crontab>>>,
    clock: Clock,
    session: Session,
    /// How long the database may take to answer. The server's `statement_timeout` is shorter.
    answer_timeout: Duration,
    shared: Arc<Shared>,
    stop: CancellationToken,
    clock_state: Option<ClockState>,
    /// When the worker last published its items.
    items_published_at: Option<DateTime<Utc>>,
    /// Whether the worker has logged that it cannot add jobs; reset when it can again.
    warned: bool,
    pauses: RetryPauses,
}

struct Item {
    crontab: Arc<Crontab>,
    /// Since when this worker schedules the item; `None` if it has not begun.
    since: Option<DateTime<Utc>>,
    /// All ticks up to this time are added or skipped.
    done: DateTime<Utc>,
    /// The item is skipped until then, because its job is blocked.
    blocked_until: Option<Instant>,
    /// The item is skipped while an older worker may still retry this tick.
    left_to_others: Option<LeftToOthers>,
    /// The differing definition of another worker that was last warned of.
    conflicting_item: Option<String>,
}

impl Item {
    fn new(crontab: &Arc<Crontab>) -> Item {
        let crontab = crontab.clone();
        Item {
            crontab,
            since: None,
            done: DateTime::<Utc>::MAX_UTC,
            blocked_until: None,
            left_to_others: None,
            conflicting_item: None,
        }
    }

    fn is_new(&self) -> bool {
        self.since.is_none()
    }

    fn has_due_tick(&self, now: DateTime<Utc>) -> bool {
        self.crontab.next_after(self.done).is_some_and(|next| next <= now)
    }
}

/// A recent tick that fired before this worker started, and that no worker has added.
#[derive(Clone, Copy)]
struct LeftToOthers {
    tick: DateTime<Utc>,
    until: Instant,
}

/// Since when the worker has been reading the clock without a gap.
#[derive(Clone, Copy)]
struct ClockState {
    /// Ticks before this time were missed.
    since: DateTime<Utc>,
    last_check: DateTime<Utc>,
}

/// A time at which an item fires.
struct Tick {
    item: usize,
    at: DateTime<Utc>,
    backfilled: bool,
    /// `None` if a hook rejected the job.
    job: Option<ScheduledJob>,
}

/// What the scheduler needs of the worker's settings.
pub(crate) struct CronSettings {
    pub(crate) session: Session,
    pub(crate) clock: Clock,
    pub(crate) answer_timeout: Duration,
}

/// The scheduler of a running worker. Stops when this is dropped.
pub(crate) struct CronTask {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl CronTask {
    /// Starts the scheduler, which runs until the worker is asked to stop.
    pub(crate) fn start(
        settings: CronSettings,
        mut crontabs: watch::Receiver<Vec<Arc<Crontab>>>,
        shared: Arc<Shared>,
        shutdown: &Shutdown,
    ) -> CronTask {
        let items = crontabs.borrow_and_update().iter().map(Item::new).collect();
        let name = format!("graphile_worker {} cron", shared.worker_id);
        let session = settings.session.named(&name).with(&[LOCK_TIMEOUT]);
        let stop = shutdown.leaving.child_token();
        let cron = Scheduler {
            items,
            crontabs,
            clock: settings.clock,
            session,
            answer_timeout: settings.answer_timeout,
            shared,
            stop: stop.clone(),
            clock_state: None,
            items_published_at: None,
            warned: false,
            pauses: PAUSES,
        };
        CronTask { stop, task: tokio::spawn(cron.run()) }
    }

    /// Stops the scheduler. Waits for its current statement, unless the worker is asked to stop a second time.
    pub(crate) async fn stop(mut self, shutdown: &Shutdown) {
        self.stop.cancel();
        tokio::select! {
            _ = &mut self.task => {}
            () = shutdown.insisted.cancelled() => {}
            () = tokio::time::sleep(STOP_TIMEOUT) => {}
        }
    }
}

impl Drop for CronTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Scheduler {
    /// Runs until the worker stops, and restarts after a panic: a scheduler that stops silently goes unnoticed for too
    /// long.
    async fn run(mut self) {
        while let Err(panic) = AssertUnwindSafe(self.run_until_stopped()).catch_unwind().await {
            let panic = crate::error::panic_message(panic.as_ref());
            error!(label = "cron", worker_id = &*self.shared.worker_id, panic, "the scheduler panicked; restarting it");
            self.pause().await;
        }
    }

    /// Reconnects whenever the connection fails.
    async fn run_until_stopped(&mut self) {
        let stop = self.stop.clone();
        while !stop.is_cancelled() {
            let connecting = tokio::select! {
                () = stop.cancelled() => return,
                connecting = self.connect() => connecting,
            };
            let error = match connecting {
                Ok(mut connection) => match self.run_on(&mut connection).await {
                    Ok(()) => return drop(connection.close().await),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if !std::mem::replace(&mut self.warned, true) {
                warn!(
                    label = "cron",
                    worker_id = &*self.shared.worker_id,
                    error = &error as &dyn std::error::Error,
                    "could not add recurring jobs; retrying"
                );
            }
            self.pause().await;
        }
    }

    /// Waits, longer each time, or until the worker stops.
    async fn pause(&mut self) {
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(self.pauses.next()) => {}
        }
    }

    fn succeeded(&mut self) {
        if std::mem::take(&mut self.warned) {
            info!(label = "cron", worker_id = &*self.shared.worker_id, "adding recurring jobs again");
        }
        self.pauses.reset();
    }

    async fn connect(&self) -> Result<PgConnection, Error> {
        self.session.connect().await.context(|| "connect to the database".to_owned())
    }

    /// Runs a statement, within the answer timeout.
    async fn ask<'q>(
        &self,
        connection: &mut PgConnection,
        statement: &Statement,
        bind: impl FnOnce(Query<'q>) -> Query<'q>,
    ) -> Result<Vec<PgRow>, Error> {
        let query = bind(statement.query()).persistent(false);
        let answer = tokio::time::timeout(self.answer_timeout, self.session.fetch_all(connection, query)).await;
        let answer = answer.map_err(|_| Error::NoAnswer { after: self.answer_timeout })?;
        answer.context(|| "schedule recurring jobs".to_owned())
    }

    /// Adds jobs over this connection until the worker stops or the connection fails.
    async fn run_on(&mut self, connection: &mut PgConnection) -> Result<(), Error> {
        while !self.stop.is_cancelled() {
            let checked_at = Instant::now();
            let now = self.now(connection).await?;
            self.update_clock_state(connection, now).await?;
            self.check_older_workers(connection, now).await?;
            match self.add_due_batch(connection, now).await {
                Ok(true) => continue,
                Ok(false) => {}
                // Another worker was adding jobs of the same items.
                Err(error) if error.is_contention() => {
                    debug!(
                        label = "cron",
                        error = &error as &dyn std::error::Error,
                        "conflict with another transaction; retrying"
                    );
                    tokio::time::sleep(SHORTEST_PAUSE.mul_f64(jitter())).await;
                    continue;
                }
                Err(error) => return Err(error),
            }
            self.succeeded();
            let tick = || CronTickContext { worker_id: self.shared.worker_id.clone(), at: now };
            catch_panic("CronTick", self.shared.hooks.emit(CronTick, tick)).await;
            self.publish_items(connection, now).await;
            self.wait_for_next_tick(now, checked_at).await;
        }
        Ok(())
    }

    /// Applies a changed crontab, and notices if the worker was paused or the clock was set back.
    async fn update_clock_state(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        if self.crontabs.has_changed().unwrap_or(false) {
            self.replace_items();
        }
        if self.items.iter().any(Item::is_new) {
            self.begin_new_items(connection, now).await?;
        }
        let Some(mut clock_state) = self.clock_state else {
            self.clock_state = Some(ClockState { since: now, last_check: now });
            return Ok(());
        };
        let passed = now - clock_state.last_check;
        if passed > MAX_LATENESS {
            clock_state.since = clock_state.since.max(minus(now, MAX_LATENESS));
            self.skip_missed(clock_state.since, now, |_| true).await;
        } else if passed < -MAX_LATENESS {
            warn!(
                label = "cron",
                before = %clock_state.last_check,
                %now,
                "the clock was set back: no item fires again for a time at which it has already fired"
            );
            clock_state.since = clock_state.since.min(now);
            for item in &mut self.items {
                item.done = item.done.min(now);
                item.since = item.since.min(Some(now));
            }
        }
        self.clock_state = Some(ClockState { last_check: now, ..clock_state });
        Ok(())
    }

    /// Keeps the state of unchanged items, and replaces the others.
    fn replace_items(&mut self) {
        let mut before: HashMap<String, Item> =
            self.items.drain(..).map(|item| (item.crontab.identifier().to_owned(), item)).collect();
        let item = |crontab: &Arc<Crontab>| match before.remove(crontab.identifier()) {
            Some(item) if item.crontab == *crontab => item,
            _ => Item::new(crontab),
        };
        self.items = self.crontabs.borrow_and_update().iter().map(item).collect();
        self.items_published_at = None;
    }

    /// Registers new items, and decides which of their missed ticks to backfill, and which to leave to older workers.
    async fn begin_new_items(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        self.register_items(connection, now).await?;
        let new = self.items.iter().filter(|item| item.is_new());
        let executed: Vec<DateTime<Utc>> = new.map(|item| item.done).collect();
        self.skip_missed(now, now, Item::is_new).await;
        let until = Instant::now() + LEAVE_TO_OLDER_WORKERS;
        for (item, executed) in self.items.iter_mut().filter(|item| item.is_new()).zip(executed) {
            let tick = tick_of_older_workers(&item.crontab, executed, item.done, now);
            item.left_to_others = tick.map(|tick| LeftToOthers { tick, until });
            item.since = Some(now);
        }
        Ok(())
    }

    /// Takes over the items that are due and whose earlier ticks older workers have added, or had the time to add.
    async fn check_older_workers(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        for item in &mut self.items {
            item.left_to_others = item.left_to_others.filter(|left| Instant::now() < left.until);
        }
        let waiting = self.items.iter().filter(|item| item.left_to_others.is_some() && item.has_due_tick(now));
        let identifiers: Vec<&str> = waiting.map(|item| item.crontab.identifier()).collect();
        if identifiers.is_empty() {
            return Ok(());
        }
        let executions = self.last_executions(connection, &identifiers, now).await?;
        for item in &mut self.items {
            let executed = executions.get(item.crontab.identifier()).copied();
            item.left_to_others = item.left_to_others.filter(|left| executed.is_none_or(|at| at < left.tick));
        }
        Ok(())
    }

    async fn wait_for_next_tick(&self, now: DateTime<Utc>, checked_at: Instant) {
        let next = self.items.iter().filter_map(|item| item.crontab.next_after(item.done.max(now))).min();
        let soon = plus(now, MAX_TICK_CHECK_INTERVAL);
        let older_workers_check = Instant::now() + OLDER_WORKERS_CHECK_INTERVAL;
        let is_waiting = |item: &&Item| item.left_to_others.is_some() && item.has_due_tick(now);
        let waiting = self.items.iter().find(is_waiting).map(|_| older_workers_check);
        let unblocked = self.items.iter().filter_map(|item| item.blocked_until).chain(waiting).min();
        let unblocked = async {
            match unblocked {
                Some(end) => tokio::time::sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = self.clock.wait_until(next.unwrap_or(soon).min(soon), now, checked_at) => {}
            () = unblocked => {}
            // `update_clock_state` applies the changed crontab.
            Ok(()) = async { self.crontabs.clone().changed().await } => {}
        }
    }

    async fn now(&self, connection: &mut PgConnection) -> Result<DateTime<Utc>, Error> {
        match &self.clock {
            Clock::Local => Ok(Utc::now()),
            Clock::Test(clock) => Ok(clock.now()),
            Clock::Database => {
                let rows = self.ask(connection, &self.shared.statements.cron_time, |query| query).await?;
                rows.first().ok_or(sqlx::Error::RowNotFound).and_then(|row| row.try_get("now")).context(read)
            }
        }
    }

    /// Registers the new items that no worker has registered yet, and reads when the others last fired.
    async fn register_items(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        let new = self.items.iter().filter(|item| item.is_new());
        let identifiers: Vec<&str> = new.map(|item| item.crontab.identifier()).collect();
        let known = self.last_executions(connection, &identifiers, now).await?;
        for item in self.items.iter_mut().filter(|item| item.is_new()) {
            let identifier = item.crontab.identifier();
            let since = known.get(identifier).copied().unwrap_or(now);
            if since > plus(now, MAX_LATENESS) {
                warn!(
                    label = "cron",
                    identifier,
                    %since,
                    %now,
                    "the crontab item last fired in the future, and does not fire again before then. \
                     If a clock was wrong, delete the item's row in _private_known_crontabs"
                );
            }
            // Not `since` itself: a tick at exactly that time may not be added yet.
            item.done = just_before(since.min(now));
        }
        Ok(())
    }

    /// Registers the items that are not known, and returns when the others last fired or were registered.
    async fn last_executions(
        &self,
        connection: &mut PgConnection,
        identifiers: &[&str],
        now: DateTime<Utc>,
    ) -> Result<HashMap<String, DateTime<Utc>>, Error> {
        let statement = &self.shared.statements.cron_known;
        let rows = self.ask(connection, statement, |query| query.bind(identifiers).bind(now)).await?;
        rows.iter()
            .map(|row| Ok((row.try_get("identifier")?, crate::db::rows::time(row, "since")?)))
            .collect::<sqlx::Result<_>>()
            .context(read)
    }

    /// Decides which ticks before `on_time` are backfilled, for the selected items. Runs on a blocking thread, because
    /// a large `fillLimit` can mean many ticks to count.
    async fn skip_missed(&mut self, on_time: DateTime<Utc>, now: DateTime<Utc>, is_selected: impl Fn(&Item) -> bool) {
        let items: Vec<(Arc<Crontab>, DateTime<Utc>)> =
            self.items.iter().filter(|item| is_selected(item)).map(|item| (item.crontab.clone(), item.done)).collect();
        let count = move || -> Vec<DateTime<Utc>> {
            items.iter().map(|(crontab, done)| resume_after(crontab, *done, on_time, now)).collect()
        };
        // This fails only if the runtime shuts down.
        let items = self.items.iter_mut().filter(|item| is_selected(item));
        for (item, done) in items.zip(tokio::task::spawn_blocking(count).await.unwrap_or_default()) {
            item.done = done;
        }
    }

    /// Adds the jobs of due ticks, oldest first, up to one batch. Returns false if none was due.
    async fn add_due_batch(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<bool, Error> {
        let mut next: BinaryHeap<Reverse<(DateTime<Utc>, usize)>> = BinaryHeap::new();
        for (nth, item) in self.items.iter_mut().enumerate() {
            item.blocked_until = item.blocked_until.filter(|end| Instant::now() < *end);
            if item.blocked_until.is_none() && item.left_to_others.is_none() {
                let first = item.crontab.next_after(item.done).filter(|first| *first <= now);
                next.extend(first.map(|first| Reverse((first, nth))));
            }
        }
        let mut due = Vec::new();
        while due.len() < LARGEST_BATCH
            && let Some(Reverse((at, item))) = next.pop()
        {
            due.push((at, item));
            let after = self.items[item].crontab.next_after(at).filter(|after| *after <= now);
            next.extend(after.map(|after| Reverse((after, item))));
        }
        if due.is_empty() {
            return Ok(false);
        }
        let on_time = self.clock_state.map_or(now, |clock_state| clock_state.since);
        let mut ticks = Vec::with_capacity(due.len());
        for (at, item) in due {
            let on_time = self.items[item].since.map_or(on_time, |since| on_time.max(since));
            ticks.push(self.tick(item, at, at < on_time).await);
        }
        self.add(connection, &ticks, now).await?;
        Ok(true)
    }

    /// A tick with the job to add, unless a hook rejects it.
    async fn tick(&self, item: usize, at: DateTime<Utc>, backfilled: bool) -> Tick {
        let crontab = &self.items[item].crontab;
        let scheduling = self.shared.hooks.schedule(job(crontab, at, backfilled));
        let job = match catch_panic("BeforeJobSchedule", scheduling).await {
            Some(Ok(job)) => Some(job),
            Some(Err(reason)) => {
                let identifier = crontab.identifier();
                info!(label = "cron", identifier, %at, reason, "a hook rejected the recurring job");
                None
            }
            None => None,
        };
        Tick { item, at, backfilled, job }
    }

    /// Adds the jobs of these ticks, unless another worker already has. If the database rejects a job, or a lock blocks
    /// it, the batch is split until only that job is left out.
    async fn add(&mut self, connection: &mut PgConnection, ticks: &[Tick], now: DateTime<Utc>) -> Result<(), Error> {
        let mut pieces = vec![ticks.iter().collect::<Vec<&Tick>>()];
        while let Some(mut piece) = pieces.pop() {
            piece.retain(|tick| self.items[tick.item].blocked_until.is_none());
            let Err(error) = self.try_to_add(connection, &piece, now).await else { continue };
            let failure = add_failure(&error);
            if failure == AddFailure::Transient {
                return Err(error);
            }
            if piece.len() > 1 {
                let rest = piece.split_off(piece.len() / 2);
                pieces.extend([rest, piece]);
                continue;
            }
            let Some(tick) = piece.pop() else { continue };
            let item = &mut self.items[tick.item];
            let (identifier, error) = (item.crontab.identifier(), &error as &dyn std::error::Error);
            if failure == AddFailure::Locked {
                warn!(
                    label = "cron",
                    identifier,
                    at = %tick.at,
                    error,
                    "another transaction blocks the job of this crontab item; retrying in a minute"
                );
                item.blocked_until = Some(Instant::now() + BLOCKED_PAUSE);
            } else {
                error!(
                    label = "cron",
                    identifier,
                    at = %tick.at,
                    error,
                    "the database rejected the job of this crontab item"
                );
                item.done = tick.at;
            }
        }
        Ok(())
    }

    async fn try_to_add(
        &mut self,
        connection: &mut PgConnection,
        ticks: &[&Tick],
        now: DateTime<Utc>,
    ) -> Result<(), Error> {
        let mut wanted: Vec<(&Tick, &ScheduledJob)> =
            ticks.iter().filter_map(|tick| Some((*tick, tick.job.as_ref()?))).collect();
        // Twice: if the row of an item was deleted, the item is registered again before the second try.
        for is_last in [false, true] {
            if wanted.is_empty() {
                break;
            }
            let rows = self.take(connection, &wanted).await?;
            let mut forgotten = Vec::new();
            for ((tick, job), row) in wanted.into_iter().zip(&rows) {
                if !row.try_get::<bool, _>("is_known").context(read)? {
                    forgotten.push((tick, job));
                } else if let Some(job_id) = row.try_get("job_id").context(read)? {
                    self.emit_added(tick, job, job_id).await;
                }
            }
            if is_last {
                for (tick, _) in &forgotten {
                    let item = &mut self.items[tick.item];
                    let identifier = item.crontab.identifier();
                    error!(
                        label = "cron",
                        identifier,
                        "this role may not update the crontab item in _private_known_crontabs; retrying in a minute"
                    );
                    item.blocked_until = Some(Instant::now() + BLOCKED_PAUSE);
                }
            } else if !forgotten.is_empty() {
                let identifiers: Vec<&str> =
                    forgotten.iter().map(|(tick, _)| self.items[tick.item].crontab.identifier()).collect();
                let statement = &self.shared.statements.cron_known;
                self.ask(connection, statement, |query| query.bind(&identifiers).bind(now)).await?;
            }
            wanted = forgotten;
        }
        for tick in ticks {
            let item = &mut self.items[tick.item];
            if item.blocked_until.is_none() {
                item.done = tick.at;
            }
        }
        Ok(())
    }

    /// Marks the ticks as done and adds their jobs.
    async fn take(
        &self,
        connection: &mut PgConnection,
        wanted: &[(&Tick, &ScheduledJob)],
    ) -> Result<Vec<PgRow>, Error> {
        fn each<'j, T>(wanted: &'j [(&Tick, &ScheduledJob)], of: impl Fn(&'j JobSpec) -> T) -> Vec<T> {
            wanted.iter().map(|(_, job)| of(&job.spec)).collect()
        }
        let identifier = |(tick, _): &(&Tick, _)| self.items[tick.item].crontab.identifier().to_owned();
        let positions: Vec<i32> = wanted.iter().map(|(tick, _)| i32::try_from(tick.item).unwrap_or(i32::MAX)).collect();
        self.ask(connection, &self.shared.statements.cron_ticks, |query| {
            query
                .bind(wanted.iter().map(identifier).collect::<Vec<_>>())
                .bind(wanted.iter().map(|(tick, _)| tick.at).collect::<Vec<_>>())
                .bind(wanted.iter().map(|(_, job)| job.identifier.clone()).collect::<Vec<_>>())
                .bind(wanted.iter().map(|(_, job)| job.payload.to_string()).collect::<Vec<_>>())
                .bind(each(wanted, |spec| spec.queue_name.clone()))
                .bind(each(wanted, |spec| spec.max_attempts))
                .bind(each(wanted, |spec| spec.job_key.clone()))
                .bind(each(wanted, |spec| spec.priority))
                .bind(each(wanted, |spec| spec.job_key_mode.unwrap_or_default().as_str()))
                .bind(each(wanted, |spec| spec.flags.as_ref().map(|flags| json!(flags).to_string())))
                .bind(each(wanted, |spec| spec.run_at))
                .bind(positions)
        })
        .await
    }

    /// Logs the added job, wakes the worker, and emits the hook.
    async fn emit_added(&self, tick: &Tick, job: &ScheduledJob, job_id: i64) {
        let crontab = &self.items[tick.item].crontab;
        info!(
            label = "cron",
            worker_id = &*self.shared.worker_id,
            identifier = crontab.identifier(),
            task_identifier = job.identifier,
            job_id,
            at = %tick.at,
            backfilled = tick.backfilled,
            "recurring job added"
        );
        self.shared.utils.added().notify_one();
        let hooks = &self.shared.hooks;
        let context = || CronJobContext {
            worker_id: self.shared.worker_id.clone(),
            crontab: crontab.clone(),
            at: tick.at,
            job_id,
        };
        if tick.backfilled {
            catch_panic("CronJobBackfilled", hooks.emit(CronJobBackfilled, context)).await;
        } else {
            catch_panic("CronJobScheduled", hooks.emit(CronJobScheduled, context)).await;
        }
    }

    /// Publishes this worker's items, and warns once about each one that another worker defines differently. A worker
    /// that has stopped publishes nothing, so a changed crontab causes no warning.
    async fn publish_items(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) {
        if self.items_published_at.is_some_and(|published| (now - published).abs() < ITEM_COMPARE_INTERVAL) {
            return;
        }
        let is_first = self.items_published_at.is_none();
        let identifiers: Vec<&str> = self.items.iter().map(|item| item.crontab.identifier()).collect();
        let definitions: Vec<String> = self.items.iter().map(|item| item_key(&item.crontab)).collect();
        let statement = &self.shared.statements.cron_items;
        let rows = match self.ask(connection, statement, |query| query.bind(&identifiers).bind(&definitions)).await {
            Ok(rows) => rows,
            // Not fatal: the comparison only helps to find mistakes, and the role may lack the privilege.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                return debug!(label = "cron", error, "could not compare crontab items with other workers");
            }
        };
        self.items_published_at = Some(now);
        let others: HashMap<String, String> =
            rows.iter().filter_map(|row| Some((row.try_get("identifier").ok()?, row.try_get("item").ok()?))).collect();
        for (item, ours) in self.items.iter_mut().zip(definitions) {
            let identifier = item.crontab.identifier();
            let Some(theirs) = others.get(identifier) else { continue };
            if is_first {
                info!(label = "cron", identifier, before = theirs, now = ours, "the crontab item has changed");
            } else if item.conflicting_item.as_ref() != Some(theirs) {
                warn!(
                    label = "cron",
                    identifier,
                    ours,
                    theirs,
                    "another worker has a different crontab item with this identifier, so they suppress each other's \
                     jobs: give one of them another identifier with `?id=…`"
                );
                item.conflicting_item = Some(theirs.clone());
            }
        }
    }
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

fn read() -> String {
    "read the state of recurring jobs".to_owned()
}

/// Why jobs were not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AddFailure {
    /// The database, the network or a missing privilege: all jobs are retried later.
    Transient,
    /// The database rejects one of the jobs.
    Rejected,
    /// Another transaction holds a lock that one of the jobs needs.
    Locked,
}

fn add_failure(error: &Error) -> AddFailure {
    let Error::Database { source: sqlx::Error::Database(error), .. } = error else { return AddFailure::Transient };
    let code = error.code().unwrap_or_default();
    // Lock timeout, statement timeout.
    if ["55P03", "57014"].contains(&&*code) {
        return AddFailure::Locked;
    }
    // Invalid data, a constraint, a limit of the server, our own checks, an exception raised by a trigger.
    if ["22", "23", "54", "GW", "P0001"].iter().any(|class| code.starts_with(class)) {
        return AddFailure::Rejected;
    }
    AddFailure::Transient
}

fn plus(time: DateTime<Utc>, length: TimeDelta) -> DateTime<Utc> {
    time.checked_add_signed(length).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

fn minus(time: DateTime<Utc>, length: TimeDelta) -> DateTime<Utc> {
    time.checked_sub_signed(length).unwrap_or(DateTime::<Utc>::MIN_UTC)
}

fn just_before(time: DateTime<Utc>) -> DateTime<Utc> {
    minus(time, TimeDelta::microseconds(1))
}

/// The time after which to add the ticks of an item that is done up to `done`: all ticks from `on_time` on, and the
/// missed ones that its `fill` and `fillLimit` cover.
fn resume_after(crontab: &Crontab, done: DateTime<Utc>, on_time: DateTime<Utc>, now: DateTime<Utc>) -> DateTime<Utc> {
    if done >= on_time {
        return done;
    }
    let fill = crontab.options.fill.map(|fill| fill.as_duration()).unwrap_or_default();
    let after = done.max(just_before(minus(now, fill).min(on_time)));
    let Some(limit) = crontab.options.fill_limit else { return after };
    let newest = crontab.fire_times_before(on_time).take_while(|at| *at > after).take(limit as usize);
    after.max(just_before(newest.last().unwrap_or(on_time)))
}

/// The newest tick that a new worker skips and that a worker which was running then may still add. `executed` is when
/// the item last fired, and `done` is up to when the new worker skips its ticks.
fn tick_of_older_workers(
    crontab: &Crontab,
    executed: DateTime<Utc>,
    done: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Option<DateTime<Utc>> {
    // `executed` is just before the last execution, which is done.
    let executed = plus(executed, TimeDelta::microseconds(1)).max(minus(now, MAX_LATENESS));
    crontab.fire_times_before(now).next().filter(|tick| executed < *tick && *tick <= done)
}

/// The part of an item's definition that all workers must agree on.
fn item_key(crontab: &Crontab) -> String {
    let zone = crontab.options.tz.map(|zone| format!(" {zone}")).unwrap_or_default();
    format!("{}{zone} {}", crontab.schedule, crontab.task_identifier)
}

/// The job of a tick.
fn job(crontab: &Crontab, at: DateTime<Utc>, backfilled: bool) -> ScheduledJob {
    let mut payload: Map<String, Value> = crontab.payload.clone().unwrap_or_default();
    let ts = at.to_rfc3339_opts(SecondsFormat::Millis, true);
    payload.insert("_cron".to_owned(), json!({"ts": ts, "backfilled": backfilled}));
    let options = &crontab.options;
    ScheduledJob {
        identifier: crontab.task_identifier.clone(),
        payload: Value::Object(payload),
        spec: JobSpec {
            queue_name: options.queue.clone(),
            run_at: Some(at),
            max_attempts: options.max_attempts,
            job_key: options.job_key.clone(),
            job_key_mode: options.job_key_mode.map(|mode| match mode {
                CrontabJobKeyMode::Replace => JobKeyMode::Replace,
                CrontabJobKeyMode::PreserveRunAt => JobKeyMode::PreserveRunAt,
            }),
            priority: options.priority,
            ..JobSpec::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(text: &str) -> DateTime<Utc> {
        format!("2026-03-10T{text}Z").parse().unwrap()
    }

    /// The ticks of an item that is done up to `done`, for a worker that has run since `on_time`.
    fn ticks(line: &str, done: &str, on_time: &str, now: &str) -> Vec<String> {
        let crontab: Crontab = line.parse().unwrap();
        let (done, on_time, now) = (time(done), time(on_time), time(now));
        let after = resume_after(&crontab, done, on_time, now);
        let times = crontab.fire_times(after).take_while(|at| *at <= now);
        times.map(|at| at.format("%H:%M:%S").to_string()).collect()
    }

    #[test]
    fn a_running_worker_adds_ticks_when_they_are_due() {
        assert_eq!(ticks("* * * * * t", "08:00:00", "07:58:00", "08:02:10"), ["08:01:00", "08:02:00"]);
        assert!(ticks("* * * * * t", "08:00:00", "07:58:00", "08:00:59").is_empty());
    }

    #[test]
    fn missed_ticks_are_added_as_far_back_as_the_items_fill_reaches() {
        assert_eq!(ticks("0 * * * * t", "05:30:00", "09:00:30", "09:00:30"), Vec::<String>::new());
        assert_eq!(ticks("0 * * * * t ?fill=2h", "05:30:00", "09:00:00", "09:00:30"), ["08:00:00", "09:00:00"]);
        assert_eq!(
            ticks("0 * * * * t ?fill=2h", "05:30:00", "09:00:00", "09:00:00"),
            ["07:00:00", "08:00:00", "09:00:00"]
        );
        assert_eq!(
            ticks("0 * * * * t ?fill=1w", "06:30:00", "09:00:00", "09:00:30"),
            ["07:00:00", "08:00:00", "09:00:00"]
        );
    }

    #[test]
    fn a_new_worker_leaves_a_recent_tick_to_older_workers() {
        let left = |line: &str, executed: &str, now: &str| {
            let crontab: Crontab = line.parse().unwrap();
            let (executed, now) = (just_before(time(executed)), time(now));
            let done = resume_after(&crontab, executed, now, now);
            tick_of_older_workers(&crontab, executed, done, now).map(|at| at.format("%H:%M:%S").to_string())
        };
        assert_eq!(left("* * * * * t", "08:00:00", "08:02:30").as_deref(), Some("08:02:00"));
        assert_eq!(left("* * * * * t", "08:02:00", "08:02:30"), None, "it was added");
        assert_eq!(left("* * * * * t", "08:02:10", "08:02:30"), None, "the item was registered after it");
        assert_eq!(left("* * * * * t", "08:01:00", "08:02:00"), None, "the tick of now is this worker's own");
        assert_eq!(left("0 * * * * t", "05:00:00", "08:06:00"), None, "an older worker would not add it any more");
        assert_eq!(left("* * * * * t ?fill=1h", "08:00:00", "08:02:30"), None, "this worker adds it");
    }

    #[test]
    fn fill_limit_adds_only_the_newest_missed_ticks() {
        let line = "0 * * * * t ?fill=1d&fillLimit=2";
        assert_eq!(ticks(line, "01:30:00", "09:30:00", "09:30:00"), ["08:00:00", "09:00:00"]);
        assert_eq!(ticks(line, "08:30:00", "09:30:00", "09:30:00"), ["09:00:00"]);
        assert_eq!(
            ticks(line, "01:30:00", "08:30:00", "09:30:00"),
            ["07:00:00", "08:00:00", "09:00:00"],
            "and the ticks that are on time"
        );
        assert!(ticks(line, "09:10:00", "09:30:00", "09:30:00").is_empty());
    }

    #[test]
    fn a_fill_longer_than_time_itself_reaches_back_to_the_last_execution() {
        let line = "0 * * * * t ?fill=4294967295w";
        assert_eq!(ticks(line, "06:30:00", "09:00:00", "09:00:30"), ["07:00:00", "08:00:00", "09:00:00"]);
    }

    #[test]
    fn a_clock_that_is_set_back_repeats_no_tick() {
        assert!(ticks("* * * * * t ?fill=1d", "12:00:00", "09:00:00", "10:00:00").is_empty());
    }
}
