//! The exchange: one round trip that reports what finished and claims what comes next; and how much to claim.
//!
//! While one exchange is under way outcomes gather for the next, as in a group commit: under load it carries
//! hundreds of jobs, when idle it carries one, at once. Nothing here is a setting.

use crate::Error;
use crate::context::Surroundings;
use crate::db::{self, Statements};
use crate::error::Doing;
use crate::hooks::FetchError;
use crate::job::Job;
use crate::settle::{Attempts, GiveBack, NextRun, Settlement};
use chrono::{DateTime, Utc};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{Connection, PgConnection, Row};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Beyond this many jobs a claim costs as much as it saves (bench/RESULTS.md).
const LARGEST_CLAIM: usize = 500;

/// A connection that does not answer for this long is taken for dead.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How often an idle worker looks whether its tasks still have the ids it knows.
const TASKS_INTERVAL: Duration = Duration::from_secs(10);

/// A job that is to wait for longer waits for so long: a hundred years.
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Between two attempts to reach the database: from this, doubling, to the other.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What is to be written about jobs that are no longer in hand.
#[derive(Debug, Default)]
pub(crate) struct Report {
    done: Vec<(i64, Option<DateTime<Utc>>)>,
    given_back: Vec<GivenBack>,
    /// Queues of which no job is in hand any more.
    pub(crate) free_queues: Vec<i32>,
    /// Jobs that their handlers have completed themselves.
    gone: Vec<i64>,
    /// The jobs that ran, with their errors, where somebody wants to be told when that is written.
    pub(crate) jobs: Vec<(Arc<Job>, Option<String>)>,
}

impl Report {
    pub(crate) fn is_empty(&self) -> bool {
        self.done.is_empty()
            && self.given_back.is_empty()
            && self.free_queues.is_empty()
            && self.gone.is_empty()
            && self.jobs.is_empty()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = i64> {
        let done = self.done.iter().map(|(id, _)| *id).chain(self.gone.iter().copied());
        done.chain(self.given_back.iter().map(|back| back.id))
    }

    /// Puts what was not written before what has come since.
    pub(crate) fn put_back(&mut self, mut earlier: Report) {
        earlier.done.append(&mut self.done);
        earlier.given_back.append(&mut self.given_back);
        earlier.free_queues.append(&mut self.free_queues);
        earlier.gone.append(&mut self.gone);
        earlier.jobs.append(&mut self.jobs);
        *self = earlier;
    }

    pub(crate) fn add(&mut self, job: &Job, settlement: Settlement) {
        match settlement {
            Settlement::Complete => self.done.push((job.id, job.locked_at)),
            Settlement::GiveBack(how) => {
                self.given_back.push(GivenBack { id: job.id, locked_at: job.locked_at, key: job.key.clone(), how });
            }
            Settlement::Nothing => self.gone.push(job.id),
        }
    }
}

/// A job that goes back into the table.
#[derive(Debug)]
struct GivenBack {
    id: i64,
    locked_at: Option<DateTime<Utc>>,
    /// The key it had when it was claimed.
    key: Option<String>,
    how: GiveBack,
}

/// How fast jobs and round trips are, and so how many jobs to have in hand: for fast jobs enough that no slot waits
/// for the database, for slow ones exactly the free slots.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    job: Option<f64>,
    round_trip: Option<f64>,
}

impl Pace {
    pub(crate) fn job(&mut self, took: Duration) {
        average(&mut self.job, took, 0.1);
    }

    pub(crate) fn round_trip(&mut self, took: Duration) {
        average(&mut self.round_trip, took, 0.3);
    }

    /// How many more jobs to claim with so many in hand.
    pub(crate) fn wanted(&self, concurrency: usize, in_hand: usize) -> usize {
        let ahead = match (self.job, self.round_trip) {
            // What the slots get through while an exchange is under way, twice over: one in hand, one on its way.
            (Some(job), Some(round_trip)) => 2.0 * concurrency as f64 * round_trip / job.max(1e-6),
            _ => 0.0,
        };
        let target = concurrency + (ahead as usize).min(2 * LARGEST_CLAIM);
        target.saturating_sub(in_hand).min(LARGEST_CLAIM.max(concurrency))
    }
}

/// A moving average in seconds; one outlier does not move it far.
fn average(value: &mut Option<f64>, sample: Duration, weight: f64) {
    let sample = sample.as_secs_f64();
    *value = Some(value.map_or(sample, |value| value + weight * (sample - value)));
}

