//! The errors of this crate. Each message says what happened, with the value, and what to do. Also which
//! errors are worth a retry. This module imports no other module of the crate: the code that builds an error
//! passes in everything that its message needs.

use std::time::Duration;

/// Errors of this library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server's version is not supported.
    #[error("PostgreSQL {found} is not supported: version {lowest} or later is required")]
    #[non_exhaustive]
    ServerTooOld {
        /// The version of the server.
        found: String,
        /// The lowest supported major version.
        lowest: i32,
    },

    /// The database is read-only.
    #[error("{found}: {advice}")]
    #[non_exhaustive]
    ReadOnly {
        /// Whether the server is a standby. Otherwise `default_transaction_read_only` is on.
        is_standby: bool,
        /// What was found.
        found: String,
        /// What to do about it.
        advice: String,
    },

    /// Invalid schema name.
    #[error("the schema name {name:?} {problem}")]
    #[non_exhaustive]
    InvalidSchemaName {
        /// The name.
        name: String,
        /// What is wrong.
        problem: &'static str,
    },

    /// A newer release has applied a breaking migration.
    #[error(
        "schema {schema:?} has the breaking migration {} of {author}; this release supports migrations up to {known}: upgrade graphile_worker",
        list(unknown)
    )]
    #[non_exhaustive]
    SchemaTooNew {
        /// The schema.
        schema: String,
        /// Whose migration: Node's graphile-worker's, or ours.
        author: &'static str,
        /// The unsupported ids.
        unknown: Vec<i32>,
        /// The highest supported id.
        known: i32,
    },

    /// Workers of the Rust port (the `graphile_worker` of crates.io) are running in the schema.
    #[error(
        "workers of the Rust port (the graphile_worker of crates.io) are running in schema {schema:?} ({}; last heartbeat {} s ago). They would take running jobs from workers of this release. Stop them, then run `graphile-worker migrate --from-rust-port`. Crashed workers count as running for 5 minutes after their last heartbeat: if all of them have crashed, add `--force`.",
        workers.join(", "),
        since.as_secs()
    )]
    #[non_exhaustive]
    RustPortRunning {
        /// The schema.
        schema: String,
        /// Their ids.
        workers: Vec<String>,
        /// How long ago the last heartbeat was.
        since: Duration,
    },

    /// Workers of the Rust port may be alive in the schema, without heartbeats: its recovery is off by default.
    #[error(
        "workers of the Rust port, the graphile_worker of crates.io, may be running in the schema {schema:?}: {because}; {holds}. A job that they still run would run a second time: stop them and try again. If all of them have ended, run `graphile-worker migrate --from-rust-port --force`"
    )]
    #[non_exhaustive]
    RustPortMayRun {
        /// The schema.
        schema: String,
        /// What shows it.
        because: String,
        /// Which workers hold which jobs.
        holds: String,
    },

    /// A newer release waits for older workers to finish before it migrates the schema.
    #[error(
        "a newer release is about to migrate schema {schema:?} (step {step} of {author}; this release supports steps up to {known}): upgrade graphile_worker, or retry later"
    )]
    #[non_exhaustive]
    UpgradeUnderWay {
        /// The schema.
        schema: String,
        /// Whose step: Node's graphile-worker's, or ours.
        author: &'static str,
        /// The step that the newer release is about to apply.
        step: i32,
        /// The highest supported step.
        known: i32,
    },

    /// The schema is used by another application.
    #[error(
        "schema {schema:?} contains a table `jobs` but no migration ledger: it is not a Graphile Worker schema. Choose another schema."
    )]
    #[non_exhaustive]
    SchemaOccupied {
        /// The schema.
        schema: String,
    },

    /// The schema contains tables or views of other applications, so it was not dropped.
    #[error(
        "schema {schema:?} was not dropped: it contains objects that are not Graphile Worker's ({strangers}). Move them to another schema, then retry."
    )]
    #[non_exhaustive]
    SchemaShared {
        /// The schema.
        schema: String,
        /// The objects that are not Graphile Worker's.
        strangers: String,
    },

    /// The schema does not exist and the role may not create it.
    #[error(
        "schema {schema:?} does not exist and this role may not create it: ask the database owner to run `{statement}`, then retry"
    )]
    #[non_exhaustive]
    MayNotCreateSchema {
        /// The schema.
        schema: String,
        /// The role of the connection.
        role: String,
        /// The statement that creates the schema for this role.
        statement: String,
        /// The server's error.
        source: sqlx::Error,
    },

    /// The schema of an old release cannot be migrated while its workers run jobs.
    #[error(
        "schema {schema:?} is at level {level}, and its jobs and queues are still locked ({held} locks of {workers}). Stop the workers of the old release, let their jobs finish, and retry. Locks of dead workers expire after 4 hours; to clear them now, set locked_at and locked_by to null in the tables jobs and job_queues."
    )]
    #[non_exhaustive]
    JobsRunning {
        /// The schema.
        schema: String,
        /// The schema's level.
        level: i32,
        /// Number of locks.
        held: i64,
        /// The workers that hold the locks.
        workers: String,
    },

    /// A [source of tasks](crate::WorkerOptions::task_source) cannot be used.
    #[error("{problem}")]
    #[non_exhaustive]
    TaskSource {
        /// What is wrong with it.
        problem: String,
    },

    /// Invalid value of a setting.
    #[error("{setting} {problem}")]
    #[non_exhaustive]
    InvalidOption {
        /// The setting.
        setting: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },

    /// A limit is invalid, or its task or group does not exist.
    #[error("{problem}")]
    #[non_exhaustive]
    InvalidLimit {
        /// What is wrong and what to do.
        problem: String,
    },

    /// Invalid or unsupported connection parameters: in a connection string, a `PG…` variable or a service file.
    #[error("invalid connection parameters: {problem}")]
    #[non_exhaustive]
    InvalidConnection {
        /// What is wrong and what to do. Contains no secrets.
        problem: String,
    },

    /// A payload cannot be serialized as JSON.
    #[error("could not serialize the payload of task {identifier:?} as JSON")]
    #[non_exhaustive]
    InvalidPayload {
        /// The task.
        identifier: String,
        /// The serializer's error.
        source: serde_json::Error,
    },

    /// A crontab has errors.
    #[error("the crontab is invalid:\n{source}")]
    #[non_exhaustive]
    InvalidCrontab {
        /// The errors, with line and column.
        source: graphile_worker_crontab::CrontabParseError,
    },

    /// A crontab file cannot be read.
    #[error("the crontab {} {problem}", path.display())]
    #[non_exhaustive]
    CrontabFile {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        problem: String,
    },

    /// A crontab file has errors.
    #[error("the crontab {} is invalid:\n{source}", path.display())]
    #[non_exhaustive]
    InvalidCrontabFile {
        /// The file.
        path: std::path::PathBuf,
        /// The errors, with line and column.
        source: graphile_worker_crontab::CrontabParseError,
    },

    /// A crontab item defined in code cannot be expressed as a crontab line.
    #[error(transparent)]
    #[non_exhaustive]
    InvalidCronItem {
        /// What is wrong.
        source: graphile_worker_crontab::CrontabItemError,
    },

    /// Invalid schedule.
    #[error(transparent)]
    #[non_exhaustive]
    InvalidSchedule {
        /// What is wrong.
        source: graphile_worker_crontab::ScheduleError,
    },

    /// Two crontab items have the same identifier.
    #[error(
        "two crontab items (tasks {:?} and {:?}) have the same identifier {identifier:?}: give one of them another with `?id=…` or `.id(…)`",
        tasks[0], tasks[1]
    )]
    #[non_exhaustive]
    CronIdentifierTwice {
        /// The identifier.
        identifier: String,
        /// Their tasks.
        tasks: [String; 2],
    },

    /// The payload of a recurring job is not a JSON object.
    #[error(
        "the payload of the crontab item for task {identifier:?} must be a JSON object, because the worker adds `_cron` to it"
    )]
    #[non_exhaustive]
    CronPayloadNotAnObject {
        /// The task.
        identifier: String,
    },

    /// A hook rejected a job.
    #[error("a hook rejected a job of task {identifier:?}: {reason}")]
    #[non_exhaustive]
    JobRejected {
        /// The task.
        identifier: String,
        /// The hook's reason.
        reason: String,
    },

    /// A job cannot be added in a batch.
    #[error(
        "job {position} of the batch (task {identifier:?}) has the key mode unsafe_dedupe, which batches do not support: add it separately"
    )]
    #[non_exhaustive]
    UnsafeDedupeInBatch {
        /// The job's position, from 1.
        position: usize,
        /// The job's task.
        identifier: String,
    },

    /// The function for forbidden flags panicked.
    #[error("the function for forbidden flags panicked, so the worker cannot decide which jobs to run")]
    ForbiddenFlagsPanicked,

    /// The function for accepted flags panicked.
    #[error("the function for accepted flags panicked, so the worker cannot decide which jobs to run")]
    AcceptedFlagsPanicked,

    /// The worker stopped before it could record all outcomes: the database did not answer, or another
    /// transaction kept the jobs locked.
    #[error(
        "worker {worker_id} could not record the outcomes of its last jobs: they stay locked until they are recovered, or for 4 hours without recovery"
    )]
    #[non_exhaustive]
    OutcomesNotWritten {
        /// The worker.
        worker_id: String,
    },

    /// The database was not ready within [`startup_timeout`](crate::WorkerOptions::startup_timeout).
    #[error("the database was not ready after {waited:.0?}")]
    #[non_exhaustive]
    DatabaseNotReady {
        /// How long the worker retried.
        waited: std::time::Duration,
        /// The error of the last attempt.
        source: Box<Error>,
    },

    /// A pooler rejected a startup parameter.
    #[error(
        "the pooler rejected the connection ({message}): remove the parameter from the URL; for `extra_float_digits`, build the \
         pool with PgConnectOptions::extra_float_digits(None), or set ignore_startup_parameters in PgBouncer"
    )]
    #[non_exhaustive]
    PoolerRefuses {
        /// The pooler's message.
        message: String,
    },

    /// [`shutdown_signal`](crate::WorkerOptions::shutdown_signal) completed before the worker had started.
    #[error("the worker was stopped before the database was ready")]
    StoppedBeforeStart,

    /// The server did not answer in time.
    #[error("the database did not answer within {after:?}")]
    #[non_exhaustive]
    NoAnswer {
        /// The time limit.
        after: std::time::Duration,
    },

    /// Another worker has the job, or it was changed or removed.
    #[error("job {job_id} no longer belongs to this worker")]
    #[non_exhaustive]
    NotOwned {
        /// The job.
        job_id: i64,
    },

    /// A database error of tokio-postgres.
    #[cfg(feature = "tokio-postgres")]
    #[error("could not {context}")]
    #[non_exhaustive]
    TokioPostgres {
        /// What failed, as in "add a job".
        context: String,
        /// The driver's error.
        source: tokio_postgres::Error,
    },

    /// A database error.
    #[error("could not {context}{}", advice(source))]
    #[non_exhaustive]
    Database {
        /// What failed, as in "add a job".
        context: String,
        /// The driver's error.
        source: sqlx::Error,
    },
}

