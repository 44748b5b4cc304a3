//! What a limit allows, and how it is set, dropped, paused and resumed. The rules are those of `_rs_limit_problem`; they are
//! here a second time so that a worker rejects a bad limit before it connects.
//!
//! Not here: `inspect/limits` lists the limits with their use, and `sql/schema/117-limited-exchange-functions.sql` enforces them.

use crate::db::executor::UtilsExecutor;
use crate::db::rows::text;
use crate::db::{Parameter, session};
use crate::error::Context;
use crate::{Error, WorkerUtils};
use chrono::{DateTime, Utc};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{Executor, Postgres, Row};
use std::fmt;
use std::time::{Duration, Instant};
use tracing::info;

/// The longest name, in characters.
const LONGEST_NAME: usize = 140;

/// The longest period of a rate.
const LONGEST_PERIOD: Duration = Duration::from_secs(366 * 86_400);

/// A burst may take this many seconds at its rate, because a claim adds it to the time.
const LONGEST_BURST: f64 = 366.0 * 86_400.0 * 10.0;

/// How often, and for how long, to try again while another session moves waiting jobs.
const SETTLE_PAUSE: Duration = Duration::from_millis(20);
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The highest weight.
const HIGHEST_WEIGHT: f64 = 1_000_000.0;

/// How many jobs of a task, a queue or a group may run at the same time in all workers, and how many may start in a period.
///
/// Set it with [`WorkerUtils::set_limit`], or with [`WorkerOptions::limit`](crate::WorkerOptions::limit) when a worker starts.
///
/// ```
/// use graphile_worker::Limit;
/// use std::time::Duration;
///
/// let emails = Limit::task("send_email").concurrency(5).rate(100, Duration::from_secs(60));
/// let tenants = Limit::queue("tenant:*").concurrency(2).in_group("api");
/// let api = Limit::group("api").concurrency(20);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[must_use = "a limit does nothing until it is set"]
pub struct Limit {
    name: String,
    concurrency: Option<u32>,
    rate: Option<(u32, Duration)>,
    burst: Option<u32>,
    weight: Option<f64>,
    cost: Option<u32>,
    group: Option<String>,
    trip: Option<u32>,
    trip_for: Option<Duration>,
}

impl Limit {
    /// A limit on all jobs of a task.
    pub fn task(identifier: &str) -> Limit {
        Limit::named(format!("task:{identifier}"))
    }

    /// A limit on a queue, or on each queue that begins with a text, if the name ends with `*`. A queue under a limit without
    /// a [`concurrency`](Limit::concurrency) runs one job at a time, as a queue without a limit does.
    pub fn queue(name: &str) -> Limit {
        Limit::named(format!("queue:{name}"))
    }

    /// A limit that several tasks and queues share: those [in the group](Limit::in_group).
    pub fn group(name: &str) -> Limit {
        Limit::named(format!("group:{name}"))
    }

    /// A limit by its full name: `task:NAME`, `queue:NAME`, `queue:PREFIX*` or `group:NAME`.
    pub fn named(name: impl Into<String>) -> Limit {
        Limit {
            name: name.into(),
            concurrency: None,
            rate: None,
            burst: None,
            weight: None,
            cost: None,
            group: None,
            trip: None,
            trip_for: None,
        }
    }

    /// The full name, such as `task:send_email`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets how many jobs may run at the same time (default: any number; one job of a queue). In a group, this is the sum of
    /// their [costs](Limit::cost).
    pub fn concurrency(mut self, jobs: u32) -> Limit {
        self.concurrency = Some(jobs);
        self
    }

    /// Sets how many jobs may start in a period (default: any number). At most this number plus the [`burst`](Limit::burst)
    /// start in any such period. Retries count.
    pub fn rate(mut self, jobs: u32, period: Duration) -> Limit {
        self.rate = Some((jobs, period));
        self
    }

    /// Sets how many jobs may start at once, if fewer have started before than the rate allows (default 1). The others are
    /// spaced evenly over the period.
    pub fn burst(mut self, jobs: u32) -> Limit {
        self.burst = Some(jobs);
        self
    }

    /// Sets the share of a queue beside other queues (default 1): a queue of weight 2 gets twice as much of the workers' time.
    pub fn weight(mut self, weight: f64) -> Limit {
        self.weight = Some(weight);
        self
    }

    /// Sets how much a job takes of the limit of its group (default 1).
    pub fn cost(mut self, cost: u32) -> Limit {
        self.cost = Some(cost);
        self
    }

