//! The clock: adds the jobs of crontab items when they are due, once among all workers of both kinds, and makes up for
//! those that were missed.
//!
//! Which ticks those are is decided without a database (`resume_after`). A tick is taken by moving the item's
//! `last_execution` forward in the statement that adds its job. When an item fires is the business of the crate
//! `graphile_worker_crontab`; how items are described in code, of `cron_items`.

use crate::Error;
use crate::context::Surroundings;
use crate::db::Statement;
use crate::error::Doing;
use crate::exchange::jitter;
use crate::hooks::{
    CronJobBackfilled, CronJobContext, CronJobScheduled, CronTick, CronTickContext, ScheduledJob, guarded,
};
use crate::job::{JobKeyMode, JobSpec};
use crate::options::Settings;
use crate::shutdown::Shutdown;
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use futures_util::FutureExt;
use graphile_worker_crontab::{Crontab, CrontabJobKeyMode};
use serde_json::{Map, Value, json};
use sqlx::postgres::{PgConnectOptions, PgRow};
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

/// A tick that a running worker comes to so late is still on time: the database was away for a moment. If it has not
/// looked at the clock for longer, what was due before was missed, as if no worker had run, and is made up for where the
/// item says so (`fill`). Work that takes long is no absence: the clock is looked at after every statement.
const LATEST: TimeDelta = TimeDelta::minutes(5);

/// The clock is looked at so often, also if nothing is due: it may have been changed, or the machine have slept.
const LOOK_INTERVAL: TimeDelta = TimeDelta::minutes(1);

/// Workers compare their items so often.
const SAY_INTERVAL: TimeDelta = TimeDelta::seconds(30);

/// So many jobs are added in one statement.
const LARGEST_BATCH: usize = 500;

/// How long the database may take to answer; its own limit for a statement is less.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a statement may wait for what somebody else has locked (a job with the item's key, say), and how long the
/// item that had to wait is then left alone, so that the others are not kept.
const LOCK_TIMEOUT: (&str, &str) = ("lock_timeout", "5s");
const REST: Duration = Duration::from_secs(60);

/// How long to wait for the database when it is away.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How long a tick that is just being added may take when the worker stops.
const TIME_TO_STOP: Duration = Duration::from_secs(5);

/// A clock that stands still until it is set: for tests of what recurs, which then need not wait.
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
    /// A clock that shows this time.
    pub fn at(now: DateTime<Utc>) -> TestClock {
        TestClock(Arc::new(watch::Sender::new(now)))
    }

    /// Sets it, forward or back.
    pub fn set(&self, now: DateTime<Utc>) {
        self.0.send_replace(now);
    }

    /// What it shows.
    pub fn now(&self) -> DateTime<Utc> {
        *self.0.borrow()
    }

    /// Returns when it shows this time or a later one, or one before that at which we looked.
    async fn reaches(&self, time: DateTime<Utc>, looked: DateTime<Utc>) {
        // The sender lives as long as this clock.
        let _ = self.0.subscribe().wait_for(|now| *now >= time || *now < looked).await;
    }
}

/// Whose time it is.
#[derive(Clone)]
pub(crate) enum Clock {
    Database,
    Local,
    Test(TestClock),
}

/// The items of a worker, and how far each has come.
struct Cron {
    items: Vec<Item>,
    /// What they are to be; may be replaced.
    crontabs: watch::Receiver<Vec<Arc<Crontab>>>,
    clock: Clock,
    options: PgConnectOptions,
    surroundings: Arc<Surroundings>,
    stop: CancellationToken,
    attention: Option<Attention>,
    /// When it last said what its items are.
    said_items: Option<DateTime<Utc>>,
    /// Whether the log says that the database is away, and how long to wait for it next time.
    complained: bool,
    pause: Duration,
}

struct Item {
    crontab: Arc<Crontab>,
    /// Since when it is looked after; none: not yet.
    since: Option<DateTime<Utc>>,
    /// All its ticks up to then are dealt with.
    done: DateTime<Utc>,
    /// Left alone until then.
    rests_until: Option<Instant>,
    /// What another worker says it is, once we have complained.
    disputed: Option<String>,
}

impl Item {
    fn new(crontab: &Arc<Crontab>) -> Item {
        let crontab = crontab.clone();
        Item { crontab, since: None, done: DateTime::<Utc>::MAX_UTC, rests_until: None, disputed: None }
    }

