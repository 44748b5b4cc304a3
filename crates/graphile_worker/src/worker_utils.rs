//! Adding, changing and removing jobs: from the application's pool, or inside a transaction of its own.

use crate::adding::{self, Adding, NewJob, counted};
use crate::db::{Parameter, Schema, Statement, Statements, bound};
use crate::error::Doing;
use crate::hooks::{BeforeJobSchedule, HookRegistry, ScheduledJob};
use crate::job::{Job, JobKeyMode, JobSpec, RawJobSpec};
use crate::migrate::{Migration, examine, migrate};
use crate::recovery::{
    self, ActiveWorker, Sweep, SweepStaleWorkersOptions, SweepStaleWorkersResult, WorkerRecoveryConfig,
};
use crate::task::{BatchTaskHandler, TaskHandler};
use crate::{Error, db};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::to_raw_value;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool, Row};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Notify};

/// Cleanup needs this isolation level, whatever the database's default is: it must see jobs that others have just added.
const READ_COMMITTED: &str = "begin isolation level read committed";

/// How many milliseconds cleanup waits before it tries again to lock names that were busy: at most a second in all.
const CLEANUP_PAUSES: [u64; 5] = [20, 50, 130, 300, 500];

/// What may be changed about jobs that do not run; what is `None` stays.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RescheduleJobOptions {
    /// Not before this time.
    pub run_at: Option<DateTime<Utc>>,
    /// Lower runs first.
    pub priority: Option<i16>,
    /// How often it counts as tried.
    pub attempts: Option<i16>,
    /// How often it may be tried.
    pub max_attempts: Option<i16>,
}

/// What [`WorkerUtils::cleanup`] deletes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CleanupTask {
    /// Tasks that no job belongs to.
    GcTaskIdentifiers,
    /// Queues that no job belongs to.
    GcJobQueues,
    /// Jobs that have failed for good.
    DeletePermanentlyFailedJobs,
}

/// Adds and administers jobs. Cheap to clone.
///
/// ```no_run
/// # use graphile_worker::{JobSpec, WorkerUtils};
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let utils = WorkerUtils::new(pool.clone(), "graphile_worker");
/// utils.add_raw_job("send_email", serde_json::json!({ "to": "user@example.com" }), JobSpec::default()).await?;
///
/// // Or in a transaction of your own: a job that is rolled back never existed.
/// let mut transaction = pool.begin().await?;
/// utils.within(&mut transaction).add_raw_job("send_email", (), JobSpec::default()).await?;
/// transaction.commit().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct WorkerUtils<S = PgPool> {
    source: S,
    shared: Arc<Shared>,
}

#[derive(Clone)]
struct Shared {
    /// A name that cannot be a schema's is reported by the first call, so that making utilities cannot fail.
    statements: Result<Arc<Statements>, (String, &'static str)>,
    use_local_time: bool,
    hooks: Arc<HookRegistry>,
    adding: Arc<Adding>,
    recovery: WorkerRecoveryConfig,
}

impl Shared {
    fn new(statements: Result<Arc<Statements>, (String, &'static str)>) -> Shared {
        Shared {
            statements,
            use_local_time: false,
            hooks: Arc::default(),
            adding: Arc::default(),
            recovery: WorkerRecoveryConfig::default(),
        }
    }
}

/// Where statements are run: the application's pool, or [`Within`] a transaction of its own.
pub trait Source: sealed::Source {}

impl<S: sealed::Source> Source for S {}

pub(crate) mod sealed {
    use super::{Error, Job, Parameter, Shared, Statement};
    use crate::adding::{self, NewJob};
    use crate::db::Statements;
    use std::future::Future;
    use std::sync::Arc;

    pub trait Source: Send + Sync {
        #[allow(private_interfaces)]
        fn jobs(
            &self,
            statement: &Statement,
            parameters: Vec<Parameter>,
            doing: impl Fn() -> String + Send + Sync,
        ) -> impl Future<Output = Result<Vec<Job>, Error>> + Send;

        /// For a statement whose rows are a `number` each.
        #[allow(private_interfaces)]
        fn numbers(
            &self,
            statement: &Statement,
            parameters: Vec<Parameter>,
            doing: impl Fn() -> String + Send + Sync,
        ) -> impl Future<Output = Result<Vec<i64>, Error>> + Send;

