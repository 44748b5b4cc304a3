//! Every setting of a worker: its default, its check, and `init`.

use crate::Error;
use crate::WorkerContext;
use crate::context::{Extensions, Surroundings};
use crate::cron::{Clock, TestClock};
use crate::cron_items::{self, IntoCron};
use crate::db::{Schema, Statements};
use crate::error::Doing;
use crate::exchange::Exchange;
use crate::hooks::{Event, HookRegistry, Plugin};
use crate::migrate::{Migration, migrate_within};
use crate::recovery::WorkerRecoveryConfig;
use crate::shutdown::Shutdown;
use crate::startup::{self, Startup};
use crate::task::{BatchTaskHandler, IntoTaskHandlerResult, Task, TaskHandler, TaskOptions, Tasks};
use crate::tasks_dir::{HostOptions, HostSettings, Leftovers, TasksDir};
use crate::upgrade;
use crate::watch::{CrontabFile, Watched, WatchedCrontab};
use crate::worker::Worker;
use crate::worker_utils::WorkerUtils;
use futures_util::FutureExt;
use graphile_worker_crontab::Crontab;
use serde::de::DeserializeOwned;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, Connection, PgConnection, PgPool};
use std::collections::HashMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, watch};
use tracing::warn;

/// Describes a worker.
///
/// ```no_run
/// # use graphile_worker::{WorkerOptions, WorkerContext};
/// # async fn example() -> Result<(), graphile_worker::Error> {
/// let worker = WorkerOptions::default()
///     .database_url("postgres://user:password@localhost/my_app")
///     .concurrency(10)
///     .define_task("hello", |name: String, _ctx: WorkerContext| async move { println!("Hello, {name}") })
///     .init()
///     .await?;
/// worker.run().await
/// # }
/// ```
pub struct WorkerOptions {
    database: Option<Database>,
    schema: String,
    concurrency: Option<usize>,
    poll_interval: Duration,
    max_pg_conn: u32,
    tasks: Vec<Task>,
    tasks_dir: Option<PathBuf>,
    host_options: HostOptions,
    task_options: HashMap<String, TaskOptions>,
    extensions: Extensions,
    hooks: HookRegistry,
    crontabs: Vec<Crontab>,
    crontab_file: Option<CrontabFile>,
    watch: bool,
    cron_clock: Option<TestClock>,
    recovery: WorkerRecoveryConfig,
    use_local_time: bool,
    forbidden_flags: ForbiddenFlags,
    listen: bool,
    prepared_statements: bool,
    listen_os_shutdown_signals: bool,
    shutdown_signal: Option<ShutdownSignal>,
    shutdown_grace_period: Duration,
    interrupted_job_retry_delay: Duration,
    max_migration_wait: Duration,
    startup_timeout: Duration,
    keep_locks_fresh_after: Duration,
}

/// For the worker's own connections. Every statement of a worker is planned once, and meant to go by an index in its
/// order, whatever the planner believes: statistics taken while no job was locked make it read the whole table for each report instead (280 ms
/// for 1,000 jobs of 200,000, bench/RESULTS.md). And none may go on when the worker has given up on it (after 60 seconds).
/// A pooler may not pass these on; there, statements are planned anew every time.
const OWN_CONNECTIONS: [(&str, &str); 8] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_sort", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
    ("statement_timeout", "50s"),
];

/// A connection of the handlers' pool that was used so recently is not asked whether it is alive.
const TRUSTED_FOR: Duration = Duration::from_secs(1);

enum Database {
    Url(String),
    Pool(PgPool),
}

type ShutdownSignal = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;
type FlagsFunction = dyn Fn() -> Pin<Box<dyn Future<Output = Option<Vec<String>>> + Send>> + Send + Sync;

/// Flags of jobs that the worker must not run.
#[derive(Clone, Default)]
pub(crate) enum ForbiddenFlags {
    #[default]
    None,
    List(Vec<String>),
    Function(Arc<FlagsFunction>),
}

