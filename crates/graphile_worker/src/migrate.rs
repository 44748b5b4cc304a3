//! Migrating: from whatever is in the database to what this release works with.
//!
//! `look` reads what is there, `plan` decides (pure), `apply` does it in one transaction. The ledger
//! `migrations` belongs to Node's worker and holds exactly its ids; what is ours is recorded in
//! `_rs_additions`. A database that is up to date is looked at and left alone: nothing is locked. Before a step that
//! older workers must not work with, they are asked to finish: see `upgrade`.

use crate::Error;
use crate::db::{Schema, queries, quote_identifier, schema};
use crate::error::Doing;
use crate::upgrade::{self, Breaking, Request};
use sqlx::postgres::PgRow;
use sqlx::{Acquire, AssertSqlSafe, Connection, PgConnection, Postgres, Row};
use std::fmt;
use std::time::Duration;
use tracing::{debug, info, warn};

/// PostgreSQL 12 is the first with stored generated columns, which the contract's tables have.
pub(crate) const LOWEST_POSTGRES: i32 = 120_000;

/// The level of Node's ledger that the contract describes: Node 0.18's.
pub(crate) const LEVEL: i32 = 20;

/// Those of Node's migrations that an older worker must not work with.
const BREAKING: [i32; 7] = [1, 3, 11, 13, 14, 16, 19];

/// The step of our own ledger that installs the SQL functions. A release that changes them gives them
/// the next free number, so that an older release knows to leave them alone.
const FUNCTIONS_STEP: i32 = 6;

/// The step of our own ledger that makes the indexes.
const INDEXES_STEP: i32 = 2;

/// The step that makes the tables of recovery, by which live workers are known.
const WORKERS_STEP: i32 = 5;

/// A step of our own ledger that is nothing but an SQL file.
#[derive(Debug, PartialEq, Eq)]
struct Addition {
    step: i32,
    /// Whether workers of older releases must not work with what it makes. They are asked to finish first.
    breaking: bool,
    file: &'static str,
    what: &'static str,
}

const ADDITIONS: &[Addition] = &[
    Addition { step: 3, breaking: false, file: schema::TABLE_CARE, what: "tell vacuum how to treat the tables" },
    Addition { step: 4, breaking: false, file: schema::CRONTAB_ITEMS, what: "create the table of crontab items" },
    Addition { step: WORKERS_STEP, breaking: false, file: schema::WORKERS, what: "create the tables of recovery" },
    Addition { step: 6, breaking: false, file: schema::USED_NAMES, what: "protect the names that jobs use" },
];

/// A breaking step more, for the tests of live upgrades: in a program that is built for it, and started for it.
#[cfg(feature = "_next_release")]
const NEXT_RELEASE: Addition =
    Addition { step: 1000, breaking: true, file: schema::NEXT_RELEASE, what: "take the next release's step" };

/// The steps of our own ledger that are SQL files, in their order.
fn additions() -> impl Iterator<Item = &'static Addition> {
    #[cfg(feature = "_next_release")]
    let next_release = std::env::var_os("GW_TEST_NEXT_RELEASE").map(|_| &NEXT_RELEASE);
    #[cfg(not(feature = "_next_release"))]
    let next_release = None;
    ADDITIONS.iter().chain(next_release)
}

/// The highest step of our own ledger that this release knows.
pub(crate) fn last_addition() -> i32 {
    additions().map(|addition| addition.step).max().unwrap_or(0)
}

/// How often a migration is tried when another program changes the schema at the same moment.
const ATTEMPTS: u32 = 10;

/// How long the building of an index waits for transactions that were there before it.
const INDEX_LOCK_TIMEOUT: &str = "60s";

/// What [`migrate`] found and did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migration {
    /// The schema.
    pub schema: String,
    /// The level it was at, or `None` where nothing was installed.
    pub from: Option<i32>,
    /// The level it is at.
    pub level: i32,
    /// Whether anything was changed.
    pub changed: bool,
    /// Jobs that were moved from an older release's tables.
    pub moved_jobs: u64,
}

