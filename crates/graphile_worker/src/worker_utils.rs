//! Adding, changing and removing jobs, through a pool or in the application's own transaction. This module is
//! the public API; `adding` writes the jobs, `schema` migrates, `recovery` sweeps, and `inspect` lists.

use crate::Error;
use crate::adding::{self, Adding, NewJob};
use crate::db::connect::DatabaseConfig;
use crate::db::executor::{UtilsExecutor, WithinSqlx};
use crate::db::session;
use crate::db::{Parameter, Schema, Statement, Statements};
use crate::error::Context;
use crate::hooks::{BeforeJobSchedule, HookRegistry, ScheduledJob};
use crate::job::{Job, JobKeyMode, JobSpec, RawJobSpec};
use crate::recovery::sweep::Sweep;
use crate::recovery::{self, ActiveWorker, SweepStaleWorkersOptions, SweepStaleWorkersResult, WorkerRecoveryConfig};
use crate::schema::migrate::{ConnectionKind, Migration, Purpose, examine, migrate_through};
use crate::schema::roles::{self, RoleRight, grant_sql, revoke_sql};
use crate::schema::uninstall::{self, Uninstall};
use crate::schema::upgrade;
use crate::task::{BatchTaskHandler, TaskHandler};
use crate::text::counted;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::to_raw_value;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, PgPool, Postgres, Row};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// How many milliseconds cleanup waits before it tries again to lock names that were busy: at most a second in all.
const CLEANUP_PAUSES: [u64; 5] = [20, 50, 130, 300, 500];

/// The place where the Rust port has these types.
pub mod types {
    pub use super::{CleanupTask, RescheduleJobOptions};
}

/// Changes to jobs that do not run, for [`WorkerUtils::reschedule_jobs`]. Settings that are not set, or set to `None`, stay
/// as they are.
///
/// ```
/// use graphile_worker::RescheduleJobOptions;
///
/// let first_and_with_all_attempts = RescheduleJobOptions::default().priority(-10).attempts(0);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[must_use]
pub struct RescheduleJobOptions {
    run_at: Option<DateTime<Utc>>,
    priority: Option<i16>,
    attempts: Option<i16>,
    max_attempts: Option<i16>,
}

impl RescheduleJobOptions {
    /// Sets the earliest time to run.
    pub fn run_at(mut self, run_at: impl Into<Option<DateTime<Utc>>>) -> RescheduleJobOptions {
        self.run_at = run_at.into();
        self
    }

    /// Sets the priority. Lower numbers run first.
    pub fn priority(mut self, priority: impl Into<Option<i16>>) -> RescheduleJobOptions {
        self.priority = priority.into();
        self
    }

    /// Sets the number of attempts counted so far.
    pub fn attempts(mut self, attempts: impl Into<Option<i16>>) -> RescheduleJobOptions {
        self.attempts = attempts.into();
        self
    }

    /// Sets the maximum number of attempts.
    pub fn max_attempts(mut self, max_attempts: impl Into<Option<i16>>) -> RescheduleJobOptions {
        self.max_attempts = max_attempts.into();
        self
    }
}

/// What [`WorkerUtils::cleanup`] deletes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CleanupTask {
    /// Tasks without jobs.
    GcTaskIdentifiers,
    /// Queues without jobs.
    GcJobQueues,
    /// Jobs that failed permanently.
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
pub struct WorkerUtils<E = PgPool> {
    executor: E,
    shared: Arc<Shared>,
}

