//! Adding, changing and removing jobs: from the application's pool, or inside a transaction of its own.

use crate::db::{Schema, Statement, Statements};
use crate::error::Doing;
use crate::hooks::{BeforeJobSchedule, HookRegistry, ScheduledJob};
use crate::job::{Job, JobKeyMode, JobSpec, RawJobSpec};
use crate::migrate::{Migration, migrate};
use crate::task::{BatchTaskHandler, TaskHandler};
use crate::{Error, db};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, PgPool, Postgres, Row};
use std::sync::Arc;
use tokio::sync::Mutex;

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

struct Shared {
    /// A name that cannot be a schema's is reported by the first call, so that making utilities cannot fail.
    statements: Result<Arc<Statements>, (String, &'static str)>,
    use_local_time: bool,
    hooks: Arc<HookRegistry>,
}

/// Where statements are run: the application's pool, or [`Within`] a transaction of its own.
pub trait Source: sealed::Source {}

impl<S: sealed::Source> Source for S {}

pub(crate) mod sealed {
    use super::{Error, Job, Parameter, Statement};
    use std::future::Future;

    pub trait Source: Send + Sync {
        #[allow(private_interfaces)]
        fn jobs(
            &self,
            statement: &Statement,
            parameters: Vec<Parameter>,
            doing: impl Fn() -> String + Send + Sync,
        ) -> impl Future<Output = Result<Vec<Job>, Error>> + Send;
    }
}

/// A value for a statement, of one of the types that ours take.
pub(crate) enum Parameter {
    Text(Option<String>),
    Time(Option<DateTime<Utc>>),
    Int(Option<i32>),
    Bool(bool),
    Ids(Vec<i64>),
    TextArray(Option<Vec<String>>),
    Texts(Vec<Option<String>>),
    Times(Vec<Option<DateTime<Utc>>>),
    Shorts(Vec<Option<i16>>),
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
}

/// A connection, or transaction, of the application's.
pub struct Within<'c>(Mutex<&'c mut PgConnection>);

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
}

fn read(rows: sqlx::Result<Vec<PgRow>>, doing: impl Fn() -> String) -> Result<Vec<Job>, Error> {
    let rows = rows.doing(&doing)?;
    let jobs = rows.iter().filter(|row| !row.is_empty());
    jobs.map(|row| db::job(row, None)).collect::<sqlx::Result<_>>().doing(&doing)
}

