//! The clock: adds the jobs of crontab items when they are due, once among all workers of both kinds, and makes up for
//! those that were missed.
//!
//! Which ticks those are is decided without a database (`first_to_add`). A tick is taken by moving the item's
//! `last_execution` forward in the statement that adds its job. When an item fires is the business of the crate
//! `graphile_worker_crontab`; how items are described in code, of `cron_items`.

use crate::Error;
use crate::context::Surroundings;
use crate::db::Statement;
use crate::error::Doing;
use crate::exchange::jitter;
use crate::hooks::{CronJobBackfilled, CronJobContext, CronJobScheduled, CronTick, CronTickContext, ScheduledJob};
use crate::job::{JobKeyMode, JobSpec};
use crate::options::Settings;
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use futures_util::FutureExt;
use graphile_worker_crontab::{Crontab, CrontabJobKeyMode};
use serde_json::{Map, Value, json};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection, Row};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

/// A tick that a running worker comes to so late is still on time: a tick before it took long, or the database was away
/// for a moment. What is later was missed, as if no worker had run, and is made up for where the item says so (`fill`).
const LATEST: TimeDelta = TimeDelta::minutes(5);

/// The clock is looked at so often, also if nothing is due: it may have been changed, or the machine have slept.
const LOOK_INTERVAL: TimeDelta = TimeDelta::minutes(1);

/// Workers compare their items so often, if any is due.
const SAY_INTERVAL: TimeDelta = TimeDelta::seconds(30);

/// So many jobs are added in one statement.
const LARGEST_BATCH: usize = 500;

/// How long the database may take to answer; its own limit for a statement is less.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

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

    /// Returns when it shows this time or a later one, or was put back.
    async fn reaches(&self, time: DateTime<Utc>) {
        let mut changes = self.0.subscribe();
        let before = *changes.borrow_and_update();
        // The sender lives as long as this clock.
        let _ = changes.wait_for(|now| *now >= time || *now < before).await;
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
    clock: Clock,
    options: PgConnectOptions,
    surroundings: Arc<Surroundings>,
    stop: CancellationToken,
    /// Since when it keeps the time: what was due before was missed.
    started: Option<DateTime<Utc>>,
    /// When it last said what its items are.
    said_items: Option<DateTime<Utc>>,
    /// Whether the log says that the database is away, and how long to wait for it next time.
    complained: bool,
    pause: Duration,
}

struct Item {
    crontab: Arc<Crontab>,
    /// All its ticks up to then are dealt with.
    done: DateTime<Utc>,
    /// What another worker says it is, once we have complained.
    disputed: Option<String>,
}