        #[allow(private_interfaces)]
        fn add(
            &self,
            _shared: &Shared,
            statements: &Arc<Statements>,
            job: NewJob,
        ) -> impl Future<Output = Result<Job, Error>> + Send
        where
            Self: Sized,
        {
            adding::by_itself(self, statements, job)
        }

        #[allow(private_interfaces)]
        fn add_many(
            &self,
            _shared: &Shared,
            statements: &Arc<Statements>,
            jobs: Vec<NewJob>,
        ) -> impl Future<Output = Result<Vec<Job>, Error>> + Send
        where
            Self: Sized,
        {
            adding::add_many_within(self, statements, jobs)
        }
    }
}

impl sealed::Source for PgPool {
    #[allow(private_interfaces)]
    async fn jobs(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        doing: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<Job>, Error> {
        read(bound(statement, parameters).fetch_all(self).await, doing)
    }

    #[allow(private_interfaces)]
    async fn numbers(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        doing: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<i64>, Error> {
        read_numbers(bound(statement, parameters).fetch_all(self).await, doing)
    }

    #[allow(private_interfaces)]
    async fn add(&self, shared: &Shared, statements: &Arc<Statements>, job: NewJob) -> Result<Job, Error> {
        adding::add(self, &shared.adding, statements, job).await
    }

    #[allow(private_interfaces)]
    async fn add_many(
        &self,
        shared: &Shared,
        statements: &Arc<Statements>,
        jobs: Vec<NewJob>,
    ) -> Result<Vec<Job>, Error> {
        adding::add_many(self, &shared.adding, statements, jobs).await
    }
}

/// A connection, or transaction, of the application's.
pub struct Within<'c>(Mutex<&'c mut PgConnection>);

impl<'c> Within<'c> {
    pub(crate) fn new(connection: &'c mut PgConnection) -> Within<'c> {
        Within(Mutex::new(connection))
    }
}

impl sealed::Source for Within<'_> {
    #[allow(private_interfaces)]
    async fn jobs(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        doing: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<Job>, Error> {
        read(bound(statement, parameters).fetch_all(&mut **self.0.lock().await).await, doing)
    }

    #[allow(private_interfaces)]
    async fn numbers(
        &self,
        statement: &Statement,
        parameters: Vec<Parameter>,
        doing: impl Fn() -> String + Send + Sync,
    ) -> Result<Vec<i64>, Error> {
        read_numbers(bound(statement, parameters).fetch_all(&mut **self.0.lock().await).await, doing)
    }
}

fn read_numbers(rows: sqlx::Result<Vec<PgRow>>, doing: impl Fn() -> String) -> Result<Vec<i64>, Error> {
    let numbers = |rows: Vec<PgRow>| rows.iter().map(|row| row.try_get("number")).collect();
    rows.and_then(numbers).doing(doing)
}

fn read(rows: sqlx::Result<Vec<PgRow>>, doing: impl Fn() -> String) -> Result<Vec<Job>, Error> {
    let rows = rows.doing(&doing)?;
    let jobs = rows.iter().filter(|row| !row.is_empty());
    jobs.map(|row| db::job(row, None)).collect::<sqlx::Result<_>>().doing(&doing)
}

impl WorkerUtils {
    /// Utilities for the schema of this name.
    pub fn new(pool: PgPool, schema: impl Into<String>) -> WorkerUtils {
        let name = schema.into();
        let statements = match Schema::new(&name) {
            Ok(schema) => Ok(Arc::new(Statements::new(schema))),
            Err(Error::InvalidSchemaName { name, problem }) => Err((name, problem)),
            Err(_) => Err((name, "is not legal")),
        };
        WorkerUtils { source: pool, shared: Arc::new(Shared::new(statements)) }
    }

    pub(crate) fn with_statements(pool: PgPool, statements: Arc<Statements>) -> WorkerUtils {
        WorkerUtils { source: pool, shared: Arc::new(Shared::new(Ok(statements))) }
    }