impl ForbiddenFlags {
    pub(crate) async fn current(&self) -> Result<Option<Vec<String>>, Error> {
        let flags = match self {
            ForbiddenFlags::None => None,
            ForbiddenFlags::List(flags) => Some(flags.clone()),
            ForbiddenFlags::Function(function) => {
                let asked = AssertUnwindSafe(async { function().await }).catch_unwind().await;
                asked.map_err(|_| Error::ForbiddenFlagsPanicked)?
            }
        };
        Ok(flags.filter(|flags| !flags.is_empty()))
    }
}

/// What the running worker needs to know.
pub(crate) struct Settings {
    pub(crate) connect_options: PgConnectOptions,
    pub(crate) concurrency: usize,
    pub(crate) poll_interval: Duration,
    pub(crate) use_local_time: bool,
    pub(crate) forbidden_flags: ForbiddenFlags,
    pub(crate) listen: bool,
    pub(crate) prepared_statements: bool,
    pub(crate) listen_os_shutdown_signals: bool,
    pub(crate) shutdown_signal: Option<ShutdownSignal>,
    pub(crate) shutdown_grace_period: Duration,
    pub(crate) interrupted_job_retry_delay: Duration,
    pub(crate) startup_timeout: Duration,
    pub(crate) keep_locks_fresh_after: Duration,
    pub(crate) cron_clock: Clock,
    /// Whether there may be jobs that recur later, if there are none now.
    pub(crate) crontab_may_change: bool,
    pub(crate) recovery: WorkerRecoveryConfig,
}

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        WorkerOptions {
            database: None,
            schema: "graphile_worker".to_owned(),
            concurrency: None,
            poll_interval: Duration::from_secs(2),
            max_pg_conn: 20,
            tasks: Vec::new(),
            tasks_dir: None,
            host_options: HostOptions::default(),
            task_options: HashMap::new(),
            extensions: Extensions::default(),
            hooks: HookRegistry::new(),
            crontabs: Vec::new(),
            crontab_file: None,
            watch: false,
            cron_clock: None,
            recovery: WorkerRecoveryConfig::default(),
            use_local_time: false,
            forbidden_flags: ForbiddenFlags::None,
            listen: true,
            prepared_statements: true,
            listen_os_shutdown_signals: true,
            shutdown_signal: None,
            shutdown_grace_period: Duration::from_secs(5),
            interrupted_job_retry_delay: Duration::from_secs(30),
            max_migration_wait: upgrade::LONGEST_WAIT,
            startup_timeout: startup::DEFAULT_TIMEOUT,
            keep_locks_fresh_after: Duration::from_secs(60 * 60),
        }
    }
}

impl WorkerOptions {
    /// The database, by URL (default: the environment's `DATABASE_URL`).
    pub fn database_url(mut self, url: &str) -> WorkerOptions {
        self.database = Some(Database::Url(url.to_owned()));
        self
    }

    /// The database, by the application's pool. The worker opens connections of its own to the same database; the
    /// pool is what handlers get.
    pub fn pg_pool(mut self, pool: PgPool) -> WorkerOptions {
        self.database = Some(Database::Pool(pool));
        self
    }

    /// The schema (default `graphile_worker`).
    pub fn schema(mut self, schema: &str) -> WorkerOptions {
        self.schema = schema.to_owned();
        self
    }

    /// The name of the schema that is set.
    pub fn schema_name(&self) -> &str {
        &self.schema
    }

    /// How to connect to the database that is set; none where none is, or where it is not a URL.
    pub fn connect_options(&self) -> Option<PgConnectOptions> {
        match self.database.as_ref()? {
            Database::Url(url) => url.parse().ok(),
            Database::Pool(pool) => Some(PgConnectOptions::clone(&pool.connect_options())),
        }
    }

    /// How many jobs run at the same time (default: the number of cores).
    pub fn concurrency(mut self, jobs: usize) -> WorkerOptions {
        self.concurrency = Some(jobs);
        self
    }

    /// How long an idle worker sleeps at most when it hears of nothing (default 2 seconds).
    pub fn poll_interval(mut self, interval: Duration) -> WorkerOptions {
        self.poll_interval = interval;
        self
    }