    /// Makes the jobs count against the limit of a group, too. Set that limit first.
    pub fn in_group(mut self, name: &str) -> Limit {
        self.group = Some(name.to_owned());
        self
    }

    /// Sets a circuit breaker (default: none): after this number of failures in a row, no job starts for `pause`. Then the
    /// breaker is half-open: one job at a time runs, until one succeeds.
    pub fn breaker(self, failures: u32, pause: Duration) -> Limit {
        self.trip(failures).trip_for(pause)
    }

    /// The first half of [`breaker`](Limit::breaker), for settings that are read one by one.
    #[doc(hidden)]
    pub fn trip(mut self, failures: u32) -> Limit {
        self.trip = Some(failures);
        self
    }

    /// The second half of [`breaker`](Limit::breaker).
    #[doc(hidden)]
    pub fn trip_for(mut self, pause: Duration) -> Limit {
        self.trip_for = Some(pause);
        self
    }

    pub(crate) fn is_of_group(&self) -> bool {
        self.name.starts_with("group:")
    }

    /// The task that it limits.
    fn of_task(&self) -> Option<&str> {
        self.name.strip_prefix("task:")
    }

    /// Fails if no database would accept it.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), Error> {
        self.problem().map_or(Ok(()), |problem| Err(Error::InvalidLimit { problem }))
    }

    /// What is wrong with it, in the words of `_rs_limit_problem`.
    fn problem(&self) -> Option<String> {
        let name = &self.name;
        let (kind, rest) = name.split_once(':').unwrap_or((name, ""));
        let burst = self.burst.map(f64::from).zip(self.rate);
        Some(if !matches!(kind, "task" | "queue" | "group") || rest.is_empty() {
            format!("Limit name is {}, expected task:NAME, queue:NAME, queue:PREFIX* or group:NAME.", quoted(name))
        } else if name.chars().count() > LONGEST_NAME {
            let length = name.chars().count();
            format!("Limit name is too long (max length: {LONGEST_NAME}), this one has {length}.")
        } else if kind != "queue" && rest.ends_with('*') {
            let name = quoted(name);
            format!("Limit name is {name}, but only queues can have a pattern. Put the tasks into a group instead.")
        } else if kind == "queue" && rest.strip_suffix('*').unwrap_or(rest).contains('*') {
            format!("Limit name is {}, but a pattern may only have a * at its end.", quoted(name))
        } else if self.concurrency == Some(0) {
            format!("Concurrency must be at least 1, got 0. To start no jobs at all, pause {name}.")
        } else if let Some((0, _)) = self.rate {
            "Rate must be at least 1, got 0.".to_owned()
        } else if let Some((_, period)) = self.rate.filter(|(_, period)| period.as_micros() == 0) {
            format!("Period must be longer than 0, got {}.", interval(period))
        } else if let Some((_, period)) = self.rate.filter(|(_, period)| *period > LONGEST_PERIOD) {
            format!("Period must be at most 366 days, got {}.", interval(period))
        } else if let Some(burst) = self.burst.filter(|_| self.rate.is_none()) {
            format!("Burst {burst} needs a rate.")
        } else if self.burst == Some(0) {
            "Burst must be at least 1, got 0.".to_owned()
        } else if let Some((burst, _)) =
            burst.filter(|(burst, (jobs, period))| period.as_secs_f64() / f64::from(*jobs) * burst > LONGEST_BURST)
        {
            format!("Burst {burst} is too large: at this rate, that number of starts would take more than 10 years.")
        } else if let Some(weight) = self.weight.filter(|weight| !(*weight > 0.0 && *weight <= HIGHEST_WEIGHT)) {
            format!("Weight must be more than 0 and at most 1000000, got {}.", number(weight))
        } else if self.weight.is_some() && kind != "queue" {
            format!("Only queues have a weight, and this is {name}.")
        } else if self.cost == Some(0) {
            "Cost must be at least 1, got 0.".to_owned()
        } else if let Some(cost) = self.cost.filter(|_| self.group.is_none()) {
            format!("Cost {cost} needs a group: it is how much a job takes of the group's limit.")
        } else if self.group.is_some() && kind == "group" {
            "A group cannot be in another group.".to_owned()
        } else if self.trip == Some(0) {
            "Trip must be at least 1 failure, got 0.".to_owned()
        } else if let Some(failures) = self.trip.filter(|_| self.trip_for.is_none()) {
            format!("Trip {failures} needs a pause: for how long no job starts after it, for example 1 minute.")
        } else if let Some(pause) = self.trip_for.filter(|_| self.trip.is_none()) {
            let pause = interval(pause);
            format!("Pause {pause} needs a trip: the number of failures in a row after which it begins.")
        } else if let Some(pause) = self.trip_for.filter(|pause| pause.as_micros() == 0) {
            format!("Pause after a trip must be longer than 0, got {}.", interval(pause))
        } else if let Some(pause) = self.trip_for.filter(|pause| *pause > LONGEST_PERIOD) {
            format!("Pause after a trip must be at most 366 days, got {}.", interval(pause))
        } else if self.concurrency.is_none()
            && self.rate.is_none()
            && self.group.is_none()
            && self.weight.is_none()
            && self.trip.is_none()
        {
            format!("Limit {name} needs a concurrency, a rate, a group, a weight or a breaker.")
        } else {
            return None;
        })
    }

    /// The settings as they are stored, with the defaults.
    fn settings(&self) -> Settings {
        let group = self.group.as_deref().map(|group| group.strip_prefix("group:").unwrap_or(group));
        Settings {
            concurrency: self.concurrency.map(whole),
            rate: self.rate.map(|(jobs, _)| whole(jobs)),
            per_seconds: self.rate.map(|(_, period)| period.as_micros() as f64 / 1e6),
            burst: whole(self.burst.unwrap_or(1)),
            weight: self.weight.unwrap_or(1.0),
            cost: whole(self.cost.unwrap_or(1)),
            group: group.map(|group| format!("group:{group}")),
            trip: self.trip.map(whole),
            trip_seconds: self.trip_for.map(|pause| pause.as_micros() as f64 / 1e6),
        }
    }
}

