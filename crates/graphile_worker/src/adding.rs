//! How jobs are added: singly, merged with concurrent calls, or in chunks.
//!
//! While one statement is under way, the jobs that other callers of the process add are collected for the
//! next one, so that 32 callers share one commit instead of waiting for 32. Workers are notified once per
//! commit; a worker in the same process is woken directly. The public API is in `worker_utils`.

use crate::Error;
use crate::db::executor::{UtilsExecutor, WithinSqlx};
use crate::db::session;
use crate::db::{self, Parameter, Statements, rows};
use crate::error::Context;
use crate::job::{Job, JobKeyMode, JobSpec};
use crate::text::counted;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Postgres, Row};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

/// Maximum number of jobs in a merged statement.
const LARGEST_MERGE: usize = 1000;

/// Jobs per chunk of a large batch.
const CHUNK: usize = 10_000;

/// Smaller batches are added in one statement, to save round trips.
const MIN_CHUNKED: usize = 200;

/// A job to be added.
pub(crate) struct NewJob {
    pub(crate) identifier: Arc<str>,
    pub(crate) payload: Box<RawValue>,
    /// With the task's maximum number of attempts and, if local time is used, with `run_at`.
    pub(crate) spec: JobSpec,
}

impl NewJob {
    fn flags(&self) -> Option<String> {
        self.spec.flags.as_ref().map(|flags| serde_json::json!(flags).to_string())
    }
}

/// State shared by all callers in this process that add jobs.
#[derive(Default)]
pub(crate) struct Adding {
    pending: Mutex<Pending>,
    /// Notified when jobs were added, to wake a worker in this process.
    pub(crate) added: Arc<Notify>,
}

#[derive(Default)]
struct Pending {
    jobs: Vec<Caller>,
    /// Whether a merge is running that will also add these jobs.
    under_way: bool,
    /// Whether a single add is running.
    alone: bool,
}

/// A job, and the caller that waits for it.
struct Caller {
    job: NewJob,
    answer: oneshot::Sender<Result<Job, Error>>,
}

impl Adding {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a job, together with other jobs that are being added at the same time.
pub(crate) async fn add(
    pool: &PgPool,
    adding: &Arc<Adding>,
    statements: &Arc<Statements>,
    job: NewJob,
) -> Result<Job, Error> {
    // An add with a key may wait for another transaction; no other caller should wait for that. One that expires takes another
    // statement.
    if job.spec.job_key.is_some() || job.spec.expires_at.is_some() {
        let added = add_single(pool, statements, job).await?;
        adding.added.notify_one();
        return Ok(added);
    }
    let context = format!("add a job of the task {:?}", job.identifier);
    let (first, answered) = match adding.mode(job) {
        AddMode::Alone(job, _until_added) => return add_single(pool, statements, job).await,
        AddMode::First(answered) => (true, answered),
        AddMode::Later(answered) => (false, answered),
    };
    if first {
        // In its own task, which continues for the others if this caller is dropped.
        let (pool, adding, statements) = (pool.clone(), adding.clone(), statements.clone());
        tokio::spawn(Merging { pool, adding, statements, is_over: false }.merge_until_empty());
    }
    answered.await.unwrap_or_else(|_| Err(runtime_stopped(context)))
}

/// How to add a caller's job.
enum AddMode<'a> {
    /// No other add is running: a single statement is fastest. The guard marks the end of the add.
    Alone(NewJob, Alone<'a>),
    /// A single add is running: start a merge.
    First(Answered),
    /// A merge is running and will add this job, too.
    Later(Answered),
}

type Answered = oneshot::Receiver<Result<Job, Error>>;

struct Alone<'a>(&'a Adding);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.pending().alone = false;
        self.0.added.notify_one();
    }
}

impl Adding {
    fn mode(&self, job: NewJob) -> AddMode<'_> {
        let mut pending = self.pending();
        if !pending.under_way && !std::mem::replace(&mut pending.alone, true) {
            return AddMode::Alone(job, Alone(self));
        }
        let (answer, answered) = oneshot::channel();
        pending.jobs.push(Caller { job, answer });
        if std::mem::replace(&mut pending.under_way, true) {
            AddMode::Later(answered)
        } else {
            AddMode::First(answered)
        }
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
            // The runtime is shutting down. Fail the waiting callers; later ones start a new merge.
            let mut pending = self.adding.pending();
            pending.jobs.clear();
            pending.under_way = false;
        }
    }
}

