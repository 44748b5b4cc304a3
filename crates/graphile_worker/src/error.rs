//! What can go wrong, in sentences that say what to do.

/// Why the library could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server is older than the schema needs.
    #[error("this is PostgreSQL {found}, and the schema needs PostgreSQL {} or later", crate::migrate::LOWEST_POSTGRES / 10_000)]
    ServerTooOld {
        /// The version of the server.
        found: String,
    },

    /// The name of the schema cannot be one.
    #[error("the schema name {name:?} {problem}")]
    InvalidSchemaName {
        /// The name that was given.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },

    /// A newer release has changed the schema in a way that this one must not work with.
    #[error(
        "the schema {schema:?} holds the breaking migration {} of {author}, and this release knows them up to {known}: use a release that knows it",
        list(unknown)
    )]
    SchemaTooNew {
        /// The schema.
        schema: String,
        /// Whose migrations: Node's graphile-worker, or ours.
        author: &'static str,
        /// The ids that are not known here.
        unknown: Vec<i32>,
        /// The highest id that is known here.
        known: i32,
    },

    /// A newer release waits for the workers of older ones to finish, because it has to change the schema.
    #[error(
        "a newer release is about to change the schema {schema:?} (step {step} of {author}, and this release knows them up to {known}): use that release, or try again when it has given up"
    )]
    UpgradeUnderWay {
        /// The schema.
        schema: String,
        /// Whose step: Node's graphile-worker's, or ours.
        author: &'static str,
        /// The step that it waits to take.
        step: i32,
        /// The last step that is known here.
        known: i32,
    },

    /// The schema belongs to something else.
    #[error(
        "the schema {schema:?} has a table `jobs` and no ledger, so it is not Graphile Worker's: choose another schema"
    )]
    SchemaOccupied {
        /// The schema.
        schema: String,
    },

    /// The schema cannot be dropped: others have tables or views in it.
    #[error(
        "the schema {schema:?} is not dropped, because of what is not Graphile Worker's in it ({strangers}): move that elsewhere, then try again"
    )]
    SchemaShared {
        /// The schema.
        schema: String,
        /// What is not ours.
        strangers: String,
    },

    /// The role may not create schemas, and there is none.
    #[error("the schema {schema:?} does not exist, and this role may not create it: have the owner of the database run `create schema {quoted} authorization \"{role}\"`, then try again", quoted = crate::db::quote_identifier(schema))]
    MayNotCreateSchema {
        /// The schema.
        schema: String,
        /// The role that tried.
        role: String,
        /// What the server said.
        source: sqlx::Error,
    },

    /// An old release's schema cannot be moved up while its workers run jobs.
    #[error(
        "the schema {schema:?} is at level {level}, and {held} locks on its jobs and queues are held by {workers}: stop the workers of the old release and let their jobs finish, then try again (locks of dead workers expire after 4 hours; to clear them now, set locked_at and locked_by to null in its tables jobs and job_queues)"
    )]
    JobsRunning {
        /// The schema.
        schema: String,
        /// The level it is at.
        level: i32,
        /// How many locks are held.
        held: i64,
        /// By whom.
        workers: String,
    },

    /// The folder of tasks cannot be used.
    #[error("the tasks folder {} {problem}", path.display())]
    TasksDir {
        /// The folder.
        path: std::path::PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// A setting cannot be what it was set to.
    #[error("{setting} {problem}")]
    InvalidOption {
        /// The setting.
        setting: &'static str,
        /// What is wrong with it, and what is expected.
        problem: String,
    },

    /// A payload cannot be written as JSON.
    #[error("the payload of a job of the task {identifier:?} cannot be written as JSON")]
    InvalidPayload {
        /// The task.
        identifier: String,
        /// Why not.
        source: serde_json::Error,
    },

    /// A crontab has mistakes in it.
    #[error("the crontab cannot be used:\n{source}")]
    InvalidCrontab {
        /// All of them.
        source: graphile_worker_crontab::CrontabParseError,
    },

    /// A file of crontab items cannot be read.
    #[error("the crontab {} {problem}", path.display())]
    CrontabFile {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// A file of crontab items has mistakes in it.
    #[error("the crontab {} cannot be used:\n{source}", path.display())]
    InvalidCrontabFile {
        /// The file.
        path: std::path::PathBuf,
        /// All of them.
        source: graphile_worker_crontab::CrontabParseError,
    },

    /// An item of a crontab was described in code with something that a crontab cannot say.
    #[error(transparent)]
    InvalidCronItem {
        /// What is wrong with it.
        source: graphile_worker_crontab::CrontabItemError,
    },

    /// A time at which something is to recur is no time.
    #[error(transparent)]
    InvalidSchedule {
        /// What is wrong with it.
        source: graphile_worker_crontab::ScheduleError,
    },

    /// Two items of the worker's crontab cannot be told apart.
    #[error(
        "two crontab items (of the tasks {:?} and {:?}) have the identifier {identifier:?}, and their ticks would be taken for one another's: give one of them another with `?id=…` or `.id(…)`",
        tasks[0], tasks[1]
    )]
    CronIdentifierTwice {
        /// The identifier.
        identifier: String,
        /// Their tasks.
        tasks: [String; 2],
    },

    /// The payload of a recurring job has no place for `_cron`.
    #[error(
        "the payload of the crontab item of the task {identifier:?} is not an object in JSON: `_cron`, which says when the job was due, has to go into it"
    )]
    CronPayloadNotAnObject {
        /// The task.
        identifier: String,
    },

    /// A hook did not let a job be added.
    #[error("a job of the task {identifier:?} was not added: {reason}")]
    JobRefused {
        /// The task.
        identifier: String,
        /// What the hook said.
        reason: String,
    },

    /// A batch of jobs contains one that a batch cannot take.
    #[error(
        "job {position} of the batch (task {identifier:?}) has the key mode unsafe_dedupe, which a batch cannot have: add it by itself"
    )]
    UnsafeDedupeInBatch {
        /// Its place, from 1.
        position: usize,
        /// Its task.
        identifier: String,
    },

    /// The function that names forbidden flags panicked.
    #[error("the function that names forbidden flags panicked, so there is no telling which jobs may run")]
    ForbiddenFlagsPanicked,

    /// The worker had to leave while the database was away.
    #[error(
        "worker {worker_id} could not write what became of its last jobs: they stay locked by it until they are recovered"
    )]
    OutcomesNotWritten {
        /// The worker.
        worker_id: String,
    },

    /// The database was not ready within [`startup_timeout`](crate::WorkerOptions::startup_timeout).
    #[error("gave up waiting for the database after {waited:.0?}")]
    DatabaseNotReady {
        /// How long it was tried.
        waited: std::time::Duration,
        /// Why the last attempt failed.
        source: Box<Error>,
    },

    /// The future of [`shutdown_signal`](crate::WorkerOptions::shutdown_signal) was done before the worker had started.
    #[error("the worker was asked to stop before the database was ready")]
    StoppedBeforeStart,

    /// The server has taken a statement and said nothing since.
    #[error("no answer from the database in {after:?}")]
    NoAnswer {
        /// How long we waited.
        after: std::time::Duration,
    },

    /// The job has been given to another worker, changed or removed since this one claimed it.
    #[error("job {job_id} is no longer this worker's")]
    NotOurs {
        /// The job.
        job_id: i64,
    },

    /// The same, through tokio-postgres.
    #[cfg(feature = "tokio-postgres")]
    #[error("could not {doing}")]
    TokioPostgres {
        /// What was tried.
        doing: String,
        /// Why it failed.
        source: tokio_postgres::Error,
    },

    /// The server, or the way to it, failed.
    #[error("could not {doing}")]
    Database {
        /// What was tried.
        doing: String,
        /// Why it failed.
        source: sqlx::Error,
    },
}