impl fmt::Display for Migration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Migration { schema, from, level, changed, moved_jobs } = self;
        match (from, changed) {
            (_, false) => write!(f, "schema {schema:?} is up to date at level {level}"),
            (None, true) => write!(f, "schema {schema:?} installed at level {level}"),
            (Some(from), true) if from == level => write!(f, "schema {schema:?} updated at level {level}"),
            (Some(from), true) => {
                write!(f, "schema {schema:?} updated from level {from} to level {level}")?;
                if *moved_jobs > 0 {
                    write!(f, ", {} kept", crate::adding::counted(*moved_jobs as usize))
                } else {
                    Ok(())
                }
            }
        }
    }
}

/// Installs the schema, or brings what is there up to date; safe to call at every start and from many
/// processes at once. Not inside a transaction of your own.
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
    migrate_within(upgrade::LONGEST_WAIT, database, schema).await
}

/// The same, but waits at most so long for workers of older releases to finish, where there is a step that they must
/// not work with ([`migrate`]: 10 minutes). After that it is taken all the same, unless jobs would be lost by it.
pub async fn migrate_within<'c>(
    longest_wait: Duration,
    database: impl Acquire<'c, Database = Postgres>,
    schema: impl AsRef<str>,
) -> Result<Migration, Error> {
    let schema = Schema::new(schema.as_ref())?;
    let mut connection = database.acquire().await.doing(|| "connect to the database".to_owned())?;
    let mut request = Request::new(longest_wait);
    let mut attempt = 1;
    loop {
        match migrate_once(&mut connection, &schema, &mut request).await {
            Err(error) if attempt < ATTEMPTS && somebody_else_was_at_it(&error) => {
                tokio::time::sleep(Duration::from_millis(20) * attempt).await;
                attempt += 1;
            }
            Err(Error::JobsRunning { workers, .. }) if request.waits_for(&workers) => {
                tokio::time::sleep(upgrade::LOOK_INTERVAL).await;
            }
            // Then everything is looked at again: somebody else may have been faster.
            Ok(None) => tokio::time::sleep(upgrade::LOOK_INTERVAL).await,
            Ok(Some(migration)) => return Ok(migration),
            Err(error) => return Err(error),
        }
    }
}

/// What is installed, for whoever only wants to know.
pub(crate) struct Examined {
    pub(crate) installed: bool,
    /// Of Node's ledger.
    pub(crate) level: Option<i32>,
    /// Of our own.
    pub(crate) addition: Option<i32>,
    pub(crate) functions_are_ours: bool,
    /// Whether [`migrate`] would change anything, or why it would refuse to.
    pub(crate) is_up_to_date: Result<bool, Error>,
}

/// Looks at the schema, and leaves it alone.
pub(crate) async fn examine(connection: &mut PgConnection, schema: &Schema) -> Result<Examined, Error> {
    let found = look(connection, schema).await?;
    let recorded = found.additions.iter().flatten().find(|step| step.id == FUNCTIONS_STEP);
    Ok(Examined {
        installed: found.layout != Layout::None,
        level: found.level(),
        addition: found.additions.iter().flatten().map(|step| step.id).max(),
        functions_are_ours: recorded
            .is_some_and(|step| step.checksum.is_some() && step.checksum == found.functions_checksum),
        is_up_to_date: plan(schema, &found).map(|plan| plan.is_nothing()),
    })
}

/// Nothing where older workers have to finish first.
async fn migrate_once(
    connection: &mut PgConnection,
    schema: &Schema,
    request: &mut Request,
) -> Result<Option<Migration>, Error> {
    let found = look(connection, schema).await?;
    let planned = plan(schema, &found)?;
    if planned.is_nothing() {
        warn_of(&planned, schema);
        return Ok(Some(report(schema, &found, false, 0)));
    }
    if let Some(breaking) = planned.breaking(&found)
        && !request.is_granted(connection, schema, &breaking).await?
    {
        return Ok(None);
    }

    let doing = || format!("migrate the schema {:?}", schema.name());
    // Read committed, whatever the database's default: what we read after waiting for the lock must be
    // what the one before us has left.
    let mut transaction = connection.begin_with("begin isolation level read committed").await.doing(doing)?;
    sqlx::query("select pg_advisory_xact_lock(hashtextextended('graphile_worker migrate ' || $1, 0))")
        .bind(schema.name())
        .execute(&mut *transaction)
        .await
        .doing(doing)?;
    if found.ledger_can_be_locked {
        // Node takes no advisory lock, but begins each of its steps with an insert into the ledger.
        run(&mut transaction, schema, queries::LOCK_LEDGER, "lock the ledger").await?;
    }
    let found = look(&mut transaction, schema).await?;
    let planned = plan(schema, &found)?;
    let moved_jobs = apply(&mut transaction, schema, &found, &planned).await?;
    transaction.commit().await.doing(doing)?;
    if planned.indexes == Indexes::BesideRunningWorkers {
        build_indexes_beside_running_workers(connection, schema).await;
    }

    warn_of(&planned, schema);
    let migration = report(schema, &found, !planned.is_nothing(), moved_jobs);
    info!(schema = schema.name(), from = migration.from, level = migration.level, moved_jobs, "schema migrated");
    Ok(Some(migration))
}