    /// How many connections the handlers' pool may have, where the worker makes it (default 20). The worker itself
    /// uses two more, a third under load, one for jobs that recur, and one or two where recovery is on.
    pub fn max_pg_conn(mut self, connections: u32) -> WorkerOptions {
        self.max_pg_conn = connections;
        self
    }

    /// Runs jobs of this task.
    pub fn define_job<T: TaskHandler>(mut self) -> WorkerOptions {
        self.tasks.push(Task::handler::<T>());
        self
    }

    /// Runs jobs of this task, whose payloads are arrays.
    pub fn define_batch_job<T: BatchTaskHandler>(mut self) -> WorkerOptions {
        self.tasks.push(Task::batch_handler::<T>());
        self
    }

    /// Runs jobs of all these tasks: `define_jobs::<(SendEmail, SendReport)>()`.
    pub fn define_jobs<T: TaskHandlers>(mut self) -> WorkerOptions {
        self.tasks.extend(T::tasks());
        self
    }

    /// Runs jobs of the task of this name with a function.
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

    /// Runs jobs of the tasks in this folder, beside those that are defined in code. Each executable file is a task:
    /// `a/b/send.sh` is the task `a/b/send`. Files that are no tasks are named in a warning.
    ///
    /// The program gets `{"payload": …}` on standard input, and in its environment
    /// `GRAPHILE_WORKER_PAYLOAD_FORMAT` (`json`), `GRAPHILE_WORKER_TASK_IDENTIFIER`, `GRAPHILE_WORKER_JOB_ID`,
    /// `GRAPHILE_WORKER_JOB_KEY` (where it has one), `GRAPHILE_WORKER_JOB_ATTEMPTS`, `GRAPHILE_WORKER_JOB_MAX_ATTEMPTS`,
    /// `GRAPHILE_WORKER_JOB_PRIORITY` and `GRAPHILE_WORKER_JOB_RUN_AT`. What it writes goes into the log, line by line;
    /// exit code 0 means that the job is done, anything else that it has failed, with the last lines of standard error in
    /// `last_error`.
    ///
    /// When its timeout has passed (default: 4 hours), or the worker has to leave and its grace period is over, the
    /// program and all that it has started get SIGTERM, and SIGKILL 3 seconds later.
    ///
    /// ```no_run
    /// # use graphile_worker::WorkerOptions;
    /// # async fn example() -> Result<(), graphile_worker::Error> {
    /// let worker = WorkerOptions::default().tasks_dir("tasks").init().await?;
    /// # Ok(()) }
    /// ```
    pub fn tasks_dir(mut self, path: impl Into<PathBuf>) -> WorkerOptions {
        self.tasks_dir = Some(path.into());
        self
    }

    /// Which programs run the scripts of the folder of tasks, how many at once, and how large they may become.
    pub fn host_options(mut self, options: HostOptions) -> WorkerOptions {
        self.host_options = options;
        self
    }

    /// Sets the timeout, back-off and limits of a task; wins over what its handler says.
    pub fn task_options(mut self, identifier: &str, options: TaskOptions) -> WorkerOptions {
        self.task_options.insert(identifier.to_owned(), options);
        self
    }