impl Error {
    /// The message with those of its sources, in one line, for a log.
    pub(crate) fn to_string_with_sources(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            // Some errors already print what they wrap.
            let said = error.to_string();
            if !text.ends_with(&said) {
                text = format!("{text}: {said}");
            }
            source = error.source();
        }
        text
    }

    /// Whether the same call may succeed later with nothing else changed: a connection was lost, two
    /// transactions got in each other's way, the server is starting or out of resources.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Database { source, .. } => match source {
                sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) | sqlx::Error::PoolTimedOut => true,
                // 08 connection, 40 conflict with another transaction, 53 resources, 57 shutting down or starting,
                // 58 the system
                // beneath it, 55P03 a lock that did not come in time, 25006 a standby that is about to take over.
                sqlx::Error::Database(error) => error.code().is_some_and(|code| {
                    ["08", "40", "53", "55P03", "57", "58", "25006"].iter().any(|class| code.starts_with(class))
                }),
                _ => false,
            },
            Error::JobsRunning { .. } | Error::NoAnswer { .. } => true,
            Error::DatabaseNotReady { source, .. } => source.is_retryable(),
            _ => false,
        }
    }

    /// Whether the database may only not be ready yet: not reachable, starting, out of connections, or a table is locked.
    pub(crate) fn may_pass(&self) -> bool {
        use std::io::ErrorKind::{InvalidData, InvalidInput, PermissionDenied, Unsupported};
        match self {
            // A certificate that is not trusted arrives as invalid data.
            Error::Database { source: sqlx::Error::Io(error), .. } => {
                !matches!(error.kind(), InvalidData | InvalidInput | PermissionDenied | Unsupported)
            }
            Error::Database { source: sqlx::Error::Database(_) | sqlx::Error::PoolTimedOut, .. } => self.is_retryable(),
            Error::NoAnswer { .. } => true,
            _ => false,
        }
    }

    /// Whether the server undid the statement because of another transaction: the connection is as good as before.
    pub(crate) fn is_contention(&self) -> bool {
        self.has_code(&["40001", "40P01"]) || self.is_lock_timeout()
    }

    /// Whether another transaction held for longer than `lock_timeout` what the statement needed.
    pub(crate) fn is_lock_timeout(&self) -> bool {
        self.has_code(&["55P03"])
    }

    fn has_code(&self, codes: &[&str]) -> bool {
        let Error::Database { source: sqlx::Error::Database(error), .. } = self else { return false };
        error.code().is_some_and(|code| codes.contains(&&*code))
    }
}

/// Attaches what was being done to a driver's error.
pub(crate) trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T> Doing<T> for sqlx::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Database { doing: what(), source })
    }
}

fn list(ids: &[i32]) -> String {
    ids.iter().map(i32::to_string).collect::<Vec<_>>().join(", ")
}
