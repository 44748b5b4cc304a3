//! How jobs get into the table: one by one, merged with others that come at the same moment, or many in pieces.
//!
//! Adding is an exchange too: while one statement of a program is under way, the jobs that its callers add meanwhile
//! gather for the next, so that 32 callers wait for one commit and not for 32. The workers are woken after the commit,
//! once for all of them; one in this program is woken at once.

use crate::Error;
use crate::db::{self, Parameter, Statements};
use crate::error::Doing;
use crate::job::{Job, JobKeyMode, JobSpec};
use crate::worker_utils::{Source, Within};
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Postgres, Row};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

/// So many callers' jobs go into one statement at most.
const LARGEST_MERGE: usize = 1000;

/// A batch goes in pieces of so many jobs, none of which the program holds twice...
const PIECE: usize = 10_000;

/// ...if it is at least so large: for fewer, one round trip is worth more.
const WORTH_PIECES: usize = 200;

/// A job that is to be added.
pub(crate) struct NewJob {
    pub(crate) identifier: Arc<str>,
    pub(crate) payload: Box<RawValue>,
    /// With the task's own maximum of attempts and, if that is wanted, the time of this machine.
    pub(crate) spec: JobSpec,
}

impl NewJob {
    fn flags(&self) -> Option<String> {
        self.spec.flags.as_ref().map(|flags| serde_json::json!(flags).to_string())
    }
}

/// What the callers of a program share when they add jobs.
#[derive(Default)]
pub(crate) struct Adding {
    waiting: Mutex<Waiting>,
    /// Notified when jobs were added: for a worker in this program.
    pub(crate) added: Arc<Notify>,
}

#[derive(Default)]
struct Waiting {
    jobs: Vec<Caller>,
    /// Whether somebody is on the way to the database, and will come back for these.
    under_way: bool,
    /// Whether somebody is adding a job in a statement of its own.
    alone: bool,
}

/// A job, and who waits for it.
struct Caller {
    job: NewJob,
    answer: oneshot::Sender<Result<Job, Error>>,
}

impl Adding {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a job with whatever else is being added.
pub(crate) async fn add(
    pool: &PgPool,
    adding: &Arc<Adding>,
    statements: &Arc<Statements>,
    job: NewJob,
) -> Result<Job, Error> {
    // A key may be held by a transaction that takes its time: nobody else is to wait for that.
    if job.spec.job_key.is_some() {
        let added = by_itself(pool, statements, job).await?;
        adding.added.notify_one();
        return Ok(added);
    }
    let doing = format!("add a job of the task {:?}", job.identifier);
    let (first, answered) = match adding.turn(job) {
        Turn::Alone(job, _until_added) => return by_itself(pool, statements, job).await,
        Turn::First(answered) => (true, answered),
        Turn::Later(answered) => (false, answered),
    };
    if first {
        // A task of its own: it goes on for the others when this caller is gone.
        let (pool, adding, statements) = (pool.clone(), adding.clone(), statements.clone());
        tokio::spawn(Merging { pool, adding, statements, is_over: false }.add_until_nobody_waits());
    }
    answered.await.unwrap_or_else(|_| Err(stopped(doing)))
}

/// What a caller is to do.
enum Turn<'a> {
    /// Nobody else is adding: a statement of its own is the fastest way. Until this is dropped.
    Alone(NewJob, Alone<'a>),
    /// Somebody is: take the jobs of all who come to the database.
    First(Answered),
    /// Somebody is on the way, and will come back for this one.
    Later(Answered),
}

type Answered = oneshot::Receiver<Result<Job, Error>>;

struct Alone<'a>(&'a Adding);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.waiting().alone = false;
        self.0.added.notify_one();
    }
}

impl Adding {
    fn turn(&self, job: NewJob) -> Turn<'_> {
        let mut waiting = self.waiting();
        if !waiting.under_way && !std::mem::replace(&mut waiting.alone, true) {
            return Turn::Alone(job, Alone(self));
        }
        let (answer, answered) = oneshot::channel();
        waiting.jobs.push(Caller { job, answer });
        if std::mem::replace(&mut waiting.under_way, true) { Turn::Later(answered) } else { Turn::First(answered) }
    }
}