fn warn_of(plan: &Plan, schema: &Schema) {
    for warning in &plan.warnings {
        warn!(schema = schema.name(), "{warning}");
    }
}

fn report(schema: &Schema, found: &Installation, changed: bool, moved_jobs: u64) -> Migration {
    let level = found.level().unwrap_or(0).max(LEVEL);
    Migration { schema: schema.name().to_owned(), from: found.level(), level, changed, moved_jobs }
}

/// Another installer, ours or Node's, made the same object first: look again.
fn somebody_else_was_at_it(error: &Error) -> bool {
    let Error::Database { source: sqlx::Error::Database(error), .. } = error else {
        return false;
    };
    // What we were about to make is there (unique violation, duplicate schema, table, object, column), what we
    // were about to use is gone (undefined table, column, object, function, wrong object type), deadlock,
    // serialization failure, lock timeout, and "tuple concurrently updated", which has no code of its own.
    let code = error.code().unwrap_or_default();
    [
        "23505", "42P06", "42P07", "42710", "42701", "42P01", "42703", "42704", "42883", "42809", "40P01", "40001",
        "55P03",
    ]
    .contains(&code.as_ref())
        || error.message().contains("concurrently updated")
}

/// What is in the database.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Installation {
    server_version: i32,
    role: String,
    schema_exists: bool,
    /// Node's ledger, if there is one.
    ledger: Option<Vec<Step>>,
    ledger_has_breaking: bool,
    ledger_can_be_locked: bool,
    layout: Layout,
    /// Since level 17.
    view_exists: bool,
    /// Our own ledger, if there is one.
    additions: Option<Vec<Step>>,
    functions_checksum: Option<String>,
    /// In what the tables and functions differ from the contract. Looked at only where a newer release
    /// of Node's worker has been here.
    differences: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Step {
    id: i32,
    breaking: bool,
    checksum: Option<String>,
    /// Not taken yet: a newer release waits to take it.
    is_wanted: bool,
}

/// The shape of the tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Layout {
    #[default]
    None,
    /// Levels 1 to 10: a job names its task and queue.
    ByName,
    /// Levels 11 to 15: a job points at them, in tables with other names.
    ById,
    /// Since level 16.
    Current,
}

impl Installation {
    fn level(&self) -> Option<i32> {
        self.ledger.iter().flatten().map(|step| step.id).max()
    }

    fn has_addition(&self, id: i32) -> bool {
        self.additions.iter().flatten().any(|step| step.id == id && !step.is_wanted)
    }

    fn unknown(&self) -> impl Iterator<Item = &Step> {
        self.ledger.iter().flatten().filter(|step| step.id > LEVEL)
    }
}

async fn look(connection: &mut PgConnection, schema: &Schema) -> Result<Installation, Error> {
    let doing = || format!("look at the schema {:?}", schema.name());
    // Every start of a worker looks: `raw_sql` needs one round trip where a prepared statement needs two.
    let row = sqlx::raw_sql(schema.sql(queries::INSTALLATION)).fetch_one(&mut *connection).await.doing(doing)?;
    let is = |column: &str| row.try_get::<bool, _>(column).doing(doing);
    let mut found = Installation {
        server_version: row.try_get("server_version").doing(doing)?,
        role: row.try_get("role").doing(doing)?,
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
        let rows = sqlx::raw_sql(schema.sql(queries::LEDGER)).fetch_all(&mut *connection).await.doing(doing)?;
        found.ledger = Some(rows.iter().map(|row| step(row, None, false)).collect::<sqlx::Result<_>>().doing(doing)?);
    }
    if is("additions_exist")? {
        let rows = sqlx::raw_sql(schema.sql(queries::ADDITIONS)).fetch_all(&mut *connection).await.doing(doing)?;
        let steps = rows.iter().map(|row| step(row, row.try_get("checksum")?, row.try_get("is_wanted")?));
        found.additions = Some(steps.collect::<sqlx::Result<_>>().doing(doing)?);
    }
    found.functions_checksum = functions_checksum(connection, schema).await?;
    if found.unknown().next().is_some() {
        found.differences = sqlx::query_scalar(schema.sql(queries::CONTRACT_DIFFERENCES))
            .fetch_all(&mut *connection)
            .await
            .doing(doing)?;
    }
    Ok(found)
}