    /// A value that handlers find by its type with [`WorkerContext::extension`].
    pub fn add_extension<T: Send + Sync + 'static>(mut self, value: T) -> WorkerOptions {
        self.extensions.insert(value);
        self
    }

    /// Calls the handler whenever the event happens; see [`HookRegistry`].
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

    /// A job that recurs while the worker [runs](Worker::run): an item made by [`Cron`](crate::Cron), a [`Crontab`], or
    /// the text of a crontab, and then the result is a `Result`. Its task need not be one of this worker's.
    ///
    /// ```
    /// # use graphile_worker::WorkerOptions;
    /// let options = WorkerOptions::default().with_cron("0 8 * * * send_daily_report ?tz=Europe/Paris")?;
    /// # Ok::<(), graphile_worker::Error>(())
    /// ```
    pub fn with_cron<C: IntoCron>(self, cron: C) -> C::Options {
        cron.add_to(self)
    }

    /// Jobs that recur: many items.
    pub fn with_crons(mut self, items: impl IntoIterator<Item = impl Into<Crontab>>) -> WorkerOptions {
        self.crontabs.extend(items.into_iter().map(Into::into));
        self
    }

    /// Jobs that recur: the items of a crontab in this file, which has to be there.
    pub fn crontab_file(mut self, path: impl Into<PathBuf>) -> WorkerOptions {
        self.crontab_file = Some(CrontabFile { path: path.into(), may_be_missing: false });
        self
    }

    /// The same for a file that need not be there.
    pub fn crontab_file_if_any(mut self, path: impl Into<PathBuf>) -> WorkerOptions {
        self.crontab_file = Some(CrontabFile { path: path.into(), may_be_missing: true });
        self
    }

    /// Whether the [folder of tasks](WorkerOptions::tasks_dir) and the [crontab](WorkerOptions::crontab_file) are looked at
    /// again and again while the worker [runs](Worker::run) (default: no). What has changed holds for the next job: those
    /// that run are left alone, and those that wait for a task that was removed wait until it is back. A crontab with
    /// mistakes in it changes nothing.
    pub fn watch(mut self, watch: bool) -> WorkerOptions {
        self.watch = watch;
        self
    }

    /// Goes by this clock for jobs that recur (default: the database's).
    pub fn cron_clock(mut self, clock: &TestClock) -> WorkerOptions {
        self.cron_clock = Some(clock.clone());
        self
    }

    /// Whether and how jobs of workers that died are recovered (default: they are not, for 4 hours).
    pub fn worker_recovery(mut self, recovery: WorkerRecoveryConfig) -> WorkerOptions {
        self.recovery = recovery;
        self
    }

    /// How often the worker says that it lives; switches recovery on.
    pub fn heartbeat_interval(mut self, interval: Duration) -> WorkerOptions {
        self.recovery = self.recovery.heartbeat_interval(interval);
        self
    }

    /// How often it looks for dead workers; switches recovery on.
    pub fn sweep_interval(mut self, interval: Duration) -> WorkerOptions {
        self.recovery = self.recovery.sweep_interval(interval);
        self
    }

    /// Since when a worker has not been heard of that is dead; switches recovery on.
    pub fn sweep_threshold(mut self, threshold: Duration) -> WorkerOptions {
        self.recovery = self.recovery.sweep_threshold(threshold);
        self
    }

    /// How long jobs of a dead worker wait before they run again; switches recovery on.
    pub fn recovery_delay(mut self, delay: Duration) -> WorkerOptions {
        self.recovery = self.recovery.recovery_delay(delay);
        self
    }

    /// Whether this machine's clock decides which jobs are due (default: no, the database's).
    pub fn use_local_time(mut self, use_local_time: bool) -> WorkerOptions {
        self.use_local_time = use_local_time;
        self
    }

    /// Does not run jobs with any of these flags.
    pub fn forbidden_flags(mut self, flags: impl IntoIterator<Item = impl Into<String>>) -> WorkerOptions {
        self.forbidden_flags = ForbiddenFlags::List(flags.into_iter().map(Into::into).collect());
        self
    }

    /// Does not run jobs with any of the flags that the function returns; asked at every claim, so it had better be
    /// quick.
    pub fn forbidden_flags_fn(self, flags: impl Fn() -> Option<Vec<String>> + Send + Sync + 'static) -> WorkerOptions {
        self.forbidden_flags_async(move || std::future::ready(flags()))
    }

    /// The same for an async function.
    pub fn forbidden_flags_async<F, Fut>(mut self, flags: F) -> WorkerOptions
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<Vec<String>>> + Send + 'static,
    {
        self.forbidden_flags = ForbiddenFlags::Function(Arc::new(move || Box::pin(flags())));
        self
    }

    /// Whether to be woken by the database (default: yes). A transaction pooler cannot do that: then the worker polls.
    pub fn use_notifications(mut self, listen: bool) -> WorkerOptions {
        self.listen = listen;
        self
    }

    /// Whether to keep prepared statements (default: yes). Not all poolers can.
    pub fn use_prepared_statements(mut self, prepared: bool) -> WorkerOptions {
        self.prepared_statements = prepared;
        self
    }

    /// Whether SIGINT, SIGTERM and SIGHUP stop the worker (default: yes).
    pub fn listen_os_shutdown_signals(mut self, listen: bool) -> WorkerOptions {
        self.listen_os_shutdown_signals = listen;
        self
    }

    /// Stops the worker when the future that this makes is done.
    pub fn shutdown_signal<F, Fut>(mut self, signal: F) -> WorkerOptions
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        self.shutdown_signal = Some(Arc::new(move || Box::pin(signal())));
        self
    }

    /// How long running jobs may take to end when the worker is told to stop (default 5 seconds).
    pub fn shutdown_grace_period(mut self, period: Duration) -> WorkerOptions {
        self.shutdown_grace_period = period;
        self
    }

    /// How long a job waits that the worker had to leave in the middle (default 30 seconds).
    pub fn interrupted_job_retry_delay(mut self, delay: Duration) -> WorkerOptions {
        self.interrupted_job_retry_delay = delay;
        self
    }

    /// How long [`init`](WorkerOptions::init) waits for workers of older releases to finish, where it has to change the
    /// schema in a way that they must not work with (default 10 minutes; zero: not at all). They are asked to, and
    /// leave when their jobs are done.
    pub fn max_migration_wait(mut self, wait: Duration) -> WorkerOptions {
        self.max_migration_wait = wait;
        self
    }

    /// How long [`init`](WorkerOptions::init), and again [`run`](Worker::run), retry if the database is not ready: not
    /// reachable, starting or shutting down, out of connections, or a table is locked (default 30 seconds; zero: one
    /// attempt). Errors that time does not cure, such as a wrong password, end them at once.
    pub fn startup_timeout(mut self, timeout: Duration) -> WorkerOptions {
        self.startup_timeout = timeout;
        self
    }

    /// Since when a job runs whose lock is kept from looking old (an hour). Only for tests, which cannot wait so long.
    #[doc(hidden)]
    pub fn keep_locks_fresh_after(mut self, duration: Duration) -> WorkerOptions {
        self.keep_locks_fresh_after = duration;
        self
    }

    /// Checks the settings, connects, and installs or updates the schema. Waits for the database if it is not ready
    /// ([`startup_timeout`](WorkerOptions::startup_timeout)).
    pub async fn init(self) -> Result<Worker, Error> {
        let concurrency = match self.concurrency {
            None => std::thread::available_parallelism().map_or(1, usize::from),
            Some(0) => return Err(invalid("concurrency", "is 0, expected at least 1")),
            Some(jobs) => jobs,
        };
        if self.poll_interval.is_zero() {
            return Err(invalid("poll_interval", "is zero, expected more"));
        }
        let leftovers = Leftovers::default();
        let crontab_file = match self.crontab_file {
            None => None,
            Some(file) => Some(WatchedCrontab::read(file, self.crontabs.clone())?),
        };
        let crontabs = match &crontab_file {
            None => cron_items::checked(self.crontabs)?,
            Some(file) => file.items()?,
        };
        let cron_clock = match self.cron_clock {
            Some(clock) => Clock::Test(clock),
            None if self.use_local_time => Clock::Local,
            None => Clock::Database,
        };
        let schema = Schema::new(&self.schema)?;
        let (pool, database_url) = pool(self.database, self.max_pg_conn)?;
        let in_code = tasks_by_name(self.tasks, &self.task_options)?;
        let (tasks, folder) = match self.tasks_dir {
            None => (in_code, None),
            Some(path) => {
                let host_settings = HostSettings {
                    options: self.host_options,
                    database_url,
                    schema: schema.name().to_owned(),
                    concurrency,
                    max_pool_size: pool.options().get_max_connections(),
                    shutdown_grace_period: self.shutdown_grace_period,
                };
                let options = self.task_options.clone();
                let folder = TasksDir::new(&path, in_code, options, leftovers.clone(), host_settings)?;
                let loaded = folder.load(folder.scan()?, None).await;
                (loaded.tasks.clone(), Some((folder, loaded)))
            }
        };
        if !(self.watch && folder.is_some()) {
            check_names(&self.task_options, &tasks)?;
        }
        if let Some((folder, _)) = folder.as_ref().filter(|_| tasks.is_empty()) {
            warn!(label = "worker", folder = %folder.path().display(), "there are no tasks in the tasks folder");
        }
        cron_items::warn_of_unknown_tasks(&cron_items::of_unknown_tasks(&crontabs, &tasks));
        let (tasks, crontabs) = (watch::Sender::new(Arc::new(tasks)), watch::Sender::new(crontabs));
        let hosts = folder.as_ref().map(|(folder, _)| folder.hosts().clone());
        let connect_options = PgConnectOptions::clone(&pool.connect_options()).application_name("graphile_worker");
        // What is slow the worker says itself, without pages of SQL.
        let mut connect_options = connect_options.disable_statement_logging();
        if self.prepared_statements {
            connect_options = connect_options.options(OWN_CONNECTIONS);
        } else {
            connect_options = connect_options.statement_cache_capacity(0);
        }
        self.recovery.check()?;
        let worker_id = new_worker_id(&self.recovery);
        let mut startup = Startup::new(self.startup_timeout);
        let mut stop_signal = None;
        let connection = loop {
            let connecting = Exchange::connect_ahead(&connect_options, &worker_id, self.prepared_statements);
            let migrating = migrate_within(self.max_migration_wait, &pool, schema.name());
            let error = match connected_and_migrated(connecting, migrating).await {
                Ok(connection) => break connection,
                Err(error) => error,
            };
            let stopped = stop_signal.get_or_insert_with(|| match &self.shutdown_signal {
                Some(signal) => signal(),
                None => Box::pin(std::future::pending()),
            });
            tokio::select! {
                waited = startup.wait_after(error) => waited?,
                () = stopped => return Err(Error::StoppedBeforeStart),
            }
        };
        startup.succeeded();
        let statements = Arc::new(Statements::new(schema));
        let hooks = Arc::new(self.hooks);
        let surroundings = Surroundings {
            worker_id: worker_id.into(),
            utils: WorkerUtils::with_statements(pool, statements.clone())
                .with_use_local_time(self.use_local_time)
                .with_recovery(self.recovery.clone())
                .with_hooks(hooks.clone()),
            extensions: self.extensions,
            statements,
            hooks,
        };
        Ok(Worker {
            settings: Arc::new(Settings {
                connect_options,
                concurrency,
                poll_interval: self.poll_interval,
                use_local_time: self.use_local_time,
                forbidden_flags: self.forbidden_flags,
                listen: self.listen,
                prepared_statements: self.prepared_statements,
                listen_os_shutdown_signals: self.listen_os_shutdown_signals,
                shutdown_signal: self.shutdown_signal,
                shutdown_grace_period: self.shutdown_grace_period,
                interrupted_job_retry_delay: self.interrupted_job_retry_delay,
                startup_timeout: self.startup_timeout,
                keep_locks_fresh_after: self.keep_locks_fresh_after,
                cron_clock,
                crontab_may_change: self.watch && crontab_file.is_some(),
                recovery: self.recovery,
            }),
            watched: self.watch.then(|| Arc::new(Mutex::new(Watched::new(folder, crontab_file, &tasks, &crontabs)))),
            tasks,
            crontabs,
            surroundings: Arc::new(surroundings),
            leftovers,
            hosts,
            shutdown: Shutdown::default(),
            left_because: Arc::default(),
            connection: Mutex::new(Some(connection)),
        })
    }
}

