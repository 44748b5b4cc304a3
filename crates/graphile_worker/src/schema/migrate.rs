//! Migrations: from whatever is installed to the schema of this release.
//!
//! `inspect` reads what is installed, `plan` decides what to do (pure), and `apply` does it in one
//! transaction. The ledger `migrations` belongs to Node's worker and contains exactly its ids; our own steps
//! are recorded in `_rs_additions`. An up-to-date database is only read, without locks. Before a breaking
//! step, older workers are asked to finish: see `upgrade`. The SQL is in `steps`.

use super::steps::{
    Addition, BREAKING, EARLIER_INDEXES_STEP, FUNCTIONS_STEP, INDEXES_STEP, LEVEL, LOWEST_POSTGRES, WORKERS_STEP,
    additions, files, last_addition, queries,
};
use crate::Error;
use crate::db::connect::DatabaseConfig;
use crate::db::session;
use crate::db::{Schema, quote_identifier};
use crate::error::Context;
use crate::schema::upgrade::{self, Breaking, Request};
use sqlx::postgres::PgRow;
use sqlx::{Acquire, AssertSqlSafe, Connection, PgConnection, Postgres, Row};
use std::fmt;
use std::time::Duration;
use tokio::sync::watch;
use tracing::{debug, info, warn};

/// The migrations that the Rust port (the `graphile_worker` of crates.io) has added to Node's ledger beyond
/// the contract.
const OF_RUST_PORT: std::ops::RangeInclusive<i32> = 21..=22;

/// The warning about a database of the Rust port.
const OF_RUST_PORT_WARNING: &str = "found tables, functions and ledger entries of the Rust port (the graphile_worker of crates.io). They slow this release down and could make Node's worker skip its own migrations. When no worker of the port is running, run `graphile-worker migrate --from-rust-port`";

/// How often a migration is retried if another program changes the schema at the same time.
const ATTEMPTS: u32 = 10;

/// How long building an index waits for transactions that were open before it.
const INDEX_LOCK_TIMEOUT: &str = "60s";

/// Result of [`migrate`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migration {
    /// The schema.
    pub schema: String,
    /// The previous level; `None` if nothing was installed.
    pub from: Option<i32>,
    /// The current level.
    pub level: i32,
    /// Whether anything was changed.
    pub changed: bool,
    /// Number of jobs moved from an older release's tables.
    pub moved_jobs: u64,
    /// Whether the Rust port's objects were removed ([`migrate_from_rust_port`]).
    pub removed_rust_port: bool,
    /// Number of released jobs of the Rust port's workers.
    pub released_jobs: u64,
}

impl fmt::Display for Migration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Migration { schema, from, level, changed, moved_jobs, removed_rust_port, released_jobs } = self;
        match (from, changed) {
            (_, false) => write!(f, "schema {schema:?} is up to date at level {level}"),
            (None, true) => write!(f, "schema {schema:?} installed at level {level}"),
            (Some(from), true) if from == level => write!(f, "schema {schema:?} updated at level {level}"),
            (Some(from), true) => {
                write!(f, "schema {schema:?} updated from level {from} to level {level}")?;
                if *moved_jobs > 0 {
                    write!(f, ", {} moved", crate::text::counted(*moved_jobs as usize))?;
                }
                Ok(())
            }
        }?;
        if *removed_rust_port {
            let released = crate::text::counted(*released_jobs as usize);
            write!(f, ", objects of the Rust port removed, {released} of its workers released")?;
        }
        Ok(())
    }
}

/// Installs or updates the schema. Safe to call at every start and from several processes at once. Do not
/// call it inside a transaction.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), graphile_worker::Error> {
/// graphile_worker::migrate(&pool, "graphile_worker").await?;
/// # Ok(()) }
/// ```
pub async fn migrate<'c>(
    database: impl Acquire<'c, Database = Postgres>,
    schema: impl AsRef<str>,
) -> Result<Migration, Error> {
    migrate_with_max_wait(upgrade::DEFAULT_MIGRATION_WAIT, database, schema).await
}

/// The same for a worker, which must be able to write even if there is nothing to migrate.
pub(crate) async fn migrate_for_worker(
    way: ConnectionKind,
    max_wait: Duration,
    connection: &mut PgConnection,
    schema: &Schema,
) -> Result<Migration, Error> {
    let purpose = Purpose { must_write: true, ..Purpose::default() };
    migrate_through(purpose, way, max_wait, connection, schema).await
}

/// The same for a database of the Rust port, the `graphile_worker` of crates.io: also releases the jobs that its workers held,
/// and removes its tables, its functions and its entries in Node's ledger. If the port has never used the database, this does
/// the same as [`migrate`].
///
/// Stop the port's workers first. This fails with [`Error::RustPortRunning`] while their heartbeats are fresh, and with
/// [`Error::RustPortMayRun`] while their sessions are connected or while they hold jobs that they may still be running; see
/// [`force_migrate_from_rust_port`].
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), graphile_worker::Error> {
/// let migration = graphile_worker::migrate_from_rust_port(&pool, "graphile_worker").await?;
/// println!("{} jobs of the port's workers were released", migration.released_jobs);
/// # Ok(()) }
/// ```
pub async fn migrate_from_rust_port<'c>(
    database: impl Acquire<'c, Database = Postgres>,
    schema: impl AsRef<str>,
) -> Result<Migration, Error> {
    let schema = Schema::new(schema.as_ref())?;
    let mut connection = database.acquire().await.context(|| "connect to the database".to_owned())?;
    migrate_through(
        Purpose::FROM_RUST_PORT,
        ConnectionKind::Unknown,
        upgrade::DEFAULT_MIGRATION_WAIT,
        &mut connection,
        &schema,
    )
    .await
}

/// The same, even if workers of the port may be alive. The jobs of a live one would run a second time: call this only if you
/// know that its processes have ended, for example after a crash.
pub async fn force_migrate_from_rust_port<'c>(
    database: impl Acquire<'c, Database = Postgres>,
    schema: impl AsRef<str>,
) -> Result<Migration, Error> {
    let purpose = Purpose { by_force: true, ..Purpose::FROM_RUST_PORT };
    let schema = Schema::new(schema.as_ref())?;
    let mut connection = database.acquire().await.context(|| "connect to the database".to_owned())?;
    migrate_through(purpose, ConnectionKind::Unknown, upgrade::DEFAULT_MIGRATION_WAIT, &mut connection, &schema).await
}