fn step(row: &PgRow, checksum: Option<String>, is_wanted: bool) -> sqlx::Result<Step> {
    Ok(Step { id: row.try_get("id")?, breaking: row.try_get("breaking")?, checksum, is_wanted })
}

async fn functions_checksum(connection: &mut PgConnection, schema: &Schema) -> Result<Option<String>, Error> {
    sqlx::raw_sql(schema.sql(queries::FUNCTIONS_CHECKSUM))
        .fetch_one(connection)
        .await
        .and_then(|row| row.try_get(0))
        .doing(|| format!("look at the functions of the schema {:?}", schema.name()))
}

/// What is to be done, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Plan {
    create_schema: bool,
    create_ledger: bool,
    add_breaking_column: bool,
    tables: Tables,
    create_view: bool,
    drop_leftovers: bool,
    complete_ledger: bool,
    correct_flags: bool,
    create_additions: bool,
    additions: Vec<&'static Addition>,
    install_functions: bool,
    indexes: Indexes,
    /// Breaking steps that running workers of older releases are told about.
    announce: Vec<i32>,
    /// What the operator should know; nothing to be done about it here.
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
    /// With the tables, which are new.
    Create,
    /// On tables that are in use: after everything else, and without locking anybody out.
    BesideRunningWorkers,
}

impl Plan {
    /// What older workers must not work with. Where nothing was installed nobody works.
    fn breaking(&self, found: &Installation) -> Option<Breaking> {
        // Without our ledger, nobody of ours works here.
        let additions = self.additions.iter().filter(|addition| addition.breaking && found.additions.is_some());
        let breaking = Breaking {
            migrations: self.announce.clone(),
            additions: additions.map(|addition| addition.step).collect(),
            has_tables: found.layout == Layout::Current,
            workers_register: found.has_addition(WORKERS_STEP),
            has_additions: found.additions.is_some(),
        };
        let concerns_somebody = !breaking.migrations.is_empty() || !breaking.additions.is_empty();
        (found.level().is_some() && concerns_somebody).then_some(breaking)
    }

    fn is_nothing(&self) -> bool {
        *self == Plan { warnings: self.warnings.clone(), ..Plan::default() }
    }
}

fn plan(schema: &Schema, found: &Installation) -> Result<Plan, Error> {
    if found.server_version < LOWEST_POSTGRES {
        let version = found.server_version;
        return Err(Error::ServerTooOld { found: format!("{}.{}", version / 10_000, version % 10_000) });
    }
    if found.level().is_none() && matches!(found.layout, Layout::ByName | Layout::ById) {
        return Err(Error::SchemaOccupied { schema: schema.name().to_owned() });
    }
    let mut warnings = Vec::new();
    refuse_unknown(schema, upgrade::NODE, found.ledger.as_deref(), LEVEL, &mut warnings)?;
    refuse_unknown(schema, upgrade::OURS, found.additions.as_deref(), last_addition(), &mut warnings)?;
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
        drop_leftovers: found.layout == Layout::Current && missing.contains(&18),
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
        // Where nothing was installed nobody works here; the channel is the whole database's, and workers
        // of other schemas would take it personally.
        announce: if known.is_empty() {
            Vec::new()
        } else {
            missing.into_iter().filter(|id| BREAKING.contains(id)).collect()
        },
        warnings,
    })
}

fn refuse_unknown(
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
            "a newer release of {author} has migrated the schema ({harmless:?}); nothing in that is marked as breaking, so this release goes on"
        ));
    }
    Ok(())
}

