//! Building a worker from its options: checks them, loads the tasks and the crontab, connects, and migrates the schema.
//! Running the worker is in `registration` and `run_loop`.

use super::Worker;
use super::exchange::Exchange;
use super::external_tasks::ExternalTasks;
use super::inflight::LONGEST_BATCH;
use super::listener::ListenOn;
use super::settings::{Settings, new_worker_id};
use super::startup::Startup;
use crate::Error;
use crate::context::Shared;
use crate::cron::clock::Clock;
use crate::cron::file::WatchedCrontab;
use crate::cron::items;
use crate::db::connect::DatabaseConfig;
use crate::db::session::{self, Session};
use crate::db::{Schema, Statements};
use crate::error::Context;
use crate::options::{Database, Direct, WorkerOptions};
use crate::schema::migrate::{ConnectionKind, Migration, migrate_for_worker};
use crate::shutdown::Shutdown;
use crate::task::Tasks;
use crate::task_source::TaskSourceSetup;
use crate::worker_utils::WorkerUtils;
use graphile_worker_crontab::Crontab;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, PgConnection, PgPool};
use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, watch};
use tracing::{info, warn};

/// A pool connection that was used this recently is not pinged.
const SKIP_PING_WITHIN: Duration = Duration::from_secs(1);

impl WorkerOptions {
    /// Checks the options, connects, and installs or migrates the schema. Waits for the database if it is not ready
    /// ([`startup_timeout`](WorkerOptions::startup_timeout)).
    pub async fn init(mut self) -> Result<Worker, Error> {
        self.check()?;
        let schema = Schema::new(&self.schema)?;
        let (crontab_file, crontabs) = self.read_crontab()?;
        let databases = Databases::new(&mut self)?;
        let (tasks, external) = self.load_tasks(&databases, &schema).await?;
        items::warn_of_unknown_tasks(&items::of_unknown_tasks(&crontabs, &tasks));
        for name in self.repeatable_tasks.unknown(&tasks) {
            warn!(label = "worker", task_identifier = name, "repeatable task not found");
        }

        let concurrency = self.concurrency_or_default();
        let worker_id = new_worker_id(&self.recovery);
        let connected = self.connect_and_migrate(&databases, &schema, &worker_id).await?;
        let listen = self.listen.then(|| connected.listen_on(databases.direct));
        let statements = Arc::new(Statements::new(schema, connected.is_pooled));
        let hooks = Arc::new(self.hooks);
        let shared = Shared {
            worker_id: worker_id.into(),
            utils: WorkerUtils::with_statements(databases.pool, statements.clone())
                .with_use_local_time(self.use_local_time)
                .with_recovery(self.recovery.clone())
                .with_hooks(hooks.clone()),
            extensions: self.extensions,
            statements,
            hooks,
        };
        let (tasks, crontabs) = (watch::Sender::new(Arc::new(tasks)), watch::Sender::new(crontabs));
        let crontab_may_change = self.watch && crontab_file.is_some();
        let watched_crontab = crontab_file.filter(|_| self.watch).map(|file| Arc::new(Mutex::new(file)));
        Ok(Worker {
            settings: Arc::new(Settings {
                session: connected.session,
                answer_timeout: databases.answer_timeout,
                concurrency,
                poll_interval: self.poll_interval,
                use_local_time: self.use_local_time,
                flags: self.flags,
                listen,
                listen_os_shutdown_signals: self.listen_os_shutdown_signals,
                shutdown_signal: self.shutdown_signal,
                shutdown_grace_period: self.shutdown_grace_period,
                interrupted_job_retry_delay: self.interrupted_job_retry_delay,
                startup_timeout: self.startup_timeout,
                keep_locks_fresh_after: self.keep_locks_fresh_after,
                longest_batch: self.longest_batch.unwrap_or(LONGEST_BATCH),
                always_batch: self.longest_batch.is_some(),
                limits: self.limits.into(),
                cron_clock: match self.cron_clock {
                    Some(clock) => Clock::Test(clock),
                    None if self.use_local_time => Clock::Local,
                    None => Clock::Database,
                },
                crontab_may_change,
                recovery: self.recovery,
            }),
            tasks,
            crontabs,
            shared: Arc::new(shared),
            watched_crontab,
            external,
            shutdown: Shutdown::default(),
            exit_reason: Arc::default(),
            connection: Mutex::new(Some(connected.connection)),
        })
    }