/// Same as [`migrate`], but waits at most this long for older workers to finish before a breaking step
/// ([`migrate`] waits 10 minutes). After that it proceeds, unless jobs would be lost.
pub async fn migrate_with_max_wait<'c>(
    max_wait: Duration,
    database: impl Acquire<'c, Database = Postgres>,
    schema: impl AsRef<str>,
) -> Result<Migration, Error> {
    let schema = Schema::new(schema.as_ref())?;
    let mut connection = database.acquire().await.context(|| "connect to the database".to_owned())?;
    migrate_through(Purpose::default(), ConnectionKind::Unknown, max_wait, &mut connection, &schema).await
}

/// Options of a migration.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Purpose {
    /// A worker must be able to write even if there is nothing to migrate.
    pub(crate) must_write: bool,
    /// Whether to remove the Rust port's objects.
    pub(crate) from_rust_port: bool,
    /// Whether to do so even if workers of the port may be alive.
    pub(crate) by_force: bool,
}

impl Purpose {
    pub(crate) const FROM_RUST_PORT: Purpose = Purpose { must_write: false, from_rust_port: true, by_force: false };
}

/// How the database is reached: whether a pooler may share our connection with other clients.
pub(crate) enum ConnectionKind {
    /// Only this connection is available; it is tested for signs of a pooler.
    Unknown,
    /// Another connection can be opened to detect a pooler.
    By(Box<DatabaseConfig>),
    /// Another connection detects whether there is a pooler; wait for its result.
    Known(watch::Receiver<Option<bool>>),
}

impl ConnectionKind {
    /// Whether changes to the session stay with this connection.
    async fn keeps_sessions(&mut self, connection: &mut PgConnection) -> Result<bool, Error> {
        match self {
            ConnectionKind::Unknown => {
                Ok(!session::is_shared(connection).await.context(|| "detect a pooler".to_owned())?)
            }
            ConnectionKind::By(config) => {
                let context = || "detect a pooler".to_owned();
                let mut session = session::session_to_detect(DatabaseConfig::clone(config));
                let _ = session.connect_and_detect().await.context(context)?.close().await;
                Ok(!session.is_pooled() || session::keeps_sessions(session.config()).await.context(context)?)
            }
            ConnectionKind::Known(is_pooled) => {
                Ok(is_pooled.wait_for(Option::is_some).await.is_ok_and(|known| *known != Some(true)))
            }
        }
    }
}

pub(crate) async fn migrate_through(
    purpose: Purpose,
    mut way: ConnectionKind,
    max_wait: Duration,
    connection: &mut PgConnection,
    schema: &Schema,
) -> Result<Migration, Error> {
    let mut request = Request::new(max_wait);
    let mut attempt = 1;
    loop {
        match migrate_once(connection, schema, &mut request, &mut way, purpose).await {
            Err(error) if attempt < ATTEMPTS && is_concurrent_migration(&error) => {
                tokio::time::sleep(Duration::from_millis(20) * attempt).await;
                attempt += 1;
            }
            Err(Error::JobsRunning { workers, .. }) if request.waits_for(&workers) => {
                tokio::time::sleep(upgrade::OLD_WORKER_POLL_INTERVAL).await;
            }
            // Check again: another installer may have been faster.
            Ok(None) => tokio::time::sleep(upgrade::OLD_WORKER_POLL_INTERVAL).await,
            Ok(Some(migration)) => return Ok(migration),
            Err(error) => return Err(error),
        }
    }
}

/// What is installed, for callers that only read.
pub(crate) struct Examined {
    pub(crate) installed: bool,
    /// The level in Node's ledger.
    pub(crate) level: Option<i32>,
    /// The level in our own ledger.
    pub(crate) addition: Option<i32>,
    pub(crate) functions_are_ours: bool,
    /// Whether [`migrate`] would change nothing, or the error it would return.
    pub(crate) is_up_to_date: Result<bool, Error>,
    /// Traces of the Rust port, if it has used the database.
    pub(crate) rust_port: Option<RustPort>,
}

/// Reads what is installed. Changes nothing.
pub(crate) async fn examine(connection: &mut PgConnection, schema: &Schema) -> Result<Examined, Error> {
    let found = inspect(connection, schema).await?;
    let recorded = found.additions.iter().flatten().find(|step| step.id == FUNCTIONS_STEP);
    Ok(Examined {
        installed: found.layout != Layout::None,
        level: found.level(),
        addition: found.additions.iter().flatten().map(|step| step.id).max(),
        functions_are_ours: recorded
            .is_some_and(|step| step.checksum.is_some() && step.checksum == found.functions_checksum),
        is_up_to_date: plan(schema, &found).map(|plan| plan.is_nothing()),
        rust_port: found.rust_port,
    })
}

/// Returns `None` if older workers must finish first.
async fn migrate_once(
    connection: &mut PgConnection,
    schema: &Schema,
    request: &mut Request,
    way: &mut ConnectionKind,
    purpose: Purpose,
) -> Result<Option<Migration>, Error> {
    let found = inspect(connection, schema).await?.seen_for(purpose);
    let planned = plan(schema, &found)?.removing_rust_port(purpose, schema, &found)?;
    if let Some(read_only) = &found.read_only
        && (purpose.must_write || !planned.is_nothing())
    {
        return Err(read_only.error());
    }
    if planned.is_nothing() {
        warn_of(&planned, schema);
        return Ok(Some(report(schema, &found, false, Moved::default())));
    }
    if let Some(breaking) = planned.breaking(&found)
        && !request.is_granted(connection, schema, &breaking).await?
    {
        return Ok(None);
    }

    let context = || format!("migrate the schema {:?}", schema.name());
    let mut transaction = connection.begin_with(session::BEGIN).await.context(context)?;
    let lock = sqlx::query(schema.sql(queries::LOCK_MIGRATIONS)).persistent(false);
    lock.execute(&mut *transaction).await.context(context)?;
    if found.ledger_can_be_locked {
        // Node takes no advisory lock, but starts each migration with an insert into the ledger.
        run(&mut transaction, schema, queries::LOCK_LEDGER, "lock the ledger").await?;
    }
    let found = inspect(&mut transaction, schema).await?.seen_for(purpose);
    let planned = plan(schema, &found)?.removing_rust_port(purpose, schema, &found)?;
    let moved = apply(&mut transaction, schema, &found, &planned).await?;
    session::commit(transaction).await.context(context)?;
    if planned.indexes == Indexes::BesideRunningWorkers {
        build_indexes_beside_running_workers(connection, schema, way).await;
    }

    warn_of(&planned, schema);
    let migration = report(schema, &found, !planned.is_nothing(), moved);
    log(&migration);
    Ok(Some(migration))
}