/// Ours are installed where they are missing or where another program has replaced them since we did.
/// A newer release of ours owns what it installed; a newer release of Node's worker that changed the
/// tables or signatures is left to its own functions.
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
            "the SQL functions are not ours, and ours would not fit ({}): working with what is there",
            found.differences.join("; ")
        ));
        return false;
    }
    true
}

/// Carries the plan out and says how many jobs were moved.
async fn apply(
    connection: &mut PgConnection,
    schema: &Schema,
    found: &Installation,
    plan: &Plan,
) -> Result<u64, Error> {
    let mut moved_jobs = 0;
    if plan.create_schema {
        create_schema(connection, schema, &found.role).await?;
    }
    if plan.create_ledger {
        run(connection, schema, schema::LEDGER, "create the ledger").await?;
    }
    if plan.add_breaking_column {
        run(connection, schema, schema::LEDGER_BREAKING_COLUMN, "extend the ledger").await?;
    }
    match plan.tables {
        Tables::Keep => {}
        Tables::Create => run(connection, schema, schema::TABLES, "create the tables").await?,
        Tables::MoveFrom(layout) => moved_jobs = move_jobs(connection, schema, found, layout).await?,
    }
    if plan.create_view {
        run(connection, schema, schema::VIEW, "create the view").await?;
    }
    if plan.drop_leftovers {
        run(connection, schema, schema::LEFTOVERS, "clear up the leftovers").await?;
    }
    if plan.complete_ledger {
        run(connection, schema, schema::LEDGER_ENTRIES, "complete the ledger").await?;
    }
    if plan.correct_flags {
        run(connection, schema, schema::LEDGER_FLAGS, "correct the ledger").await?;
    }
    if plan.create_additions {
        run(connection, schema, schema::ADDITIONS, "create our own ledger").await?;
    }
    for addition in &plan.additions {
        run(connection, schema, addition.file, addition.what).await?;
        record(connection, schema, addition.step, None, addition.breaking).await?;
    }
    if plan.install_functions {
        install_functions(connection, schema).await?;
    }
    if plan.indexes == Indexes::Create {
        for (_, file) in schema::INDEXES {
            run(connection, schema, file, "create the indexes").await?;
        }
        record(connection, schema, INDEXES_STEP, None, false).await?;
    }
    for id in &plan.announce {
        upgrade::announce(connection, schema, *id).await?;
    }
    if found.additions.is_some() && !plan.announce.is_empty() {
        sqlx::query(schema.sql(queries::FORGET_WANTED_MIGRATIONS))
            .bind(&plan.announce)
            .execute(connection)
            .await
            .doing(|| format!("complete our own ledger of {:?}", schema.name()))?;
    }
    Ok(moved_jobs)
}

async fn create_schema(connection: &mut PgConnection, schema: &Schema, role: &str) -> Result<(), Error> {
    match run(connection, schema, schema::SCHEMA, "create the schema").await {
        Err(Error::Database { source, .. }) if is_permission_denied(&source) => {
            Err(Error::MayNotCreateSchema { schema: schema.name().to_owned(), role: role.to_owned(), source })
        }
        result => result,
    }
}

fn is_permission_denied(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "42501")
}

/// Claims are only slower without them, so that nothing here keeps a worker from starting.
async fn build_indexes_beside_running_workers(connection: &mut PgConnection, schema: &Schema) {
    match try_to_build_indexes(connection, schema).await {
        Ok(true) => {}
        Ok(false) => debug!(schema = schema.name(), "somebody else is building the indexes"),
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            warn!(
                schema = schema.name(),
                error, "cannot build the indexes: claiming jobs is slower; the next start tries again"
            );
        }
    }
}