/// What a worker may run.
pub(crate) struct Wants {
    pub(crate) jobs: usize,
    pub(crate) forbidden_flags: Option<Vec<String>>,
    /// How many more jobs of a task that is limited.
    pub(crate) limits: HashMap<Arc<str>, usize>,
    pub(crate) now: Option<DateTime<Utc>>,
}

pub(crate) struct Reply {
    pub(crate) jobs: Vec<Job>,
    pub(crate) took: Duration,
    /// Jobs that this worker holds, where an earlier answer was lost: some may be known.
    pub(crate) found_again: Vec<Job>,
}

/// The worker's own connection. Lost, it is made again, for ever; nobody else uses it.
pub(crate) struct Exchange {
    options: PgConnectOptions,
    connection: Option<PgConnection>,
    statements: Arc<Statements>,
    surroundings: Arc<Surroundings>,
    tasks: HashMap<i32, Arc<str>>,
    task_ids: Vec<i32>,
    persistent: bool,
    /// Whether an exchange began whose end we have not seen, so that the database may know more than we do.
    uncertain: bool,
    tasks_learned: Instant,
}

impl Exchange {
    pub(crate) async fn open(
        options: PgConnectOptions,
        statements: Arc<Statements>,
        surroundings: Arc<Surroundings>,
        identifiers: &[Arc<str>],
        persistent: bool,
    ) -> Result<Exchange, Error> {
        // Ours alone, so that a new connection can find the one before it.
        let name = format!("graphile_worker {}", surroundings.worker_id);
        let mut exchange = Exchange {
            options: options.application_name(&name),
            connection: None,
            statements,
            surroundings,
            tasks: HashMap::new(),
            task_ids: Vec::new(),
            persistent,
            uncertain: false,
            tasks_learned: Instant::now(),
        };
        let mut connection = exchange.connect().await?;
        exchange.learn_task_ids(&mut connection, identifiers).await?;
        exchange.connection = Some(connection);
        Ok(exchange)
    }

    async fn connect(&self) -> Result<PgConnection, Error> {
        PgConnection::connect_with(&self.options).await.doing(|| "connect to the database".to_owned())
    }

    async fn learn_task_ids(&mut self, connection: &mut PgConnection, identifiers: &[Arc<str>]) -> Result<(), Error> {
        let doing = || "look up the tasks".to_owned();
        let names: Vec<String> = identifiers.iter().map(|identifier| identifier.to_string()).collect();
        let statements = &self.statements;
        sqlx::query(statements.ensure_tasks.sql())
            .persistent(false)
            .bind(&names)
            .execute(&mut *connection)
            .await
            .doing(doing)?;
        let rows = sqlx::query(statements.task_ids.sql())
            .persistent(false)
            .bind(&names)
            .fetch_all(&mut *connection)
            .await
            .doing(doing)?;
        for row in rows {
            let identifier: &str = row.try_get("identifier").doing(doing)?;
            if let Some(known) = identifiers.iter().find(|known| &***known == identifier) {
                self.tasks.insert(row.try_get("id").doing(doing)?, known.clone());
            }
        }
        self.task_ids = self.tasks.keys().copied().collect();
        Ok(())
    }