fn log(migration: &Migration) {
    let Migration { schema, level, .. } = migration;
    match migration.from.filter(|from| from != level) {
        _ if !migration.changed => {}
        Some(from) => {
            info!(schema, from, to = level, moved_jobs = migration.moved_jobs, "schema updated to a newer level");
        }
        None if migration.from.is_none() => info!(schema, level, "schema installed"),
        None => info!(schema, level, "schema updated"),
    }
}

fn warn_of(plan: &Plan, schema: &Schema) {
    for warning in &plan.warnings {
        warn!(schema = schema.name(), "{warning}");
    }
}

fn report(schema: &Schema, found: &Installation, changed: bool, moved: Moved) -> Migration {
    let level = found.level().unwrap_or(0).max(LEVEL);
    let Moved { moved_jobs, removed_rust_port, released_jobs } = moved;
    let (schema, from) = (schema.name().to_owned(), found.level());
    Migration { schema, from, level, changed, moved_jobs, removed_rust_port, released_jobs }
}

/// What happened to existing jobs.
#[derive(Default)]
struct Moved {
    moved_jobs: u64,
    removed_rust_port: bool,
    released_jobs: u64,
}

/// Whether another installer, ours or Node's, created the same object first: retry.
fn is_concurrent_migration(error: &Error) -> bool {
    let Error::Database { source: sqlx::Error::Database(error), .. } = error else {
        return false;
    };
    // The object that we create exists (unique violation, duplicate schema, table, object, column), the
    // object that we use is gone (undefined table, column, object, function, wrong object type), deadlock,
    // serialization failure, lock timeout, and "tuple concurrently updated", which has no code of its own.
    let code = error.code().unwrap_or_default();
    [
        "23505", "42P06", "42P07", "42710", "42701", "42P01", "42703", "42704", "42883", "42809", "40P01", "40001",
        "55P03",
    ]
    .contains(&code.as_ref())
        || error.message().contains("concurrently updated")
}

/// What is installed in the database.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Installation {
    server_version: i32,
    role: String,
    read_only: Option<ReadOnly>,
    schema_exists: bool,
    /// Node's ledger, if it exists.
    ledger: Option<Vec<Step>>,
    ledger_has_breaking: bool,
    ledger_can_be_locked: bool,
    layout: Layout,
    /// Since level 17.
    view_exists: bool,
    /// Our own ledger, if it exists.
    additions: Option<Vec<Step>>,
    functions_checksum: Option<String>,
    /// Traces of the Rust port, if it has used the database.
    rust_port: Option<RustPort>,
    /// How the tables and functions differ from the contract. Only read if a newer release of Node's worker
    /// has migrated the schema.
    differences: Vec<String>,
}

/// Why this session cannot write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ReadOnly {
    pub(crate) is_standby: bool,
    /// Where `default_transaction_read_only` was set, in the words of `pg_settings.source`.
    pub(crate) set_by: String,
    pub(crate) database: String,
    pub(crate) role: String,
}

impl ReadOnly {
    /// From a row of installation.sql or doctor_server.sql.
    pub(crate) fn read(row: &PgRow) -> sqlx::Result<Option<ReadOnly>> {
        let is_standby = row.try_get("is_standby")?;
        let set_by: Option<String> = row.try_get("read_only_by")?;
        Ok((is_standby || set_by.is_some()).then_some(ReadOnly {
            is_standby,
            set_by: set_by.unwrap_or_default(),
            database: row.try_get("database")?,
            role: row.try_get("role")?,
        }))
    }

    pub(crate) fn found(&self) -> String {
        if self.is_standby {
            return "the server is a read-only standby".to_owned();
        }
        "transactions are read-only: default_transaction_read_only is on".to_owned()
    }

    pub(crate) fn advice(&self) -> String {
        let (database, role) = (quote_identifier(&self.database), quote_identifier(&self.role));
        let reset = "reset default_transaction_read_only";
        match &*self.set_by {
            _ if self.is_standby => "connect to the primary".to_owned(),
            "database" => format!("run `alter database {database} {reset}`"),
            "user" => format!("run `alter role {role} {reset}`"),
            "database user" => format!("run `alter role {role} in database {database} {reset}`"),
            "client" | "session" => "remove it from the connection string or PGOPTIONS".to_owned(),
            _ => "turn it off in the server's configuration".to_owned(),
        }
    }

    fn error(&self) -> Error {
        Error::ReadOnly { is_standby: self.is_standby, found: self.found(), advice: self.advice() }
    }
}

/// Traces of the Rust port, and signs that its workers are alive.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RustPort {
    /// Its workers with a fresh heartbeat.
    pub(crate) live_workers: Vec<String>,
    last_heartbeat: Duration,
    /// The server processes of sessions that look like its own.
    pub(crate) sessions: Vec<i32>,
    /// The number of sessions whose statements this role may not see.
    hidden_sessions: i64,
    /// The number of jobs that its workers hold, and the ids of ten of them at most.
    pub(crate) jobs: i64,
    job_ids: Vec<i64>,
    /// The workers that hold them.
    pub(crate) holders: Vec<String>,
    /// How long ago the last of these jobs was claimed.
    newest_lock: Option<Duration>,
}

impl RustPort {
    /// How long after its last heartbeat the port itself declares a worker dead. An older lock is not a sign of life either.
    const RECENT: Duration = Duration::from_secs(5 * 60);

    fn read(row: &PgRow) -> sqlx::Result<RustPort> {
        let duration = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Ok(RustPort {
            live_workers: row.try_get("workers")?,
            last_heartbeat: duration(row.try_get("seconds")?),
            sessions: row.try_get("sessions")?,
            hidden_sessions: row.try_get("hidden_sessions")?,
            jobs: row.try_get("jobs")?,
            job_ids: row.try_get("job_ids")?,
            holders: row.try_get("holders")?,
            newest_lock: row.try_get::<Option<f64>, _>("newest_lock_seconds")?.map(duration),
        })
    }

    /// The error if a worker of it sends heartbeats.
    pub(crate) fn running(&self, schema: &Schema) -> Option<Error> {
        let (schema, workers) = (schema.name().to_owned(), self.live_workers.clone());
        (!workers.is_empty()).then_some(Error::RustPortRunning { schema, workers, since: self.last_heartbeat })
    }