/// False where somebody else is at it.
async fn try_to_build_indexes(connection: &mut PgConnection, schema: &Schema) -> Result<bool, Error> {
    let doing = || format!("build the indexes of {:?}", schema.name());
    let lock = |function: &str| {
        AssertSqlSafe(format!("select {function}(hashtextextended('graphile_worker indexes ' || $1, 0))"))
    };
    let is_ours: bool = sqlx::query_scalar(lock("pg_try_advisory_lock"))
        .bind(schema.name())
        .fetch_one(&mut *connection)
        .await
        .doing(doing)?;
    if !is_ours {
        return Ok(false);
    }
    // A transaction that somebody has forgotten to end would be waited for.
    let before: String =
        sqlx::query_scalar("select current_setting('lock_timeout')").fetch_one(&mut *connection).await.doing(doing)?;
    let set_lock_timeout = "select set_config('lock_timeout', $1, false)";
    sqlx::query(set_lock_timeout).bind(INDEX_LOCK_TIMEOUT).execute(&mut *connection).await.doing(doing)?;
    let built = build_indexes(connection, schema).await;
    sqlx::query(set_lock_timeout).bind(before).execute(&mut *connection).await.doing(doing)?;
    sqlx::query(lock("pg_advisory_unlock")).bind(schema.name()).execute(connection).await.doing(doing)?;
    built.map(|()| true)
}

async fn build_indexes(connection: &mut PgConnection, schema: &Schema) -> Result<(), Error> {
    for (name, file) in schema::INDEXES {
        let doing = || format!("build the index {name} of {:?}", schema.name());
        let is_valid: Option<bool> = sqlx::query_scalar(schema.sql(queries::INDEX_IS_VALID))
            .bind(name)
            .fetch_optional(&mut *connection)
            .await
            .doing(doing)?;
        if is_valid == Some(true) {
            continue;
        }
        if is_valid == Some(false) {
            let index = format!("{}.{name}", quote_identifier(schema.name()));
            let drop = AssertSqlSafe(format!("drop index concurrently if exists {index}"));
            sqlx::raw_sql(drop).execute(&mut *connection).await.doing(doing)?;
        }
        sqlx::raw_sql(schema.sql_concurrently(file)).execute(&mut *connection).await.doing(doing)?;
    }
    record(connection, schema, INDEXES_STEP, None, false).await
}

async fn run(connection: &mut PgConnection, schema: &Schema, file: &'static str, what: &str) -> Result<(), Error> {
    sqlx::raw_sql(schema.sql(file))
        .execute(connection)
        .await
        .map(|_| ())
        .doing(|| format!("{what} of {:?}", schema.name()))
}

/// Brings the jobs of an old release into new tables. Refuses while a worker of that release holds any:
/// it would finish them in tables that are no more.
async fn move_jobs(
    connection: &mut PgConnection,
    schema: &Schema,
    found: &Installation,
    layout: Layout,
) -> Result<u64, Error> {
    let doing = || format!("move the jobs of {:?}", schema.name());
    run(connection, schema, schema::OLD_LAYOUT_SET_ASIDE, "set aside the old tables").await?;
    let locks = sqlx::query(schema.sql(queries::OLD_LAYOUT_LOCKS)).fetch_one(&mut *connection).await.doing(doing)?;
    let held: i64 = locks.try_get("held").doing(doing)?;
    if held > 0 {
        return Err(Error::JobsRunning {
            schema: schema.name().to_owned(),
            level: found.level().unwrap_or(0),
            held,
            workers: locks.try_get("workers").doing(doing)?,
        });
    }
    let reader = if layout == Layout::ByName { schema::OLD_LAYOUT_BY_NAME } else { schema::OLD_LAYOUT_BY_ID };
    run(connection, schema, reader, "read the old tables").await?;
    run(connection, schema, schema::TABLES, "create the tables").await?;
    run(connection, schema, schema::OLD_LAYOUT_BRING_IN, "move the jobs").await?;
    let moved: i64 = sqlx::query_scalar(schema.sql(queries::COUNT_JOBS)).fetch_one(connection).await.doing(doing)?;
    Ok(moved.unsigned_abs())
}