    fn is_new(&self) -> bool {
        self.since.is_none()
    }
}

/// When we have looked at the clock.
#[derive(Clone, Copy)]
struct Attention {
    /// What was due before was missed.
    since: DateTime<Utc>,
    last_look: DateTime<Utc>,
}

/// A moment at which an item fires.
struct Tick {
    item: usize,
    at: DateTime<Utc>,
    backfilled: bool,
    /// None: a hook did not want it.
    job: Option<ScheduledJob>,
}

/// The clock of a running worker. Stops when this is dropped.
pub(crate) struct RunningCron {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl RunningCron {
    /// Keeps the time beside the worker, until that is asked to stop.
    pub(crate) fn start(
        settings: &Settings,
        mut crontabs: watch::Receiver<Vec<Arc<Crontab>>>,
        surroundings: Arc<Surroundings>,
        shutdown: &Shutdown,
    ) -> RunningCron {
        let items = crontabs.borrow_and_update().iter().map(Item::new).collect();
        let name = format!("graphile_worker {} cron", surroundings.worker_id);
        let mut options = settings.connect_options.clone().application_name(&name);
        if settings.prepared_statements {
            options = options.options([LOCK_TIMEOUT]);
        }
        let stop = shutdown.leaving.child_token();
        let cron = Cron {
            items,
            crontabs,
            clock: settings.cron_clock.clone(),
            options,
            surroundings,
            stop: stop.clone(),
            attention: None,
            said_items: None,
            complained: false,
            pause: SHORTEST_PAUSE,
        };
        RunningCron { stop, task: tokio::spawn(cron.keep_time()) }
    }

    /// Lets it finish what it has begun, unless somebody insists.
    pub(crate) async fn stop(mut self, shutdown: &Shutdown) {
        self.stop.cancel();
        tokio::select! {
            _ = &mut self.task => {}
            () = shutdown.insisted.cancelled() => {}
            () = tokio::time::sleep(TIME_TO_STOP) => {}
        }
    }
}

impl Drop for RunningCron {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Cron {
    /// Keeps the time until it is told to stop, whatever happens: a crontab that has silently stopped is found out too
    /// late.
    async fn keep_time(mut self) {
        while let Err(panic) = AssertUnwindSafe(self.keep_time_until_stopped()).catch_unwind().await {
            let panic = crate::execute::panic_message(panic.as_ref());
            error!(label = "cron", worker_id = &*self.surroundings.worker_id, panic, "panicked; going on");
            self.rest().await;
        }
    }