impl Error {
    /// A [source of tasks](crate::WorkerOptions::task_source) cannot be used, and why.
    pub fn task_source(problem: impl Into<String>) -> Error {
        Error::TaskSource { problem: problem.into() }
    }

    /// An error of the driver, with what was attempted: "could not {context}".
    pub fn database(context: impl Into<String>, source: sqlx::Error) -> Error {
        Error::Database { context: context.into(), source }
    }

    /// The message and its sources in one line, for a log.
    pub fn to_string_with_sources(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            // Some errors already print what they wrap.
            let message = error.to_string();
            if !text.ends_with(&message) {
                text = format!("{text}: {message}");
            }
            source = error.source();
        }
        text
    }

    /// Whether a retry of the same call may succeed: the connection was lost, transactions conflicted, or the
    /// server is starting or out of resources.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Database { source, .. } => match source {
                sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) | sqlx::Error::PoolTimedOut => true,
                // 08 connection, 40 conflict with another transaction, 53 resources, 57 shutting down or
                // starting, 58 operating system, 55P03 lock timeout, 25006 a standby that may be promoted.
                sqlx::Error::Database(error) => error.code().is_some_and(|code| {
                    ["08", "40", "53", "55P03", "57", "58", "25006"].iter().any(|class| code.starts_with(class))
                }),
                _ => false,
            },
            // A standby may be promoted.
            Error::JobsRunning { .. } | Error::NoAnswer { .. } | Error::ReadOnly { .. } => true,
            Error::DatabaseNotReady { source, .. } => source.is_retryable(),
            _ => false,
        }
    }

    /// Whether the database may only not be ready yet: unreachable, starting, out of connections, or with a
    /// locked table.
    pub(crate) fn is_transient_at_start(&self) -> bool {
        use std::io::ErrorKind::{InvalidData, InvalidInput, PermissionDenied, Unsupported};
        match self {
            // An untrusted certificate arrives as invalid data.
            Error::Database { source: sqlx::Error::Io(error), .. } => {
                !matches!(error.kind(), InvalidData | InvalidInput | PermissionDenied | Unsupported)
            }
            Error::Database { source: sqlx::Error::Database(_) | sqlx::Error::PoolTimedOut, .. } => self.is_retryable(),
            Error::NoAnswer { .. } | Error::ReadOnly { .. } => true,
            _ => false,
        }
    }

    /// Whether the server, the database or the role has reached its connection limit.
    pub(crate) fn is_out_of_connections(&self) -> bool {
        self.has_code(&["53300"])
    }

    /// The same for a rejected limit, in one sentence after another.
    pub(crate) fn of_limit(self) -> Error {
        if !self.has_code(&["GWBLI"]) {
            return self;
        }
        let Error::Database { source: sqlx::Error::Database(error), .. } = &self else { return self };
        let hint = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>().and_then(|error| error.hint());
        let problem = [Some(error.message()), hint].into_iter().flatten().collect::<Vec<_>>().join(" ");
        Error::InvalidLimit { problem }
    }

    /// Whether the server rejected the login. A running worker keeps its outcomes and retries: the password may have been
    /// rotated, or `pg_hba.conf` may be about to change back.
    pub(crate) fn is_login_rejected(&self) -> bool {
        matches!(self, Error::Database { source, .. } if is_login_rejected(source))
    }

    /// Whether the server rolled the statement back because of another transaction. The connection can still
    /// be used.
    pub(crate) fn is_contention(&self) -> bool {
        self.has_code(&["40001", "40P01"]) || self.is_lock_timeout()
    }

    /// Whether another transaction held a lock that the statement needed for longer than `lock_timeout`.
    pub(crate) fn is_lock_timeout(&self) -> bool {
        self.has_code(&["55P03"])
    }

    pub(crate) fn has_code(&self, codes: &[&str]) -> bool {
        let Error::Database { source: sqlx::Error::Database(error), .. } = self else { return false };
        error.code().is_some_and(|code| codes.contains(&&*code))
    }
}