    /// Reads the crontab file, if there is one. Returns it with all items, including those defined in code.
    fn read_crontab(&mut self) -> Result<(Option<WatchedCrontab>, Vec<Arc<Crontab>>), Error> {
        let in_code = std::mem::take(&mut self.crontabs);
        match self.crontab_file.take() {
            None => Ok((None, items::checked(in_code)?)),
            Some(file) => {
                let file = WatchedCrontab::read(file, in_code)?;
                let items = file.items()?;
                Ok((Some(file), items))
            }
        }
    }

    /// All tasks, and the source that some of them come from.
    async fn load_tasks(
        &mut self,
        databases: &Databases,
        schema: &Schema,
    ) -> Result<(Tasks, Option<ExternalTasks>), Error> {
        let in_code = self.tasks_in_code()?;
        let Some(source) = self.task_source.take() else {
            self.check_task_options(&in_code, &BTreeSet::new())?;
            return Ok((in_code, None));
        };
        let setup = TaskSourceSetup {
            database: databases.config.clone(),
            schema: schema.name().to_owned(),
            concurrency: self.concurrency_or_default(),
            max_pool_size: databases.pool.options().get_max_connections(),
            shutdown_grace_period: self.shutdown_grace_period,
            in_code: in_code.keys().map(|name| name.to_string()).collect(),
            watch: self.watch,
        };
        let source = source.open(setup).await?;
        let external =
            ExternalTasks::new(source.clone(), in_code, self.task_options.clone(), self.repeatable_tasks.clone());
        let tasks = external.all_tasks();
        if !self.watch {
            self.check_task_options(&tasks, &source.missing())?;
        }
        Ok((tasks, Some(external)))
    }