async fn install_functions(connection: &mut PgConnection, schema: &Schema) -> Result<(), Error> {
    run(connection, schema, schema::FUNCTIONS, "install the functions").await?;
    run(connection, schema, schema::RECOVERY_FUNCTIONS, "install the functions of recovery").await?;
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
        .bind(step)
        .bind(checksum)
        .bind(breaking)
        .execute(connection)
        .await
        .map(|_| ())
        .doing(|| format!("record step {step} of {:?}", schema.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graphile_worker() -> Schema {
        Schema::new("graphile_worker").expect("a legal name")
    }

    fn ledger(ids: impl IntoIterator<Item = i32>) -> Option<Vec<Step>> {
        Some(
            ids.into_iter()
                .map(|id| Step { id, breaking: BREAKING.contains(&id), checksum: None, is_wanted: false })
                .collect(),
        )
    }

    fn taken(id: i32, breaking: bool) -> Step {
        Step { id, breaking, checksum: None, is_wanted: false }
    }

    fn functions(checksum: &str) -> Option<Vec<Step>> {
        let functions = Step { checksum: Some(checksum.to_owned()), ..taken(FUNCTIONS_STEP, false) };
        let others = additions().map(|addition| taken(addition.step, addition.breaking));
        Some([functions, taken(INDEXES_STEP, false)].into_iter().chain(others).collect())
    }

    fn up_to_date() -> Installation {
        Installation {
            server_version: 150_018,
            role: "app".to_owned(),
            schema_exists: true,
            ledger: ledger(1..=20),
            ledger_has_breaking: true,
            ledger_can_be_locked: true,
            layout: Layout::Current,
            view_exists: true,
            additions: functions("ours"),
            functions_checksum: Some("ours".to_owned()),
            differences: Vec::new(),
        }
    }

    fn planned(found: &Installation) -> Plan {
        plan(&graphile_worker(), found).expect("a plan")
    }

    fn refused(found: &Installation) -> String {
        plan(&graphile_worker(), found).expect_err("a refusal").to_string()
    }

    #[test]
    fn an_empty_database_gets_everything_and_nobody_is_told() {
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
    fn what_is_up_to_date_is_left_alone() {
        assert!(planned(&up_to_date()).is_nothing());
    }

    #[test]
    fn a_server_below_the_lowest_version_is_refused() {
        let found = Installation { server_version: 110_022, ..Installation::default() };
        assert_eq!(refused(&found), "this is PostgreSQL 11.22, and the schema needs PostgreSQL 12 or later");
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
    fn functions_that_were_replaced_are_put_back() {
        let found = Installation { functions_checksum: Some("theirs".to_owned()), ..up_to_date() };
        assert_eq!(planned(&found), Plan { install_functions: true, ..Plan::default() });
    }

    #[test]
    fn functions_of_a_newer_release_of_ours_are_left_alone() {
        let mut found = Installation { functions_checksum: Some("newer".to_owned()), ..up_to_date() };
        found.additions.as_mut().expect("a ledger").push(taken(last_addition() + 1, false));
        assert!(planned(&found).is_nothing());
    }

    #[test]
    fn functions_on_tables_we_do_not_know_are_left_alone() {
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
    fn an_unknown_breaking_migration_is_refused_and_named() {
        let mut found = up_to_date();
        found.ledger.as_mut().expect("a ledger").extend([taken(21, false), taken(22, true)]);
        assert_eq!(
            refused(&found),
            "the schema \"graphile_worker\" holds the breaking migration 22 of Node's graphile-worker, and this \
             release knows them up to 20: use a release that knows it"
        );
    }

    #[test]
    fn an_unknown_breaking_addition_of_ours_is_refused() {
        let mut found = up_to_date();
        found.additions.as_mut().expect("a ledger").push(taken(last_addition() + 1, true));
        assert!(refused(&found).contains("of graphile_worker for Rust"));
    }

    #[test]
    fn while_a_newer_release_waits_to_take_a_breaking_step_an_older_one_does_not_start() {
        let mut found = up_to_date();
        let wanted = Step { is_wanted: true, ..taken(last_addition() + 1, true) };
        found.additions.as_mut().expect("a ledger").push(wanted);
        assert!(refused(&found).contains("a newer release is about to change the schema"));
    }

    #[test]
    fn while_a_newer_release_waits_to_apply_a_breaking_migration_of_nodes_an_older_one_does_not_start() {
        let wanted = |id: i32| {
            let mut found = up_to_date();
            found.additions.as_mut().expect("a ledger").push(Step { is_wanted: true, ..taken(-id, true) });
            found
        };
        assert!(refused(&wanted(LEVEL + 1)).contains("(step 21 of Node's graphile-worker, and this release"));
        assert!(planned(&wanted(LEVEL)).is_nothing(), "a step that this release knows keeps nobody from starting");
    }

    #[test]
    fn indexes_for_tables_that_are_in_use_are_built_beside_their_users() {
        let found = Installation { additions: None, ..up_to_date() };
        assert_eq!(planned(&found).indexes, Indexes::BesideRunningWorkers);
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