    /// Why its workers may be alive although none of them sends heartbeats; a part of a sentence.
    pub(crate) fn may_run_because(&self) -> Option<String> {
        if !self.sessions.is_empty() {
            let processes = self.sessions.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
            return Some(format!("sessions that look like theirs are connected (server processes {processes})"));
        }
        if self.jobs > 0 && self.hidden_sessions > 0 {
            return Some(format!(
                "{} sessions of other roles do not show this role whose they are; a member of pg_monitor sees them",
                self.hidden_sessions
            ));
        }
        let newest = self.newest_lock.filter(|age| *age < RustPort::RECENT)?;
        Some(format!(
            "they claimed a job {} ago, less than 5 minutes",
            crate::text::format_duration(newest.as_secs_f64())
        ))
    }

    /// The jobs that its workers hold, and which workers; a part of a sentence.
    pub(crate) fn holds(&self) -> String {
        if self.jobs == 0 {
            return "they hold no jobs".to_owned();
        }
        let mut ids = self.job_ids.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
        if self.jobs > self.job_ids.len() as i64 {
            ids.push_str(", …");
        }
        let jobs = crate::text::counted(usize::try_from(self.jobs).unwrap_or_default());
        format!("{} {} {jobs}: {ids}", self.holders.join(", "), if self.holders.len() == 1 { "holds" } else { "hold" })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Step {
    id: i32,
    breaking: bool,
    checksum: Option<String>,
    /// Not applied yet: a newer release is waiting to apply it.
    is_wanted: bool,
}

/// The shape of the tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Layout {
    #[default]
    None,
    /// Levels 1 to 10: jobs contain the names of their task and queue.
    ByName,
    /// Levels 11 to 15: jobs contain their ids, in tables with other names.
    ById,
    /// Since level 16.
    Current,
}

impl Installation {
    fn level(&self) -> Option<i32> {
        self.ledger.iter().flatten().filter(|step| !self.is_of_rust_port(step)).map(|step| step.id).max()
    }

    /// Whether a migration in Node's ledger was written by the Rust port.
    fn is_of_rust_port(&self, step: &Step) -> bool {
        self.rust_port.is_some() && OF_RUST_PORT.contains(&step.id)
    }

    /// Treats all workers of the port as dead.
    fn seen_for(mut self, purpose: Purpose) -> Installation {
        if purpose.by_force && self.rust_port.is_some() {
            self.rust_port = Some(RustPort::default());
        }
        self
    }

    fn has_addition(&self, id: i32) -> bool {
        self.additions.iter().flatten().any(|step| step.id == id && !step.is_wanted)
    }

    fn unknown(&self) -> impl Iterator<Item = &Step> {
        self.ledger.iter().flatten().filter(|step| step.id > LEVEL && !self.is_of_rust_port(step))
    }
}

async fn inspect(connection: &mut PgConnection, schema: &Schema) -> Result<Installation, Error> {
    let context = || format!("read the schema {:?}", schema.name());
    // Every worker start reads this: `raw_sql` needs one round trip, a prepared statement two.
    let rows = session::read(connection, schema.sql(queries::INSTALLATION)).await.context(context)?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound).context(context)?;
    let is = |column: &str| row.try_get::<bool, _>(column).context(context);
    let mut found = Installation {
        server_version: row.try_get("server_version").context(context)?,
        role: row.try_get("role").context(context)?,
        read_only: ReadOnly::read(row).context(context)?,
        schema_exists: is("schema_exists")?,
        ledger_has_breaking: is("ledger_has_breaking")?,
        ledger_can_be_locked: is("ledger_can_be_locked")?,
        layout: match (is("tables_exist")?, is("old_tables_exist")?, is("old_tables_have_task_ids")?) {
            (true, _, _) => Layout::Current,
            (false, true, true) => Layout::ById,
            (false, true, false) => Layout::ByName,
            (false, false, _) => Layout::None,
        },
        view_exists: is("tables_exist")? && is("view_or_table_jobs_exists")?,
        ..Installation::default()
    };
    if is("ledger_exists")? {
        let rows = session::read(connection, schema.sql(queries::LEDGER)).await.context(context)?;
        found.ledger =
            Some(rows.iter().map(|row| step(row, None, false)).collect::<sqlx::Result<_>>().context(context)?);
    }
    if is("additions_exist")? {
        let rows = session::read(connection, schema.sql(queries::ADDITIONS)).await.context(context)?;
        let steps = rows.iter().map(|row| step(row, row.try_get("checksum")?, row.try_get("is_wanted")?));
        found.additions = Some(steps.collect::<sqlx::Result<_>>().context(context)?);
    }
    if is("is_of_rust_port")? {
        found.rust_port = Some(match is("can_read_rust_port")? {
            true => read_rust_port(connection, schema).await.context(context)?,
            false => RustPort::default(),
        });
    }
    found.functions_checksum = functions_checksum(connection, schema).await?;
    if found.unknown().next().is_some() {
        let rows = session::read(connection, schema.sql(queries::CONTRACT_DIFFERENCES)).await.context(context)?;
        found.differences = rows.iter().map(|row| row.try_get(0)).collect::<sqlx::Result<_>>().context(context)?;
    }
    Ok(found)
}

async fn read_rust_port(connection: &mut PgConnection, schema: &Schema) -> sqlx::Result<RustPort> {
    let rows = session::read(connection, schema.sql(queries::RUST_PORT)).await?;
    rows.first().ok_or(sqlx::Error::RowNotFound).and_then(RustPort::read)
}

/// Reads traces of the Rust port; `None` if this is not a database of the port.
pub(crate) async fn look_for_rust_port(
    connection: &mut PgConnection,
    schema: &Schema,
) -> sqlx::Result<Option<RustPort>> {
    let rows = session::read(connection, schema.sql(queries::INSTALLATION)).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    match row.try_get("is_of_rust_port")? && row.try_get("can_read_rust_port")? {
        true => read_rust_port(connection, schema).await.map(Some),
        false => Ok(None),
    }
}

fn step(row: &PgRow, checksum: Option<String>, is_wanted: bool) -> sqlx::Result<Step> {
    Ok(Step { id: row.try_get("id")?, breaking: row.try_get("breaking")?, checksum, is_wanted })
}

async fn functions_checksum(connection: &mut PgConnection, schema: &Schema) -> Result<Option<String>, Error> {
    session::read(connection, schema.sql(queries::FUNCTIONS_CHECKSUM))
        .await
        .and_then(|rows| rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get(0))
        .context(|| format!("read the functions of the schema {:?}", schema.name()))
}

