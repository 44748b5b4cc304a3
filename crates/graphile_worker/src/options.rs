//! The options of a worker: each with its default and its check. `worker/start` builds the worker from them.

use crate::Error;
use crate::WorkerContext;
use crate::context::Extensions;
use crate::cron::clock::TestClock;
use crate::cron::file::CrontabFile;
use crate::cron::items::CronItem;
use crate::db::connect::{self, DatabaseConfig, PasswordFunction};
use crate::db::session::ANSWER_TIMEOUT;
use crate::flags::{FlagSettings, Flags};
use crate::hooks::{Event, HookRegistry, Plugin};
use crate::limits::Limit;
use crate::recovery::WorkerRecoveryConfig;
use crate::schema::upgrade;
use crate::shutdown::{self, ShutdownSignal, WorkerShutdownConfig};
use crate::task::{
    BatchTaskHandler, IntoTaskHandlerResult, JobDefinition, RepeatableTasks, Task, TaskHandler, TaskOptions, Tasks,
};
use crate::task_source::TaskSource;
use graphile_worker_crontab::{Crontab, parse_crontab};
use serde::de::DeserializeOwned;
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The options of a worker. [`init`](WorkerOptions::init) checks them and builds the worker.
///
/// **Turn recovery on in production.** It is off by default. Without it, the jobs of a worker that is killed (out of
/// memory, a lost machine, SIGKILL) stay locked for 4 hours before another worker runs them. With it, they run again
/// after 5 to 7 minutes. One call turns it on: see [`worker_recovery`](WorkerOptions::worker_recovery).
///
/// ```no_run
/// # use graphile_worker::{WorkerContext, WorkerOptions, WorkerRecoveryConfig};
/// # async fn example() -> Result<(), graphile_worker::Error> {
/// let worker = WorkerOptions::default()
///     .database_url("postgres://user:password@localhost/my_app")
///     .concurrency(10)
///     .worker_recovery(WorkerRecoveryConfig::default().enabled(true))
///     .define_task("hello", |name: String, _ctx: WorkerContext| async move { println!("Hello, {name}") })
///     .init()
///     .await?;
/// worker.run().await
/// # }
/// ```
#[must_use = "options do nothing until `init`"]
pub struct WorkerOptions {
    pub(crate) database: Option<Database>,
    pub(crate) direct: Option<Direct>,
    pub(crate) password: Option<PasswordFunction>,
    pub(crate) answer_timeout: Option<Duration>,
    pub(crate) schema: String,
    pub(crate) concurrency: Option<usize>,
    pub(crate) poll_interval: Duration,
    pub(crate) max_pg_conn: u32,
    pub(crate) tasks: Vec<Task>,
    pub(crate) task_source: Option<Box<dyn TaskSource>>,
    pub(crate) task_options: HashMap<String, TaskOptions>,
    pub(crate) repeatable_tasks: RepeatableTasks,
    pub(crate) limits: Vec<Limit>,
    pub(crate) extensions: Extensions,
    pub(crate) hooks: HookRegistry,
    pub(crate) crontabs: Vec<Crontab>,
    pub(crate) crontab_file: Option<CrontabFile>,
    pub(crate) watch: bool,
    pub(crate) cron_clock: Option<TestClock>,
    pub(crate) recovery: WorkerRecoveryConfig,
    pub(crate) use_local_time: bool,
    pub(crate) flags: FlagSettings,
    pub(crate) listen: bool,
    pub(crate) prepared_statements: bool,
    pub(crate) listen_os_shutdown_signals: bool,
    pub(crate) shutdown_signal: Option<ShutdownSignal>,
    pub(crate) shutdown_grace_period: Duration,
    pub(crate) interrupted_job_retry_delay: Duration,
    pub(crate) max_migration_wait: Duration,
    pub(crate) startup_timeout: Duration,
    pub(crate) keep_locks_fresh_after: Duration,
    pub(crate) longest_batch: Option<Duration>,
}