    /// Reports and claims. Returns only when it is written, however long the database is away; an error is one that
    /// waiting would not cure.
    pub(crate) async fn exchange(&mut self, report: &Report, wants: &Wants) -> Result<Reply, Error> {
        let mut pause = SHORTEST_PAUSE;
        let mut away = false;
        loop {
            let attempt = tokio::time::timeout(ANSWER_TIMEOUT, self.try_exchange(report, wants)).await;
            let error = match attempt {
                Ok(Ok(reply)) => {
                    if away {
                        info!(label = "worker", worker_id = &*self.surroundings.worker_id, "the database is back");
                    }
                    return Ok(reply);
                }
                Ok(Err(error)) if !error.is_retryable() => return Err(error),
                Ok(Err(error)) => error.to_string_with_sources(),
                Err(_) => format!("no answer in {ANSWER_TIMEOUT:?}"),
            };
            self.surroundings.hooks.emit(FetchError, || self.surroundings.event(Some(error.clone()))).await;
            if !away {
                warn!(
                    label = "worker",
                    worker_id = &*self.surroundings.worker_id,
                    error,
                    "lost the database: trying again until it is back"
                );
                away = true;
            }
            tokio::time::sleep(pause.mul_f64(0.5 + jitter())).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn try_exchange(&mut self, report: &Report, wants: &Wants) -> Result<Reply, Error> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        // Until the answer is here: also where we are dropped while we wait for it.
        let uncertain = std::mem::replace(&mut self.uncertain, true);
        let mut found_again = Vec::new();
        if uncertain {
            self.end_earlier_connection(&mut connection).await?;
            found_again = self.held(&mut connection).await?;
        }
        let settled: HashSet<i64> = report.ids().collect();
        found_again.retain(|job| !settled.contains(&job.id));
        // A queue whose next job was claimed without our knowledge is not free.
        let taken: HashSet<Option<i32>> = found_again.iter().map(|job| job.job_queue_id).collect();
        let free = report.free_queues.iter().copied().filter(|queue| !taken.contains(&Some(*queue)));
        let free_queues: Vec<i32> = free.collect();
        let started = Instant::now();
        let jobs = self.report_and_claim(&mut connection, report, &free_queues, wants).await?;
        self.uncertain = false;
        self.connection = Some(connection);
        Ok(Reply { jobs, took: started.elapsed(), found_again })
    }

    async fn report_and_claim(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        free_queues: &[i32],
        wants: &Wants,
    ) -> Result<Vec<Job>, Error> {
        let doing = || "exchange jobs with the database".to_owned();
        let (done, done_at): (Vec<_>, Vec<_>) = report.done.iter().copied().unzip();
        let back = &report.given_back;
        let limit = i32::try_from(wants.jobs).unwrap_or(i32::MAX);
        let (task_ids, limits) = self.tasks_and_limits(wants);
        let rows = sqlx::query(self.statements.exchange.sql())
            .persistent(self.persistent)
            .bind(&*self.surroundings.worker_id)
            .bind(done)
            .bind(done_at)
            .bind(back.iter().map(|back| back.id).collect::<Vec<_>>())
            .bind(back.iter().map(|back| back.locked_at).collect::<Vec<_>>())
            .bind(back.iter().map(|back| back.how.error.as_deref()).collect::<Vec<_>>())
            .bind(back.iter().map(|back| seconds(back.how.run_at)).collect::<Vec<_>>())
            .bind(back.iter().map(|back| time(back.how.run_at)).collect::<Vec<_>>())
            .bind(back.iter().map(|back| attempts(back.how.attempts)).collect::<Vec<_>>())
            .bind(back.iter().map(|back| back.how.payload.as_deref()).collect::<Vec<_>>())
            .bind(free_queues)
            .bind(task_ids)
            .bind(limit)
            .bind(&wants.forbidden_flags)
            .bind(wants.now)
            .bind(back.iter().map(|back| back.key.as_deref()).collect::<Vec<_>>())
            .bind(limits)
            .fetch_all(connection)
            .await
            .doing(doing)?;
        self.jobs(&rows).doing(doing)
    }

    async fn held(&self, connection: &mut PgConnection) -> Result<Vec<Job>, Error> {
        let doing = || "look for jobs that this worker holds".to_owned();
        let rows = sqlx::query(self.statements.held.sql())
            .persistent(false)
            .bind(&*self.surroundings.worker_id)
            .fetch_all(connection)
            .await
            .doing(doing)?;
        self.jobs(&rows).doing(doing)
    }

    /// The server may not have noticed that we are gone, and what it was told to do may still be waiting for a lock.
    async fn end_earlier_connection(&self, connection: &mut PgConnection) -> Result<(), Error> {
        // Behind a pooler, connections are not ours to end.
        let Some(name) = self.options.get_application_name().filter(|_| self.persistent) else { return Ok(()) };
        loop {
            let left: i64 = sqlx::query_scalar(self.statements.terminate_earlier_connection.sql())
                .persistent(false)
                .bind(name)
                .fetch_one(&mut *connection)
                .await
                .doing(|| "end an earlier connection".to_owned())?;
            if left == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The tasks that may run more jobs and, if any of them is limited, how many each may take.
    fn tasks_and_limits(&self, wants: &Wants) -> (Vec<i32>, Option<Vec<Option<i32>>>) {
        if wants.limits.is_empty() {
            return (self.task_ids.clone(), None);
        }
        let with_limits = self.tasks.iter().map(|(id, identifier)| (*id, wants.limits.get(identifier).copied()));
        let (ids, limits) = with_limits
            .filter(|(_, limit)| *limit != Some(0))
            .map(|(id, limit)| (id, limit.map(|limit| i32::try_from(limit).unwrap_or(i32::MAX))))
            .unzip();
        (ids, Some(limits))
    }

    fn jobs(&self, rows: &[PgRow]) -> sqlx::Result<Vec<Job>> {
        let known = |row: &PgRow| -> sqlx::Result<Option<Job>> {
            let Some(identifier) = self.tasks.get(&row.try_get("task_id")?) else { return Ok(None) };
            db::job(row, Some(identifier.clone())).map(Some)
        };
        rows.iter().filter_map(|row| known(row).transpose()).collect()
    }

    /// Whether this worker may hold jobs that it has not heard of.
    pub(crate) fn is_uncertain(&self) -> bool {
        self.uncertain
    }

    /// Tasks that no job belonged to may have been deleted, and have another id when they come back. A busy worker
    /// has jobs of its tasks; an idle one looks from time to time.
    pub(crate) async fn learn_task_ids_again(&mut self, identifiers: &[Arc<str>]) {
        if self.tasks_learned.elapsed() < TASKS_INTERVAL {
            return;
        }
        self.tasks_learned = Instant::now();
        if let Some(mut connection) = self.connection.take()
            && let Ok(Ok(())) =
                tokio::time::timeout(ANSWER_TIMEOUT, self.learn_task_ids(&mut connection, identifiers)).await
        {
            self.connection = Some(connection);
        }
    }

    /// How long until the next job of the future is due; a question for when there is nothing else to do.
    pub(crate) async fn next_due(&mut self, now: Option<DateTime<Utc>>) -> Option<Duration> {
        let query = sqlx::query(self.statements.next_run_at.sql())
            .persistent(self.persistent)
            .bind(&self.task_ids)
            .bind(now)
            .fetch_one(self.connection.as_mut()?);
        // Without an answer the worker polls; the next exchange will find out what is wrong.
        let row = tokio::time::timeout(ANSWER_TIMEOUT, query).await.ok()?.ok()?;
        let seconds: f64 = row.try_get::<Option<_>, _>("seconds").ok()??;
        Some(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
    }

    /// Frees the locks of workers that died hours ago.
    pub(crate) async fn clear_stale_locks(&mut self) {
        let Some(connection) = self.connection.as_mut() else { return };
        let query = sqlx::query(self.statements.clear_stale_locks.sql()).persistent(false).fetch_one(connection);
        if let Ok(Ok(row)) = tokio::time::timeout(ANSWER_TIMEOUT, query).await {
            let (jobs, queues) = (row.try_get::<i64, _>("jobs"), row.try_get::<i64, _>("queues"));
            if let (Ok(jobs), Ok(queues)) = (jobs, queues)
                && jobs + queues > 0
            {
                info!(
                    label = "worker",
                    worker_id = &*self.surroundings.worker_id,
                    jobs,
                    queues,
                    "freed locks older than 4 hours"
                );
            }
        }
    }

    pub(crate) async fn close(self) {
        if let Some(connection) = self.connection {
            let _ = connection.close().await;
        }
    }
}

fn seconds(run_at: NextRun) -> Option<f64> {
    match run_at {
        NextRun::After(wait) => Some(wait.min(LONGEST_WAIT).as_secs_f64()),
        _ => None,
    }
}

fn time(run_at: NextRun) -> Option<DateTime<Utc>> {
    match run_at {
        // What a timestamp of PostgreSQL can hold, and nobody means more.
        NextRun::At(time) => Some(time.clamp(DateTime::UNIX_EPOCH, DateTime::UNIX_EPOCH + LONGEST_WAIT * 80)),
        _ => None,
    }
}

fn attempts(attempts: Attempts) -> i32 {
    match attempts {
        Attempts::Refund => -1,
        Attempts::Charge => 0,
        Attempts::Exhaust => 1,
    }
}

/// Anything from 0 to 1, so that many workers do not come back at the same moment.
pub(crate) fn jitter() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    (RandomState::new().hash_one(0) % 1000) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(job: Duration, round_trip: Duration) -> Pace {
        let mut pace = Pace::default();
        pace.job(job);
        pace.round_trip(round_trip);
        pace
    }

    #[test]
    fn slow_jobs_are_claimed_slot_by_slot() {
        let pace = pace(Duration::from_secs(1), Duration::from_millis(2));
        assert_eq!(pace.wanted(10, 0), 10);
        assert_eq!(pace.wanted(10, 7), 3);
        assert_eq!(pace.wanted(10, 10), 0);
    }

    #[test]
    fn fast_jobs_are_claimed_ahead_up_to_a_limit() {
        let pace = pace(Duration::from_micros(5), Duration::from_millis(5));
        assert_eq!(pace.wanted(2, 0), LARGEST_CLAIM);
        assert_eq!(pace.wanted(2, 1002), 0);
    }

    #[test]
    fn before_anything_is_known_only_the_slots_are_filled() {
        assert_eq!(Pace::default().wanted(4, 1), 3);
    }
}
