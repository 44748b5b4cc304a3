//! The exchange: one round trip that reports what finished and claims what comes next; and how much to claim.
//!
//! While one exchange is under way outcomes gather for the next, as in a group commit: under load it carries
//! hundreds of jobs, when idle it carries one, at once. Nothing here is a setting.
//!
//! Where even that is not enough, a second lane exchanges beside the first (`second_lane`). Claims of two connections
//! that go on at the same time get in each other's way in one case: when one of them deletes a job that was still free
//! when the other one began to look. So a job is reported only when every exchange that was under way when it came is
//! over (`hand`).

use crate::Error;
use crate::context::Surroundings;
use crate::db::{self, Statements};
use crate::error::Doing;
use crate::hooks::FetchError;
use crate::job::Job;
use crate::listener::MustLeave;
use crate::settle::{Attempts, GiveBack, NextRun, Settlement};
use crate::upgrade::notice_in_ledgers;
use chrono::{DateTime, Utc};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{Connection, PgConnection, Row};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tracing::{debug, info, warn};

/// 1,000 jobs a claim instead of 500 save 2 µs of 16 a job (bench/RESULTS.md); more would be hoarding.
const LARGEST_CLAIM: usize = 1000;

/// Payloads that are claimed ahead take about this many bytes at most, besides those of the jobs that fill the slots.
const BYTES_AHEAD: f64 = 32.0 * 1024.0 * 1024.0;

/// A connection that does not answer for this long is taken for dead.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A server that does not answer the first connection for this long is not ready.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// The same for a question that the worker can do without. Behind a pooler there is no other limit.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a worker looks whether its tasks still have the ids it knows.
const TASKS_INTERVAL: Duration = Duration::from_secs(10);

/// A job that is to wait for longer waits for so long: a hundred years.
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Between two attempts to reach the database: from this, doubling, to the other.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How long a statement waits for a lock. An exchange asks to wait for no row, but PostgreSQL does in one case: if a row that
/// is skipped becomes free at that moment and another transaction takes it. The worker must give up long before the
/// other side of a deadlock does (`deadlock_timeout`, a second by default). The table may also be locked by `alter table`.
const LOCK_TIMEOUT: (&str, &str) = ("lock_timeout", "100ms");

/// The same behind a pooler, which passes on no settings: for this transaction only. The server gives an exchange up before
/// the worker does.
const BEGIN: &str =
    "begin isolation level read committed; set local lock_timeout = '100ms'; set local statement_timeout = '50s'";

/// How long the worker waits for an open transaction that adds a task of its own: hardly at all.
const BEGIN_BRIEFLY: &str = "begin; set local lock_timeout = '20ms'";

/// An exchange of so many jobs is worth the second lane's while.
pub(crate) const WORTH_A_LANE: usize = LARGEST_CLAIM / 4;

/// A connection over which jobs are exchanged. The first carries everything; under load the second helps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    First,
    Second,
}

/// What is to be written about jobs that are no longer in hand.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) ended: Vec<Ended>,
    /// Queues of which no job is in hand any more.
    pub(crate) free_queues: Vec<i32>,
}

/// A job that is out of our hands.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) job: Arc<Job>,
    /// Which reply had brought it.
    pub(crate) reply: u64,
    pub(crate) settlement: Settlement,
    /// What came of it, where it ran to its end.
    pub(crate) result: Option<Result<(), String>>,
    /// How often it was reported in vain.
    pub(crate) tries: u8,
}

impl Ended {
    fn given_back(&self) -> Option<(&Job, &GiveBack)> {
        match &self.settlement {
            Settlement::GiveBack(how) => Some((&self.job, how)),
            _ => None,
        }
    }
}

impl Report {
    pub(crate) fn is_empty(&self) -> bool {
        self.ended.is_empty() && self.free_queues.is_empty()
    }