impl<E> fmt::Debug for WorkerUtils<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let schema =
            self.shared.statements.as_ref().map_or_else(|(name, _)| &**name, |statements| statements.schema.name());
        f.debug_struct("WorkerUtils").field("schema", &schema).finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Shared {
    /// If the schema name is invalid, the first call reports it, so that `new` cannot fail.
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

impl WorkerUtils {
    /// Creates utilities for this schema.
    pub fn new(pool: PgPool, schema: impl Into<String>) -> WorkerUtils {
        let name = schema.into();
        let statements = match Schema::new(&name) {
            Ok(schema) => Ok(Arc::new(Statements::new(schema, false))),
            Err(Error::InvalidSchemaName { name, problem }) => Err((name, problem)),
            Err(_) => Err((name, "is invalid")),
        };
        WorkerUtils { executor: pool, shared: Arc::new(Shared::new(statements)) }
    }

    pub(crate) fn with_statements(pool: PgPool, statements: Arc<Statements>) -> WorkerUtils {
        WorkerUtils { executor: pool, shared: Arc::new(Shared::new(Ok(statements))) }
    }

    /// Sets whether jobs without `run_at` get this machine's time (default: no, they get the database's).
    pub fn with_use_local_time(self, use_local_time: bool) -> WorkerUtils {
        let shared = Shared { use_local_time, ..Shared::clone(&self.shared) };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    /// Sets whether to use prepared statements (default: yes). Set it to `false` if the pool connects through
    /// a pooler such as PgBouncer: each statement then runs in a transaction of its own and leaves nothing in
    /// the server's connection.
    pub fn with_prepared_statements(self, prepared: bool) -> WorkerUtils {
        let again = |statements: &Arc<Statements>| Arc::new(Statements::new(statements.schema.clone(), !prepared));
        let statements = self.shared.statements.as_ref().map(again).map_err(Clone::clone);
        let shared = Shared { statements, ..Shared::clone(&self.shared) };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    /// Sets hooks that can change or reject jobs as they are added (default: none).
    pub fn with_hooks(self, hooks: Arc<HookRegistry>) -> WorkerUtils {
        let shared = Shared { hooks, ..Shared::clone(&self.shared) };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    pub(crate) fn with_recovery(self, recovery: WorkerRecoveryConfig) -> WorkerUtils {
        let shared = Shared { recovery, ..Shared::clone(&self.shared) };
        WorkerUtils { shared: Arc::new(shared), ..self }
    }

    /// Returns the same utilities on a connection or in a transaction of the application.
    pub fn within<'c>(&self, connection: &'c mut PgConnection) -> WorkerUtils<WithinSqlx<'c>> {
        WorkerUtils { executor: WithinSqlx::new(connection), shared: self.shared.clone() }
    }

    /// Alias of [`within`](WorkerUtils::within), under the name it has in the Rust port.
    pub fn with_executor<'c>(&self, connection: &'c mut PgConnection) -> WorkerUtils<WithinSqlx<'c>> {
        self.within(connection)
    }

    /// Returns the same utilities on a client or in a transaction of tokio-postgres.
    #[cfg(feature = "tokio-postgres")]
    pub fn within_tokio_postgres<'c, C: tokio_postgres::GenericClient + Sync>(
        &self,
        client: &'c C,
    ) -> WorkerUtils<crate::db::tokio_postgres::WithinTokioPostgres<'c, C>> {
        WorkerUtils { executor: crate::db::tokio_postgres::WithinTokioPostgres(client), shared: self.shared.clone() }
    }

    /// The application's pool.
    pub(crate) fn pool(&self) -> &PgPool {
        &self.executor
    }

    /// Runs a statement in its own transaction.
    pub(crate) async fn fetch_all(&self, query: Query<'_, Postgres, PgArguments>) -> sqlx::Result<Vec<PgRow>> {
        let is_pooled = self.shared.statements.as_ref().is_ok_and(|statements| statements.is_pooled);
        session::fetch_all_safely_on(&mut *self.executor.acquire().await?, is_pooled, query).await
    }

    /// The same for a statement that returns exactly one row.
    pub(crate) async fn fetch_one(&self, query: Query<'_, Postgres, PgArguments>) -> sqlx::Result<PgRow> {
        self.fetch_all(query).await?.into_iter().next().ok_or(sqlx::Error::RowNotFound)
    }

    /// The name of a queue; `None` where there is none with this id.
    pub async fn queue_name(&self, id: i32) -> Result<Option<String>, Error> {
        let context = || format!("look for the queue with the id {id}");
        let rows = self.fetch_all(self.statements()?.queue_name.query().bind(id)).await.context(context)?;
        rows.first().map(|row| row.try_get(0)).transpose().context(context)
    }

    /// Deletes unneeded rows and returns their number. Safe while workers run: it never waits for them or for
    /// open transactions.
    ///
    /// Task and queue names fall into 64 buckets. Cleanup keeps the names of a bucket while an open
    /// transaction is adding a job with one of them; the next cleanup deletes them.
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
        let context = || "delete permanently failed jobs".to_owned();
        let query = self.statements()?.delete_failed_jobs.query();
        let mut transaction = self.executor.begin_with(session::BEGIN).await.context(context)?;
        let deleted = query.execute(&mut *transaction).await.context(context)?.rows_affected();
        session::commit(transaction).await.context(context)?;
        Ok(deleted)
    }

    /// Retries if a name may be in use; most transactions that add jobs are short.
    async fn delete_unused_names(&self, kind: &'static str) -> Result<u64, Error> {
        let context = || format!("delete {kind}s without jobs");
        let statement = &self.statements()?.delete_unused_names;
        let mut deleted = 0;
        let mut pauses = CLEANUP_PAUSES.into_iter();
        loop {
            let mut transaction = self.executor.begin_with(session::BEGIN).await.context(context)?;
            let (count, is_busy): (i64, bool) =
                statement.query_as().bind(kind).fetch_one(&mut *transaction).await.context(context)?;
            session::commit(transaction).await.context(context)?;
            deleted += count.unsigned_abs();
            let Some(pause) = pauses.next().filter(|_| is_busy) else { return Ok(deleted) };
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    /// Lists registered workers, which are those with recovery. A worker is stale if its last heartbeat is
    /// older than `stale_after`.
    pub async fn list_active_workers(&self, stale_after: Duration) -> Result<Vec<ActiveWorker>, Error> {
        let query = self.statements()?.recovery_workers.query().bind(stale_after.as_secs_f64());
        recovery::active_workers(self.fetch_all(query).await)
    }

    /// Releases the jobs of dead workers. Uses the worker's recovery settings, or the defaults of
    /// [`WorkerRecoveryConfig`] if no worker created these utilities. Does nothing while another sweep runs.
    pub async fn sweep_stale_workers(
        &self,
        options: SweepStaleWorkersOptions,
    ) -> Result<SweepStaleWorkersResult, Error> {
        self.sweep_stale_workers_with_config(&self.shared.recovery, options).await
    }

    /// Same as [`sweep_stale_workers`](WorkerUtils::sweep_stale_workers), with another configuration.
    pub async fn sweep_stale_workers_with_config(
        &self,
        config: &WorkerRecoveryConfig,
        options: SweepStaleWorkersOptions,
    ) -> Result<SweepStaleWorkersResult, Error> {
        let transaction = self.executor.begin_with(session::BEGIN).await.context(|| "sweep".to_owned())?;
        let statements = self.statements()?;
        let sweep = Sweep { statements, hooks: &self.shared.hooks, worker_id: "worker-utils".into(), config, options };
        sweep.sweep(transaction).await
    }

    /// Installs or updates the schema; see [`migrate`](crate::migrate).
    pub async fn migrate(&self) -> Result<Migration, Error> {
        self.migrate_with_max_wait(upgrade::DEFAULT_MIGRATION_WAIT).await
    }

    /// Same as [`migrate`](WorkerUtils::migrate), but waits at most this long for older workers (default 10
    /// minutes); see [`migrate_with_max_wait`](crate::migrate_with_max_wait).
    pub async fn migrate_with_max_wait(&self, max_wait: Duration) -> Result<Migration, Error> {
        self.migrate_for(Purpose::default(), max_wait).await
    }

    /// Migrates a database of the Rust port; see [`migrate_from_rust_port`](crate::migrate_from_rust_port).
    pub async fn migrate_from_rust_port(&self) -> Result<Migration, Error> {
        self.migrate_for(Purpose::FROM_RUST_PORT, upgrade::DEFAULT_MIGRATION_WAIT).await
    }

    /// The same even if workers of the port may be alive; see
    /// [`force_migrate_from_rust_port`](crate::force_migrate_from_rust_port).
    pub async fn force_migrate_from_rust_port(&self) -> Result<Migration, Error> {
        self.migrate_for(Purpose { by_force: true, ..Purpose::FROM_RUST_PORT }, upgrade::DEFAULT_MIGRATION_WAIT).await
    }

    async fn migrate_for(&self, purpose: Purpose, max_wait: Duration) -> Result<Migration, Error> {
        let way = ConnectionKind::By(Box::new(PgConnectOptions::clone(&self.executor.connect_options()).into()));
        let schema = &self.statements()?.schema;
        let mut connection = self.executor.acquire().await.context(|| "connect to the database".to_owned())?;
        migrate_through(purpose, way, max_wait, &mut connection, schema).await
    }

    /// Whether the schema is up to date. Changes nothing. Fails if a newer release has applied a breaking
    /// migration.
    pub async fn is_migrated(&self) -> Result<bool, Error> {
        let mut connection = self.executor.acquire().await.context(|| "connect to the database".to_owned())?;
        examine(&mut connection, &self.statements()?.schema).await?.is_up_to_date
    }

    /// Reports what [`uninstall`](WorkerUtils::uninstall) would drop. Changes nothing.
    pub async fn uninstall_preview(&self) -> Result<Uninstall, Error> {
        uninstall::drop_schema(&self.executor, self.statements()?, false).await
    }

    /// Drops the schema with all jobs. Leaves the schemas of other applications alone. Fails if the schema contains other
    /// tables or views.
    pub async fn uninstall(&self) -> Result<Uninstall, Error> {
        uninstall::drop_schema(&self.executor, self.statements()?, true).await
    }

    /// Grants these rights to a role. Must run as the schema's owner.
    pub async fn grant(&self, role: &str, rights: &[RoleRight]) -> Result<(), Error> {
        let sql = grant_sql(self.statements()?.schema.name(), role, rights)?;
        roles::apply(&self.executor, sql, || format!("grant rights to the role {role:?}")).await
    }

    /// Revokes all rights of a role on the schema. Must run as the schema's owner.
    pub async fn revoke(&self, role: &str) -> Result<(), Error> {
        let sql = revoke_sql(self.statements()?.schema.name(), role)?;
        roles::apply(&self.executor, sql, || format!("revoke the rights of the role {role:?}")).await
    }
}

impl<E: UtilsExecutor> WorkerUtils<E> {
    /// Adds a job.
    pub async fn add_job<T: TaskHandler>(&self, payload: T, spec: JobSpec) -> Result<Job, Error> {
        let spec = with_default_attempts(spec, T::options().max_attempts);
        self.add_raw_job(T::IDENTIFIER, payload, spec).await
    }

    /// Adds one job for several items; its payload is an array. If a waiting job has the same key, the items
    /// are appended to it.
    pub async fn add_batch_job<T: BatchTaskHandler>(&self, items: Vec<T>, spec: JobSpec) -> Result<Job, Error> {
        let spec = with_default_attempts(spec, T::options().max_attempts);
        self.add_raw_job(T::IDENTIFIER, items, spec).await
    }

    /// Adds a job whose task is known only at run time.
    pub async fn add_raw_job(&self, identifier: &str, payload: impl Serialize, spec: JobSpec) -> Result<Job, Error> {
        let job = self.hooked(identifier, &payload, spec).await?;
        let statements = self.statements()?;
        match self.executor.pool() {
            Some(pool) => adding::add(pool, &self.shared.adding, statements, job).await,
            None => adding::add_single(&self.executor, statements, job).await,
        }
    }

    /// Adds a job that runs when this was not called with the key for the time `wait`, and at the latest `max_wait` after the
    /// first call (`None`: however long the calls go on). Each call replaces the payload; two arrays are joined, as in a
    /// [batch job](WorkerUtils::add_batch_job). Safe if many call it at the same time.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # async fn example(utils: graphile_worker::WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// let (wait, max_wait) = (Duration::from_secs(2), Duration::from_secs(30));
    /// utils.debounce("reindex", serde_json::json!({ "page": 7 }), "reindex:7", wait, max_wait).await?;
    /// # Ok(()) }
    /// ```
    pub async fn debounce(
        &self,
        identifier: &str,
        payload: impl Serialize,
        key: &str,
        wait: Duration,
        max_wait: impl Into<Option<Duration>>,
    ) -> Result<Job, Error> {
        self.debounce_in_queue(identifier, payload, key, (wait, max_wait.into()), None).await
    }

    /// Like [`debounce`](WorkerUtils::debounce), for a job in a queue.
    #[doc(hidden)]
    pub async fn debounce_in_queue(
        &self,
        identifier: &str,
        payload: impl Serialize,
        key: &str,
        (wait, max_wait): (Duration, Option<Duration>),
        queue_name: Option<String>,
    ) -> Result<Job, Error> {
        let times =
            [Parameter::Float(Some(wait.as_secs_f64())), Parameter::Float(max_wait.map(|max| max.as_secs_f64()))];
        let spec = JobSpec { job_key: Some(key.to_owned()), queue_name, ..JobSpec::default() };
        self.add_by_key(&self.statements()?.debounce, identifier, &payload, spec, times).await
    }

    /// Adds a job, at most one per key and `every`. The first call is due at once. The calls that follow within `every` become
    /// one job with the last payload, which is due when that time is over. So no call is lost, and the times at which the jobs
    /// are due are at least `every` apart. Retries do not count. Safe if many call it at the same time.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # async fn example(utils: graphile_worker::WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// utils.throttle("sync", serde_json::json!({ "user": 7 }), "sync:7", Duration::from_secs(60)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn throttle(
        &self,
        identifier: &str,
        payload: impl Serialize,
        key: &str,
        every: Duration,
    ) -> Result<Job, Error> {
        self.throttle_in_queue(identifier, payload, key, every, None).await
    }

    /// Like [`throttle`](WorkerUtils::throttle), for a job in a queue.
    #[doc(hidden)]
    pub async fn throttle_in_queue(
        &self,
        identifier: &str,
        payload: impl Serialize,
        key: &str,
        every: Duration,
        queue_name: Option<String>,
    ) -> Result<Job, Error> {
        let times = [Parameter::Float(Some(every.as_secs_f64()))];
        let spec = JobSpec { job_key: Some(key.to_owned()), queue_name, ..JobSpec::default() };
        self.add_by_key(&self.statements()?.throttle, identifier, &payload, spec, times).await
    }

    /// Adds a job by its key, after the hooks. They can change its task, payload, queue and key.
    async fn add_by_key(
        &self,
        statement: &Statement,
        identifier: &str,
        payload: &impl Serialize,
        spec: JobSpec,
        times: impl IntoIterator<Item = Parameter>,
    ) -> Result<Job, Error> {
        let NewJob { identifier, payload, spec } = self.hooked(identifier, payload, spec).await?;
        let context = || format!("add a job of the task {identifier:?}");
        let mut parameters = vec![
            Parameter::Text(Some(identifier.to_string())),
            Parameter::Text(Some(payload.get().to_owned())),
            Parameter::Text(spec.job_key),
        ];
        parameters.extend(times);
        parameters.push(Parameter::Text(spec.queue_name));
        let added = self.executor.jobs(statement, parameters, context).await?.pop();
        self.shared.adding.added.notify_one();
        added.ok_or_else(|| Error::Database { context: context(), source: sqlx::Error::RowNotFound })
    }

    /// Adds several jobs of one task, all or none; returns them in order.
    pub async fn add_jobs<T: TaskHandler>(&self, jobs: &[(T, &JobSpec)]) -> Result<Vec<Job>, Error> {
        let max_attempts = T::options().max_attempts;
        let jobs = jobs.iter().map(|(payload, spec)| (T::IDENTIFIER, payload, *spec));
        self.add_many(jobs, max_attempts).await
    }

    /// Adds several jobs, all or none; returns them in order. If one of them has the key mode
    /// `PreserveRunAt`, it applies to all. `UnsafeDedupe` is rejected.
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
        let statements = self.statements()?;
        match self.executor.pool() {
            Some(pool) => adding::add_many(pool, &self.shared.adding, statements, new_jobs).await,
            None => adding::add_many_within(&self.executor, statements, new_jobs).await,
        }
    }

    /// Removes the job with this key. A running job continues, but loses its key and is not retried. Returns
    /// `None` if no job has the key.
    pub async fn remove_job(&self, job_key: &str) -> Result<Option<Job>, Error> {
        let parameters = vec![Parameter::Text(Some(job_key.to_owned()))];
        let context = || format!("remove the job with key {job_key:?}");
        Ok(self.executor.jobs(&self.statements()?.remove_job, parameters, context).await?.pop())
    }

    /// Completes (deletes) those of the jobs that are not running; returns them.
    pub async fn complete_jobs(&self, ids: &[i64]) -> Result<Vec<Job>, Error> {
        let parameters = vec![Parameter::Ids(ids.to_vec())];
        let context = || format!("complete {}", counted(ids.len()));
        self.executor.jobs(&self.statements()?.complete_jobs, parameters, context).await
    }

    /// Fails those of the jobs that are not running, permanently; returns them.
    pub async fn permanently_fail_jobs(&self, ids: &[i64], reason: &str) -> Result<Vec<Job>, Error> {
        let parameters = vec![Parameter::Ids(ids.to_vec()), Parameter::Text(Some(reason.to_owned()))];
        let context = || format!("fail {}", counted(ids.len()));
        self.executor.jobs(&self.statements()?.permanently_fail_jobs, parameters, context).await
    }

    /// Reschedules those of the jobs that are not running; returns them.
    pub async fn reschedule_jobs(&self, ids: &[i64], options: RescheduleJobOptions) -> Result<Vec<Job>, Error> {
        let parameters = vec![
            Parameter::Ids(ids.to_vec()),
            Parameter::Time(options.run_at),
            Parameter::Int(options.priority.map(i32::from)),
            Parameter::Int(options.attempts.map(i32::from)),
            Parameter::Int(options.max_attempts.map(i32::from)),
        ];
        let context = || format!("reschedule {}", counted(ids.len()));
        self.executor.jobs(&self.statements()?.reschedule_jobs, parameters, context).await
    }

    /// Releases everything that these workers have locked. Use it only for workers that are dead: the jobs of
    /// a live one would run twice.
    pub async fn force_unlock_workers(&self, worker_ids: &[&str]) -> Result<(), Error> {
        let ids = worker_ids.iter().map(|id| (*id).to_owned()).collect();
        let parameters = vec![Parameter::TextArray(Some(ids))];
        let context = || "unlock workers".to_owned();
        self.executor.jobs(&self.statements()?.force_unlock_workers, parameters, context).await.map(|_| ())
    }

    /// The job after all hooks, with its payload serialized as JSON.
    pub(crate) async fn hooked(
        &self,
        identifier: &str,
        payload: &impl Serialize,
        spec: JobSpec,
    ) -> Result<NewJob, Error> {
        let invalid = |source| Error::InvalidPayload { identifier: identifier.to_owned(), source };
        let mut job = if !self.shared.hooks.has::<BeforeJobSchedule>() {
            NewJob { identifier: identifier.into(), payload: to_raw_value(payload).map_err(invalid)?, spec }
        } else {
            let payload = serde_json::to_value(payload).map_err(invalid)?;
            let job = ScheduledJob { identifier: identifier.to_owned(), payload, spec };
            let rejected = |reason| Error::JobRejected { identifier: identifier.to_owned(), reason };
            let job = self.shared.hooks.schedule(job).await.map_err(rejected)?;
            let payload = to_raw_value(&job.payload).map_err(invalid)?;
            NewJob { identifier: job.identifier.into(), payload, spec: job.spec }
        };
        if self.shared.use_local_time {
            job.spec.run_at.get_or_insert_with(Utc::now);
        }
        Ok(job)
    }

    /// Notified when jobs are added through these utilities or their clones.
    pub(crate) fn added(&self) -> Arc<Notify> {
        self.shared.adding.added.clone()
    }

    pub(crate) fn executor(&self) -> &E {
        &self.executor
    }

    pub(crate) fn hooks(&self) -> &HookRegistry {
        &self.shared.hooks
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

/// Adds one job to the database of this connection string, then disconnects. For scripts; use [`WorkerUtils`]
/// to add more than one.
pub async fn add_job(
    database_url: &str,
    identifier: &str,
    payload: impl Serialize,
    spec: JobSpec,
) -> Result<Job, Error> {
    let context = || "connect to the database".to_owned();
    let options = DatabaseConfig::parse(database_url)?.current_options().await.context(context)?;
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_lazy_with(options);
    // Works with and without a pooler. A single statement gains nothing from being prepared.
    let utils = WorkerUtils::new(pool.clone(), "graphile_worker").with_prepared_statements(false);
    let job = utils.add_raw_job(identifier, payload, spec).await;
    pool.close().await;
    job
}