    /// Opens the worker's first connection and migrates the schema. Retries for the startup timeout.
    async fn connect_and_migrate(
        &self,
        databases: &Databases,
        schema: &Schema,
        worker_id: &str,
    ) -> Result<Connected, Error> {
        let own = session::own(databases.config.clone());
        let settings = session::own_settings(databases.answer_timeout);
        let mut session = Session::new(own.clone(), settings.clone(), !self.prepared_statements);
        let in_turn = databases.direct.is_none() && own.may_change();
        let mut startup = Startup::new(self.startup_timeout);
        let mut stop_signal = None;
        let (connection, is_pooled) = loop {
            let detected = watch::Sender::new(None);
            let connecting = async {
                let connected = Exchange::connect_ahead(&session, worker_id).await?;
                // Not `send`: the migration may subscribe later.
                detected.send_replace(Some(connected.1));
                Ok(connected)
            };
            let migrating = databases.migrate(detected.subscribe(), self.max_migration_wait, schema);
            let error = match connected_and_migrated(connecting, migrating, databases.no_second(), in_turn).await {
                Ok(connected) => break connected,
                Err(error) => explained(error),
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
        if databases.owns_pool && !is_pooled {
            databases.config.is_direct();
        }
        if is_pooled {
            session = Session::new(own, settings, true);
            info!(
                label = "worker",
                worker_id,
                direct_connection = databases.direct.is_some(),
                "connected through a pooler: each statement runs in its own transaction, and is not prepared"
            );
        }
        Ok(Connected { connection, session, is_pooled })
    }
}

/// The connections to the database.
struct Databases {
    config: DatabaseConfig,
    /// Bypasses the pooler.
    direct: Option<DatabaseConfig>,
    answer_timeout: Duration,
    /// For handlers and utilities.
    pool: PgPool,
    /// Whether the worker has made the pool.
    owns_pool: bool,
}

impl Databases {
    fn new(options: &mut WorkerOptions) -> Result<Databases, Error> {
        let config = options.required_database()?;
        let direct = match options.direct.take() {
            None => None,
            Some(Direct::Text(text)) => Some(DatabaseConfig::parse(&text)?),
            Some(Direct::Config(config)) => Some(config),
        };
        let direct = direct.map(|config| session::own(config.with_password_function(options.password.clone())));
        let answer_timeout = options.checked_answer_timeout(&config)?;
        let owns_pool = !matches!(options.database, Some(Database::Pool(_)));
        let pool = pool(options.database.take(), &config, options.max_pg_conn, answer_timeout);
        config.update_pool(&pool);
        Ok(Databases { config, direct, answer_timeout, pool, owns_pool })
    }

    /// Migrates the schema over the direct connection, if there is one, or else over a connection of the pool.
    async fn migrate(
        &self,
        is_pooled: watch::Receiver<Option<bool>>,
        max_wait: Duration,
        schema: &Schema,
    ) -> Result<Migration, Error> {
        let Some(direct) = &self.direct else {
            let mut connection = self.pool.acquire().await.context(|| "connect to the database".to_owned())?;
            let migrated =
                migrate_for_worker(ConnectionKind::Known(is_pooled), max_wait, &mut connection, schema).await;
            if matches!(migrated, Err(Error::ReadOnly { .. })) {
                // A session keeps the `default_transaction_read_only` that it began with: the next attempt needs a new one.
                let _ = connection.close().await;
            }
            return migrated;
        };
        let mut connection = direct.connect().await?;
        let migrated =
            migrate_for_worker(ConnectionKind::By(Box::new(direct.clone())), max_wait, &mut connection, schema).await;
        let _ = connection.close().await;
        migrated
    }

    /// Returns if a connection limit keeps the pool from connecting for the migration.
    async fn no_second(&self) -> Error {
        match self.direct {
            None => no_second_connection(&self.pool).await,
            Some(_) => std::future::pending().await,
        }
    }
}

/// The worker's first connection.
struct Connected {
    connection: PgConnection,
    session: Session,
    is_pooled: bool,
}

impl Connected {
    fn listen_on(&self, direct: Option<DatabaseConfig>) -> ListenOn {
        ListenOn {
            may_be_pooled: self.is_pooled,
            is_direct: direct.is_some(),
            config: direct.unwrap_or_else(|| self.session.config_with_settings()),
        }
    }
}

/// Connects and migrates at the same time. If connecting fails, returns that error and drops the migration, whose pool
/// would retry for 30 seconds without saying why. With `in_turn`, migrates after connecting, because the pool needs the
/// server and the password that the connection found.
async fn connected_and_migrated<C>(
    connecting: impl Future<Output = Result<C, Error>>,
    migrating: impl Future<Output = Result<Migration, Error>>,
    no_second_connection: impl Future<Output = Error>,
    in_turn: bool,
) -> Result<C, Error> {
    let (mut connecting, mut migrating) = (std::pin::pin!(connecting), std::pin::pin!(migrating));
    tokio::select! {
        connected = &mut connecting => {
            let connection = connected?;
            tokio::select! {
                migrated = migrating => migrated?,
                error = no_second_connection => return Err(error),
            };
            Ok(connection)
        }
        migrated = &mut migrating, if !in_turn => {
            let connection = connecting.await?;
            migrated?;
            Ok(connection)
        }
    }
}

/// Explains the error of a pooler that rejects a startup parameter of the application's pool.
fn explained(error: Error) -> Error {
    match &error {
        Error::Database { source, .. } if session::is_rejected_parameter(source) => Error::PoolerRefuses {
            message: match source.as_database_error() {
                Some(error) => error.message().to_owned(),
                None => source.to_string(),
            },
        },
        _ => error,
    }
}

/// Returns if a connection limit keeps the pool from opening a connection besides the worker's first. The pool itself
/// would retry for 30 seconds without saying why.
async fn no_second_connection(pool: &PgPool) -> Error {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let connecting = PgConnection::connect_with(&pool.connect_options()).await;
        match connecting.context(|| "open a second connection".to_owned()) {
            Err(error) if error.is_out_of_connections() => return error,
            Ok(connection) => drop(connection.close().await),
            Err(_) => {}
        }
        if pool.size() > 0 {
            return std::future::pending().await;
        }
    }
}

/// The handlers' pool: the application's own, or a new one, which connects on first use.
fn pool(database: Option<Database>, config: &DatabaseConfig, max_connections: u32, answer_timeout: Duration) -> PgPool {
    if let Some(Database::Pool(pool)) = database {
        return pool;
    }
    let moved_at = config.moved_at();
    PgPoolOptions::new()
        .max_connections(max_connections)
        // A connection that was just used is alive. A ping would cost each query an extra round trip.
        .test_before_acquire(false)
        .before_acquire(move |connection, meta| {
            let is_outdated = moved_at.is_outdated(meta.age);
            Box::pin(async move {
                if is_outdated {
                    return Ok(false);
                }
                if meta.idle_for > SKIP_PING_WITHIN {
                    // If the network has dropped the connection silently, the pool opens another one.
                    let asked = tokio::time::timeout(answer_timeout / 4, connection.ping()).await;
                    asked.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))??;
                }
                Ok(true)
            })
        })
        .connect_lazy_with(config.pool_options())
}