struct Merging {
    pool: PgPool,
    adding: Arc<Adding>,
    statements: Arc<Statements>,
    is_over: bool,
}

impl Drop for Merging {
    fn drop(&mut self) {
        if !self.is_over {
            // The runtime goes down: whoever waits is told, and whoever comes later begins anew.
            let mut waiting = self.adding.waiting();
            waiting.jobs.clear();
            waiting.under_way = false;
        }
    }
}

impl Merging {
    async fn add_until_nobody_waits(mut self) {
        let mut connection = None;
        loop {
            let callers: Vec<Caller> = {
                let mut waiting = self.adding.waiting();
                let count = waiting.jobs.len().min(LARGEST_MERGE);
                if count == 0 {
                    waiting.under_way = false;
                    break;
                }
                waiting.jobs.drain(..count).collect()
            };
            self.add(callers, &mut connection).await;
        }
        self.is_over = true;
    }

    async fn add(&self, callers: Vec<Caller>, connection: &mut Option<PoolConnection<Postgres>>) {
        let mut to = match connection.take() {
            Some(connection) => connection,
            None => match self.pool.acquire().await {
                Ok(connection) => connection,
                Err(error) => return refuse(callers, &error),
            },
        };
        let jobs = callers.iter().map(|caller| &caller.job);
        let rows = db::bound(&self.statements.add_merged_jobs, merged(jobs)).fetch_all(&mut *to).await;
        let added: sqlx::Result<Vec<(usize, Job)>> = rows.and_then(|rows| rows.iter().map(position_and_job).collect());
        let added = match added {
            Ok(added) => added,
            // One of them is not legal: by themselves, each gets what it deserves.
            Err(sqlx::Error::Database(_)) => return self.add_each(callers),
            Err(error) => return refuse(callers, &error),
        };
        let count = added.len();
        let mut callers: Vec<Option<Caller>> = callers.into_iter().map(Some).collect();
        for (position, job) in added {
            if let Some(caller) = callers.get_mut(position - 1).and_then(Option::take) {
                let _ = caller.answer.send(Ok(job));
            }
        }
        self.adding.added.notify_one();
        self.add_each(callers.into_iter().flatten());
        if count > 0 && wake(&self.statements, &mut to, count).await.is_err() {
            // The jobs are there all the same; workers find them when they poll.
            return;
        }
        *connection = Some(to);
    }

    /// Adds jobs whose task or queue is new, or that are not legal, each for itself.
    fn add_each(&self, callers: impl IntoIterator<Item = Caller>) {
        for Caller { job, answer } in callers {
            let (pool, statements, added) = (self.pool.clone(), self.statements.clone(), self.adding.added.clone());
            tokio::spawn(async move {
                let result = by_itself(&pool, &statements, job).await;
                added.notify_one();
                let _ = answer.send(result);
            });
        }
    }
}

/// Adds a job in a statement of its own, which also wakes the workers.
pub(crate) async fn by_itself(source: &impl Source, statements: &Statements, job: NewJob) -> Result<Job, Error> {
    let NewJob { identifier, payload, spec } = job;
    let doing = || format!("add a job of the task {identifier:?}");
    let parameters = vec![
        Parameter::Text(Some(identifier.to_string())),
        Parameter::Text(Some(payload.get().to_owned())),
        Parameter::Text(spec.queue_name),
        Parameter::Time(spec.run_at),
        Parameter::Int(spec.max_attempts.map(i32::from)),
        Parameter::Text(spec.job_key),
        Parameter::Int(spec.priority.map(i32::from)),
        Parameter::TextArray(spec.flags),
        Parameter::Text(Some(spec.job_key_mode.unwrap_or_default().as_str().to_owned())),
    ];
    let added = source.jobs(&statements.add_job, parameters, doing).await?.pop();
    added.ok_or_else(|| Error::Database { doing: doing(), source: sqlx::Error::RowNotFound })
}