/// Both at the same time. If there is no connection, that is what is reported, and the migration is not waited for: the pool
/// that it uses goes on trying for 30 seconds if a server refuses connections, and does not say why.
async fn connected_and_migrated(
    connecting: impl Future<Output = Result<PgConnection, Error>>,
    migrating: impl Future<Output = Result<Migration, Error>>,
) -> Result<PgConnection, Error> {
    let (mut connecting, mut migrating) = (std::pin::pin!(connecting), std::pin::pin!(migrating));
    tokio::select! {
        connected = &mut connecting => {
            let connection = connected?;
            migrating.await?;
            Ok(connection)
        }
        migrated = &mut migrating => {
            let connection = connecting.await?;
            migrated?;
            Ok(connection)
        }
    }
}

fn invalid(setting: &'static str, problem: &str) -> Error {
    Error::InvalidOption { setting, problem: problem.to_owned() }
}

/// Refuses options of tasks that there are not.
fn check_names(options: &HashMap<String, TaskOptions>, tasks: &Tasks) -> Result<(), Error> {
    match options.keys().find(|identifier| !tasks.contains_key(&***identifier)) {
        Some(unknown) => Err(Error::InvalidOption {
            setting: "task_options",
            problem: format!("names {unknown:?}, which is not defined"),
        }),
        None => Ok(()),
    }
}