    /// Whether a job without a time gets this machine's (default: no, the database's).
    pub fn with_use_local_time(self, use_local_time: bool) -> WorkerUtils {
        let shared = Shared { use_local_time, ..Shared::clone(&self.shared) };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    /// Lets these hooks decide on jobs that are added (default: none).
    pub fn with_hooks(self, hooks: Arc<HookRegistry>) -> WorkerUtils {
        let shared = Shared { hooks, ..Shared::clone(&self.shared) };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    pub(crate) fn with_recovery(self, recovery: WorkerRecoveryConfig) -> WorkerUtils {
        let shared = Shared { recovery, ..Shared::clone(&self.shared) };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    /// The same utilities inside a transaction, or on a connection, of the application's.
    pub fn within<'c>(&self, connection: &'c mut PgConnection) -> WorkerUtils<Within<'c>> {
        WorkerUtils { source: Within::new(connection), shared: self.shared.clone() }
    }

    /// The same utilities inside a transaction, or on a client, of tokio-postgres.
    #[cfg(feature = "tokio-postgres")]
    pub fn within_tokio_postgres<'c, C: tokio_postgres::GenericClient + Sync>(
        &self,
        client: &'c C,
    ) -> WorkerUtils<crate::tokio_postgres::WithinTokioPostgres<'c, C>> {
        WorkerUtils { source: crate::tokio_postgres::WithinTokioPostgres(client), shared: self.shared.clone() }
    }

    /// Notified when jobs are added through these utilities or their clones.
    pub(crate) fn added(&self) -> Arc<Notify> {
        self.shared.adding.added.clone()
    }

    /// The application's pool.
    pub(crate) fn pool(&self) -> &PgPool {
        &self.source
    }

    /// The name of a queue; `None` where there is none with this id.
    pub(crate) async fn queue_name(&self, id: i32) -> Result<Option<String>, Error> {
        let doing = || format!("look for the queue with the id {id}");
        let statement = self.statements()?.queue_name.sql();
        sqlx::query_scalar(statement).bind(id).fetch_optional(&self.source).await.doing(doing)
    }

    /// Deletes what is no longer needed and returns the number of deleted rows. Safe beside running workers and open
    /// transactions: cleanup does not wait for them. It keeps the name of a task or queue while a transaction that adds a
    /// job with this name, or with a name in the same of 64 buckets, is open; the next cleanup deletes it.
    pub async fn cleanup(&self, tasks: &[CleanupTask]) -> Result<u64, Error> {
        let mut deleted = 0;
        for task in tasks {
            deleted += match task {
                CleanupTask::DeletePermanentlyFailedJobs => self.delete_failed_jobs().await?,
                CleanupTask::GcTaskIdentifiers => self.delete_unused_names("task").await?,
                CleanupTask::GcJobQueues => self.delete_unused_names("queue").await?,
            };
        }
        Ok(deleted)
    }

    async fn delete_failed_jobs(&self) -> Result<u64, Error> {
        let doing = || "delete jobs that failed for good".to_owned();
        let statement = self.statements()?.delete_failed_jobs.sql();
        let mut transaction = self.source.begin_with(READ_COMMITTED).await.doing(doing)?;
        let deleted = sqlx::query(statement).execute(&mut *transaction).await.doing(doing)?.rows_affected();
        transaction.commit().await.doing(doing)?;
        Ok(deleted)
    }