/// With a shorter timeout, the worker would replace the connections of a server that is only busy.
const SHORTEST_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) enum Database {
    Text(String),
    Config(DatabaseConfig),
    Pool(PgPool),
}

/// A connection that bypasses the pooler.
pub(crate) enum Direct {
    Text(String),
    Config(DatabaseConfig),
}

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        let stopping = WorkerShutdownConfig::default();
        WorkerOptions {
            database: None,
            direct: None,
            password: None,
            answer_timeout: None,
            schema: "graphile_worker".to_owned(),
            concurrency: None,
            poll_interval: Duration::from_secs(2),
            max_pg_conn: 20,
            tasks: Vec::new(),
            task_source: None,
            task_options: HashMap::new(),
            repeatable_tasks: RepeatableTasks::default(),
            limits: Vec::new(),
            extensions: Extensions::default(),
            hooks: HookRegistry::new(),
            crontabs: Vec::new(),
            crontab_file: None,
            watch: false,
            cron_clock: None,
            recovery: WorkerRecoveryConfig::default(),
            use_local_time: false,
            flags: FlagSettings::default(),
            listen: true,
            prepared_statements: true,
            listen_os_shutdown_signals: stopping.listen_os_shutdown_signals,
            shutdown_signal: None,
            shutdown_grace_period: stopping.grace_period,
            interrupted_job_retry_delay: stopping.interrupted_job_retry_delay,
            max_migration_wait: upgrade::DEFAULT_MIGRATION_WAIT,
            startup_timeout: Duration::from_secs(30),
            keep_locks_fresh_after: Duration::from_secs(60 * 60),
            longest_batch: None,
        }
    }
}

/// Without passwords.
impl fmt::Debug for WorkerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerOptions")
            .field("schema", &self.schema)
            .field("concurrency", &self.concurrency)
            .field("poll_interval", &self.poll_interval)
            .field("tasks", &self.tasks.iter().map(|task| &*task.identifier).collect::<Vec<_>>())
            .field("recovery", &self.recovery)
            .finish_non_exhaustive()
    }
}

impl WorkerOptions {
    /// Sets the database, as a libpq connection string: a URL, `name=value` pairs, or the name of a database. Default:
    /// `DATABASE_URL` from the environment, or else `PGDATABASE` or `PGSERVICE` with the other `PG…` variables. See
    /// [`DatabaseConfig`].
    pub fn database_url(mut self, url: &str) -> WorkerOptions {
        self.database = Some(Database::Text(url.to_owned()));
        self
    }

    /// Sets the database, as a parsed connection string.
    pub fn database(mut self, config: DatabaseConfig) -> WorkerOptions {
        self.database = Some(Database::Config(config));
        self
    }