fn tasks_by_name(tasks: Vec<Task>, options: &HashMap<String, TaskOptions>) -> Result<Tasks, Error> {
    let mut by_name = Tasks::new();
    for mut task in tasks {
        if let Some(options) = options.get(&*task.identifier) {
            task.options = options.clone();
        }
        if task.identifier.is_empty() || task.identifier.chars().count() > 128 {
            let problem = format!("{:?} has no legal name, expected 1 to 128 characters", task.identifier);
            return Err(Error::InvalidOption { setting: "the task", problem });
        }
        if let Some(twice) = by_name.insert(task.identifier.clone(), Arc::new(task)) {
            return Err(Error::InvalidOption {
                setting: "the task",
                problem: format!("{:?} is defined twice, expected once", twice.identifier),
            });
        }
    }
    Ok(by_name)
}

/// The pool, which connects when it is first used, and the database's URL, for programs that connect by themselves.
fn pool(database: Option<Database>, max_connections: u32) -> Result<(PgPool, String), Error> {
    let url = match database {
        Some(Database::Pool(pool)) => {
            let url = url_of(&pool);
            return Ok((pool, url));
        }
        Some(Database::Url(url)) => url,
        None => std::env::var("DATABASE_URL")
            .map_err(|_| invalid("the database", "is missing: call database_url or pg_pool, or set DATABASE_URL"))?,
    };
    let options = url.parse().doing(|| "read the database's URL".to_owned())?;
    let pool = PgPoolOptions::new()
        .max_connections(max_connections)
        // A connection that was just used is alive: asking would cost every query a round trip more.
        .test_before_acquire(false)
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                if meta.idle_for > TRUSTED_FOR {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
        .connect_lazy_with(options);
    Ok((pool, url))
}

/// Where a pool connects to, in words that other programs understand too.
fn url_of(pool: &PgPool) -> String {
    let mut url = pool.connect_options().to_url_lossy();
    let pairs: Vec<(String, String)> = url.query_pairs().into_owned().collect();
    url.set_query(None);
    for (name, value) in pairs {
        // Only sqlx knows the first. The second is its default, and libpq's, but to Node's `pg` it means more.
        if name != "statement-cache-capacity" && (name.as_str(), value.as_str()) != ("sslmode", "prefer") {
            url.query_pairs_mut().append_pair(&name, &value);
        }
    }
    url.into()
}

/// `rs-` tells our workers from Node's, `rs-live-` those that register from those that nobody may declare dead.
pub(crate) fn new_worker_id(recovery: &WorkerRecoveryConfig) -> String {
    use std::hash::{BuildHasher, RandomState};
    let random = || RandomState::new().hash_one(std::process::id());
    let kind = if recovery.enabled { "live" } else { "worker" };
    format!("rs-{kind}-{:016x}{:08x}", random(), random() as u32)
}

/// A tuple of task handlers, for [`WorkerOptions::define_jobs`].
pub trait TaskHandlers {
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn tasks() -> Vec<Task>;
}

macro_rules! tuples_of_task_handlers {
    ($($first:ident $($rest:ident)*)?) => {
        $(
            impl<$first: TaskHandler, $($rest: TaskHandler),*> TaskHandlers for ($first, $($rest,)*) {
                #[allow(private_interfaces)]
                fn tasks() -> Vec<Task> {
                    vec![Task::handler::<$first>(), $(Task::handler::<$rest>()),*]
                }
            }
            tuples_of_task_handlers!($($rest)*);
        )?
    };
}

tuples_of_task_handlers!(A B C D E F G H I J K L M N O P);