/// The steps to take, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Plan {
    create_schema: bool,
    create_ledger: bool,
    add_breaking_column: bool,
    tables: Tables,
    create_view: bool,
    drop_interrupted: bool,
    complete_ledger: bool,
    correct_flags: bool,
    create_additions: bool,
    additions: Vec<&'static Addition>,
    install_functions: bool,
    indexes: Indexes,
    remove_rust_port: bool,
    /// Breaking migrations that running workers of older releases are notified of.
    announce: Vec<i32>,
    /// Warnings for the operator.
    warnings: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Tables {
    #[default]
    Keep,
    Create,
    MoveFrom(Layout),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Indexes {
    #[default]
    Keep,
    /// Together with the new tables.
    Create,
    /// On tables that are in use: after everything else, without blocking other sessions.
    BesideRunningWorkers,
}

impl Plan {
    /// The breaking steps. `None` if nothing was installed, because no worker can be running.
    fn breaking(&self, found: &Installation) -> Option<Breaking> {
        // Without our ledger, no worker of ours is running.
        let additions = self.additions.iter().filter(|addition| addition.breaking && found.additions.is_some());
        let breaking = Breaking {
            migrations: self.announce.clone(),
            additions: additions.map(|addition| addition.step).collect(),
            has_tables: found.layout == Layout::Current,
            workers_register: found.has_addition(WORKERS_STEP),
            has_additions: found.additions.is_some(),
        };
        let affects_workers = !breaking.migrations.is_empty() || !breaking.additions.is_empty();
        (found.level().is_some() && affects_workers).then_some(breaking)
    }

    /// The same, but also removes the Rust port's objects, if requested and if there are any. Fails if a worker of the port
    /// may be alive.
    fn removing_rust_port(mut self, purpose: Purpose, schema: &Schema, found: &Installation) -> Result<Plan, Error> {
        if let Some(port) = found.rust_port.as_ref().filter(|_| purpose.from_rust_port) {
            if let Some(because) = port.may_run_because() {
                let (schema, holds) = (schema.name().to_owned(), port.holds());
                return Err(Error::RustPortMayRun { schema, because, holds });
            }
            self.remove_rust_port = true;
            self.warnings.retain(|warning| !warning.starts_with(OF_RUST_PORT_WARNING));
        }
        Ok(self)
    }

    fn is_nothing(&self) -> bool {
        *self == Plan { warnings: self.warnings.clone(), ..Plan::default() }
    }
}

fn plan(schema: &Schema, found: &Installation) -> Result<Plan, Error> {
    if found.server_version < LOWEST_POSTGRES {
        let version = found.server_version;
        let found = format!("{}.{}", version / 10_000, version % 10_000);
        return Err(Error::ServerTooOld { found, lowest: LOWEST_POSTGRES / 10_000 });
    }
    if found.level().is_none() && matches!(found.layout, Layout::ByName | Layout::ById) {
        return Err(Error::SchemaOccupied { schema: schema.name().to_owned() });
    }
    let mut warnings = Vec::new();
    if let Some(port) = &found.rust_port {
        if let Some(running) = port.running(schema) {
            return Err(running);
        }
        let may_run = port.may_run_because().map(|because| format!("; its workers may be alive: {because}"));
        warnings.push(OF_RUST_PORT_WARNING.to_owned() + &may_run.unwrap_or_default());
    }
    let nodes = found.ledger.iter().flatten().filter(|step| !found.is_of_rust_port(step)).cloned();
    reject_unknown(schema, upgrade::NODE, Some(&nodes.collect::<Vec<_>>()), LEVEL, &mut warnings)?;
    reject_unknown(schema, upgrade::OURS, found.additions.as_deref(), last_addition(), &mut warnings)?;
    let is_unknown = |step: &&Step| step.id > last_addition() || step.id < -LEVEL;
    if let Some(wanted) = found.additions.iter().flatten().filter(|step| step.is_wanted).find(is_unknown) {
        return Err(upgrade::under_way(schema.name().to_owned(), wanted.id));
    }

    let known: Vec<i32> = found.ledger.iter().flatten().map(|step| step.id).collect();
    let missing: Vec<i32> = (1..=LEVEL).filter(|id| !known.contains(id)).collect();
    let wrong_flag = |step: &Step| step.id <= LEVEL && step.breaking != BREAKING.contains(&step.id);
    Ok(Plan {
        create_schema: !found.schema_exists,
        create_ledger: found.ledger.is_none(),
        add_breaking_column: found.ledger.is_some() && !found.ledger_has_breaking,
        tables: match found.layout {
            Layout::None => Tables::Create,
            Layout::Current => Tables::Keep,
            old => Tables::MoveFrom(old),
        },
        create_view: !found.view_exists,
        drop_interrupted: found.layout == Layout::Current && missing.contains(&18),
        complete_ledger: !missing.is_empty(),
        correct_flags: found.ledger.iter().flatten().any(wrong_flag),
        create_additions: found.additions.is_none(),
        additions: additions().filter(|addition| !found.has_addition(addition.step)).collect(),
        install_functions: functions_are_ours_to_install(found, &mut warnings),
        indexes: match found.layout {
            _ if found.has_addition(INDEXES_STEP) => Indexes::Keep,
            Layout::Current => Indexes::BesideRunningWorkers,
            _ => Indexes::Create,
        },
        remove_rust_port: false,
        // If nothing was installed, no worker is running here. The channel is shared by the whole database:
        // workers of other schemas would get the notification, too.
        announce: if known.is_empty() {
            Vec::new()
        } else {
            missing.into_iter().filter(|id| BREAKING.contains(id)).collect()
        },
        warnings,
    })
}

fn reject_unknown(
    schema: &Schema,
    author: &'static str,
    steps: Option<&[Step]>,
    known: i32,
    warnings: &mut Vec<String>,
) -> Result<(), Error> {
    let unknown = |breaking: bool| -> Vec<i32> {
        let steps = steps.iter().copied().flatten();
        steps
            .filter(|step| step.id > known && !step.is_wanted && step.breaking == breaking)
            .map(|step| step.id)
            .collect()
    };
    let (breaking, harmless) = (unknown(true), unknown(false));
    if !breaking.is_empty() {
        return Err(Error::SchemaTooNew { schema: schema.name().to_owned(), author, unknown: breaking, known });
    }
    if !harmless.is_empty() {
        warnings.push(format!(
            "a newer release of {author} has migrated the schema ({harmless:?}); no step is breaking, so this release continues"
        ));
    }
    Ok(())
}

/// Our functions are installed if they are missing, or if another program has replaced them. A newer release
/// of ours owns what it installed. If a newer release of Node's worker has changed the tables or signatures,
/// its own functions are kept.
fn functions_are_ours_to_install(found: &Installation, warnings: &mut Vec<String>) -> bool {
    let additions = || found.additions.iter().flatten();
    if additions().any(|step| step.id > last_addition() && !step.is_wanted) {
        return false;
    }
    let recorded = additions().find(|step| step.id == FUNCTIONS_STEP);
    if recorded.is_some_and(|step| step.checksum.is_some() && step.checksum == found.functions_checksum) {
        return false;
    }
    if !found.differences.is_empty() {
        warnings.push(format!(
            "the SQL functions were replaced, and ours do not match the tables ({}): using the existing ones",
            found.differences.join("; ")
        ));
        return false;
    }
    true
}

/// Applies the plan and returns what happened to existing jobs.
async fn apply(
    connection: &mut PgConnection,
    schema: &Schema,
    found: &Installation,
    plan: &Plan,
) -> Result<Moved, Error> {
    let mut moved = Moved::default();
    if plan.create_schema {
        create_schema(connection, schema, &found.role).await?;
    }
    if plan.create_ledger {
        run(connection, schema, files::LEDGER, "create the ledger").await?;
    }
    if plan.add_breaking_column {
        run(connection, schema, files::LEDGER_BREAKING_COLUMN, "extend the ledger").await?;
    }
    match plan.tables {
        Tables::Keep => {}
        Tables::Create => run(connection, schema, files::TABLES, "create the tables").await?,
        Tables::MoveFrom(layout) => moved.moved_jobs = move_jobs(connection, schema, found, layout).await?,
    }
    if plan.create_view {
        run(connection, schema, files::VIEW, "create the view").await?;
    }
    if plan.drop_interrupted {
        run(connection, schema, files::INTERRUPTED_MIGRATION, "remove the leftovers of an interrupted migration")
            .await?;
    }
    if plan.complete_ledger {
        run(connection, schema, files::LEDGER_ENTRIES, "complete the ledger").await?;
    }
    if plan.correct_flags {
        run(connection, schema, files::LEDGER_FLAGS, "correct the ledger").await?;
    }
    if plan.create_additions {
        run(connection, schema, files::ADDITIONS, "create our own ledger").await?;
    }
    for addition in &plan.additions {
        run(connection, schema, addition.file, addition.what).await?;
        record(connection, schema, addition.step, None, addition.breaking).await?;
    }
    if plan.install_functions {
        install_functions(connection, schema).await?;
    }
    if plan.indexes == Indexes::Create {
        for (_, file) in files::INDEXES {
            run(connection, schema, file, "create the indexes").await?;
        }
        describe_indexes(connection, schema).await?;
    }
    if plan.remove_rust_port {
        run(connection, schema, files::RUST_PORT_RETIREMENTS, "find the replaced jobs").await?;
        moved.released_jobs = sqlx::query(schema.sql(queries::RUST_PORT_FREE_JOBS))
            .execute(&mut *connection)
            .await
            .context(|| format!("release the jobs of the Rust port's workers in {:?}", schema.name()))?
            .rows_affected();
        run(connection, schema, files::RUST_PORT_REMOVED, "remove the Rust port's objects").await?;
        moved.removed_rust_port = true;
    }
    for id in &plan.announce {
        upgrade::announce(connection, schema, *id).await?;
    }
    if found.additions.is_some() && !plan.announce.is_empty() {
        sqlx::query(schema.sql(queries::DELETE_MIGRATION_REQUESTS))
            .persistent(false)
            .bind(&plan.announce)
            .execute(connection)
            .await
            .context(|| format!("complete our own ledger of {:?}", schema.name()))?;
    }
    Ok(moved)
}

async fn create_schema(connection: &mut PgConnection, schema: &Schema, role: &str) -> Result<(), Error> {
    match run(connection, schema, files::SCHEMA, "create the schema").await {
        Err(Error::Database { source, .. }) if is_permission_denied(&source) => {
            let statement =
                format!("create schema {} authorization {}", quote_identifier(schema.name()), quote_identifier(role));
            let (schema, role) = (schema.name().to_owned(), role.to_owned());
            Err(Error::MayNotCreateSchema { schema, role, statement, source })
        }
        result => result,
    }
}

fn is_permission_denied(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "42501")
}