/// How many connections a worker needs: two for exchanges, one each for notifications, heartbeats, sweeps and
/// cron, and one in its pool.
pub(crate) const CONNECTIONS_OF_A_WORKER: i64 = 7;

/// Whether the server rejected the login: a wrong password, an unknown role, or a rule of `pg_hba.conf`.
pub(crate) fn is_login_rejected(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else { return false };
    error.code().is_some_and(|code| code.starts_with("28"))
}

/// Advice for an error whose message does not say what to do.
fn advice(error: &sqlx::Error) -> String {
    let sqlx::Error::Database(error) = error else { return String::new() };
    let Some(error) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>() else { return String::new() };
    let needs = format!("and a worker needs {CONNECTIONS_OF_A_WORKER} connections");
    // The message is localised; the name of the server function that raised it is not.
    match (error.code(), error.routine()) {
        ("53300", Some("InitializeSessionUserId")) => {
            format!(" (the role has reached its connection limit, {needs}: see `alter role … connection limit`)")
        }
        ("53300", Some("CheckMyDatabase")) => {
            format!(" (the database has reached its connection limit, {needs}: see `alter database … connection limit`)")
        }
        ("53300", _) => " (the server has no free connections: use smaller pools or a pooler, or raise max_connections)".to_owned(),
        ("25006", _) => " (the server is read-only: it is a standby, or default_transaction_read_only is on. Connect to the primary, or turn the setting off)".to_owned(),
        _ => String::new(),
    }
}

/// Adds to a driver's error what failed.
pub(crate) trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T> Context<T> for sqlx::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Database { context: what(), source })
    }
}

fn list(ids: &[i32]) -> String {
    ids.iter().map(i32::to_string).collect::<Vec<_>>().join(", ")
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(a value that is not text)".to_owned())
}