/// The largest number that the database stores stands for all above.
fn whole(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// As `format('%L')` quotes it.
fn quoted(text: &str) -> String {
    let doubled = text.replace('\'', "''");
    if text.contains('\\') { format!("E'{}'", doubled.replace('\\', "\\\\")) } else { format!("'{doubled}'") }
}

/// As PostgreSQL prints an interval of seconds.
fn interval(period: Duration) -> String {
    let (seconds, micros) = (period.as_secs(), period.subsec_micros());
    let fraction = format!(".{micros:06}");
    let fraction = fraction.trim_end_matches('0').trim_end_matches('.');
    format!("{:02}:{:02}:{:02}{fraction}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// As PostgreSQL prints a number.
fn number(number: f64) -> String {
    match number {
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        number => number.to_string(),
    }
}

/// The settings of a limit, as they are stored.
#[derive(Debug, PartialEq)]
struct Settings {
    concurrency: Option<i32>,
    rate: Option<i32>,
    per_seconds: Option<f64>,
    burst: i32,
    weight: f64,
    cost: i32,
    group: Option<String>,
    trip: Option<i32>,
    trip_seconds: Option<f64>,
}

impl Settings {
    fn read(row: &PgRow) -> sqlx::Result<Settings> {
        Ok(Settings {
            concurrency: row.try_get("concurrency")?,
            rate: row.try_get("rate")?,
            per_seconds: row.try_get("per_seconds")?,
            burst: row.try_get("burst")?,
            weight: row.try_get("weight")?,
            cost: row.try_get("cost")?,
            group: row.try_get("group_name")?,
            trip: row.try_get("trip")?,
            trip_seconds: row.try_get("trip_seconds")?,
        })
    }
}

/// For logs: only what is set.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        parts.extend(self.concurrency.map(|jobs| format!("concurrency {jobs}")));
        if let Some((jobs, seconds)) = self.rate.zip(self.per_seconds) {
            parts.push(format!("rate {jobs} per {seconds} s, burst {}", self.burst));
        }
        parts.extend((self.weight != 1.0).then(|| format!("weight {}", self.weight)));
        parts.extend((self.cost != 1).then(|| format!("cost {}", self.cost)));
        parts.extend(self.group.clone());
        if let Some((failures, seconds)) = self.trip.zip(self.trip_seconds) {
            parts.push(format!("trips for {seconds} s after {failures} failures"));
        }
        f.write_str(&parts.join(", "))
    }
}

/// A change to a limit, for [`WorkerUtils::change_limit`].
#[doc(hidden)]
#[derive(Debug, Clone)]
pub enum LimitChange<'a> {
    Set(&'a Limit),
    Drop(&'a str),
    Pause(&'a str, Option<DateTime<Utc>>),
    Resume(&'a str),
}

/// Limits on how many jobs run at the same time in all workers, how many start in a period, and pauses.
///
/// Names are `task:NAME`, `queue:NAME`, `queue:PREFIX*` and `group:NAME`; a pause may also be for `all`. A change is effective at the
/// workers' next claims. Running jobs continue. These methods also move the waiting jobs, 10,000 in a transaction, so that they
/// return late if a million jobs wait; workers do the same if you drop the future. If you call them in your own transaction
/// ([`within`](WorkerUtils::within)), the workers move all jobs after the commit. Keep the transaction short: until it ends, few
/// jobs under limits start.
impl<E: UtilsExecutor> WorkerUtils<E> {
    /// Sets a limit, or replaces it with all its settings. The task, or the group, must exist: see
    /// [`add_job`](WorkerUtils::add_job).
    ///
    /// ```no_run
    /// # use graphile_worker::{Limit, WorkerUtils};
    /// # async fn example(utils: WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// utils.set_limit(&Limit::task("send_email").concurrency(5)).await
    /// # }
    /// ```
    pub async fn set_limit(&self, limit: &Limit) -> Result<(), Error> {
        self.change_limit(LimitChange::Set(limit), |_| ()).await.map(drop)
    }

    /// Drops a limit, and its pause. Returns `false` if there is none. Its jobs go back to where jobs without a limit are, and
    /// Node's workers run them again.
    pub async fn drop_limit(&self, name: &str) -> Result<bool, Error> {
        self.change_limit(LimitChange::Drop(name), |_| ()).await
    }

    /// Starts no more jobs of a task, a queue, the queues of a pattern, or a group, until it is
    /// [resumed](WorkerUtils::resume). `all` pauses all of these workers, but not Node's.
    pub async fn pause(&self, name: &str) -> Result<(), Error> {
        self.change_limit(LimitChange::Pause(name, None), |_| ()).await.map(drop)
    }

    /// Pauses until this time, which must be in the future. See [`pause`](WorkerUtils::pause).
    pub async fn pause_until(&self, name: &str, until: DateTime<Utc>) -> Result<(), Error> {
        self.change_limit(LimitChange::Pause(name, Some(until)), |_| ()).await.map(drop)
    }

    /// Ends a pause, reopens a limit that a [rate-limited](crate::TaskError::rate_limited) job has closed, and resets a
    /// tripped [breaker](Limit::breaker). Returns `false` if there was nothing to resume under this name.
    pub async fn resume(&self, name: &str) -> Result<bool, Error> {
        self.change_limit(LimitChange::Resume(name), |_| ()).await
    }

    /// Makes the change, then calls the function with the number of jobs that were moved, several times if they are many.
    #[doc(hidden)]
    pub async fn change_limit(&self, change: LimitChange<'_>, progress: impl FnMut(u64) + Send) -> Result<bool, Error> {
        let statements = self.statements()?;
        let named = |name: &str| Parameter::Text(Some(name.to_owned()));
        let (statement, parameters, what) = match change {
            LimitChange::Set(limit) => {
                self.store_limit(limit).await?;
                self.settle_limits(progress).await?;
                return Ok(true);
            }
            LimitChange::Drop(name) => (&statements.drop_limit, vec![named(name)], format!("drop the limit {name}")),
            LimitChange::Pause(name, until) => {
                (&statements.pause, vec![named(name), Parameter::Time(until)], format!("pause {name}"))
            }
            LimitChange::Resume(name) => (&statements.resume, vec![named(name)], format!("resume {name}")),
        };
        let done = self.executor().numbers(statement, parameters, || what.clone()).await.map_err(Error::of_limit)?;
        self.settle_limits(progress).await?;
        Ok(done.first() == Some(&1))
    }

    async fn store_limit(&self, limit: &Limit) -> Result<(), Error> {
        limit.check()?;
        let context = || format!("set the limit {}", limit.name);
        let settings = limit.settings();
        let parameters = vec![
            Parameter::Text(Some(limit.name.clone())),
            Parameter::Int(settings.concurrency),
            Parameter::Int(settings.rate),
            Parameter::Float(settings.per_seconds),
            Parameter::Int(limit.burst.map(whole)),
            Parameter::Float(limit.weight),
            Parameter::Int(limit.cost.map(whole)),
            Parameter::Text(limit.group.clone()),
            Parameter::Int(settings.trip),
            Parameter::Float(settings.trip_seconds),
        ];
        let statement = &self.statements()?.set_limit;
        self.executor().numbers(statement, parameters, context).await.map(drop).map_err(Error::of_limit)
    }

    /// Moves all waiting jobs under their limits. If another session is moving them, waits for it. In a transaction of the
    /// application, leaves this to the workers, after the commit.
    async fn settle_limits(&self, mut progress: impl FnMut(u64) + Send) -> Result<(), Error> {
        if self.executor().pool().is_none() {
            return Ok(());
        }
        let context = || "move the waiting jobs under their limits".to_owned();
        let (mut moved, mut busy_since) = (0, None);
        loop {
            let numbers = self.executor().numbers(&self.statements()?.settle_limits, Vec::new(), context).await?;
            match numbers.first() {
                None | Some(0) => return Ok(()),
                Some(more) if *more > 0 => {
                    busy_since = None;
                    moved += more.unsigned_abs();
                    progress(moved);
                }
                Some(_) if busy_since.get_or_insert_with(Instant::now).elapsed() > SETTLE_TIMEOUT => return Ok(()),
                Some(_) => tokio::time::sleep(SETTLE_PAUSE).await,
            }
        }
    }
}

impl WorkerUtils {
    /// Sets the limits of a worker's options that are not as they should be. Adds their tasks, if they do not exist yet. Waiting
    /// jobs are left to the running worker.
    pub(crate) async fn set_limits_of_worker(&self, limits: &[Limit]) -> Result<(), Error> {
        if limits.is_empty() {
            return Ok(());
        }
        let tasks: Vec<&str> = limits.iter().filter_map(Limit::of_task).collect();
        let names: Vec<&str> = limits.iter().map(|limit| &*limit.name).collect();
        let context = || "set the limits of the worker".to_owned();
        let statements = self.statements()?;
        if !tasks.is_empty() {
            let query = statements.ensure_tasks.query().persistent(false);
            self.ensure_tasks(query, &tasks).await.context(|| "add the tasks that have limits".to_owned())?;
        }
        let rows = self.fetch_all(statements.limit_settings.query().bind(names)).await.context(context)?;
        // A limit in a group needs that of the group.
        let (groups, others): (Vec<&Limit>, Vec<&Limit>) = limits.iter().partition(|limit| limit.is_of_group());
        for limit in groups.into_iter().chain(others) {
            let mut stored = None;
            for row in &rows {
                if text(row, "name").context(context)? == limit.name {
                    stored = Some(Settings::read(row).context(context)?);
                }
            }
            let settings = limit.settings();
            if stored.as_ref() == Some(&settings) {
                continue;
            }
            self.store_limit(limit).await?;
            let (name, settings) = (&*limit.name, settings.to_string());
            match stored {
                Some(before) => {
                    let before = before.to_string();
                    info!(
                        label = "worker",
                        limit = name,
                        before,
                        settings,
                        "limit replaced by the options of this worker"
                    );
                }
                None => info!(label = "worker", limit = name, settings, "limit set"),
            }
        }
        Ok(())
    }

    /// Adds these tasks. Does not wait for long for an open transaction that adds one of them.
    async fn ensure_tasks(&self, query: Query<'_, Postgres, PgArguments>, names: &[&str]) -> sqlx::Result<()> {
        let mut transaction = self.pool().begin_with(session::BEGIN).await?;
        transaction.execute("set local lock_timeout = '2s'").await?;
        query.bind(names).execute(&mut *transaction).await?;
        session::commit(transaction).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_and_names_are_written_as_postgresql_writes_them() {
        assert_eq!(interval(Duration::from_secs(400 * 86_400)), "9600:00:00");
        assert_eq!(interval(Duration::from_micros(61_500_000)), "00:01:01.5");
        assert_eq!((quoted("it's"), quoted("a\\b")), ("'it''s'".to_owned(), "E'a\\\\b'".to_owned()));
    }

    #[test]
    fn only_settings_that_are_set_are_logged() {
        let limit = Limit::queue("a*").rate(100, Duration::from_secs(60)).burst(5).cost(2).in_group("api");
        assert_eq!(limit.settings().to_string(), "rate 100 per 60 s, burst 5, cost 2, group:api");
        assert_eq!(Limit::task("t").concurrency(u32::MAX).settings().to_string(), "concurrency 2147483647");
    }
}