/// Adds many jobs in a transaction of their own, and wakes the workers after it.
pub(crate) async fn add_many(
    pool: &PgPool,
    adding: &Adding,
    statements: &Statements,
    jobs: Vec<NewJob>,
) -> Result<Vec<Job>, Error> {
    let doing = || format!("add {}", counted(jobs.len()));
    let count = jobs.len();
    if !may_go_in_pieces(&jobs) {
        let added = in_one_statement(pool, statements, jobs).await?;
        adding.added.notify_one();
        return Ok(added);
    }
    let mut connection = pool.acquire().await.doing(doing)?;
    let mut transaction = sqlx::Connection::begin(&mut *connection).await.doing(doing)?;
    let within = Within::new(&mut transaction);
    let added = match names(&within, statements, &jobs).await? {
        Some(names) => in_pieces(&within, statements, jobs, &names).await?,
        None => in_one_statement(&within, statements, jobs).await?,
    };
    transaction.commit().await.doing(|| format!("add {}", counted(count)))?;
    adding.added.notify_one();
    // The jobs are there even if this fails; workers find them when they poll.
    let _ = wake(statements, &mut connection, count).await;
    Ok(added)
}

/// Adds many jobs in a transaction of the caller's, which wakes the workers when it commits. If the caller's connection has
/// no open transaction, all jobs go in one statement.
pub(crate) async fn add_many_within(
    source: &impl Source,
    statements: &Statements,
    jobs: Vec<NewJob>,
) -> Result<Vec<Job>, Error> {
    let count = jobs.len();
    if may_go_in_pieces(&jobs)
        && let Some(names) = names(source, statements, &jobs).await?
        && names.are_held(source, statements).await?
    {
        let added = in_pieces(source, statements, jobs, &names).await?;
        let parameters = vec![Parameter::Int(i32::try_from(count).ok())];
        source.numbers(&statements.notify_jobs, parameters, || "wake the workers".to_owned()).await?;
        return Ok(added);
    }
    in_one_statement(source, statements, jobs).await
}

/// Keys need to be compared with those in the table, one by one.
fn may_go_in_pieces(jobs: &[NewJob]) -> bool {
    jobs.len() >= WORTH_PIECES && jobs.iter().all(|job| job.spec.job_key.is_none())
}

async fn in_one_statement(source: &impl Source, statements: &Statements, jobs: Vec<NewJob>) -> Result<Vec<Job>, Error> {
    let preserve_run_at = jobs.iter().any(|job| job.spec.job_key_mode == Some(JobKeyMode::PreserveRunAt));
    let parameters = vec![
        Parameter::Texts(jobs.iter().map(|job| Some(job.identifier.to_string())).collect()),
        Parameter::Texts(jobs.iter().map(|job| Some(job.payload.get().to_owned())).collect()),
        Parameter::Texts(jobs.iter().map(|job| job.spec.queue_name.clone()).collect()),
        Parameter::Times(jobs.iter().map(|job| job.spec.run_at).collect()),
        Parameter::Shorts(jobs.iter().map(|job| job.spec.max_attempts).collect()),
        Parameter::Texts(jobs.iter().map(|job| job.spec.job_key.clone()).collect()),
        Parameter::Shorts(jobs.iter().map(|job| job.spec.priority).collect()),
        Parameter::Texts(jobs.iter().map(NewJob::flags).collect()),
        Parameter::Bool(preserve_run_at),
    ];
    let mut added = source.jobs(&statements.add_jobs, parameters, || format!("add {}", counted(jobs.len()))).await?;
    for (added, job) in added.iter_mut().zip(jobs) {
        added.task_identifier = job.identifier;
    }
    Ok(added)
}

/// What the rows of many jobs have in common.
struct Names {
    now: DateTime<Utc>,
    tasks: HashMap<Arc<str>, i32>,
    queues: HashMap<String, i32>,
}