    /// Calls this function to get the password of each new connection, and every 30 seconds for the handlers' pool. Use
    /// it for rotated passwords and tokens that expire. If the function fails, the worker keeps the outcomes of its
    /// jobs and retries.
    ///
    /// ```no_run
    /// # use graphile_worker::WorkerOptions;
    /// let options = WorkerOptions::default()
    ///     .database_url("postgres://me@db.example.com/my_app?sslmode=verify-full")
    ///     .password_provider(|| async { std::fs::read_to_string("/run/secrets/database-token") });
    /// ```
    pub fn password_provider<F, Fut, E>(mut self, provider: F) -> WorkerOptions
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<String, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.password = Some(connect::password_function(provider));
        self
    }

    /// Sets the database to that of the application's pool. Handlers use the pool; the worker opens its own connections
    /// to the same database. Behind a pooler such as PgBouncer, build the pool with
    /// [`extra_float_digits(None)`](PgConnectOptions::extra_float_digits), because PgBouncer rejects that parameter.
    pub fn pg_pool(mut self, pool: PgPool) -> WorkerOptions {
        self.database = Some(Database::Pool(pool));
        self
    }

    /// Sets a connection string that bypasses the pooler, if [`database_url`](WorkerOptions::database_url) points to
    /// one such as PgBouncer. The worker uses one such connection to listen for jobs and to migrate the schema, which
    /// do not work through a pooler in transaction mode. Everything else goes through the pooler.
    ///
    /// ```no_run
    /// # use graphile_worker::WorkerOptions;
    /// let options = WorkerOptions::default()
    ///     .database_url("postgres://user@pooler:6432/my_app")
    ///     .direct_database_url("postgres://user@database:5432/my_app");
    /// ```
    pub fn direct_database_url(mut self, url: &str) -> WorkerOptions {
        self.direct = Some(Direct::Text(url.to_owned()));
        self
    }

    /// Like [`direct_database_url`](WorkerOptions::direct_database_url), with a parsed connection string.
    pub fn direct_database(mut self, config: DatabaseConfig) -> WorkerOptions {
        self.direct = Some(Direct::Config(config));
        self
    }

    /// Sets the name of the schema (default `graphile_worker`).
    pub fn schema(mut self, schema: &str) -> WorkerOptions {
        self.schema = schema.to_owned();
        self
    }

    /// Returns the name of the schema.
    pub fn schema_name(&self) -> &str {
        &self.schema
    }

    /// Returns how to connect to the database, or `None` if these options set no database.
    pub fn database_config(&self) -> Option<Result<DatabaseConfig, Error>> {
        let config = match self.database.as_ref()? {
            Database::Text(text) => DatabaseConfig::parse(text),
            Database::Config(config) => Ok(config.clone()),
            Database::Pool(pool) => Ok(PgConnectOptions::clone(&pool.connect_options()).into()),
        };
        Some(config.map(|config| config.with_password_function(self.password.clone())))
    }

    /// Sets how many jobs run at the same time (default: the number of CPU cores; at least 1).
    pub fn concurrency(mut self, jobs: usize) -> WorkerOptions {
        self.concurrency = Some(jobs);
        self
    }

    /// Sets the maximum delay between polls if no notification arrives (default 2 seconds; more than zero).
    pub fn poll_interval(mut self, interval: Duration) -> WorkerOptions {
        self.poll_interval = interval;
        self
    }

    /// Sets the maximum number of connections in the handlers' pool (default 20). Has no effect with
    /// [`pg_pool`](WorkerOptions::pg_pool). The worker itself uses two more connections, a third one under load, one
    /// for recurring jobs, and one or two for recovery.
    pub fn max_pg_conn(mut self, connections: u32) -> WorkerOptions {
        self.max_pg_conn = connections;
        self
    }

    /// Runs jobs of this task.
    pub fn define_job<T: TaskHandler>(mut self) -> WorkerOptions {
        self.tasks.push(Task::handler::<T>());
        self
    }

    /// Runs jobs of this batch task, whose payloads are arrays of items.
    pub fn define_batch_job<T: BatchTaskHandler>(mut self) -> WorkerOptions {
        self.tasks.push(Task::batch_handler::<T>());
        self
    }

    /// Runs jobs of all these tasks: `define_jobs([SendEmail::definition(), SendReport::definition()])`.
    pub fn define_jobs(mut self, jobs: impl IntoIterator<Item = JobDefinition>) -> WorkerOptions {
        self.tasks.extend(jobs.into_iter().map(|definition| definition.0));
        self
    }

    /// Runs jobs of the task with this name by calling a function.
    pub fn define_task<P, F, Fut, R>(mut self, identifier: &str, function: F) -> WorkerOptions
    where
        P: DeserializeOwned + Send,
        F: Fn(P, WorkerContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: IntoTaskHandlerResult,
    {
        self.tasks.push(Task::function(identifier, TaskOptions::default(), function));
        self
    }

    /// Runs jobs of tasks that come from outside of the program's code, such as a folder of files: `TasksDir` of the crate
    /// `graphile_worker_scripts`. A worker has one source.
    pub fn task_source(mut self, source: impl TaskSource) -> WorkerOptions {
        self.task_source = Some(Box::new(source));
        self
    }

    /// Sets the timeout, back-off and concurrency limit of a task. Overrides the options of its handler.
    pub fn task_options(mut self, identifier: &str, options: TaskOptions) -> WorkerOptions {
        self.task_options.insert(identifier.to_owned(), options);
        self
    }

    /// Makes these tasks repeatable: see [`TaskOptions::repeatable`]. `*` in a name stands for any text. Call it for tasks of
    /// a [source](WorkerOptions::task_source), whose other options then stay as they are. A name that matches no task is
    /// logged.
    pub fn repeatable_tasks(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> WorkerOptions {
        self.repeatable_tasks.add(names.into_iter().map(Into::into));
        self
    }

    /// Sets a limit for all workers when this worker starts. Replaces an earlier limit of these options with the same name.
    ///
    /// Limits are stored in the database. If two workers have different settings for the same limit, those of the worker that
    /// started last apply, and it logs a line. A limit stays if you remove this call:
    /// [`WorkerUtils::drop_limit`](crate::WorkerUtils::drop_limit) and `graphile-worker limit drop` drop it. Pauses stay, too.
    ///
    /// ```
    /// # use graphile_worker::{Limit, WorkerOptions};
    /// let options = WorkerOptions::default().limit(Limit::task("send_email").concurrency(5));
    /// # drop(options);
    /// ```
    pub fn limit(mut self, limit: Limit) -> WorkerOptions {
        self.limits.retain(|earlier| earlier.name() != limit.name());
        self.limits.push(limit);
        self
    }

    /// Adds a value that handlers get by its type from [`WorkerContext::extension`].
    pub fn add_extension<T: Send + Sync + 'static>(mut self, value: T) -> WorkerOptions {
        self.extensions.insert(value);
        self
    }

    /// Calls the handler on every such event. See [`HookRegistry`].
    pub fn on<E: Event, F, Fut>(mut self, event: E, handler: F) -> WorkerOptions
    where
        F: Fn(E::Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = E::Output> + Send + 'static,
    {
        self.hooks.on(event, handler);
        self
    }

    /// Registers the hooks of a plugin.
    pub fn add_plugin(mut self, plugin: impl Plugin) -> WorkerOptions {
        self.hooks.add_plugin(plugin);
        self
    }

    /// Adds recurring jobs: an item built by [`Cron`](crate::Cron), a [`Crontab`], or the text of a crontab. For text,
    /// this method returns a `Result`. The jobs are added while the worker [runs](crate::Worker::run). Another worker may run
    /// them: this one does not have to define their tasks.
    ///
    /// ```
    /// # use graphile_worker::WorkerOptions;
    /// let options = WorkerOptions::default().with_cron("0 8 * * * send_daily_report ?tz=Europe/Paris")?;
    /// # Ok::<(), graphile_worker::Error>(())
    /// ```
    pub fn with_cron<C: IntoCron>(self, cron: C) -> C::Options {
        cron.add_to(self)
    }

    /// Adds recurring jobs from a list of items.
    pub fn with_crons(mut self, items: impl IntoIterator<Item = impl Into<Crontab>>) -> WorkerOptions {
        self.crontabs.extend(items.into_iter().map(Into::into));
        self
    }

    /// Adds the recurring jobs of this crontab file. [`init`](WorkerOptions::init) fails if the file does not exist.
    pub fn crontab_file(mut self, path: impl Into<PathBuf>) -> WorkerOptions {
        self.crontab_file = Some(CrontabFile { path: path.into(), may_be_missing: false });
        self
    }

    /// Like [`crontab_file`](WorkerOptions::crontab_file), but the file may be missing.
    pub fn crontab_file_if_any(mut self, path: impl Into<PathBuf>) -> WorkerOptions {
        self.crontab_file = Some(CrontabFile { path: path.into(), may_be_missing: true });
        self
    }

    /// Whether to reload the [source of tasks](WorkerOptions::task_source) and the [crontab
    /// file](WorkerOptions::crontab_file) when they change, while the worker [runs](crate::Worker::run) (default: no). Changes
    /// apply to jobs that start later, not to running ones. Jobs of a removed task wait until the task is back. If the
    /// changed crontab has errors, the worker keeps the previous one.
    pub fn watch(mut self, watch: bool) -> WorkerOptions {
        self.watch = watch;
        self
    }

    /// Schedules recurring jobs by this clock, for tests (default: the database's clock).
    pub fn cron_clock(mut self, clock: &TestClock) -> WorkerOptions {
        self.cron_clock = Some(clock.clone());
        self
    }

    /// Configures the recovery of dead workers' jobs (default: off).
    ///
    /// Without recovery, the jobs of a worker that is killed stay locked for 4 hours before another worker runs them.
    ///
    /// ```
    /// # use graphile_worker::{WorkerOptions, WorkerRecoveryConfig};
    /// let options = WorkerOptions::default().worker_recovery(WorkerRecoveryConfig::default().enabled(true));
    /// # drop(options);
    /// ```
    pub fn worker_recovery(mut self, recovery: WorkerRecoveryConfig) -> WorkerOptions {
        self.recovery = recovery;
        self
    }

    /// Sets how often the worker sends a heartbeat (default 30 seconds), and turns recovery on.
    pub fn heartbeat_interval(mut self, interval: Duration) -> WorkerOptions {
        self.recovery = self.recovery.heartbeat_interval(interval);
        self
    }

    /// Sets how often the workers look for dead workers (default 60 seconds), and turns recovery on.
    pub fn sweep_interval(mut self, interval: Duration) -> WorkerOptions {
        self.recovery = self.recovery.sweep_interval(interval);
        self
    }

    /// Sets how long after its last heartbeat a worker counts as dead (default 5 minutes), and turns recovery on.
    pub fn sweep_threshold(mut self, threshold: Duration) -> WorkerOptions {
        self.recovery = self.recovery.sweep_threshold(threshold);
        self
    }

    /// Sets how long a dead worker's jobs wait before they run again (default 30 seconds), and turns recovery on.
    pub fn recovery_delay(mut self, delay: Duration) -> WorkerOptions {
        self.recovery = self.recovery.recovery_delay(delay);
        self
    }

    /// Whether this machine's clock decides which jobs are due, instead of the database's (default: no).
    pub fn use_local_time(mut self, use_local_time: bool) -> WorkerOptions {
        self.use_local_time = use_local_time;
        self
    }

    /// Skips jobs with any of these flags (default: none).
    pub fn forbidden_flags(mut self, flags: impl IntoIterator<Item = impl Into<String>>) -> WorkerOptions {
        self.flags.forbidden = Flags::List(flags.into_iter().map(Into::into).collect());
        self
    }

    /// Adds one flag to the [forbidden flags](WorkerOptions::forbidden_flags).
    pub fn add_forbidden_flag(mut self, flag: &str) -> WorkerOptions {
        self.flags.forbidden.add(flag);
        self
    }

    /// Skips jobs with any of the flags that the function returns. The worker calls it for every claim, so it must be
    /// quick.
    pub fn forbidden_flags_fn(self, flags: impl Fn() -> Option<Vec<String>> + Send + Sync + 'static) -> WorkerOptions {
        self.forbidden_flags_async(move || std::future::ready(flags()))
    }

    /// Like [`forbidden_flags_fn`](WorkerOptions::forbidden_flags_fn), with an async function.
    pub fn forbidden_flags_async<F, Fut>(mut self, flags: F) -> WorkerOptions
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<Vec<String>>> + Send + 'static,
    {
        self.flags.forbidden = Flags::function(flags);
        self
    }

    /// Runs only jobs with at least one of these flags (default: all jobs; an empty list means the same). Jobs without
    /// flags do not run here. A job that also has a [forbidden flag](WorkerOptions::forbidden_flags) does not run
    /// either.
    ///
    /// Each claim reads past the jobs that it skips. To pick a few jobs out of a million, give them their own task name
    /// instead.
    ///
    /// ```
    /// # use graphile_worker::WorkerOptions;
    /// let options = WorkerOptions::default().accepted_flags(["gpu", "fast-disk"]).forbidden_flags(["macos"]);
    /// ```
    pub fn accepted_flags(mut self, flags: impl IntoIterator<Item = impl Into<String>>) -> WorkerOptions {
        self.flags.accepted = Flags::List(flags.into_iter().map(Into::into).collect());
        self
    }

    /// Adds one flag to the [accepted flags](WorkerOptions::accepted_flags).
    pub fn add_accepted_flag(mut self, flag: &str) -> WorkerOptions {
        self.flags.accepted.add(flag);
        self
    }

    /// Runs only jobs with at least one of the flags that the function returns; all jobs if it returns `None` or an
    /// empty list. The worker calls it for every claim, so it must be quick.
    pub fn accepted_flags_fn(self, flags: impl Fn() -> Option<Vec<String>> + Send + Sync + 'static) -> WorkerOptions {
        self.accepted_flags_async(move || std::future::ready(flags()))
    }

    /// Like [`accepted_flags_fn`](WorkerOptions::accepted_flags_fn), with an async function.
    pub fn accepted_flags_async<F, Fut>(mut self, flags: F) -> WorkerOptions
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<Vec<String>>> + Send + 'static,
    {
        self.flags.accepted = Flags::function(flags);
        self
    }

    /// Skips jobs with a flag that is not in this list (default: any flag is allowed). Jobs without flags always run;
    /// with an empty list, only they run. If this worker's jobs have
    /// [`resilient_job_flags`](crate::WorkerRecoveryConfig::resilient_job_flags), list those too.
    pub fn job_flag_allowlist(mut self, flags: impl IntoIterator<Item = impl Into<String>>) -> WorkerOptions {
        self.flags.allowed = Some(flags.into_iter().map(Into::into).collect());
        self
    }

    /// Whether to listen for notifications of new jobs (default: yes). If not, the worker polls. It also polls behind a
    /// pooler that shares server connections, unless it has a [direct connection](WorkerOptions::direct_database_url).
    pub fn use_notifications(mut self, listen: bool) -> WorkerOptions {
        self.listen = listen;
        self
    }

    /// The Rust port's name for [`use_notifications`](WorkerOptions::use_notifications).
    pub fn use_notification_delivery(self, listen: bool) -> WorkerOptions {
        self.use_notifications(listen)
    }

    /// Whether to use prepared statements and session settings (default: yes, unless the worker detects a pooler). The
    /// worker detects a pooler at startup, if the pooler rejects session settings or does not pass them on. Set this to
    /// `false` for a pooler that it does not detect.
    pub fn use_prepared_statements(mut self, prepared: bool) -> WorkerOptions {
        self.prepared_statements = prepared;
        self
    }

    /// Whether SIGINT, SIGTERM and SIGHUP stop the worker (default: yes).
    ///
    /// When the last such worker of the process has ended, these signals end the process again, as they do without a
    /// worker. On Linux, a handler that was there before the first worker ran stays in charge. If your program installs
    /// its own handlers, use `false` and [`Worker::request_shutdown`](crate::Worker::request_shutdown).
    pub fn listen_os_shutdown_signals(mut self, listen: bool) -> WorkerOptions {
        self.listen_os_shutdown_signals = listen;
        self
    }

    /// Stops the worker when this future completes, after its running jobs have finished.
    ///
    /// ```
    /// # use graphile_worker::WorkerOptions;
    /// let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    /// let options = WorkerOptions::default().shutdown_signal(async move {
    ///     stopped.await.ok();
    /// });
    /// # drop(options);
    /// # drop(stop);
    /// ```
    pub fn shutdown_signal(mut self, signal: impl Future<Output = ()> + Send + 'static) -> WorkerOptions {
        self.shutdown_signal = Some(shutdown::signal(signal));
        self
    }

    /// Sets how long running jobs may take to finish after the worker is asked to stop (default 5 seconds).
    pub fn shutdown_grace_period(mut self, period: Duration) -> WorkerOptions {
        self.shutdown_grace_period = period;
        self
    }

    /// Sets how long an interrupted job waits before it runs again (default 30 seconds).
    pub fn interrupted_job_retry_delay(mut self, delay: Duration) -> WorkerOptions {
        self.interrupted_job_retry_delay = delay;
        self
    }

    /// The Rust port's name for [`interrupted_job_retry_delay`](WorkerOptions::interrupted_job_retry_delay).
    pub fn shutdown_interrupted_job_retry_delay(self, delay: Duration) -> WorkerOptions {
        self.interrupted_job_retry_delay(delay)
    }

    /// Sets all shutdown options at once. Replaces earlier settings, including the shutdown signal.
    pub fn worker_shutdown(mut self, config: WorkerShutdownConfig) -> WorkerOptions {
        self.listen_os_shutdown_signals = config.listen_os_shutdown_signals;
        self.shutdown_grace_period = config.grace_period;
        self.interrupted_job_retry_delay = config.interrupted_job_retry_delay;
        self.shutdown_signal = config.shutdown_signal;
        self
    }

    /// Sets how long [`init`](WorkerOptions::init) waits for workers of older releases to stop before a breaking
    /// migration (default 10 minutes; zero: does not wait). It asks them to stop, and each stops when its running jobs
    /// have finished.
    pub fn max_migration_wait(mut self, wait: Duration) -> WorkerOptions {
        self.max_migration_wait = wait;
        self
    }

    /// Sets how long [`init`](WorkerOptions::init) and [`run`](crate::Worker::run) each retry if the database is not ready:
    /// unreachable, starting, shutting down, out of connections, or with a locked table (default 30 seconds; zero: one
    /// attempt). Errors that a retry cannot fix, such as a wrong password, are returned at once.
    pub fn startup_timeout(mut self, timeout: Duration) -> WorkerOptions {
        self.startup_timeout = timeout;
        self
    }

    /// Sets how long the worker waits for an answer from the server before it replaces the connection (default:
    /// `tcp_user_timeout` of the connection string, or else 20 seconds; at least 1 second). Only this timeout detects a
    /// network that drops packets silently. The worker's own statements are cancelled after 5/6 of it.
    pub fn answer_timeout(mut self, timeout: Duration) -> WorkerOptions {
        self.answer_timeout = Some(timeout);
        self
    }

    /// Sets how long a job runs before the worker refreshes its lock (default 1 hour). For tests, which cannot wait an
    /// hour.
    #[doc(hidden)]
    pub fn keep_locks_fresh_after(mut self, duration: Duration) -> WorkerOptions {
        self.keep_locks_fresh_after = duration;
        self
    }

    /// How long jobs of repeatable tasks run at most before their claim is written (default: 50 milliseconds). If it is set,
    /// they run in batches also if only few are due. For tests.
    #[doc(hidden)]
    pub fn longest_batch(mut self, duration: Duration) -> WorkerOptions {
        self.longest_batch = Some(duration);
        self
    }
}

/// What [`WorkerOptions::with_cron`] accepts: an item, or the text of a crontab.
pub trait IntoCron: sealed::IntoCron {
    /// [`WorkerOptions`]; for text, a `Result` of it, because the text may have errors.
    type Options;

    #[doc(hidden)]
    fn add_to(self, options: WorkerOptions) -> Self::Options;
}

/// Only this crate decides what is a crontab.
mod sealed {
    use super::{CronItem, Crontab};

    pub trait IntoCron {}

    impl IntoCron for Crontab {}
    impl<T> IntoCron for CronItem<T> {}
    impl IntoCron for &str {}
    impl IntoCron for &String {}
    impl IntoCron for String {}
}

impl IntoCron for Crontab {
    type Options = WorkerOptions;

    fn add_to(self, options: WorkerOptions) -> WorkerOptions {
        options.with_crons([self])
    }
}

impl<T: TaskHandler> IntoCron for CronItem<T> {
    type Options = WorkerOptions;

    fn add_to(self, options: WorkerOptions) -> WorkerOptions {
        options.with_crons([self])
    }
}

impl IntoCron for &str {
    type Options = Result<WorkerOptions, Error>;

    fn add_to(self, options: WorkerOptions) -> Result<WorkerOptions, Error> {
        Ok(options.with_crons(parse_crontab(self)?))
    }
}

impl IntoCron for &String {
    type Options = Result<WorkerOptions, Error>;

    fn add_to(self, options: WorkerOptions) -> Result<WorkerOptions, Error> {
        self.as_str().add_to(options)
    }
}

impl IntoCron for String {
    type Options = Result<WorkerOptions, Error>;

    fn add_to(self, options: WorkerOptions) -> Result<WorkerOptions, Error> {
        self.as_str().add_to(options)
    }
}

fn invalid(setting: &'static str, problem: &str) -> Error {
    Error::InvalidOption { setting, problem: problem.to_owned() }
}

/// The checks, which `init` runs once.
impl WorkerOptions {
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.concurrency == Some(0) {
            return Err(invalid("concurrency", "is 0, must be at least 1"));
        }
        if self.poll_interval.is_zero() {
            return Err(invalid("poll_interval", "is zero, must be greater than zero"));
        }
        self.limits.iter().try_for_each(Limit::check)?;
        self.flags.check()?;
        self.recovery.check()
    }

    pub(crate) fn concurrency_or_default(&self) -> usize {
        self.concurrency.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// The database of these options, or else of the environment.
    pub(crate) fn required_database(&self) -> Result<DatabaseConfig, Error> {
        let from_environment = || match std::env::var("DATABASE_URL").ok().filter(|url| !url.is_empty()) {
            Some(url) => Some(DatabaseConfig::parse(&url)),
            None => DatabaseConfig::from_env(),
        };
        match self.database_config().or_else(from_environment) {
            Some(config) => Ok(config?.with_password_function(self.password.clone())),
            None => Err(invalid(
                "the database",
                "is not set: call database_url, database or pg_pool, or set DATABASE_URL, PGDATABASE or PGSERVICE",
            )),
        }
    }

    /// The option overrides the connection string.
    pub(crate) fn checked_answer_timeout(&self, database: &DatabaseConfig) -> Result<Duration, Error> {
        match self.answer_timeout {
            Some(timeout) if timeout < SHORTEST_ANSWER_TIMEOUT => {
                let problem = format!("is {timeout:?}, must be at least {SHORTEST_ANSWER_TIMEOUT:?}");
                Err(invalid("answer_timeout", &problem))
            }
            Some(timeout) => Ok(timeout),
            None => {
                let of_connection = database.answer_timeout();
                Ok(of_connection.map_or(ANSWER_TIMEOUT, |timeout| timeout.max(SHORTEST_ANSWER_TIMEOUT)))
            }
        }
    }

    /// The tasks that are defined in code, by name.
    pub(crate) fn tasks_in_code(&mut self) -> Result<Tasks, Error> {
        let mut by_name = Tasks::default();
        for mut task in std::mem::take(&mut self.tasks) {
            if let Some(options) = self.task_options.get(&*task.identifier) {
                task.options = options.clone();
            }
            self.repeatable_tasks.mark(&mut task);
            if task.identifier.is_empty() || task.identifier.chars().count() > 128 {
                let problem = format!("{:?} has an invalid name: it must have 1 to 128 characters", task.identifier);
                return Err(invalid("the task", &problem));
            }
            if let Some(twice) = by_name.insert(task.identifier.clone(), Arc::new(task)) {
                return Err(invalid(
                    "the task",
                    &format!("{:?} is defined twice: define each task once", twice.identifier),
                ));
            }
        }
        Ok(by_name)
    }

    /// Rejects options of a task that does not exist.
    pub(crate) fn check_task_options(&self, tasks: &Tasks, missing: &BTreeSet<String>) -> Result<(), Error> {
        let is_known = |name: &String| tasks.contains_key(&**name) || missing.contains(name);
        match self.task_options.keys().find(|name| !is_known(name)) {
            Some(unknown) => Err(invalid("task_options", &format!("names {unknown:?}, which is not a defined task"))),
            None => Ok(()),
        }
    }
}