    #[cfg(test)]
    pub(crate) fn ids(&self) -> impl Iterator<Item = i64> {
        self.ended.iter().map(|ended| ended.job.id)
    }
}

/// How fast jobs and round trips are, and so how many jobs to have in hand: for fast jobs enough that no slot waits
/// for the database, for slow ones exactly the free slots.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    job: Option<f64>,
    round_trip: Option<f64>,
    /// Of a payload, in bytes.
    size: Option<f64>,
}

impl Pace {
    pub(crate) fn job(&mut self, took: Duration) {
        average(&mut self.job, took.as_secs_f64(), 0.1);
    }

    pub(crate) fn round_trip(&mut self, took: Duration) {
        average(&mut self.round_trip, took.as_secs_f64(), 0.3);
    }

    /// Jobs have come whose payloads have so many bytes.
    pub(crate) fn claimed(&mut self, jobs: usize, bytes: usize) {
        if jobs > 0 {
            average(&mut self.size, bytes as f64 / jobs as f64, 0.5);
        }
    }

    /// How many more jobs to claim with so many in hand.
    pub(crate) fn wanted(&self, concurrency: usize, in_hand: usize) -> usize {
        let ahead = match (self.job, self.round_trip) {
            // What the slots get through while an exchange is under way, twice over: one in hand, one on its way.
            (Some(job), Some(round_trip)) => 2.0 * concurrency as f64 * round_trip / job.max(1e-6),
            _ => 0.0,
        };
        let ahead = ahead.min(BYTES_AHEAD / self.size.unwrap_or_default().max(1.0));
        let target = concurrency + (ahead as usize).min(3 * LARGEST_CLAIM);
        target.saturating_sub(in_hand).min(LARGEST_CLAIM.max(concurrency))
    }
}

/// A moving average; one outlier does not move it far.
fn average(value: &mut Option<f64>, sample: f64, weight: f64) {
    *value = Some(value.map_or(sample, |value| value + weight * (sample - value)));
}

/// What a worker may run.
pub(crate) struct Wants {
    pub(crate) jobs: usize,
    pub(crate) forbidden_flags: Option<Vec<String>>,
    /// How many more jobs of a task that is limited.
    pub(crate) limits: HashMap<Arc<str>, usize>,
    pub(crate) now: Option<DateTime<Utc>>,
    /// How many seconds old the worker's heartbeat may be, where it has one.
    pub(crate) freshness: Option<f64>,
}

/// What the database answers to an exchange.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) jobs: Vec<Job>,
    /// Reported jobs, and queues to be freed, whose rows another transaction has locked: nothing was written about them.
    pub(crate) blocked_jobs: HashSet<i64>,
    pub(crate) blocked_queues: Vec<i32>,
    /// Whether there were due jobs that others had locked.
    pub(crate) contended: bool,
    /// The time of the claim.
    pub(crate) clock: Option<DateTime<Utc>>,
    pub(crate) took: Duration,
}

pub(crate) struct Reply {
    pub(crate) answer: Answer,
    /// Jobs that this worker holds, if an earlier answer was lost: some may be known.
    pub(crate) found_again: Vec<Job>,
    /// To be kept until the jobs are in hand.
    pub(crate) under_way: UnderWay,
}