/// Makes the tasks and queues that are new. `None` where one of the jobs is not legal.
async fn names(source: &impl Source, statements: &Statements, jobs: &[NewJob]) -> Result<Option<Arc<Names>>, Error> {
    let tasks: BTreeSet<&Arc<str>> = jobs.iter().map(|job| &job.identifier).collect();
    let queues: BTreeSet<&String> = jobs.iter().filter_map(|job| job.spec.queue_name.as_ref()).collect();
    let attempts: BTreeSet<i16> = jobs.iter().filter_map(|job| job.spec.max_attempts).collect();
    let parameters = vec![
        Parameter::Texts(tasks.iter().map(|name| Some(name.to_string())).collect()),
        Parameter::Texts(queues.iter().map(|name| Some((*name).clone())).collect()),
        Parameter::Shorts(attempts.into_iter().map(Some).collect()),
    ];
    let doing = || format!("add {}", counted(jobs.len()));
    let mut numbers = source.numbers(&statements.job_names, parameters, doing).await?.into_iter();
    let Some(now) = numbers.next().and_then(DateTime::from_timestamp_micros) else { return Ok(None) };
    let mut ids = numbers.map(|id| i32::try_from(id).unwrap_or_default());
    Ok(Some(Arc::new(Names {
        now,
        tasks: tasks.into_iter().cloned().zip(ids.by_ref()).collect(),
        queues: queues.into_iter().cloned().zip(ids).collect(),
    })))
}

impl Names {
    /// Whether the transaction that looked these names up is still open. If not, cleanup may delete them at any moment.
    async fn are_held(&self, source: &impl Source, statements: &Statements) -> Result<bool, Error> {
        let doing = || "add jobs".to_owned();
        let parameters = vec![Parameter::Time(Some(self.now))];
        Ok(source.numbers(&statements.is_same_transaction, parameters, doing).await? == [1])
    }

    fn queue(&self, job: &NewJob) -> Option<i32> {
        job.spec.queue_name.as_ref().and_then(|name| self.queues.get(name)).copied()
    }
}

/// Writes the rows, and returns the jobs as they now are, without reading them again.
async fn in_pieces(
    source: &impl Source,
    statements: &Statements,
    jobs: Vec<NewJob>,
    names: &Arc<Names>,
) -> Result<Vec<Job>, Error> {
    let count = jobs.len();
    let doing = || format!("add {}", counted(count));
    let mut added = Vec::with_capacity(count);
    let mut jobs = jobs.into_iter();
    let mut next = spawn_piece(&mut jobs, names);
    while let Some(piece) = next.take() {
        let (piece, parameters) = piece.await.map_err(|_| stopped(doing()))?;
        // While the database writes this one, the next is put together.
        next = spawn_piece(&mut jobs, names);
        let ids = source.numbers(&statements.add_piece, parameters, doing).await?;
        let written = ids.into_iter().zip(piece).map(|(id, job)| written(id, names.queue(&job), job, names.now));
        added.extend(written);
    }
    Ok(added)
}

type Piece = (Vec<NewJob>, Vec<Parameter>);

/// Puts the next piece together on another core.
fn spawn_piece(jobs: &mut std::vec::IntoIter<NewJob>, names: &Arc<Names>) -> Option<JoinHandle<Piece>> {
    let piece: Vec<NewJob> = jobs.take(PIECE).collect();
    let names = names.clone();
    (!piece.is_empty()).then(|| {
        tokio::spawn(async move {
            let parameters = vec![
                Parameter::Ints(piece.iter().map(|job| names.tasks.get(&job.identifier).copied()).collect()),
                Parameter::Ints(column(&piece, |job| names.queue(job))),
                Parameter::Texts(piece.iter().map(|job| Some(job.payload.get().to_owned())).collect()),
                Parameter::Times(column(&piece, |job| job.spec.run_at)),
                Parameter::Shorts(column(&piece, |job| job.spec.max_attempts)),
                Parameter::Shorts(column(&piece, |job| job.spec.priority)),
                Parameter::Texts(column(&piece, NewJob::flags)),
            ];
            (piece, parameters)
        })
    })
}

