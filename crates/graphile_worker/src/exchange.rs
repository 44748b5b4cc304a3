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
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tracing::{debug, info, warn};

/// 1,000 jobs a claim instead of 500 save 2 µs of 16 a job (bench/RESULTS.md); more would be hoarding.
const LARGEST_CLAIM: usize = 1000;

/// A connection that does not answer for this long is taken for dead.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A server that does not answer the first connection for this long is not ready.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// How often an idle worker looks whether its tasks still have the ids it knows.
const TASKS_INTERVAL: Duration = Duration::from_secs(10);

/// A job that is to wait for longer waits for so long: a hundred years.
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Between two attempts to reach the database: from this, doubling, to the other.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How long a report waits for rows that somebody has locked, before it goes without them.
const LOCK_TIMEOUT: (&str, &str) = ("lock_timeout", "1s");

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

    pub(crate) fn ids(&self) -> impl Iterator<Item = i64> {
        self.ended.iter().map(|ended| ended.job.id)
    }

    pub(crate) fn concerns_queue(&self, queue: i32) -> bool {
        self.ended.iter().any(|ended| ended.job.job_queue_id == Some(queue))
    }

    /// Takes those of the jobs that are `wanted` out of it.
    pub(crate) fn take(&mut self, wanted: impl Fn(&Ended) -> bool) -> Report {
        let (taken, kept) = std::mem::take(&mut self.ended).into_iter().partition(wanted);
        self.ended = kept;
        Report { ended: taken, free_queues: Vec::new() }
    }

    /// Puts what was not written before what has come since.
    pub(crate) fn put_back(&mut self, mut earlier: Report) {
        earlier.ended.append(&mut self.ended);
        earlier.free_queues.append(&mut self.free_queues);
        *self = earlier;
    }
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
        let target = concurrency + (ahead as usize).min(3 * LARGEST_CLAIM);
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
    /// How many seconds old the worker's heartbeat may be, where it has one.
    pub(crate) freshness: Option<f64>,
}

/// What came of an exchange.
pub(crate) enum Exchanged {
    Written(Reply),
    /// Nothing: an open transaction of somebody else's holds the rows of these jobs, which were to be reported.
    Held(HashSet<i64>),
}