fn bound(statement: &Statement, parameters: Vec<Parameter>) -> Query<'static, Postgres, PgArguments> {
    parameters.into_iter().fold(sqlx::query(statement.sql()), |query, parameter| match parameter {
        Parameter::Text(value) => query.bind(value),
        Parameter::Time(value) => query.bind(value),
        Parameter::Int(value) => query.bind(value),
        Parameter::Bool(value) => query.bind(value),
        Parameter::Ids(value) => query.bind(value),
        Parameter::TextArray(value) => query.bind(value),
        Parameter::Texts(value) => query.bind(value),
        Parameter::Times(value) => query.bind(value),
        Parameter::Shorts(value) => query.bind(value),
    })
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
        WorkerUtils {
            source: pool,
            shared: Arc::new(Shared { statements, use_local_time: false, hooks: Arc::default() }),
        }
    }

    pub(crate) fn with_statements(pool: PgPool, statements: Arc<Statements>, use_local_time: bool) -> WorkerUtils {
        let shared = Shared { statements: Ok(statements), use_local_time, hooks: Arc::default() };
        WorkerUtils { source: pool, shared: Arc::new(shared) }
    }

    /// Whether a job without a time gets this machine's (default: no, the database's).
    pub fn with_use_local_time(self, use_local_time: bool) -> WorkerUtils {
        let Shared { statements, hooks, .. } = &*self.shared;
        let shared = Shared { statements: statements.clone(), use_local_time, hooks: hooks.clone() };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    /// Lets these hooks decide on jobs that are added (default: none).
    pub fn with_hooks(self, hooks: Arc<HookRegistry>) -> WorkerUtils {
        let Shared { statements, use_local_time, .. } = &*self.shared;
        let shared = Shared { statements: statements.clone(), use_local_time: *use_local_time, hooks };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    /// The same utilities inside a transaction, or on a connection, of the application's.
    pub fn within<'c>(&self, connection: &'c mut PgConnection) -> WorkerUtils<Within<'c>> {
        WorkerUtils { source: Within(Mutex::new(connection)), shared: self.shared.clone() }
    }

    /// The same utilities inside a transaction, or on a client, of tokio-postgres.
    #[cfg(feature = "tokio-postgres")]
    pub fn within_tokio_postgres<'c, C: tokio_postgres::GenericClient + Sync>(
        &self,
        client: &'c C,
    ) -> WorkerUtils<crate::tokio_postgres::WithinTokioPostgres<'c, C>> {
        WorkerUtils { source: crate::tokio_postgres::WithinTokioPostgres(client), shared: self.shared.clone() }
    }

    /// The application's pool.
    pub(crate) fn pool(&self) -> &PgPool {
        &self.source
    }

    /// Clears up; returns how many rows that deleted. Safe beside running workers, but holds them up for a moment.
    pub async fn cleanup(&self, tasks: &[CleanupTask]) -> Result<u64, Error> {
        let doing = || "clean up".to_owned();
        let statements = self.statements()?;
        let mut deleted = 0;
        for task in tasks {
            let mut transaction = self.source.begin().await.doing(doing)?;
            let statement = match task {
                CleanupTask::DeletePermanentlyFailedJobs => &statements.delete_failed_jobs,
                CleanupTask::GcTaskIdentifiers => &statements.delete_unused_tasks,
                CleanupTask::GcJobQueues => &statements.delete_unused_queues,
            };
            if *task != CleanupTask::DeletePermanentlyFailedJobs {
                sqlx::query(statements.lock_jobs.sql()).execute(&mut *transaction).await.doing(doing)?;
            }
            deleted += sqlx::query(statement.sql()).execute(&mut *transaction).await.doing(doing)?.rows_affected();
            transaction.commit().await.doing(doing)?;
        }
        Ok(deleted)
    }

    /// Installs the schema, or brings it up to date; see [`migrate`].
    pub async fn migrate(&self) -> Result<Migration, Error> {
        migrate(&self.source, self.statements()?.schema.name()).await
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
        let (identifier, payload, spec) = self.hooked(identifier, &payload, spec).await?;
        let doing = || format!("add a job of the task {identifier:?}");
        let parameters = vec![
            Parameter::Text(Some(identifier.clone())),
            Parameter::Text(Some(payload)),
            Parameter::Text(spec.queue_name),
            Parameter::Time(self.run_at(spec.run_at)),
            Parameter::Int(spec.max_attempts.map(i32::from)),
            Parameter::Text(spec.job_key),
            Parameter::Int(spec.priority.map(i32::from)),
            Parameter::TextArray(spec.flags),
            Parameter::Text(Some(spec.job_key_mode.unwrap_or_default().as_str().to_owned())),
        ];
        let added = self.source.jobs(&self.statements()?.add_job, parameters, doing).await?.pop();
        added.ok_or_else(|| Error::Database { doing: doing(), source: sqlx::Error::RowNotFound })
    }

    /// Adds many jobs of one task in one round trip; returns them in the order given.
    pub async fn add_jobs<T: TaskHandler>(&self, jobs: &[(T, &JobSpec)]) -> Result<Vec<Job>, Error> {
        let max_attempts = T::options().max_attempts;
        let jobs = jobs.iter().map(|(payload, spec)| (T::IDENTIFIER, payload, *spec));
        self.add_many(jobs, max_attempts).await
    }

    /// Adds many jobs in one round trip; returns them in the order given. If any of them has the key mode
    /// `PreserveRunAt`, it holds for all of them; `UnsafeDedupe` is refused.
    pub async fn add_raw_jobs(&self, jobs: &[RawJobSpec]) -> Result<Vec<Job>, Error> {
        let jobs = jobs.iter().map(|job| (job.identifier.as_str(), &job.payload, &job.spec));
        self.add_many(jobs, None).await
    }

    async fn add_many<'a, P: Serialize + 'a>(
        &self,
        jobs: impl ExactSizeIterator<Item = (&'a str, &'a P, &'a JobSpec)>,
        max_attempts: Option<i16>,
    ) -> Result<Vec<Job>, Error> {
        let count = jobs.len();
        let mut batch = Batch::default();
        for (position, (identifier, payload, spec)) in jobs.enumerate() {
            if spec.job_key_mode == Some(JobKeyMode::UnsafeDedupe) {
                return Err(Error::UnsafeDedupeInBatch { position: position + 1, identifier: identifier.to_owned() });
            }
            let (identifier, payload, spec) = self.hooked(identifier, payload, spec.clone()).await?;
            batch.identifiers.push(Some(identifier));
            batch.payloads.push(Some(payload));
            batch.queue_names.push(spec.queue_name);
            batch.run_ats.push(self.run_at(spec.run_at));
            batch.max_attempts.push(spec.max_attempts.or(max_attempts));
            batch.job_keys.push(spec.job_key);
            batch.priorities.push(spec.priority);
            batch.flags.push(spec.flags.map(|flags| serde_json::json!(flags).to_string()));
            batch.preserve_run_at |= spec.job_key_mode == Some(JobKeyMode::PreserveRunAt);
        }
        let parameters = vec![
            Parameter::Texts(batch.identifiers),
            Parameter::Texts(batch.payloads),
            Parameter::Texts(batch.queue_names),
            Parameter::Times(batch.run_ats),
            Parameter::Shorts(batch.max_attempts),
            Parameter::Texts(batch.job_keys),
            Parameter::Shorts(batch.priorities),
            Parameter::Texts(batch.flags),
            Parameter::Bool(batch.preserve_run_at),
        ];
        self.source.jobs(&self.statements()?.add_jobs, parameters, || format!("add {count} jobs")).await
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
        let doing = || format!("complete {} jobs", ids.len());
        self.source.jobs(&self.statements()?.complete_jobs, parameters, doing).await
    }

    /// Uses up the attempts of those of the jobs that do not run; returns them.
    pub async fn permanently_fail_jobs(&self, ids: &[i64], reason: &str) -> Result<Vec<Job>, Error> {
        let parameters = vec![Parameter::Ids(ids.to_vec()), Parameter::Text(Some(reason.to_owned()))];
        let doing = || format!("fail {} jobs", ids.len());
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
        let doing = || format!("reschedule {} jobs", ids.len());
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
    async fn hooked(
        &self,
        identifier: &str,
        payload: &impl Serialize,
        spec: JobSpec,
    ) -> Result<(String, String, JobSpec), Error> {
        let invalid = |source| Error::InvalidPayload { identifier: identifier.to_owned(), source };
        if !self.shared.hooks.has::<BeforeJobSchedule>() {
            return Ok((identifier.to_owned(), serde_json::to_string(payload).map_err(invalid)?, spec));
        }
        let payload = serde_json::to_value(payload).map_err(invalid)?;
        let job = ScheduledJob { identifier: identifier.to_owned(), payload, spec };
        let refused = |reason| Error::JobRefused { identifier: identifier.to_owned(), reason };
        let job = self.shared.hooks.schedule(job).await.map_err(refused)?;
        Ok((job.identifier, job.payload.to_string(), job.spec))
    }

    fn statements(&self) -> Result<&Arc<Statements>, Error> {
        self.shared
            .statements
            .as_ref()
            .map_err(|(name, problem)| Error::InvalidSchemaName { name: name.clone(), problem })
    }

    fn run_at(&self, run_at: Option<DateTime<Utc>>) -> Option<DateTime<Utc>> {
        if self.shared.use_local_time { run_at.or_else(|| Some(Utc::now())) } else { run_at }
    }
}

/// The fields of many jobs, an array each.
#[derive(Default)]
struct Batch {
    identifiers: Vec<Option<String>>,
    payloads: Vec<Option<String>>,
    queue_names: Vec<Option<String>>,
    run_ats: Vec<Option<DateTime<Utc>>>,
    max_attempts: Vec<Option<i16>>,
    job_keys: Vec<Option<String>>,
    priorities: Vec<Option<i16>>,
    flags: Vec<Option<String>>,
    preserve_run_at: bool,
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