/// Failing to build the indexes does not keep a worker from starting: without them, claims are only slower.
async fn build_indexes_beside_running_workers(
    connection: &mut PgConnection,
    schema: &Schema,
    way: &mut ConnectionKind,
) {
    // This takes a session lock and changes a session setting; a pooler would pass both on to the next
    // client.
    if !way.keeps_sessions(connection).await.unwrap_or(false) {
        return warn!(
            schema = schema.name(),
            "cannot build the indexes through a pooler; claims are slower. Run `graphile-worker migrate` with a \
             direct connection"
        );
    }
    match try_to_build_indexes(connection, schema).await {
        Ok(true) => {}
        Ok(false) => debug!(schema = schema.name(), "another session is building the indexes"),
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            warn!(
                schema = schema.name(),
                error, "could not build the indexes; claims are slower. The next start retries"
            );
        }
    }
}

/// Returns false if another session is building them.
async fn try_to_build_indexes(connection: &mut PgConnection, schema: &Schema) -> Result<bool, Error> {
    let context = || format!("build the indexes of {:?}", schema.name());
    let lock = sqlx::query_scalar(schema.sql(queries::LOCK_INDEXES)).persistent(false);
    let is_ours: bool = lock.fetch_one(&mut *connection).await.context(context)?;
    if !is_ours {
        return Ok(false);
    }
    // Without a timeout, this would wait for every forgotten open transaction.
    let before: String = sqlx::query_scalar("select pg_catalog.current_setting('lock_timeout')")
        .persistent(false)
        .fetch_one(&mut *connection)
        .await
        .context(context)?;
    let set_lock_timeout = "select pg_catalog.set_config('lock_timeout', $1, false)";
    let set = sqlx::query(set_lock_timeout).persistent(false).bind(INDEX_LOCK_TIMEOUT);
    set.execute(&mut *connection).await.context(context)?;
    let built = build_indexes(connection, schema).await;
    sqlx::query(set_lock_timeout).persistent(false).bind(before).execute(&mut *connection).await.context(context)?;
    let unlock = sqlx::query(schema.sql(queries::UNLOCK_INDEXES)).persistent(false);
    unlock.execute(connection).await.context(context)?;
    built.map(|()| true)
}