impl Merging {
    async fn merge_until_empty(mut self) {
        let mut connection = None;
        loop {
            let callers: Vec<Caller> = {
                let mut pending = self.adding.pending();
                let count = pending.jobs.len().min(LARGEST_MERGE);
                if count == 0 {
                    pending.under_way = false;
                    break;
                }
                pending.jobs.drain(..count).collect()
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
                Err(error) => return fail_all(callers, &error),
            },
        };
        let jobs = callers.iter().map(|caller| &caller.job);
        let query = db::bound(&self.statements.add_merged_jobs, merged(jobs));
        let rows = session::fetch_all_on(&mut to, self.statements.is_pooled, query).await;
        let added: sqlx::Result<Vec<(usize, Job)>> = rows.and_then(|rows| rows.iter().map(position_and_job).collect());
        let added = match added {
            Ok(added) => added,
            // One of the jobs is invalid. Add them one by one, so that each caller gets its own error.
            Err(sqlx::Error::Database(_)) => return self.add_each(callers),
            Err(error) => return fail_all(callers, &error),
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
        if count > 0 && notify(&self.statements, &mut to, count).await.is_err() {
            // The jobs are committed; workers find them by polling.
            return;
        }
        *connection = Some(to);
    }

    /// Adds each job by itself: its task or queue is new, or one of the jobs is invalid.
    fn add_each(&self, callers: impl IntoIterator<Item = Caller>) {
        for Caller { job, answer } in callers {
            let (pool, statements, added) = (self.pool.clone(), self.statements.clone(), self.adding.added.clone());
            tokio::spawn(async move {
                let result = add_single(&pool, &statements, job).await;
                added.notify_one();
                let _ = answer.send(result);
            });
        }
    }
}

/// Adds a job in a single statement, which also notifies the workers.
pub(crate) async fn add_single(
    executor: &impl UtilsExecutor,
    statements: &Statements,
    job: NewJob,
) -> Result<Job, Error> {
    let NewJob { identifier, payload, spec } = job;
    let context = || format!("add a job of the task {identifier:?}");
    let mut parameters = vec![
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
    let statement = match spec.expires_at {
        Some(expires_at) => {
            parameters.push(Parameter::Time(Some(expires_at)));
            &statements.add_expiring_job
        }
        None => &statements.add_job,
    };
    let added = executor.jobs(statement, parameters, context).await?.pop();
    added.ok_or_else(|| Error::Database { context: context(), source: sqlx::Error::RowNotFound })
}

/// Adds many jobs in one transaction, and notifies the workers after the commit.
pub(crate) async fn add_many(
    pool: &PgPool,
    adding: &Adding,
    statements: &Statements,
    jobs: Vec<NewJob>,
) -> Result<Vec<Job>, Error> {
    let context = || format!("add {}", counted(jobs.len()));
    let count = jobs.len();
    let expiries = Expiries::of(&jobs);
    if !can_be_chunked(&jobs) && expiries.is_empty() {
        let added = in_one_statement(pool, statements, jobs).await?;
        adding.added.notify_one();
        return Ok(added);
    }
    let is_chunked = can_be_chunked(&jobs);
    let mut connection = pool.acquire().await.context(context)?;
    let mut transaction = sqlx::Connection::begin(&mut *connection).await.context(context)?;
    let within = WithinSqlx::new(&mut transaction);
    let names = if is_chunked { names(&within, statements, &jobs).await? } else { None };
    let added = match names {
        Some(names) => in_chunks(&within, statements, jobs, &names).await?,
        None => in_one_statement(&within, statements, jobs).await?,
    };
    expiries.write(&within, statements, &added).await?;
    session::commit(transaction).await.context(|| format!("add {}", counted(count)))?;
    adding.added.notify_one();
    // The jobs are committed even if this fails; workers find them by polling.
    let _ = notify(statements, &mut connection, count).await;
    Ok(added)
}

/// Adds many jobs in the caller's transaction, which notifies the workers when it commits. If the caller's
/// connection has no open transaction, adds all jobs in one statement.
pub(crate) async fn add_many_within(
    executor: &impl UtilsExecutor,
    statements: &Statements,
    jobs: Vec<NewJob>,
) -> Result<Vec<Job>, Error> {
    let expiries = Expiries::of(&jobs);
    let added = add_all_within(executor, statements, jobs).await?;
    expiries.write(executor, statements, &added).await?;
    Ok(added)
}

/// When the jobs of a batch expire; empty if none does.
struct Expiries(Vec<Option<DateTime<Utc>>>);

impl Expiries {
    fn of(jobs: &[NewJob]) -> Expiries {
        Expiries(column(jobs, |job| job.spec.expires_at))
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes them, in the transaction that has added the jobs.
    async fn write(self, executor: &impl UtilsExecutor, statements: &Statements, added: &[Job]) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let (ids, times) = added.iter().zip(self.0).filter_map(|(job, at)| Some((job.id, Some(at?)))).unzip();
        let parameters = vec![Parameter::Ids(ids), Parameter::Times(times)];
        executor.numbers(&statements.expire_jobs, parameters, || "set when the jobs expire".to_owned()).await.map(drop)
    }
}

async fn add_all_within(
    executor: &impl UtilsExecutor,
    statements: &Statements,
    jobs: Vec<NewJob>,
) -> Result<Vec<Job>, Error> {
    let count = jobs.len();
    if can_be_chunked(&jobs)
        && let Some(names) = names(executor, statements, &jobs).await?
        && names.are_held(executor, statements).await?
    {
        let added = in_chunks(executor, statements, jobs, &names).await?;
        let parameters = vec![Parameter::Int(i32::try_from(count).ok())];
        executor.numbers(&statements.notify_jobs, parameters, || "notify the workers".to_owned()).await?;
        return Ok(added);
    }
    in_one_statement(executor, statements, jobs).await
}

/// Jobs with keys cannot: each key must be compared with those in the table.
fn can_be_chunked(jobs: &[NewJob]) -> bool {
    jobs.len() >= MIN_CHUNKED && jobs.iter().all(|job| job.spec.job_key.is_none())
}

async fn in_one_statement(
    executor: &impl UtilsExecutor,
    statements: &Statements,
    jobs: Vec<NewJob>,
) -> Result<Vec<Job>, Error> {
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
    let mut added = executor.jobs(&statements.add_jobs, parameters, || format!("add {}", counted(jobs.len()))).await?;
    for (added, job) in added.iter_mut().zip(jobs) {
        added.task_identifier = job.identifier;
    }
    Ok(added)
}

/// The ids of the jobs' tasks and queues, and the time of the transaction.
struct Names {
    now: DateTime<Utc>,
    tasks: HashMap<Arc<str>, i32>,
    queues: HashMap<String, i32>,
}

/// Creates missing tasks and queues. Returns `None` if one of the jobs is invalid.
async fn names(
    executor: &impl UtilsExecutor,
    statements: &Statements,
    jobs: &[NewJob],
) -> Result<Option<Arc<Names>>, Error> {
    let tasks: BTreeSet<&Arc<str>> = jobs.iter().map(|job| &job.identifier).collect();
    let queues: BTreeSet<&String> = jobs.iter().filter_map(|job| job.spec.queue_name.as_ref()).collect();
    let attempts: BTreeSet<i16> = jobs.iter().filter_map(|job| job.spec.max_attempts).collect();
    let parameters = vec![
        Parameter::Texts(tasks.iter().map(|name| Some(name.to_string())).collect()),
        Parameter::Texts(queues.iter().map(|name| Some((*name).clone())).collect()),
        Parameter::Shorts(attempts.into_iter().map(Some).collect()),
    ];
    let context = || format!("add {}", counted(jobs.len()));
    let mut numbers = executor.numbers(&statements.job_names, parameters, context).await?.into_iter();
    let Some(now) = numbers.next().and_then(DateTime::from_timestamp_micros) else { return Ok(None) };
    let mut ids = numbers.map(|id| i32::try_from(id).unwrap_or_default());
    Ok(Some(Arc::new(Names {
        now,
        tasks: tasks.into_iter().cloned().zip(ids.by_ref()).collect(),
        queues: queues.into_iter().cloned().zip(ids).collect(),
    })))
}

impl Names {
    /// Whether the transaction that read these names is still open. If not, cleanup may delete them at any
    /// moment.
    async fn are_held(&self, executor: &impl UtilsExecutor, statements: &Statements) -> Result<bool, Error> {
        let context = || "add jobs".to_owned();
        let parameters = vec![Parameter::Time(Some(self.now))];
        Ok(executor.numbers(&statements.is_same_transaction, parameters, context).await? == [1])
    }

    fn queue(&self, job: &NewJob) -> Option<i32> {
        job.spec.queue_name.as_ref().and_then(|name| self.queues.get(name)).copied()
    }
}

/// Inserts the rows, and returns the jobs as stored without reading them back.
async fn in_chunks(
    executor: &impl UtilsExecutor,
    statements: &Statements,
    jobs: Vec<NewJob>,
    names: &Arc<Names>,
) -> Result<Vec<Job>, Error> {
    let count = jobs.len();
    let context = || format!("add {}", counted(count));
    let mut added = Vec::with_capacity(count);
    let mut jobs = jobs.into_iter();
    let mut next = spawn_chunk(&mut jobs, names);
    while let Some(chunk) = next.take() {
        let (chunk, parameters) = chunk.await.map_err(|_| runtime_stopped(context()))?;
        // Build the next chunk while the database writes this one.
        next = spawn_chunk(&mut jobs, names);
        let ids = executor.numbers(&statements.add_chunk, parameters, context).await?;
        let written = ids.into_iter().zip(chunk).map(|(id, job)| written(id, names.queue(&job), job, names.now));
        added.extend(written);
    }
    Ok(added)
}

type Chunk = (Vec<NewJob>, Vec<Parameter>);

/// Builds the next chunk in another task.
fn spawn_chunk(jobs: &mut std::vec::IntoIter<NewJob>, names: &Arc<Names>) -> Option<JoinHandle<Chunk>> {
    let chunk: Vec<NewJob> = jobs.take(CHUNK).collect();
    let names = names.clone();
    (!chunk.is_empty()).then(|| {
        tokio::spawn(async move {
            let parameters = vec![
                Parameter::Ints(chunk.iter().map(|job| names.tasks.get(&job.identifier).copied()).collect()),
                Parameter::Ints(column(&chunk, |job| names.queue(job))),
                Parameter::Texts(chunk.iter().map(|job| Some(job.payload.get().to_owned())).collect()),
                Parameter::Times(column(&chunk, |job| job.spec.run_at)),
                Parameter::Shorts(column(&chunk, |job| job.spec.max_attempts)),
                Parameter::Shorts(column(&chunk, |job| job.spec.priority)),
                Parameter::Texts(column(&chunk, NewJob::flags)),
            ];
            (chunk, parameters)
        })
    })
}

/// One field of all jobs in a chunk. `unnest` pads shorter arrays with nulls, so an empty array means that no
/// job has the field.
fn column<T>(chunk: &[NewJob], field: impl Fn(&NewJob) -> Option<T>) -> Vec<Option<T>> {
    let column: Vec<Option<T>> = chunk.iter().map(field).collect();
    if column.iter().all(Option::is_none) { Vec::new() } else { column }
}

fn runtime_stopped(context: String) -> Error {
    Error::Database { context, source: sqlx::Error::WorkerCrashed }
}

/// The job as stored, without a key.
fn written(id: i64, job_queue_id: Option<i32>, job: NewJob, now: DateTime<Utc>) -> Job {
    let flags = job.spec.flags.filter(|flags| !flags.is_empty());
    // The database stores microseconds.
    let stored = |time: DateTime<Utc>| DateTime::from_timestamp_micros(time.timestamp_micros()).unwrap_or(time);
    Job {
        is_utf8: true,
        place: None,
        expiry: None,
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
    Ok((usize::try_from(position).unwrap_or(usize::MAX), rows::job(row)?))
}

async fn notify(statements: &Statements, connection: &mut PoolConnection<Postgres>, count: usize) -> sqlx::Result<()> {
    let parameters = vec![Parameter::Int(i32::try_from(count).ok())];
    let query = db::bound(&statements.notify_jobs, parameters);
    session::fetch_all_on(connection, statements.is_pooled, query).await.map(drop)
}

/// Returns the same error to every caller: its job was not added, or may have been.
fn fail_all(callers: Vec<Caller>, error: &sqlx::Error) {
    for caller in callers {
        let source = match error {
            sqlx::Error::Io(error) => sqlx::Error::Io(std::io::Error::new(error.kind(), error.to_string())),
            sqlx::Error::PoolTimedOut => sqlx::Error::PoolTimedOut,
            sqlx::Error::PoolClosed => sqlx::Error::PoolClosed,
            error => sqlx::Error::Protocol(error.to_string()),
        };
        let context = format!("add a job of the task {:?}", caller.job.identifier);
        let _ = caller.answer.send(Err(Error::Database { context, source }));
    }
}