    /// However often the database goes away.
    async fn keep_time_until_stopped(&mut self) {
        let stop = self.stop.clone();
        while !stop.is_cancelled() {
            let connecting = tokio::select! {
                () = stop.cancelled() => return,
                connecting = self.connect() => connecting,
            };
            let error = match connecting {
                Ok(mut connection) => match self.keep_time_on(&mut connection).await {
                    Ok(()) => return drop(connection.close().await),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if !std::mem::replace(&mut self.complained, true) {
                warn!(
                    label = "cron",
                    worker_id = &*self.surroundings.worker_id,
                    error = &error as &dyn std::error::Error,
                    "cannot schedule recurring jobs: trying again until it works"
                );
            }
            self.rest().await;
        }
    }

    /// Waits, longer each time, or until it is told to stop.
    async fn rest(&mut self) {
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(self.pause.mul_f64(0.5 + jitter())) => {}
        }
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    fn works(&mut self) {
        if std::mem::take(&mut self.complained) {
            info!(label = "cron", worker_id = &*self.surroundings.worker_id, "scheduling recurring jobs again");
        }
        self.pause = SHORTEST_PAUSE;
    }

    async fn connect(&self) -> Result<PgConnection, Error> {
        let connecting = tokio::time::timeout(ANSWER_TIMEOUT, PgConnection::connect_with(&self.options)).await;
        connecting
            .map_err(|_| Error::NoAnswer { after: ANSWER_TIMEOUT })?
            .doing(|| "connect to the database".to_owned())
    }

    /// Until it is told to stop, or the connection fails.
    async fn keep_time_on(&mut self, connection: &mut PgConnection) -> Result<(), Error> {
        while !self.stop.is_cancelled() {
            let looked = Instant::now();
            let now = self.now(connection).await?;
            self.notice(connection, now).await?;
            match self.add_some_that_are_due(connection, now).await {
                Ok(true) => continue,
                Ok(false) => {}
                // Another worker was at the same items: nothing is wrong.
                Err(error) if error.is_contention() => {
                    debug!(label = "cron", error = &error as &dyn std::error::Error, "once more");
                    tokio::time::sleep(SHORTEST_PAUSE.mul_f64(jitter())).await;
                    continue;
                }
                Err(error) => return Err(error),
            }
            self.works();
            let tick = || CronTickContext { worker_id: self.surroundings.worker_id.clone(), at: now };
            guarded("CronTick", self.surroundings.hooks.emit(CronTick, tick)).await;
            self.say_items(connection, now).await;
            self.wait_for_something_to_do(now, looked).await;
        }
        Ok(())
    }

    /// Begins; or finds that it was away, or that the clock was put back.
    async fn notice(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        if self.crontabs.has_changed().unwrap_or(false) {
            self.replace_items();
        }
        if self.items.iter().any(Item::is_new) {
            self.begin_new_items(connection, now).await?;
        }
        let Some(mut attention) = self.attention else {
            self.attention = Some(Attention { since: now, last_look: now });
            return Ok(());
        };
        let passed = now - attention.last_look;
        if passed > LATEST {
            attention.since = attention.since.max(minus(now, LATEST));
            self.skip_what_is_too_old(attention.since, now, |_| true).await;
        } else if passed < -LATEST {
            warn!(label = "cron", before = %attention.last_look, %now, "the clock was put back: items are not due again before they were last");
            attention.since = attention.since.min(now);
            for item in &mut self.items {
                item.done = item.done.min(now);
                item.since = item.since.min(Some(now));
            }
        }
        self.attention = Some(Attention { last_look: now, ..attention });
        Ok(())
    }

    /// Goes on with the items that are still there, and begins with those that are new or have changed.
    fn replace_items(&mut self) {
        let mut before: HashMap<String, Item> =
            self.items.drain(..).map(|item| (item.crontab.identifier().to_owned(), item)).collect();
        let item = |crontab: &Arc<Crontab>| match before.remove(crontab.identifier()) {
            Some(item) if item.crontab == *crontab => item,
            _ => Item::new(crontab),
        };
        self.items = self.crontabs.borrow_and_update().iter().map(item).collect();
        self.said_items = None;
    }

    /// Begins with items as a worker does that is started with them.
    async fn begin_new_items(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        self.make_known(connection, now).await?;
        self.skip_what_is_too_old(now, now, Item::is_new).await;
        for item in &mut self.items {
            item.since.get_or_insert(now);
        }
        Ok(())
    }

    async fn wait_for_something_to_do(&self, now: DateTime<Utc>, looked: Instant) {
        let next = self.items.iter().filter_map(|item| item.crontab.next_after(item.done.max(now))).min();
        let soon = plus(now, LOOK_INTERVAL);
        let rested = self.items.iter().filter_map(|item| item.rests_until).min();
        let rested = async {
            match rested {
                Some(end) => tokio::time::sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = self.clock.wait_until(next.unwrap_or(soon).min(soon), now, looked) => {}
            () = rested => {}
            // Whether they have changed is found out when the clock has been looked at.
            Ok(()) = async { self.crontabs.clone().changed().await } => {}
        }
    }

    async fn now(&self, connection: &mut PgConnection) -> Result<DateTime<Utc>, Error> {
        match &self.clock {
            Clock::Local => Ok(Utc::now()),
            Clock::Test(clock) => Ok(clock.now()),
            Clock::Database => {
                let rows = ask(connection, &self.surroundings.statements.cron_time, |query| query).await?;
                rows.first().ok_or(sqlx::Error::RowNotFound).and_then(|row| row.try_get("now")).doing(read)
            }
        }
    }

    /// Writes down those of the new items that nobody knew, and learns how far the others have come.
    async fn make_known(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        let new = self.items.iter().filter(|item| item.is_new());
        let identifiers: Vec<&str> = new.map(|item| item.crontab.identifier()).collect();
        let statement = &self.surroundings.statements.cron_known;
        let rows = ask(connection, statement, |query| query.bind(&identifiers).bind(now)).await?;
        let known: HashMap<String, DateTime<Utc>> = rows
            .iter()
            .map(|row| Ok((row.try_get("identifier")?, crate::db::time(row, "since")?)))
            .collect::<sqlx::Result<_>>()
            .doing(read)?;
        for item in self.items.iter_mut().filter(|item| item.is_new()) {
            let identifier = item.crontab.identifier();
            let since = known.get(identifier).copied().unwrap_or(now);
            if since > plus(now, LATEST) {
                warn!(label = "cron", identifier, %since, %now, "the crontab item was last due in the future, and is not due again before: was a clock wrong? To begin anew, delete its row in _private_known_crontabs");
            }
            // The tick of that very moment counts, if it has not been taken.
            item.done = just_before(since.min(now));
        }
        Ok(())
    }

    /// Decides which ticks of before `on_time` are made up for, of the items that are `meant`. On a thread of its own:
    /// with a large `fillLimit` there may be many to count.
    async fn skip_what_is_too_old(
        &mut self,
        on_time: DateTime<Utc>,
        now: DateTime<Utc>,
        meant: impl Fn(&Item) -> bool,
    ) {
        let items: Vec<(Arc<Crontab>, DateTime<Utc>)> =
            self.items.iter().filter(|item| meant(item)).map(|item| (item.crontab.clone(), item.done)).collect();
        let count = move || -> Vec<DateTime<Utc>> {
            items.iter().map(|(crontab, done)| resume_after(crontab, *done, on_time, now)).collect()
        };
        // It cannot fail but with the runtime.
        let items = self.items.iter_mut().filter(|item| meant(item));
        for (item, done) in items.zip(tokio::task::spawn_blocking(count).await.unwrap_or_default()) {
            item.done = done;
        }
    }

    /// Adds the jobs of ticks up to now, the oldest first, as many as go into one statement. Says whether there are more.
    async fn add_some_that_are_due(
        &mut self,
        connection: &mut PgConnection,
        now: DateTime<Utc>,
    ) -> Result<bool, Error> {
        let mut next: BinaryHeap<Reverse<(DateTime<Utc>, usize)>> = BinaryHeap::new();
        for (nth, item) in self.items.iter_mut().enumerate() {
            item.rests_until = item.rests_until.filter(|end| Instant::now() < *end);
            if item.rests_until.is_none() {
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
        let on_time = self.attention.map_or(now, |attention| attention.since);
        let mut ticks = Vec::with_capacity(due.len());
        for (at, item) in due {
            let on_time = self.items[item].since.map_or(on_time, |since| on_time.max(since));
            ticks.push(self.tick(item, at, at < on_time).await);
        }
        self.add(connection, &ticks, now).await?;
        Ok(true)
    }

    /// A tick, with the job that it is to add.
    async fn tick(&self, item: usize, at: DateTime<Utc>, backfilled: bool) -> Tick {
        let crontab = &self.items[item].crontab;
        let scheduling = self.surroundings.hooks.schedule(job(crontab, at, backfilled));
        let job = match guarded("BeforeJobSchedule", scheduling).await {
            Some(Ok(job)) => Some(job),
            Some(Err(reason)) => {
                info!(label = "cron", identifier = crontab.identifier(), %at, reason, "a hook did not let the job be added");
                None
            }
            None => None,
        };
        Tick { item, at, backfilled, job }
    }

    /// Adds the jobs of these ticks, as far as nobody else has. One that the database does not take, or that has to wait
    /// for somebody, keeps no other from being added.
    async fn add(&mut self, connection: &mut PgConnection, ticks: &[Tick], now: DateTime<Utc>) -> Result<(), Error> {
        let mut pieces = vec![ticks.iter().collect::<Vec<&Tick>>()];
        while let Some(mut piece) = pieces.pop() {
            piece.retain(|tick| self.items[tick.item].rests_until.is_none());
            let Err(error) = self.try_to_add(connection, &piece, now).await else { continue };
            let fault = fault(&error);
            if fault == Fault::Nobodys {
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
            if fault == Fault::Somebodys {
                warn!(label = "cron", identifier, at = %tick.at, error, "the job of this crontab item has to wait for somebody: trying again in a minute");
                item.rests_until = Some(Instant::now() + REST);
            } else {
                error!(label = "cron", identifier, at = %tick.at, error, "the database does not take the job of this crontab item");
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
        // A second time for items whose row somebody has deleted: without it, there is nothing to take a tick by.
        for is_last in [false, true] {
            if wanted.is_empty() {
                break;
            }
            let rows = self.take(connection, &wanted).await?;
            let mut forgotten = Vec::new();
            for ((tick, job), row) in wanted.into_iter().zip(&rows) {
                if !row.try_get::<bool, _>("is_known").doing(read)? {
                    forgotten.push((tick, job));
                } else if let Some(job_id) = row.try_get("job_id").doing(read)? {
                    self.tell(tick, job, job_id).await;
                }
            }
            if is_last {
                for (tick, _) in &forgotten {
                    let item = &mut self.items[tick.item];
                    let identifier = item.crontab.identifier();
                    error!(
                        label = "cron",
                        identifier,
                        "this role may not change the row of the crontab item in _private_known_crontabs: trying again in a minute"
                    );
                    item.rests_until = Some(Instant::now() + REST);
                }
            } else if !forgotten.is_empty() {
                let identifiers: Vec<&str> =
                    forgotten.iter().map(|(tick, _)| self.items[tick.item].crontab.identifier()).collect();
                let statement = &self.surroundings.statements.cron_known;
                ask(connection, statement, |query| query.bind(&identifiers).bind(now)).await?;
            }
            wanted = forgotten;
        }
        for tick in ticks {
            let item = &mut self.items[tick.item];
            if item.rests_until.is_none() {
                item.done = tick.at;
            }
        }
        Ok(())
    }

    /// Takes the ticks and adds their jobs.
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
        ask(connection, &self.surroundings.statements.cron_ticks, |query| {
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

    async fn tell(&self, tick: &Tick, job: &ScheduledJob, job_id: i64) {
        let crontab = &self.items[tick.item].crontab;
        info!(
            label = "cron",
            worker_id = &*self.surroundings.worker_id,
            identifier = crontab.identifier(),
            task_identifier = job.identifier,
            job_id,
            at = %tick.at,
            backfilled = tick.backfilled,
            "recurring job added"
        );
        self.surroundings.utils.added().notify_one();
        let hooks = &self.surroundings.hooks;
        let context = || CronJobContext {
            worker_id: self.surroundings.worker_id.clone(),
            crontab: crontab.clone(),
            at: tick.at,
            job_id,
        };
        if tick.backfilled {
            guarded("CronJobBackfilled", hooks.emit(CronJobBackfilled, context)).await;
        } else {
            guarded("CronJobScheduled", hooks.emit(CronJobScheduled, context)).await;
        }
    }

    /// Says what our items are, and complains once about each that another worker means something else by. A worker
    /// that is gone says nothing any more: a crontab that was changed is no dispute.
    async fn say_items(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) {
        if self.said_items.is_some_and(|said| (now - said).abs() < SAY_INTERVAL) {
            return;
        }
        let is_first = self.said_items.is_none();
        let identifiers: Vec<&str> = self.items.iter().map(|item| item.crontab.identifier()).collect();
        let meanings: Vec<String> = self.items.iter().map(|item| meaning(&item.crontab)).collect();
        let statement = &self.surroundings.statements.cron_items;
        let rows = match ask(connection, statement, |query| query.bind(&identifiers).bind(&meanings)).await {
            Ok(rows) => rows,
            // It only helps to find mistakes: where the role may not, ticks are added all the same.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                return debug!(label = "cron", error, "cannot compare the crontab with others'");
            }
        };
        self.said_items = Some(now);
        let others: HashMap<String, String> =
            rows.iter().filter_map(|row| Some((row.try_get("identifier").ok()?, row.try_get("item").ok()?))).collect();
        for (item, ours) in self.items.iter_mut().zip(meanings) {
            let identifier = item.crontab.identifier();
            let Some(theirs) = others.get(identifier) else { continue };
            if is_first {
                info!(label = "cron", identifier, before = theirs, now = ours, "the crontab item has changed");
            } else if item.disputed.as_ref() != Some(theirs) {
                warn!(
                    label = "cron",
                    identifier,
                    ours,
                    theirs,
                    "another worker has another crontab item of this identifier, and ticks of one stand for both: give one of them another with `?id=…`"
                );
                item.disputed = Some(theirs.clone());
            }
        }
    }
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

/// Asks the database, for which it has a minute.
async fn ask<'q>(
    connection: &mut PgConnection,
    statement: &Statement,
    bind: impl FnOnce(Query<'q>) -> Query<'q>,
) -> Result<Vec<PgRow>, Error> {
    let query = bind(sqlx::query(statement.sql())).persistent(false);
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, query.fetch_all(connection)).await;
    answer.map_err(|_| Error::NoAnswer { after: ANSWER_TIMEOUT })?.doing(|| "schedule recurring jobs".to_owned())
}

fn read() -> String {
    "read what the database says of recurring jobs".to_owned()
}

/// Whose fault it is that ticks were not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The database's, the network's, a missing right's: all of them wait until that is over.
    Nobodys,
    /// One of the jobs is such that it cannot be added.
    Items,
    /// One of the jobs has to wait for a lock that somebody else holds.
    Somebodys,
}

fn fault(error: &Error) -> Fault {
    let Error::Database { source: sqlx::Error::Database(error), .. } = error else { return Fault::Nobodys };
    let code = error.code().unwrap_or_default();
    // A lock did not come in time, the statement took too long.
    if ["55P03", "57014"].contains(&&*code) {
        return Fault::Somebodys;
    }
    // Wrong data, a constraint, a limit of the server's, our own refusals, a trigger's.
    if ["22", "23", "54", "GW", "P0001"].iter().any(|class| code.starts_with(class)) {
        return Fault::Items;
    }
    Fault::Nobodys
}

impl Clock {
    /// Returns at that time, or earlier: whoever waits looks again. It was `now` when we looked.
    async fn wait_until(&self, time: DateTime<Utc>, now: DateTime<Utc>, looked: Instant) {
        match self {
            Clock::Test(clock) => clock.reaches(time, now).await,
            Clock::Database | Clock::Local => {
                tokio::time::sleep_until(looked + (time - now).to_std().unwrap_or_default()).await;
            }
        }
    }
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

/// After which moment ticks of an item are to be added that is done up to `done`: those that are on time, and of those
/// that were missed the ones that are to be made up for.
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

/// What an item means, as far as two workers have to agree on it.
fn meaning(crontab: &Crontab) -> String {
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

    /// The ticks of an item that was dealt with until `done`, for a worker that has run since `on_time`.
    fn ticks(line: &str, done: &str, on_time: &str, now: &str) -> Vec<String> {
        let crontab: Crontab = line.parse().unwrap();
        let (done, on_time, now) = (time(done), time(on_time), time(now));
        let after = resume_after(&crontab, done, on_time, now);
        let times = crontab.fire_times(after).take_while(|at| *at <= now);
        times.map(|at| at.format("%H:%M:%S").to_string()).collect()
    }

    #[test]
    fn ticks_that_a_running_worker_comes_to_are_added() {
        assert_eq!(ticks("* * * * * t", "08:00:00", "07:58:00", "08:02:10"), ["08:01:00", "08:02:00"]);
        assert!(ticks("* * * * * t", "08:00:00", "07:58:00", "08:00:59").is_empty());
    }

    #[test]
    fn ticks_that_were_missed_are_added_as_far_back_as_the_item_says() {
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
    fn of_the_missed_ticks_only_the_newest_are_added_where_the_item_says_so() {
        let line = "0 * * * * t ?fill=1d&fillLimit=2";
        assert_eq!(ticks(line, "01:30:00", "09:30:00", "09:30:00"), ["08:00:00", "09:00:00"]);
        assert_eq!(ticks(line, "08:30:00", "09:30:00", "09:30:00"), ["09:00:00"]);
        assert_eq!(
            ticks(line, "01:30:00", "08:30:00", "09:30:00"),
            ["07:00:00", "08:00:00", "09:00:00"],
            "and what is on time"
        );
        assert!(ticks(line, "09:10:00", "09:30:00", "09:30:00").is_empty());
    }

    #[test]
    fn a_fill_that_is_longer_than_time_reaches_back_to_what_is_known() {
        let line = "0 * * * * t ?fill=4294967295w";
        assert_eq!(ticks(line, "06:30:00", "09:00:00", "09:00:30"), ["07:00:00", "08:00:00", "09:00:00"]);
    }

    #[test]
    fn a_clock_that_was_put_back_repeats_nothing() {
        assert!(ticks("* * * * * t ?fill=1d", "12:00:00", "09:00:00", "10:00:00").is_empty());
    }
}