async fn build_indexes(connection: &mut PgConnection, schema: &Schema) -> Result<(), Error> {
    for (name, file) in files::INDEXES {
        let context = || format!("build the index {name} of {:?}", schema.name());
        let is_valid: Option<bool> = sqlx::query_scalar(schema.sql(queries::INDEX_IS_VALID))
            .persistent(false)
            .bind(name)
            .fetch_optional(&mut *connection)
            .await
            .context(context)?;
        if is_valid == Some(true) {
            continue;
        }
        if is_valid == Some(false) {
            let index = format!("{}.{name}", quote_identifier(schema.name()));
            let drop = AssertSqlSafe(format!("drop index concurrently if exists {index}"));
            sqlx::raw_sql(drop).execute(&mut *connection).await.context(context)?;
        }
        sqlx::raw_sql(schema.sql_concurrently(file)).execute(&mut *connection).await.context(context)?;
    }
    for name in files::REPLACED_INDEXES {
        let index = format!("{}.{name}", quote_identifier(schema.name()));
        let drop = AssertSqlSafe(format!("drop index concurrently if exists {index}"));
        let context = || format!("drop the index {name} of {:?}", schema.name());
        sqlx::raw_sql(drop).execute(&mut *connection).await.context(context)?;
    }
    describe_indexes(connection, schema).await
}

async fn describe_indexes(connection: &mut PgConnection, schema: &Schema) -> Result<(), Error> {
    run(connection, schema, files::INDEX_COMMENTS, "describe the indexes").await?;
    for step in [EARLIER_INDEXES_STEP, INDEXES_STEP] {
        record(connection, schema, step, None, false).await?;
    }
    Ok(())
}

async fn run(connection: &mut PgConnection, schema: &Schema, file: &'static str, what: &str) -> Result<(), Error> {
    sqlx::raw_sql(schema.sql(file))
        .execute(connection)
        .await
        .map(|_| ())
        .context(|| format!("{what} of {:?}", schema.name()))
}

/// Moves the jobs of an old release into new tables. Fails while a worker of that release holds jobs: it
/// would finish them in tables that no longer exist.
async fn move_jobs(
    connection: &mut PgConnection,
    schema: &Schema,
    found: &Installation,
    layout: Layout,
) -> Result<u64, Error> {
    let context = || format!("move the jobs of {:?}", schema.name());
    run(connection, schema, files::OLD_LAYOUT_RENAME, "rename the old tables").await?;
    let locks = sqlx::query(schema.sql(queries::OLD_LAYOUT_LOCKS))
        .persistent(false)
        .fetch_one(&mut *connection)
        .await
        .context(context)?;
    let held: i64 = locks.try_get("held").context(context)?;
    if held > 0 {
        return Err(Error::JobsRunning {
            schema: schema.name().to_owned(),
            level: found.level().unwrap_or(0),
            held,
            workers: locks.try_get("workers").context(context)?,
        });
    }
    let reader = if layout == Layout::ByName { files::OLD_LAYOUT_BY_NAME } else { files::OLD_LAYOUT_BY_ID };
    run(connection, schema, reader, "read the old tables").await?;
    run(connection, schema, files::TABLES, "create the tables").await?;
    run(connection, schema, files::OLD_LAYOUT_COPY, "move the jobs").await?;
    let moved: i64 = sqlx::query_scalar(schema.sql(queries::COUNT_JOBS))
        .persistent(false)
        .fetch_one(connection)
        .await
        .context(context)?;
    Ok(moved.unsigned_abs())
}

async fn install_functions(connection: &mut PgConnection, schema: &Schema) -> Result<(), Error> {
    run(connection, schema, files::FUNCTIONS, "install the functions").await?;
    run(connection, schema, files::RECOVERY_FUNCTIONS, "install the functions of recovery").await?;
    run(connection, schema, files::ROLE_FUNCTIONS, "install the functions for roles").await?;
    run(connection, schema, files::CANCELLATION_FUNCTIONS, "install the functions of cancellations").await?;
    run(connection, schema, files::EXPIRY_FUNCTIONS, "install the functions of expiries").await?;
    run(connection, schema, files::DEBOUNCE_FUNCTIONS, "install the functions of debounce and throttle").await?;
    run(connection, schema, files::LIMIT_FUNCTIONS, "install the functions of limits").await?;
    run(connection, schema, files::LIMITED_EXCHANGE_FUNCTIONS, "install the functions of claims under limits").await?;
    run(connection, schema, files::LIMIT_OUTCOME_FUNCTIONS, "install the functions of outcomes under limits").await?;
    run(connection, schema, files::REPLACE_FUNCTIONS, "install the functions of replacing").await?;
    run(connection, schema, files::COMMENTS, "describe the tables and functions").await?;
    let checksum = functions_checksum(connection, schema).await?;
    record(connection, schema, FUNCTIONS_STEP, checksum, false).await
}