    /// Tries again if a name may be in use at this moment; most transactions that add jobs are short.
    async fn delete_unused_names(&self, kind: &'static str) -> Result<u64, Error> {
        let doing = || format!("delete {kind}s without jobs");
        let statement = &self.statements()?.delete_unused_names;
        let mut deleted = 0;
        let mut pauses = CLEANUP_PAUSES.into_iter();
        loop {
            let mut transaction = self.source.begin_with(READ_COMMITTED).await.doing(doing)?;
            let (count, is_busy): (i64, bool) =
                sqlx::query_as(statement.sql()).bind(kind).fetch_one(&mut *transaction).await.doing(doing)?;
            transaction.commit().await.doing(doing)?;
            deleted += count.unsigned_abs();
            let Some(pause) = pauses.next().filter(|_| is_busy) else { return Ok(deleted) };
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    /// The workers that have registered (those whose recovery is on); stale is who has not been heard of for so long.
    pub async fn list_active_workers(&self, stale_after: Duration) -> Result<Vec<ActiveWorker>, Error> {
        let mut connection = self.source.acquire().await.doing(|| "list workers".to_owned())?;
        recovery::active_workers(&mut connection, self.statements()?, stale_after).await
    }

    /// Frees what dead workers hold, by the defaults of [`WorkerRecoveryConfig`], or the worker's, where it has made these
    /// utilities; does nothing while somebody else sweeps.
    pub async fn sweep_stale_workers(
        &self,
        options: SweepStaleWorkersOptions,
    ) -> Result<SweepStaleWorkersResult, Error> {
        self.sweep_stale_workers_with_config(&self.shared.recovery, options).await
    }

    /// The same by another configuration.
    pub async fn sweep_stale_workers_with_config(
        &self,
        config: &WorkerRecoveryConfig,
        options: SweepStaleWorkersOptions,
    ) -> Result<SweepStaleWorkersResult, Error> {
        let mut connection = self.source.acquire().await.doing(|| "sweep".to_owned())?;
        let statements = self.statements()?;
        let sweep = Sweep { statements, hooks: &self.shared.hooks, worker_id: "worker-utils".into(), config, options };
        sweep.sweep(&mut connection).await
    }

    /// Installs the schema, or brings it up to date; see [`migrate`].
    pub async fn migrate(&self) -> Result<Migration, Error> {
        migrate(&self.source, self.statements()?.schema.name()).await
    }

    /// Whether the schema is what [`migrate`](WorkerUtils::migrate) would make of it; changes nothing. An error where a newer
    /// release has changed it in a way that this one must not work with.
    pub async fn is_migrated(&self) -> Result<bool, Error> {
        let mut connection = self.source.acquire().await.doing(|| "connect to the database".to_owned())?;
        examine(&mut connection, &self.statements()?.schema).await?.is_up_to_date
    }
}

impl<S: Source> WorkerUtils<S> {
    /// Adds a job.
    pub async fn add_job<T: TaskHandler>(&self, payload: T, spec: JobSpec) -> Result<Job, Error> {
        let spec = with_default_attempts(spec, T::options().max_attempts);
        self.add_raw_job(T::IDENTIFIER, payload, spec).await
    }

    /// Adds one job for many items: its payload is their array. Where a waiting job has the same key, the items
    /// are appended to its own.
    pub async fn add_batch_job<T: BatchTaskHandler>(&self, items: Vec<T>, spec: JobSpec) -> Result<Job, Error> {
        let spec = with_default_attempts(spec, T::options().max_attempts);
        self.add_raw_job(T::IDENTIFIER, items, spec).await
    }

    /// Adds a job whose task is known only at run time.
    pub async fn add_raw_job(&self, identifier: &str, payload: impl Serialize, spec: JobSpec) -> Result<Job, Error> {
        let job = self.hooked(identifier, &payload, spec).await?;
        self.source.add(&self.shared, self.statements()?, job).await
    }

    /// Adds many jobs of one task, all or none; returns them in the order given.
    pub async fn add_jobs<T: TaskHandler>(&self, jobs: &[(T, &JobSpec)]) -> Result<Vec<Job>, Error> {
        let max_attempts = T::options().max_attempts;
        let jobs = jobs.iter().map(|(payload, spec)| (T::IDENTIFIER, payload, *spec));
        self.add_many(jobs, max_attempts).await
    }

    /// Adds many jobs, all or none; returns them in the order given. If any of them has the key mode
    /// `PreserveRunAt`, it holds for all of them; `UnsafeDedupe` is refused.
    pub async fn add_raw_jobs<P: Serialize>(&self, jobs: &[RawJobSpec<P>]) -> Result<Vec<Job>, Error> {
        let jobs = jobs.iter().map(|job| (job.identifier.as_str(), &job.payload, &job.spec));
        self.add_many(jobs, None).await
    }

    async fn add_many<'a, P: Serialize + 'a>(
        &self,
        jobs: impl ExactSizeIterator<Item = (&'a str, &'a P, &'a JobSpec)>,
        max_attempts: Option<i16>,
    ) -> Result<Vec<Job>, Error> {
        let mut new_jobs = Vec::with_capacity(jobs.len());
        for (position, (identifier, payload, spec)) in jobs.enumerate() {
            if spec.job_key_mode == Some(JobKeyMode::UnsafeDedupe) {
                return Err(Error::UnsafeDedupeInBatch { position: position + 1, identifier: identifier.to_owned() });
            }
            let spec = with_default_attempts(spec.clone(), max_attempts);
            new_jobs.push(self.hooked(identifier, payload, spec).await?);
        }
        self.source.add_many(&self.shared, self.statements()?, new_jobs).await
    }

    /// Removes the job with this key. One that is running is kept, without its key, and will not run again. `None`
    /// where no job has the key.
    pub async fn remove_job(&self, job_key: &str) -> Result<Option<Job>, Error> {
        let parameters = vec![Parameter::Text(Some(job_key.to_owned()))];
        let doing = || format!("remove the job with key {job_key:?}");
        Ok(self.source.jobs(&self.statements()?.remove_job, parameters, doing).await?.pop())
    }

    /// Deletes those of the jobs that do not run, as if they were done; returns them.
    pub async fn complete_jobs(&self, ids: &[i64]) -> Result<Vec<Job>, Error> {
        let parameters = vec![Parameter::Ids(ids.to_vec())];
        let doing = || format!("complete {}", counted(ids.len()));
        self.source.jobs(&self.statements()?.complete_jobs, parameters, doing).await
    }

    /// Uses up the attempts of those of the jobs that do not run; returns them.
    pub async fn permanently_fail_jobs(&self, ids: &[i64], reason: &str) -> Result<Vec<Job>, Error> {
        let parameters = vec![Parameter::Ids(ids.to_vec()), Parameter::Text(Some(reason.to_owned()))];
        let doing = || format!("fail {}", counted(ids.len()));
        self.source.jobs(&self.statements()?.permanently_fail_jobs, parameters, doing).await
    }

    /// Changes when and how those of the jobs that do not run are run; returns them.
    pub async fn reschedule_jobs(&self, ids: &[i64], options: RescheduleJobOptions) -> Result<Vec<Job>, Error> {
        let parameters = vec![
            Parameter::Ids(ids.to_vec()),
            Parameter::Time(options.run_at),
            Parameter::Int(options.priority.map(i32::from)),
            Parameter::Int(options.attempts.map(i32::from)),
            Parameter::Int(options.max_attempts.map(i32::from)),
        ];
        let doing = || format!("reschedule {}", counted(ids.len()));
        self.source.jobs(&self.statements()?.reschedule_jobs, parameters, doing).await
    }

    /// Frees whatever these workers hold. Only for workers that are known to be dead.
    pub async fn force_unlock_workers(&self, worker_ids: &[&str]) -> Result<(), Error> {
        let ids = worker_ids.iter().map(|id| (*id).to_owned()).collect();
        let parameters = vec![Parameter::TextArray(Some(ids))];
        let doing = || "unlock workers".to_owned();
        self.source.jobs(&self.statements()?.force_unlock_workers, parameters, doing).await.map(|_| ())
    }

    /// A job as the hooks want it, its payload written as JSON.
    async fn hooked(&self, identifier: &str, payload: &impl Serialize, spec: JobSpec) -> Result<NewJob, Error> {
        let invalid = |source| Error::InvalidPayload { identifier: identifier.to_owned(), source };
        let mut job = if !self.shared.hooks.has::<BeforeJobSchedule>() {
            NewJob { identifier: identifier.into(), payload: to_raw_value(payload).map_err(invalid)?, spec }
        } else {
            let payload = serde_json::to_value(payload).map_err(invalid)?;
            let job = ScheduledJob { identifier: identifier.to_owned(), payload, spec };
            let refused = |reason| Error::JobRefused { identifier: identifier.to_owned(), reason };
            let job = self.shared.hooks.schedule(job).await.map_err(refused)?;
            let payload = to_raw_value(&job.payload).map_err(invalid)?;
            NewJob { identifier: job.identifier.into(), payload, spec: job.spec }
        };
        if self.shared.use_local_time {
            job.spec.run_at.get_or_insert_with(Utc::now);
        }
        Ok(job)
    }

    pub(crate) fn statements(&self) -> Result<&Arc<Statements>, Error> {
        self.shared
            .statements
            .as_ref()
            .map_err(|(name, problem)| Error::InvalidSchemaName { name: name.clone(), problem })
    }
}

fn with_default_attempts(mut spec: JobSpec, max_attempts: Option<i16>) -> JobSpec {
    spec.max_attempts = spec.max_attempts.or(max_attempts);
    spec
}

/// Adds one job to the database at this URL: for a script. A program that adds many keeps a [`WorkerUtils`].
pub async fn add_job(
    database_url: &str,
    identifier: &str,
    payload: impl Serialize,
    spec: JobSpec,
) -> Result<Job, Error> {
    let doing = || "connect to the database".to_owned();
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).connect(database_url).await.doing(doing)?;
    let job = WorkerUtils::new(pool.clone(), "graphile_worker").add_raw_job(identifier, payload, spec).await;
    pool.close().await;
    job
}