/// A moment at which an item fires.
struct Tick {
    item: usize,
    at: DateTime<Utc>,
    backfilled: bool,
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
        surroundings: Arc<Surroundings>,
        asked: &CancellationToken,
    ) -> RunningCron {
        let item =
            |crontab: &Arc<Crontab>| Item { crontab: crontab.clone(), done: DateTime::<Utc>::MAX_UTC, disputed: None };
        let name = format!("graphile_worker {} cron", surroundings.worker_id);
        let stop = asked.child_token();
        let cron = Cron {
            items: settings.crontabs.iter().map(item).collect(),
            clock: settings.cron_clock.clone(),
            options: settings.connect_options.clone().application_name(&name),
            surroundings,
            stop: stop.clone(),
            started: None,
            said_items: None,
            complained: false,
            pause: SHORTEST_PAUSE,
        };
        RunningCron { stop, task: tokio::spawn(cron.keep_time()) }
    }

    /// Lets it finish what it has begun.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        let _ = tokio::time::timeout(TIME_TO_STOP, &mut self.task).await;
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
        while AssertUnwindSafe(self.keep_time_until_stopped()).catch_unwind().await.is_err() {
            error!(label = "cron", worker_id = &*self.surroundings.worker_id, "a hook panicked; going on");
            tokio::time::sleep(SHORTEST_PAUSE).await;
        }
    }

    /// However often the database goes away.
    async fn keep_time_until_stopped(&mut self) {
        while !self.stop.is_cancelled() {
            let error = match self.connect().await {
                Ok(mut connection) => match self.keep_time_on(&mut connection).await {
                    Ok(()) => return drop(connection.close().await),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            // Another worker was at the same items: nothing is wrong, and the tick is still to be looked at.
            if !error.is_contention() && !std::mem::replace(&mut self.complained, true) {
                warn!(
                    label = "cron",
                    worker_id = &*self.surroundings.worker_id,
                    error = &error as &dyn std::error::Error,
                    "cannot schedule recurring jobs: trying again until it works"
                );
            }
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(self.pause.mul_f64(0.5 + jitter())) => {}
            }
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn works(&mut self) {
        if std::mem::take(&mut self.complained) {
            info!(label = "cron", worker_id = &*self.surroundings.worker_id, "scheduling recurring jobs again");
        }
        self.pause = SHORTEST_PAUSE;
    }

    async fn connect(&self) -> Result<PgConnection, Error> {
        let doing = || "connect to the database".to_owned();
        let connecting = tokio::time::timeout(ANSWER_TIMEOUT, PgConnection::connect_with(&self.options)).await;
        connecting.map_err(|_| Error::NoAnswer { after: ANSWER_TIMEOUT })?.doing(doing)
    }

    /// Until it is told to stop, or the connection fails.
    async fn keep_time_on(&mut self, connection: &mut PgConnection) -> Result<(), Error> {
        if self.started.is_none() {
            let now = self.now(connection).await?;
            self.make_known(connection, now).await?;
            self.say_items(connection, now).await;
            self.started = Some(now);
        }
        loop {
            let now = self.now(connection).await?;
            self.add_what_is_due(connection, now).await?;
            self.works();
            let tick = || CronTickContext { worker_id: self.surroundings.worker_id.clone(), at: now };
            self.surroundings.hooks.emit(CronTick, tick).await;
            let next = self.items.iter().filter_map(|item| item.crontab.next_after(item.done)).min();
            let look_at = next.unwrap_or(DateTime::<Utc>::MAX_UTC).min(now + LOOK_INTERVAL);
            tokio::select! {
                () = self.stop.cancelled() => return Ok(()),
                () = self.clock.wait_until(look_at, now) => {}
            }
        }
    }

    async fn now(&self, connection: &mut PgConnection) -> Result<DateTime<Utc>, Error> {
        match &self.clock {
            Clock::Local => Ok(Utc::now()),
            Clock::Test(clock) => Ok(clock.now()),
            Clock::Database => {
                let rows = self.ask(connection, &self.surroundings.statements.cron_time, |query| query).await?;
                rows.first().ok_or(sqlx::Error::RowNotFound).and_then(|row| row.try_get("now")).doing(read)
            }
        }
    }

    /// Writes down the items that nobody knew, and learns how far the others have come.
    async fn make_known(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        let identifiers: Vec<&str> = self.items.iter().map(|item| item.crontab.identifier()).collect();
        let rows = self
            .ask(connection, &self.surroundings.statements.cron_known, |query| query.bind(&identifiers).bind(now))
            .await?;
        let known: HashMap<String, DateTime<Utc>> = rows
            .iter()
            .map(|row| Ok((row.try_get("identifier")?, row.try_get("since")?)))
            .collect::<sqlx::Result<_>>()
            .doing(read)?;
        // The tick of that very moment counts, if it has not been taken.
        let a_moment = TimeDelta::microseconds(1);
        for item in &mut self.items {
            let since = known.get(item.crontab.identifier()).copied().unwrap_or(now);
            if since > now + LATEST {
                let identifier = item.crontab.identifier();
                warn!(label = "cron", identifier, %since, %now, "the crontab item was last due in the future, and is not due again before: was a clock wrong? To begin anew, delete its row in _private_known_crontabs");
            }
            let since = since.min(now);
            item.done = since.checked_sub_signed(a_moment).unwrap_or(since);
        }
        Ok(())
    }

    /// Adds the jobs of all ticks up to now, the oldest first.
    async fn add_what_is_due(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) -> Result<(), Error> {
        let on_time = self.started.unwrap_or(now).max(now - LATEST);
        let mut next: BinaryHeap<Reverse<(DateTime<Utc>, usize)>> = BinaryHeap::new();
        for (nth, item) in self.items.iter().enumerate() {
            let first = first_to_add(&item.crontab, item.done, on_time, now);
            next.extend(first.map(|first| Reverse((first, nth))));
        }
        if !next.is_empty() && self.said_items.is_none_or(|said| now - said >= SAY_INTERVAL) {
            self.say_items(connection, now).await;
        }
        while !next.is_empty() {
            let mut ticks = Vec::new();
            while ticks.len() < LARGEST_BATCH
                && let Some(Reverse((at, item))) = next.pop()
            {
                ticks.push(Tick { item, at, backfilled: at < on_time });
                let after = self.items[item].crontab.next_after(at).filter(|after| *after <= now);
                next.extend(after.map(|after| Reverse((after, item))));
            }
            self.add(connection, &ticks, now).await?;
            for tick in ticks {
                self.items[tick.item].done = tick.at;
            }
        }
        for item in &mut self.items {
            item.done = item.done.max(now);
        }
        Ok(())
    }

    /// Adds the jobs of these ticks, as far as nobody else has. A job that the database does not take is left out.
    async fn add(&self, connection: &mut PgConnection, ticks: &[Tick], now: DateTime<Utc>) -> Result<(), Error> {
        match self.try_to_add(connection, ticks, now).await {
            Err(error) if error.is_retryable() || !matches!(error, Error::Database { .. }) => Err(error),
            Err(_) if ticks.len() > 1 => {
                for tick in ticks {
                    Box::pin(self.add(connection, std::slice::from_ref(tick), now)).await?;
                }
                Ok(())
            }
            Err(error) => {
                for tick in ticks {
                    error!(
                        label = "cron",
                        identifier = self.items[tick.item].crontab.identifier(),
                        at = %tick.at,
                        error = &error as &dyn std::error::Error,
                        "the database does not take the job of this item"
                    );
                }
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    async fn try_to_add(&self, connection: &mut PgConnection, ticks: &[Tick], now: DateTime<Utc>) -> Result<(), Error> {
        let mut jobs = Vec::new();
        for tick in ticks {
            match self.surroundings.hooks.schedule(job(&self.items[tick.item].crontab, tick)).await {
                Ok(job) => jobs.push((tick, job)),
                Err(reason) => {
                    let identifier = self.items[tick.item].crontab.identifier();
                    info!(label = "cron", identifier, at = %tick.at, reason, "a hook did not let the job be added");
                }
            }
        }
        loop {
            let rows = self
                .ask(connection, &self.surroundings.statements.cron_ticks, |query| {
                    let specs = || jobs.iter().map(|(_, job)| &job.spec);
                    query
                        .bind(
                            jobs.iter().map(|(tick, _)| self.items[tick.item].crontab.identifier()).collect::<Vec<_>>(),
                        )
                        .bind(jobs.iter().map(|(tick, _)| tick.at).collect::<Vec<_>>())
                        .bind(jobs.iter().map(|(_, job)| job.identifier.as_str()).collect::<Vec<_>>())
                        .bind(jobs.iter().map(|(_, job)| job.payload.to_string()).collect::<Vec<_>>())
                        .bind(specs().map(|spec| spec.queue_name.as_deref()).collect::<Vec<_>>())
                        .bind(specs().map(|spec| spec.max_attempts).collect::<Vec<_>>())
                        .bind(specs().map(|spec| spec.job_key.as_deref()).collect::<Vec<_>>())
                        .bind(specs().map(|spec| spec.priority).collect::<Vec<_>>())
                        .bind(specs().map(|spec| spec.job_key_mode.unwrap_or_default().as_str()).collect::<Vec<_>>())
                        .bind(
                            specs()
                                .map(|spec| spec.flags.as_ref().map(|flags| json!(flags).to_string()))
                                .collect::<Vec<_>>(),
                        )
                        .bind(specs().map(|spec| spec.run_at).collect::<Vec<_>>())
                })
                .await?;
            let mut forgotten = Vec::new();
            for ((tick, job), row) in jobs.iter().zip(&rows) {
                if !row.try_get::<bool, _>("is_known").doing(read)? {
                    forgotten.push(self.items[tick.item].crontab.identifier());
                } else if let Some(job_id) = row.try_get("job_id").doing(read)? {
                    self.tell(tick, job, job_id).await;
                }
            }
            if forgotten.is_empty() {
                return Ok(());
            }
            // Somebody has deleted its row: without it, there is nothing to take the tick by.
            self.ask(connection, &self.surroundings.statements.cron_known, |query| query.bind(&forgotten).bind(now))
                .await?;
            let is_forgotten = |tick: &Tick| forgotten.contains(&self.items[tick.item].crontab.identifier());
            jobs.retain(|(tick, _)| is_forgotten(tick));
        }
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
            hooks.emit(CronJobBackfilled, context).await;
        } else {
            hooks.emit(CronJobScheduled, context).await;
        }
    }

    /// Says what our items are, and complains once about each that another worker means something else by. A worker
    /// that is gone says nothing any more: a crontab that was changed is no dispute.
    async fn say_items(&mut self, connection: &mut PgConnection, now: DateTime<Utc>) {
        let is_first = self.said_items.replace(now).is_none();
        let identifiers: Vec<&str> = self.items.iter().map(|item| item.crontab.identifier()).collect();
        let meanings: Vec<String> = self.items.iter().map(|item| meaning(&item.crontab)).collect();
        let asked = self
            .ask(connection, &self.surroundings.statements.cron_items, |query| query.bind(&identifiers).bind(&meanings))
            .await;
        let rows = match asked {
            Ok(rows) => rows,
            // It only helps to find mistakes: where the role may not, ticks are added all the same.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                return debug!(label = "cron", error, "cannot compare the crontab with others'");
            }
        };
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

    /// Asks the database, for which it has a minute.
    async fn ask<'q>(
        &self,
        connection: &mut PgConnection,
        statement: &Statement,
        bind: impl FnOnce(Query<'q>) -> Query<'q>,
    ) -> Result<Vec<sqlx::postgres::PgRow>, Error> {
        let doing = || "schedule recurring jobs".to_owned();
        let query = bind(sqlx::query(statement.sql())).persistent(false);
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, query.fetch_all(connection)).await;
        answer.map_err(|_| Error::NoAnswer { after: ANSWER_TIMEOUT })?.doing(doing)
    }
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

fn read() -> String {
    "read what the database says of recurring jobs".to_owned()
}

impl Clock {
    /// Returns at that time, or earlier: whoever waits looks again.
    async fn wait_until(&self, time: DateTime<Utc>, now: DateTime<Utc>) {
        match self {
            Clock::Test(clock) => clock.reaches(time).await,
            Clock::Database | Clock::Local => tokio::time::sleep((time - now).to_std().unwrap_or_default()).await,
        }
    }
}

/// The first tick of an item whose job is to be added: one that is on time, or one that was missed after `done` and is
/// to be made up for.
fn first_to_add(
    crontab: &Crontab,
    done: DateTime<Utc>,
    on_time: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Option<DateTime<Utc>> {
    let just_before = |time: DateTime<Utc>| time.checked_sub_signed(TimeDelta::microseconds(1)).unwrap_or(time);
    let mut after = done;
    if done < on_time {
        let fill = crontab.options.fill.map(|fill| fill.as_duration()).unwrap_or_default();
        let filled = now.checked_sub_signed(fill).unwrap_or(DateTime::<Utc>::MIN_UTC);
        after = after.max(just_before(filled.min(on_time)));
        if let Some(limit) = crontab.options.fill_limit {
            let oldest = crontab.fire_times_before(on_time).take_while(|at| *at > after).take(limit as usize).last();
            after = after.max(just_before(oldest.unwrap_or(on_time)));
        }
    }
    crontab.next_after(after).filter(|first| *first <= now)
}

/// What an item means, as far as two workers have to agree on it.
fn meaning(crontab: &Crontab) -> String {
    let zone = crontab.options.tz.map(|zone| format!(" {zone}")).unwrap_or_default();
    format!("{}{zone} {}", crontab.schedule, crontab.task_identifier)
}

/// The job of a tick.
fn job(crontab: &Crontab, tick: &Tick) -> ScheduledJob {
    let mut payload: Map<String, Value> = crontab.payload.clone().unwrap_or_default();
    let ts = tick.at.to_rfc3339_opts(SecondsFormat::Millis, true);
    payload.insert("_cron".to_owned(), json!({"ts": ts, "backfilled": tick.backfilled}));
    let options = &crontab.options;
    ScheduledJob {
        identifier: crontab.task_identifier.clone(),
        payload: Value::Object(payload),
        spec: JobSpec {
            queue_name: options.queue.clone(),
            run_at: Some(tick.at),
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
        let first = first_to_add(&crontab, done, on_time, now);
        let times = std::iter::successors(first, |at| crontab.next_after(*at)).take_while(|at| *at <= now);
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