async fn record(
    connection: &mut PgConnection,
    schema: &Schema,
    step: i32,
    checksum: Option<String>,
    breaking: bool,
) -> Result<(), Error> {
    sqlx::query(schema.sql(queries::RECORD_ADDITION))
        .persistent(false)
        .bind(step)
        .bind(checksum)
        .bind(breaking)
        .execute(connection)
        .await
        .map(|_| ())
        .context(|| format!("record step {step} of {:?}", schema.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graphile_worker() -> Schema {
        Schema::new("graphile_worker").expect("a valid name")
    }

    fn ledger(ids: impl IntoIterator<Item = i32>) -> Option<Vec<Step>> {
        Some(
            ids.into_iter()
                .map(|id| Step { id, breaking: BREAKING.contains(&id), checksum: None, is_wanted: false })
                .collect(),
        )
    }

    fn applied(id: i32, breaking: bool) -> Step {
        Step { id, breaking, checksum: None, is_wanted: false }
    }

    fn functions(checksum: &str) -> Option<Vec<Step>> {
        let functions = Step { checksum: Some(checksum.to_owned()), ..applied(FUNCTIONS_STEP, false) };
        let others = additions().map(|addition| applied(addition.step, addition.breaking));
        Some([functions, applied(INDEXES_STEP, false)].into_iter().chain(others).collect())
    }

    fn up_to_date() -> Installation {
        Installation {
            server_version: 150_018,
            role: "app".to_owned(),
            read_only: None,
            schema_exists: true,
            ledger: ledger(1..=20),
            ledger_has_breaking: true,
            ledger_can_be_locked: true,
            layout: Layout::Current,
            view_exists: true,
            additions: functions("ours"),
            rust_port: None,
            functions_checksum: Some("ours".to_owned()),
            differences: Vec::new(),
        }
    }

    fn planned(found: &Installation) -> Plan {
        plan(&graphile_worker(), found).expect("a plan")
    }

    fn rejection(found: &Installation) -> String {
        plan(&graphile_worker(), found).expect_err("an error").to_string()
    }

    #[test]
    fn an_empty_database_gets_everything_and_no_notification_is_sent() {
        let found = Installation { server_version: LOWEST_POSTGRES, ..Installation::default() };
        let everything = Plan {
            create_schema: true,
            create_ledger: true,
            tables: Tables::Create,
            create_view: true,
            complete_ledger: true,
            create_additions: true,
            additions: additions().collect(),
            install_functions: true,
            indexes: Indexes::Create,
            ..Plan::default()
        };
        assert_eq!(planned(&found), everything);
    }

    #[test]
    fn an_up_to_date_schema_is_not_changed() {
        assert!(planned(&up_to_date()).is_nothing());
    }

    #[test]
    fn a_server_below_the_lowest_version_is_rejected() {
        let found = Installation { server_version: 110_022, ..Installation::default() };
        assert_eq!(rejection(&found), "PostgreSQL 11.22 is not supported: version 12 or later is required");
    }

    #[test]
    fn old_layouts_are_moved_and_their_breaking_steps_announced() {
        let found = Installation {
            ledger: ledger(1..=10),
            ledger_has_breaking: false,
            layout: Layout::ByName,
            view_exists: false,
            additions: None,
            ..up_to_date()
        };
        let plan = planned(&found);
        assert_eq!(plan.tables, Tables::MoveFrom(Layout::ByName));
        assert!(plan.add_breaking_column && plan.complete_ledger);
        assert_eq!(plan.announce, [11, 13, 14, 16, 19]);
    }

    #[test]
    fn replaced_functions_are_installed_again() {
        let found = Installation { functions_checksum: Some("theirs".to_owned()), ..up_to_date() };
        assert_eq!(planned(&found), Plan { install_functions: true, ..Plan::default() });
    }

    #[test]
    fn functions_of_a_newer_release_of_ours_are_kept() {
        let mut found = Installation { functions_checksum: Some("newer".to_owned()), ..up_to_date() };
        found.additions.as_mut().expect("a ledger").push(applied(last_addition() + 1, false));
        assert!(planned(&found).is_nothing());
    }

    #[test]
    fn functions_on_unknown_tables_are_kept() {
        let found = Installation {
            ledger: ledger(1..=21),
            functions_checksum: Some("theirs".to_owned()),
            differences: vec!["_private_jobs has no column priority:int2".to_owned()],
            ..up_to_date()
        };
        let plan = planned(&found);
        assert!(plan.is_nothing());
        assert!(plan.warnings[0].contains("a newer release of Node's graphile-worker has migrated the schema ([21])"));
        assert!(plan.warnings[1].contains("_private_jobs has no column priority:int2"));
    }

    #[test]
    fn an_unknown_breaking_migration_is_rejected_and_named() {
        let mut found = up_to_date();
        found.ledger.as_mut().expect("a ledger").extend([applied(21, false), applied(22, true)]);
        assert_eq!(
            rejection(&found),
            "schema \"graphile_worker\" has the breaking migration 22 of Node's graphile-worker; this release \
             supports migrations up to 20: upgrade graphile_worker"
        );
    }

    #[test]
    fn an_unknown_breaking_addition_of_ours_is_rejected() {
        let mut found = up_to_date();
        found.additions.as_mut().expect("a ledger").push(applied(last_addition() + 1, true));
        assert!(rejection(&found).contains("of graphile_worker for Rust"));
    }

    #[test]
    fn an_older_release_does_not_start_while_a_newer_one_waits_for_a_breaking_step() {
        let mut found = up_to_date();
        let wanted = Step { is_wanted: true, ..applied(last_addition() + 1, true) };
        found.additions.as_mut().expect("a ledger").push(wanted);
        assert!(rejection(&found).contains("a newer release is about to migrate schema"));
    }

    #[test]
    fn an_older_release_does_not_start_while_a_newer_one_waits_for_a_breaking_migration_of_nodes() {
        let wanted = |id: i32| {
            let mut found = up_to_date();
            found.additions.as_mut().expect("a ledger").push(Step { is_wanted: true, ..applied(-id, true) });
            found
        };
        assert!(rejection(&wanted(LEVEL + 1)).contains("(step 21 of Node's graphile-worker; this release"));
        assert!(planned(&wanted(LEVEL)).is_nothing(), "a known step does not keep a worker from starting");
    }

    #[test]
    fn indexes_of_tables_in_use_are_built_without_blocking_workers() {
        let found = Installation { additions: None, ..up_to_date() };
        assert_eq!(planned(&found).indexes, Indexes::BesideRunningWorkers);
    }

    #[test]
    fn a_worker_of_the_port_may_be_alive_by_its_sessions_and_its_locks() {
        let holding = |age: u64| RustPort {
            jobs: 12,
            job_ids: (1..=10).collect(),
            holders: vec!["a".to_owned(), "b".to_owned()],
            newest_lock: Some(Duration::from_secs(age)),
            ..RustPort::default()
        };
        assert_eq!(RustPort::default().may_run_because(), None);
        assert_eq!(holding(300).may_run_because(), None);
        assert_eq!(holding(300).holds(), "a, b hold 12 jobs: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …");
        let because = |port: RustPort| port.may_run_because().unwrap_or_default();
        assert_eq!(because(holding(299)), "they claimed a job 4m 59s ago, less than 5 minutes");
        assert!(because(RustPort { hidden_sessions: 3, ..holding(300) }).starts_with("3 sessions of other roles"));
        assert_eq!(RustPort { hidden_sessions: 3, ..RustPort::default() }.may_run_because(), None, "nothing to lose");
        let idle = RustPort { sessions: vec![7, 8], ..RustPort::default() };
        assert_eq!(idle.holds(), "they hold no jobs");
        assert_eq!(because(idle), "sessions that look like theirs are connected (server processes 7, 8)");
    }

    #[test]
    fn wrong_flags_in_the_ledger_are_corrected() {
        let mut found = up_to_date();
        for step in found.ledger.iter_mut().flatten() {
            step.breaking = false;
        }
        assert_eq!(planned(&found), Plan { correct_flags: true, ..Plan::default() });
    }
}