/// Keeps the lanes apart while what the worker holds is being found out, and until it is in hand.
pub(crate) enum UnderWay {
    Alone(#[allow(dead_code)] OwnedRwLockWriteGuard<()>),
    Beside(#[allow(dead_code)] OwnedRwLockReadGuard<()>),
}

/// What the lanes of a worker know of each other.
#[derive(Default)]
pub(crate) struct Lanes {
    /// Read while an exchange is under way, until what it brought is in hand; written while the first lane finds out
    /// what the worker holds, which is not known while anything is under way.
    under_way: Arc<RwLock<()>>,
    /// Whether the second lane has lost an answer, so that the first must find out.
    pub(crate) second_lost_an_answer: AtomicBool,
    /// Whether the first lane has lost an answer and has not found out yet. Meanwhile the second lane must claim nothing: a
    /// report that is repeated may free a queue again, which is then no longer free.
    pub(crate) first_lost_an_answer: AtomicBool,
    /// Transactions that were told to commit and have not answered yet; only behind a pooler.
    committing: Mutex<HashSet<i64>>,
    tasks: Mutex<Arc<KnownTasks>>,
}

/// The ids of tasks.
#[derive(Clone, Default)]
struct KnownTasks {
    /// All that were ever known: a job that was claimed before its task was removed has a name.
    names: HashMap<i32, Arc<str>>,
    /// Those of which jobs are claimed.
    ids: Vec<i32>,
}

impl Lanes {
    /// Waits until nobody finds out what the worker holds. To be kept until the reply is in hand.
    pub(crate) async fn begin(&self) -> OwnedRwLockReadGuard<()> {
        self.under_way.clone().read_owned().await
    }

    fn committing(&self) -> MutexGuard<'_, HashSet<i64>> {
        self.committing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tasks(&self) -> Arc<KnownTasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_tasks(&self, tasks: KnownTasks) {
        *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(tasks);
    }
}

/// A connection of the worker's own. Lost, it is made again, for ever; nobody else uses it.
pub(crate) struct Exchange {
    options: PgConnectOptions,
    connection: Option<PgConnection>,
    statements: Arc<Statements>,
    surroundings: Arc<Surroundings>,
    lanes: Arc<Lanes>,
    /// The worker's tasks, and when their ids are to be looked up again.
    tasks: Vec<Arc<str>>,
    learn_at: Instant,
    /// When the names that do not exist are to be added again: an open transaction may be about to add them.
    ensure_at: Instant,
    jobs_wait: bool,
    persistent: bool,
    /// Whether an exchange began whose end we have not seen, so that the database may know more than we do.
    uncertain: bool,
}

impl Exchange {
    /// A connection for the first lane, made while something else has to be waited for.
    pub(crate) async fn connect_ahead(
        options: &PgConnectOptions,
        worker_id: &str,
        persistent: bool,
    ) -> Result<PgConnection, Error> {
        let options = options_of_first_lane(options, worker_id, persistent);
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await;
        let connected = connecting.unwrap_or_else(|_| {
            let problem = format!("no answer in {} seconds", CONNECT_TIMEOUT.as_secs());
            Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, problem)))
        });
        connected.doing(|| match options.get_socket() {
            Some(socket) => format!("connect to {}:{}", socket.display(), options.get_port()),
            None => format!("connect to {}:{}", options.get_host(), options.get_port()),
        })
    }

    /// The first lane, on the connection that was made ahead, if there is one and it still works.
    pub(crate) async fn open(
        made_ahead: Option<PgConnection>,
        options: PgConnectOptions,
        statements: Arc<Statements>,
        surroundings: Arc<Surroundings>,
        tasks: Vec<Arc<str>>,
        persistent: bool,
    ) -> Result<Exchange, Error> {
        let mut exchange = Exchange {
            options: options_of_first_lane(&options, &surroundings.worker_id, persistent),
            connection: None,
            statements,
            surroundings,
            lanes: Arc::default(),
            tasks,
            learn_at: Instant::now(),
            ensure_at: Instant::now(),
            jobs_wait: false,
            persistent,
            uncertain: false,
        };
        if let Some(mut connection) = made_ahead
            && exchange.learn_task_ids(&mut connection).await.is_ok()
        {
            exchange.connection = Some(connection);
            return Ok(exchange);
        }
        let mut connection = exchange.connect().await?;
        exchange.learn_task_ids(&mut connection).await?;
        exchange.connection = Some(connection);
        Ok(exchange)
    }

    /// The second lane, which connects when it is first used.
    pub(crate) fn second_lane(&self) -> Exchange {
        let name = connection_name(&self.surroundings.worker_id, Lane::Second);
        Exchange {
            options: self.options.clone().application_name(&name),
            connection: None,
            statements: self.statements.clone(),
            surroundings: self.surroundings.clone(),
            lanes: self.lanes.clone(),
            tasks: Vec::new(),
            learn_at: self.learn_at,
            ensure_at: self.ensure_at,
            jobs_wait: false,
            persistent: self.persistent,
            uncertain: false,
        }
    }

    pub(crate) fn lanes(&self) -> Arc<Lanes> {
        self.lanes.clone()
    }

    async fn connect(&self) -> Result<PgConnection, Error> {
        PgConnection::connect_with(&self.options).await.doing(|| "connect to the database".to_owned())
    }

    /// Looks up the ids of the worker's tasks. A name that does not exist is added, unless an open transaction is about to
    /// do the same: there are no jobs of it then, and it is looked up again before every claim until it exists.
    async fn learn_task_ids(&mut self, connection: &mut PgConnection) -> Result<(), Error> {
        let doing = || "look up the tasks".to_owned();
        let names: Vec<String> = self.tasks.iter().map(|identifier| identifier.to_string()).collect();
        let mut rows = self.task_ids(connection, &names).await.doing(doing)?;
        if rows.len() < names.len() && self.ensure_at <= Instant::now() {
            self.ensure_at = Instant::now() + TASKS_INTERVAL;
            self.ensure_tasks(connection, &names).await?;
            rows = self.task_ids(connection, &names).await.doing(doing)?;
        }
        let mut tasks = KnownTasks { ids: Vec::new(), ..(*self.lanes.tasks()).clone() };
        for row in &rows {
            let identifier: &str = row.try_get("identifier").doing(doing)?;
            self.jobs_wait = row.try_get("jobs_wait").doing(doing)?;
            if let Some(known) = self.tasks.iter().find(|known| &***known == identifier) {
                let id = row.try_get("id").doing(doing)?;
                tasks.names.insert(id, known.clone());
                tasks.ids.push(id);
            }
        }
        self.lanes.set_tasks(tasks);
        let are_all_known = rows.len() == names.len();
        self.learn_at = Instant::now() + if are_all_known { TASKS_INTERVAL } else { Duration::ZERO };
        Ok(())
    }

    /// Adds those of the tasks that do not exist, without waiting for a transaction that is about to do the same.
    async fn ensure_tasks(&self, connection: &mut PgConnection, names: &[String]) -> Result<(), Error> {
        let doing = || "add the tasks".to_owned();
        sqlx::raw_sql(BEGIN_BRIEFLY).execute(&mut *connection).await.doing(doing)?;
        let query = sqlx::query(self.statements.ensure_tasks.sql()).persistent(false).bind(names);
        let added = query.execute(&mut *connection).await.doing(doing);
        let end = if added.is_ok() { "commit" } else { "rollback" };
        sqlx::raw_sql(end).execute(&mut *connection).await.doing(doing)?;
        match added {
            Err(error) if error.is_lock_timeout() => {
                debug!(label = "worker", "an open transaction adds a task of this worker: going on without it for now");
                Ok(())
            }
            added => added.map(drop),
        }
    }

    /// The worker has these tasks from now on: claims no jobs of others, and looks up those that are new.
    pub(crate) fn tasks_are(&mut self, identifiers: Vec<Arc<str>>) {
        let mut tasks = (*self.lanes.tasks()).clone();
        tasks.ids.retain(|id| tasks.names.get(id).is_some_and(|name| identifiers.contains(name)));
        self.lanes.set_tasks(tasks);
        self.tasks = identifiers;
        self.ensure_at = Instant::now();
        self.learn_tasks_again();
    }

    /// The ids of tasks may have changed: a name that no job uses may be deleted, and gets another id when it comes back.
    pub(crate) fn learn_tasks_again(&mut self) {
        self.learn_at = Instant::now();
    }

    async fn task_ids(&self, connection: &mut PgConnection, names: &[String]) -> sqlx::Result<Vec<PgRow>> {
        sqlx::query(self.statements.task_ids.sql()).persistent(false).bind(names).fetch_all(connection).await
    }

    /// Whether any job was waiting when the tasks were last looked up.
    pub(crate) fn jobs_wait(&self) -> bool {
        self.jobs_wait
    }

    /// Reports and claims. Returns only when the database has answered, however long it is away; an error is one that waiting
    /// would not cure.
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
                Ok(Err(error)) if error.is_contention() => {
                    debug!(
                        label = "worker",
                        error = error.to_string_with_sources(),
                        "conflict with another transaction: trying again"
                    );
                    continue;
                }
                Ok(Err(error)) if !error.is_retryable() => return Err(error),
                Ok(Err(error)) => error.to_string_with_sources(),
                Err(_) => Error::NoAnswer { after: ANSWER_TIMEOUT }.to_string(),
            };
            self.lanes.first_lost_an_answer.store(true, Ordering::Release);
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
        if wants.jobs > 0 && self.learn_at <= Instant::now() {
            self.learn_task_ids(&mut connection).await?;
        }
        let lanes = self.lanes.clone();
        // Until the answer is here: also where we are dropped while we wait for it.
        let first_is_lost = std::mem::replace(&mut self.uncertain, true);
        let mut found_again = Vec::new();
        let mut second_is_lost = lanes.second_lost_an_answer.load(Ordering::Acquire);
        let under_way = if first_is_lost || second_is_lost {
            let alone = lanes.under_way.clone().write_owned().await;
            second_is_lost = lanes.second_lost_an_answer.load(Ordering::Acquire);
            self.end_earlier_exchanges(&mut connection, first_is_lost, second_is_lost).await?;
            found_again = self.held(&mut connection).await?;
            lanes.second_lost_an_answer.store(false, Ordering::Release);
            UnderWay::Alone(alone)
        } else {
            UnderWay::Beside(lanes.begin().await)
        };
        let reported: HashMap<i64, &Job> = report.ended.iter().map(|ended| (ended.job.id, &*ended.job)).collect();
        found_again.retain(|job| !reported.get(&job.id).is_some_and(|reported| reported.is_same_claim(job)));
        // A queue whose next job was claimed without our knowledge is not free.
        let taken: HashSet<Option<i32>> = found_again.iter().map(|job| job.job_queue_id).collect();
        let free = report.free_queues.iter().copied().filter(|queue| !taken.contains(&Some(*queue)));
        let exchanged = self.exchange_over(connection, report, &free.collect::<Vec<_>>(), wants).await;
        if exchanged.is_ok() {
            lanes.first_lost_an_answer.store(false, Ordering::Release);
        }
        // What was found is not in hand yet: it has to be found again.
        self.uncertain |= exchanged.is_err() && (first_is_lost || second_is_lost);
        Ok(Reply { answer: exchanged?, found_again, under_way })
    }

    /// The second lane's way: what becomes of an exchange whose answer is lost is for the first lane to find out.
    pub(crate) async fn exchange_once(&mut self, report: &Report, wants: &Wants) -> Result<Answer, Error> {
        self.uncertain = false;
        let exchanging = async {
            let connection = match self.connection.take() {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            self.uncertain = true;
            self.exchange_over(connection, report, &[], wants).await
        };
        // The first lane may have to wait for this: not for longer than for its own.
        let in_time = tokio::time::timeout(ANSWER_TIMEOUT / 4, exchanging).await;
        in_time.unwrap_or(Err(Error::NoAnswer { after: ANSWER_TIMEOUT / 4 }))
    }

    async fn exchange_over(
        &mut self,
        mut connection: PgConnection,
        report: &Report,
        free_queues: &[i32],
        wants: &Wants,
    ) -> Result<Answer, Error> {
        let started = Instant::now();
        let result = if self.persistent {
            self.report_and_claim(&mut connection, report, free_queues, wants).await
        } else {
            self.report_and_claim_behind_a_pooler(&mut connection, report, free_queues, wants).await
        };
        // The server's word that nothing has happened is an answer, too.
        if result.as_ref().err().is_none_or(Error::is_contention) {
            self.uncertain = false;
            self.connection = Some(connection);
        }
        Ok(Answer { took: started.elapsed(), ..result? })
    }

    /// Behind a pooler, a connection that was given up cannot be found again and ended, and the server may still carry out
    /// what it was told. So the exchange is a transaction that ends only if the worker says so; and what becomes of one that
    /// was told to commit can be found out by its id.
    async fn report_and_claim_behind_a_pooler(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        free_queues: &[i32],
        wants: &Wants,
    ) -> Result<Answer, Error> {
        let doing = || "exchange jobs with the database".to_owned();
        sqlx::raw_sql(BEGIN).execute(&mut *connection).await.doing(doing)?;
        let exchanging = async {
            let answer = self.report_and_claim(&mut *connection, report, free_queues, wants).await?;
            let query = sqlx::query_scalar(self.statements.current_transaction.sql()).persistent(false);
            Ok((answer, query.fetch_one(&mut *connection).await.doing(doing)?))
        };
        let (answer, transaction): (Answer, i64) = match exchanging.await {
            Ok(answered) => answered,
            Err(error) => {
                sqlx::raw_sql("rollback").execute(&mut *connection).await.doing(doing)?;
                return Err(error);
            }
        };
        self.lanes.committing().insert(transaction);
        let committed = sqlx::raw_sql("commit").execute(&mut *connection).await;
        if matches!(committed, Ok(_) | Err(sqlx::Error::Database(_))) {
            self.lanes.committing().remove(&transaction);
        }
        committed.doing(doing)?;
        Ok(answer)
    }

    async fn report_and_claim(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        free_queues: &[i32],
        wants: &Wants,
    ) -> Result<Answer, Error> {
        let doing = || "exchange jobs with the database".to_owned();
        let done = report.ended.iter().filter(|ended| ended.settlement == Settlement::Complete);
        let (done, done_at): (Vec<_>, Vec<_>) = done.map(|ended| (ended.job.id, ended.job.locked_at)).unzip();
        let back: Vec<(&Job, &GiveBack)> = report.ended.iter().filter_map(Ended::given_back).collect();
        let limit = i32::try_from(wants.jobs).unwrap_or(i32::MAX);
        let (task_ids, limits) = self.tasks_and_limits(wants);
        let rows = sqlx::query(self.statements.exchange.sql())
            .persistent(self.persistent)
            .bind(&*self.surroundings.worker_id)
            .bind(done)
            .bind(done_at)
            .bind(back.iter().map(|(job, _)| job.id).collect::<Vec<_>>())
            .bind(back.iter().map(|(job, _)| job.locked_at).collect::<Vec<_>>())
            .bind(back.iter().map(|(_, how)| how.error.as_deref()).collect::<Vec<_>>())
            .bind(back.iter().map(|(_, how)| seconds(how.run_at)).collect::<Vec<_>>())
            .bind(back.iter().map(|(_, how)| time(how.run_at)).collect::<Vec<_>>())
            .bind(back.iter().map(|(_, how)| attempts(how.attempts)).collect::<Vec<_>>())
            .bind(back.iter().map(|(_, how)| how.payload.as_deref()).collect::<Vec<_>>())
            .bind(free_queues)
            .bind(task_ids)
            .bind(limit)
            .bind(&wants.forbidden_flags)
            .bind(wants.now)
            .bind(back.iter().map(|(job, _)| job.key.as_deref()).collect::<Vec<_>>())
            .bind(limits)
            .bind(wants.freshness)
            .bind(back.iter().map(|(_, how)| how.unbegun.map(i32::from)).collect::<Vec<_>>())
            .fetch_all(connection)
            .await
            .doing(doing)?;
        self.answer(&rows).doing(doing)
    }

    /// The claimed jobs, and the last row, which is about the exchange itself.
    fn answer(&self, rows: &[PgRow]) -> sqlx::Result<Answer> {
        let Some((about, jobs)) = rows.split_last() else { return Err(sqlx::Error::RowNotFound) };
        Ok(Answer {
            jobs: self.jobs(jobs)?,
            blocked_jobs: about.try_get::<Vec<i64>, _>("blocked_jobs")?.into_iter().collect(),
            blocked_queues: about.try_get("blocked_queues")?,
            contended: about.try_get("contended")?,
            clock: about.try_get("clock")?,
            took: Duration::ZERO,
        })
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

    /// The server may not have noticed that a connection is gone, and what it was told to do may still be under way. Returns
    /// when nothing can be written any more by exchanges that were given up.
    async fn end_earlier_exchanges(
        &self,
        connection: &mut PgConnection,
        of_first: bool,
        of_second: bool,
    ) -> Result<(), Error> {
        let doing = || "end an earlier exchange".to_owned();
        let committing: Vec<i64> = self.lanes.committing().iter().copied().collect();
        for transaction in committing {
            let statement = &self.statements.transaction_status;
            loop {
                let query = sqlx::query_scalar(statement.sql()).persistent(false).bind(transaction);
                let status: Option<String> = query.fetch_one(&mut *connection).await.doing(doing)?;
                if status.as_deref() != Some("in progress") {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            self.lanes.committing().remove(&transaction);
        }
        if !self.persistent {
            // Behind a pooler, connections are not ours to end, and what was not told to commit does not.
            return Ok(());
        }
        let lanes = [(Lane::First, of_first), (Lane::Second, of_second)].into_iter().filter(|(_, lost)| *lost);
        let names: Vec<String> = lanes.map(|(lane, _)| connection_name(&self.surroundings.worker_id, lane)).collect();
        loop {
            let left: i64 = sqlx::query_scalar(self.statements.terminate_earlier_connections.sql())
                .persistent(false)
                .bind(&names)
                .fetch_one(&mut *connection)
                .await
                .doing(doing)?;
            if left == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The tasks that may run more jobs and, if any of them is limited, how many each may take.
    fn tasks_and_limits(&self, wants: &Wants) -> (Vec<i32>, Option<Vec<Option<i32>>>) {
        let tasks = self.lanes.tasks();
        if wants.limits.is_empty() {
            return (tasks.ids.clone(), None);
        }
        let limit = |id: &i32| wants.limits.get(tasks.names.get(id)?).copied();
        let with_limits = tasks.ids.iter().map(|id| (*id, limit(id)));
        let (ids, limits) = with_limits
            .filter(|(_, limit)| *limit != Some(0))
            .map(|(id, limit)| (id, limit.map(|limit| i32::try_from(limit).unwrap_or(i32::MAX))))
            .unzip();
        (ids, Some(limits))
    }

    fn jobs(&self, rows: &[PgRow]) -> sqlx::Result<Vec<Job>> {
        let tasks = self.lanes.tasks();
        let known = |row: &PgRow| -> sqlx::Result<Option<Job>> {
            let Some(identifier) = tasks.names.get(&row.try_get("task_id")?) else { return Ok(None) };
            db::job(row, Some(identifier.clone())).map(Some)
        };
        rows.iter().filter_map(|row| known(row).transpose()).collect()
    }

    /// Whether this worker may hold jobs that it has not heard of.
    pub(crate) fn is_uncertain(&self) -> bool {
        self.uncertain || self.lanes.second_lost_an_answer.load(Ordering::Acquire)
    }

    /// Tells the worker to leave where a newer release has taken over the schema, or is about to. False where there was no
    /// finding out.
    pub(crate) async fn look_at_ledgers(&mut self, must_leave: &MustLeave) -> bool {
        let Some(connection) = self.connection.as_mut() else { return false };
        match notice_in_ledgers(connection, &self.statements).await {
            Some(Some(notice)) => must_leave.tell(notice),
            Some(None) => {}
            None => return false,
        }
        true
    }

    /// How long until the next job is due that was not due yet at `claimed`, the time of the last claim.
    pub(crate) async fn next_due(&mut self, claimed: DateTime<Utc>, now: Option<DateTime<Utc>>) -> Option<Duration> {
        let mut connection = self.connection.take()?;
        let query = sqlx::query(self.statements.next_run_at.sql())
            .persistent(self.persistent)
            .bind(&self.lanes.tasks().ids)
            .bind(claimed)
            .bind(now)
            .fetch_one(&mut connection);
        // Without an answer the worker polls; the next exchange will find out what is wrong.
        let row = tokio::time::timeout(QUESTION_TIMEOUT, query).await.ok()?.ok()?;
        self.connection = Some(connection);
        let seconds: f64 = row.try_get::<Option<_>, _>("seconds").ok()??;
        Some(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
    }

    /// Keeps the locks of jobs that run for hours from looking like those of a dead worker.
    pub(crate) async fn keep_locks_fresh(&mut self, (jobs, queues): (Vec<i64>, Vec<i32>)) {
        let Some(connection) = self.connection.as_mut().filter(|_| !jobs.is_empty()) else { return };
        let query = sqlx::query(self.statements.keep_locks_fresh.sql()).persistent(false);
        let keeping = query.bind(&*self.surroundings.worker_id).bind(jobs).bind(queues).execute(connection);
        match tokio::time::timeout(ANSWER_TIMEOUT, keeping).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(label = "worker", %error, "cannot keep locks fresh now; trying again"),
            // Its answer may come when another is expected.
            Err(_) => self.connection = None,
        }
    }

    /// Frees the locks of workers that died hours ago.
    pub(crate) async fn clear_stale_locks(&mut self) {
        let Some(connection) = self.connection.as_mut() else { return };
        let query = sqlx::query(self.statements.clear_stale_locks.sql()).persistent(false).fetch_one(connection);
        let Ok(cleared) = tokio::time::timeout(ANSWER_TIMEOUT, query).await else {
            // Its answer may come when another is expected.
            self.connection = None;
            return;
        };
        if let Ok(row) = cleared {
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

/// Its name is its own, so that a new connection can find the one before it.
fn options_of_first_lane(options: &PgConnectOptions, worker_id: &str, persistent: bool) -> PgConnectOptions {
    let options = options.clone().application_name(&connection_name(worker_id, Lane::First));
    // A pooler would not pass it on.
    if persistent { options.options([LOCK_TIMEOUT]) } else { options }
}

fn connection_name(worker_id: &str, lane: Lane) -> String {
    match lane {
        Lane::First => format!("graphile_worker {worker_id}"),
        Lane::Second => format!("graphile_worker {worker_id} 2"),
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
        assert_eq!(pace.wanted(2, 2 + 3 * LARGEST_CLAIM), 0);
    }

    #[test]
    fn large_payloads_are_not_claimed_far_ahead() {
        let mut pace = pace(Duration::from_micros(5), Duration::from_millis(5));
        pace.claimed(4, 4 * 1024 * 1024);
        assert_eq!(pace.wanted(4, 0), 4 + 32);
        pace.claimed(4, 4 * 1024 * 1024 * 1024);
        assert_eq!(pace.wanted(4, 4), 0);
    }

    #[test]
    fn before_anything_is_known_only_the_slots_are_filled() {
        assert_eq!(Pace::default().wanted(4, 1), 3);
    }
}