pub(crate) struct Reply {
    pub(crate) jobs: Vec<Job>,
    pub(crate) took: Duration,
    /// Jobs that this worker holds, where an earlier answer was lost: some may be known.
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
    /// Tasks whose ids are to be looked up before the next claim: the worker has others than before.
    to_learn: Option<Vec<Arc<str>>>,
    jobs_wait: bool,
    persistent: bool,
    /// Whether an exchange began whose end we have not seen, so that the database may know more than we do.
    uncertain: bool,
    tasks_learned: Instant,
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
        identifiers: &[Arc<str>],
        persistent: bool,
    ) -> Result<Exchange, Error> {
        let mut exchange = Exchange {
            options: options_of_first_lane(&options, &surroundings.worker_id, persistent),
            connection: None,
            statements,
            surroundings,
            lanes: Arc::default(),
            to_learn: None,
            jobs_wait: false,
            persistent,
            uncertain: false,
            tasks_learned: Instant::now(),
        };
        if let Some(mut connection) = made_ahead
            && exchange.learn_task_ids(&mut connection, identifiers).await.is_ok()
        {
            exchange.connection = Some(connection);
            return Ok(exchange);
        }
        let mut connection = exchange.connect().await?;
        exchange.learn_task_ids(&mut connection, identifiers).await?;
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
            to_learn: None,
            jobs_wait: false,
            persistent: self.persistent,
            uncertain: false,
            tasks_learned: self.tasks_learned,
        }
    }

    pub(crate) fn lanes(&self) -> Arc<Lanes> {
        self.lanes.clone()
    }

    async fn connect(&self) -> Result<PgConnection, Error> {
        PgConnection::connect_with(&self.options).await.doing(|| "connect to the database".to_owned())
    }

    async fn learn_task_ids(&mut self, connection: &mut PgConnection, identifiers: &[Arc<str>]) -> Result<(), Error> {
        let doing = || "look up the tasks".to_owned();
        let names: Vec<String> = identifiers.iter().map(|identifier| identifier.to_string()).collect();
        let mut rows = self.task_ids(connection, &names).await.doing(doing)?;
        if rows.len() < names.len() {
            self.ensure_tasks(connection, &names).await?;
            rows = self.task_ids(connection, &names).await.doing(doing)?;
        }
        let mut tasks = KnownTasks { ids: Vec::new(), ..(*self.lanes.tasks()).clone() };
        for row in rows {
            let identifier: &str = row.try_get("identifier").doing(doing)?;
            self.jobs_wait = row.try_get("jobs_wait").doing(doing)?;
            if let Some(known) = identifiers.iter().find(|known| &***known == identifier) {
                let id = row.try_get("id").doing(doing)?;
                tasks.names.insert(id, known.clone());
                tasks.ids.push(id);
            }
        }
        self.lanes.set_tasks(tasks);
        Ok(())
    }

    /// Makes those of the tasks that there are not; waits for a transaction that is about to do the same.
    async fn ensure_tasks(&self, connection: &mut PgConnection, names: &[String]) -> Result<(), Error> {
        let mut waits = false;
        loop {
            let query = sqlx::query(self.statements.ensure_tasks.sql()).persistent(false).bind(names);
            let ended = query.execute(&mut *connection).await.doing(|| "add the tasks".to_owned());
            if !ended.as_ref().is_err_and(Error::is_lock_timeout) {
                return ended.map(drop);
            }
            if !std::mem::replace(&mut waits, true) {
                warn!(
                    label = "worker",
                    worker_id = &*self.surroundings.worker_id,
                    "an open transaction adds a task of this worker's: waiting for its end"
                );
            }
        }
    }

    /// The worker has these tasks from now on: claims no jobs of others, and looks up those that are new.
    pub(crate) fn tasks_are(&mut self, identifiers: Vec<Arc<str>>) {
        let mut tasks = (*self.lanes.tasks()).clone();
        tasks.ids.retain(|id| tasks.names.get(id).is_some_and(|name| identifiers.contains(name)));
        self.lanes.set_tasks(tasks);
        self.to_learn = Some(identifiers);
    }

    async fn task_ids(&self, connection: &mut PgConnection, names: &[String]) -> sqlx::Result<Vec<PgRow>> {
        sqlx::query(self.statements.task_ids.sql()).persistent(false).bind(names).fetch_all(connection).await
    }

    /// Whether any job was waiting when the tasks were last looked up.
    pub(crate) fn jobs_wait(&self) -> bool {
        self.jobs_wait
    }

    /// Reports and claims. Returns only when it is written, however long the database is away, or when it turns out that
    /// somebody keeps it from being written; an error is one that waiting would not cure.
    pub(crate) async fn exchange(&mut self, report: &Report, wants: &Wants) -> Result<Exchanged, Error> {
        let mut pause = SHORTEST_PAUSE;
        let mut away = false;
        loop {
            let attempt = tokio::time::timeout(ANSWER_TIMEOUT, self.try_exchange(report, wants)).await;
            let error = match attempt {
                Ok(Ok(reply)) => {
                    if away {
                        info!(label = "worker", worker_id = &*self.surroundings.worker_id, "the database is back");
                    }
                    return Ok(Exchanged::Written(reply));
                }
                Ok(Err(error)) if error.is_contention() => {
                    debug!(label = "worker", error = error.to_string_with_sources(), "got in each other's way");
                    if error.is_lock_timeout() {
                        let held = self.held_rows(report.ids().collect()).await;
                        if !held.is_empty() {
                            return Ok(Exchanged::Held(held));
                        }
                    }
                    continue;
                }
                Ok(Err(error)) if !error.is_retryable() => return Err(error),
                Ok(Err(error)) => error.to_string_with_sources(),
                Err(_) => Error::NoAnswer { after: ANSWER_TIMEOUT }.to_string(),
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
        if let Some(identifiers) = self.to_learn.clone() {
            self.learn_task_ids(&mut connection, &identifiers).await?;
            self.to_learn = None;
        }
        let lanes = self.lanes.clone();
        // Until the answer is here: also where we are dropped while we wait for it.
        let first_is_lost = std::mem::replace(&mut self.uncertain, true);
        let mut found_again = Vec::new();
        let mut second_is_lost = lanes.second_lost_an_answer.load(Ordering::Acquire);
        let under_way = if first_is_lost || second_is_lost {
            let alone = lanes.under_way.clone().write_owned().await;
            second_is_lost = lanes.second_lost_an_answer.load(Ordering::Acquire);
            self.end_earlier_connections(&mut connection, first_is_lost, second_is_lost).await?;
            found_again = self.held(&mut connection).await?;
            lanes.second_lost_an_answer.store(false, Ordering::Release);
            UnderWay::Alone(alone)
        } else {
            UnderWay::Beside(lanes.begin().await)
        };
        let settled: HashSet<i64> = report.ids().collect();
        found_again.retain(|job| !settled.contains(&job.id));
        // A queue whose next job was claimed without our knowledge is not free.
        let taken: HashSet<Option<i32>> = found_again.iter().map(|job| job.job_queue_id).collect();
        let free = report.free_queues.iter().copied().filter(|queue| !taken.contains(&Some(*queue)));
        let exchanged = self.exchange_over(connection, report, &free.collect::<Vec<_>>(), wants).await;
        // What was found is not in hand yet: it has to be found again.
        self.uncertain |= exchanged.is_err() && (first_is_lost || second_is_lost);
        let (jobs, took) = exchanged?;
        Ok(Reply { jobs, took, found_again, under_way })
    }

    /// The second lane's way: what becomes of an exchange whose answer is lost is for the first lane to find out.
    pub(crate) async fn exchange_once(
        &mut self,
        report: &Report,
        wants: &Wants,
    ) -> Result<(Vec<Job>, Duration), Error> {
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
    ) -> Result<(Vec<Job>, Duration), Error> {
        let started = Instant::now();
        let result = self.report_and_claim(&mut connection, report, free_queues, wants).await;
        // The server's word that nothing has happened is an answer, too.
        if result.as_ref().err().is_none_or(Error::is_contention) {
            self.uncertain = false;
            self.connection = Some(connection);
        }
        Ok((result?, started.elapsed()))
    }

    async fn report_and_claim(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        free_queues: &[i32],
        wants: &Wants,
    ) -> Result<Vec<Job>, Error> {
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
            .fetch_all(connection)
            .await
            .doing(doing)?;
        self.jobs(&rows).doing(doing)
    }

    /// Those of the jobs whose rows an open transaction of somebody else's holds; none, where that cannot be found out.
    pub(crate) async fn held_rows(&mut self, jobs: Vec<i64>) -> HashSet<i64> {
        let Some(mut connection) = self.connection.take() else { return HashSet::new() };
        let query = sqlx::query_scalar(self.statements.held_rows.sql()).persistent(false).bind(jobs);
        match tokio::time::timeout(ANSWER_TIMEOUT, query.fetch_all(&mut connection)).await {
            Ok(Ok(held)) => {
                self.connection = Some(connection);
                held.into_iter().collect()
            }
            _ => HashSet::new(),
        }
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
    async fn end_earlier_connections(
        &self,
        connection: &mut PgConnection,
        of_first: bool,
        of_second: bool,
    ) -> Result<(), Error> {
        if !self.persistent {
            // Behind a pooler, connections are not ours to end.
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
                .doing(|| "end an earlier connection".to_owned())?;
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

    /// How long until the next job of the future is due; a question for when there is nothing else to do.
    /// After a claim that began at this moment.
    pub(crate) async fn next_due(&mut self, now: Option<DateTime<Utc>>, began: Instant) -> Option<Duration> {
        let query = sqlx::query(self.statements.next_run_at.sql())
            .persistent(self.persistent)
            .bind(&self.lanes.tasks().ids)
            .bind(now)
            .bind(1.0 + began.elapsed().as_secs_f64())
            .fetch_one(self.connection.as_mut()?);
        // Without an answer the worker polls; the next exchange will find out what is wrong.
        let row = tokio::time::timeout(ANSWER_TIMEOUT, query).await.ok()?.ok()?;
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
    fn before_anything_is_known_only_the_slots_are_filled() {
        assert_eq!(Pace::default().wanted(4, 1), 3);
    }
}