/// One field of the jobs of a piece. `unnest` fills up what is shorter with nulls: where no job has the field, an empty
/// array says so.
fn column<T>(piece: &[NewJob], field: impl Fn(&NewJob) -> Option<T>) -> Vec<Option<T>> {
    let column: Vec<Option<T>> = piece.iter().map(field).collect();
    if column.iter().all(Option::is_none) { Vec::new() } else { column }
}

fn stopped(doing: String) -> Error {
    Error::Database { doing, source: sqlx::Error::WorkerCrashed }
}

/// A job as it has just been written without a key.
fn written(id: i64, job_queue_id: Option<i32>, job: NewJob, now: DateTime<Utc>) -> Job {
    let flags = job.spec.flags.filter(|flags| !flags.is_empty());
    // The database counts in microseconds.
    let stored = |time: DateTime<Utc>| DateTime::from_timestamp_micros(time.timestamp_micros()).unwrap_or(time);
    Job {
        id,
        task_identifier: job.identifier,
        payload: job.payload,
        job_queue_id,
        priority: job.spec.priority.unwrap_or(0),
        run_at: job.spec.run_at.map_or(now, stored),
        attempts: 0,
        max_attempts: job.spec.max_attempts.unwrap_or(25),
        last_error: None,
        created_at: now,
        updated_at: now,
        key: None,
        locked_at: None,
        revision: 0,
        flags: flags.map(|flags| flags.into_iter().map(|flag| (flag, true)).collect()),
    }
}

fn merged<'j>(jobs: impl Iterator<Item = &'j NewJob> + Clone) -> Vec<Parameter> {
    vec![
        Parameter::Texts(jobs.clone().map(|job| Some(job.identifier.to_string())).collect()),
        Parameter::Texts(jobs.clone().map(|job| Some(job.payload.get().to_owned())).collect()),
        Parameter::Texts(jobs.clone().map(|job| job.spec.queue_name.clone()).collect()),
        Parameter::Times(jobs.clone().map(|job| job.spec.run_at).collect()),
        Parameter::Shorts(jobs.clone().map(|job| job.spec.max_attempts).collect()),
        Parameter::Shorts(jobs.clone().map(|job| job.spec.priority).collect()),
        Parameter::Texts(jobs.map(NewJob::flags).collect()),
    ]
}

fn position_and_job(row: &PgRow) -> sqlx::Result<(usize, Job)> {
    let position: i64 = row.try_get("position")?;
    Ok((usize::try_from(position).unwrap_or(usize::MAX), db::job(row, None)?))
}

async fn wake(statements: &Statements, connection: &mut PoolConnection<Postgres>, count: usize) -> sqlx::Result<()> {
    let parameters = vec![Parameter::Int(i32::try_from(count).ok())];
    db::bound(&statements.notify_jobs, parameters).execute(&mut **connection).await.map(|_| ())
}

/// Tells every caller the same: that there is no telling what became of its job, or no way to add it.
fn refuse(callers: Vec<Caller>, error: &sqlx::Error) {
    for caller in callers {
        let source = match error {
            sqlx::Error::Io(error) => sqlx::Error::Io(std::io::Error::new(error.kind(), error.to_string())),
            sqlx::Error::PoolTimedOut => sqlx::Error::PoolTimedOut,
            sqlx::Error::PoolClosed => sqlx::Error::PoolClosed,
            error => sqlx::Error::Protocol(error.to_string()),
        };
        let doing = format!("add a job of the task {:?}", caller.job.identifier);
        let _ = caller.answer.send(Err(Error::Database { doing, source }));
    }
}
/// So many jobs.
pub(crate) fn counted(jobs: usize) -> String {
    if jobs == 1 { "1 job".to_owned() } else { format!("{jobs} jobs") }
}
