//! Checks the server, the schema, rights, tables, locks and lag, with advice. `Facts` are read first, as far
//! as the role may; `judge` decides and is pure.

use crate::db::quote_identifier;
use crate::db::rows::texts;
use crate::db::session;
use crate::error::{CONNECTIONS_OF_A_WORKER, Context};
use crate::inspect::reasons::program;
use crate::inspect::{WorkerState, WorkerSummary, short_worker_id};
use crate::schema::migrate::{Examined, ReadOnly, examine};
use crate::schema::steps::LOWEST_POSTGRES;
use crate::text::format_duration;
use crate::{Error, WorkerUtils};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{Connection, PgConnection, Row};
use std::fmt;
use std::time::Duration;

/// When a registered worker counts as dead: recovery's default.
const DEAD_AFTER: Duration = Duration::from_secs(5 * 60);

/// Result of [`WorkerUtils::doctor`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DoctorReport {
    /// The worst level of all checks.
    pub level: DoctorLevel,
    /// The checks, in order.
    pub checks: Vec<DoctorCheck>,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DoctorCheck {
    /// A stable name.
    pub name: &'static str,
    /// Its level.
    pub level: DoctorLevel,
    /// The finding.
    pub found: String,
    /// What to do, unless the level is `Ok`.
    pub advice: Option<String>,
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DoctorLevel {
    /// Fine.
    Ok,
    /// Works, but could be better.
    Advice,
    /// Broken, or will break soon.
    Problem,
}

impl DoctorLevel {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            DoctorLevel::Ok => "ok",
            DoctorLevel::Advice => "advice",
            DoctorLevel::Problem => "problem",
        }
    }
}

impl fmt::Display for DoctorLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What was read. A part that could not be read contains the error.
struct Facts {
    now: DateTime<Utc>,
    server: Server,
    /// `None` if no other connection could be opened to detect a pooler.
    pooler: Option<Pooler>,
    schema: String,
    examined: Result<Examined, String>,
    rights: Rights,
    tables: Vec<Table>,
    jobs: Option<Result<Jobs, String>>,
}

/// Whether a pooler is between us and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pooler {
    None,
    KeepsSessions,
    SharesConnections,
}

#[derive(Debug, Clone, Default)]
struct Server {
    version: String,
    version_number: i32,
    role: String,
    read_only: Option<ReadOnly>,
    search_path: Vec<String>,
    database: String,
    role_limit: i64,
    role_connections: i64,
    database_limit: i64,
    database_connections: i64,
    autovacuum: bool,
    connections: i64,
    max_connections: i64,
    notification_queue_usage: f64,
    prepared_transactions: i64,
    oldest_prepared_seconds: f64,
    hidden_sessions: i64,
    transactions: Vec<Transaction>,
    slots: Vec<Slot>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Transaction {
    pid: i32,
    role: Option<String>,
    application_name: Option<String>,
    state: String,
    seconds: f64,
    query_seconds: Option<f64>,
    xmin_age: i64,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Slot {
    name: String,
    xmin_age: i64,
}

#[derive(Debug, Clone, Default)]
struct Rights {
    may_use: bool,
    forbidden_functions: Vec<String>,
    /// Whether the role may add jobs although row security hides the tables from it.
    may_add_as_owner: bool,
    /// Functions that run as their owner and should not, or should and do not.
    became_definers: Vec<String>,
    lost_definers: Vec<String>,
    /// Functions that run as their owner with the caller's search_path.
    without_search_path: Vec<String>,
    /// Functions for roles that may add jobs, if everyone may execute them.
    for_all: Vec<String>,
}

#[derive(Debug, Clone, Default)]
struct Table {
    name: String,
    bytes: i64,
    total_bytes: i64,
    live_rows: i64,
    dead_rows: i64,
    last_vacuum_at: Option<DateTime<Utc>>,
    expected_bytes: Option<f64>,
    missing_rights: Vec<String>,
    /// Rights that row security withholds, because no policy allows them.
    hidden_rights: Vec<String>,
}

#[derive(Debug, Clone, Default)]
struct Jobs {
    jobs: i64,
    ready: i64,
    lag_seconds: f64,
    stale_jobs: i64,
    stale_queues: i64,
    failed: i64,
    workers: Vec<WorkerSummary>,
    limits: Limits,
}

/// Names of limits and pauses.
#[derive(Debug, Clone, Default)]
struct Limits {
    all: Vec<String>,
    /// Those that no job and no worker uses.
    unused: Vec<String>,
    /// Pauses without an end that are older than a day.
    long_paused: Vec<String>,
    tripped: Vec<String>,
    /// Sessions that listen for jobs under no name of ours.
    listeners: i64,
    /// Number of jobs that still wait although the jobs that they replace have ended.
    unnoticed: i64,
}

impl WorkerUtils {
    /// Checks the server and the schema. Fails only if the server cannot be queried; a missing or unreadable
    /// schema is a finding.
    pub async fn doctor(&self) -> Result<DoctorReport, Error> {
        // One connection for all: there may be no other left, and the pool would try to get one for 30 seconds.
        let mut connection = self.pool().acquire().await.context(|| "query the server".to_owned())?;
        let mut facts = self.facts(&mut connection).await?;
        let readable = facts.rights.may_use
            && facts.examined.as_ref().is_ok_and(|examined| examined.installed && examined.addition.is_some())
            && !facts.tables.iter().any(|table| table.cannot_be_read());
        if readable {
            facts.jobs = Some(self.jobs(&mut connection).await.map_err(|error| error.to_string_with_sources()));
        }
        drop(connection);
        facts.pooler = self.pooler().await.ok();
        let checks = judge(&facts);
        let level = checks.iter().map(|check| check.level).max().unwrap_or(DoctorLevel::Ok);
        Ok(DoctorReport { level, checks })
    }

    async fn facts(&self, connection: &mut PgConnection) -> Result<Facts, Error> {
        let context = || "query the server".to_owned();
        let statements = self.statements()?;
        // As the application's own statements find it.
        let path = "select pg_catalog.current_schemas(true)::pg_catalog.text[]";
        let rows = session::fetch_all_on(connection, true, sqlx::query(path)).await;
        let search_path =
            rows.and_then(|rows| rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get(0)).context(context)?;
        let mut ask = async |query| session::fetch_all_safely_on(connection, statements.is_pooled, query).await;
        let one = |rows: Vec<PgRow>| rows.into_iter().next().ok_or(sqlx::Error::RowNotFound);
        let rows = ask(sqlx::query("select pg_catalog.now()").persistent(false)).await;
        let now = rows.and_then(one).and_then(|row| row.try_get(0)).context(context)?;
        let rows = ask(statements.doctor_server.query()).await;
        let server = rows.and_then(one).and_then(|row| server(&row, search_path)).context(context)?;
        let rows = ask(statements.doctor_schema.query()).await;
        let rights = rows.and_then(one).and_then(|row| rights(&row)).context(context)?;
        let rows = ask(statements.doctor_tables.query()).await;
        let tables = rows.and_then(|rows| rows.iter().map(table).collect()).context(context)?;
        let examined = examine(connection, &statements.schema).await;
        Ok(Facts {
            now,
            server,
            pooler: None,
            schema: statements.schema.name().to_owned(),
            examined: examined.map_err(|error| error.to_string_with_sources()),
            rights,
            tables,
            jobs: None,
        })
    }

    /// Detects a pooler between us and the server, and its kind.
    async fn pooler(&self) -> sqlx::Result<Pooler> {
        let options = PgConnectOptions::clone(&self.pool().connect_options());
        let mut session = session::session_to_detect(options.into());
        let connection = session.connect_and_detect().await?;
        let _ = connection.close().await;
        Ok(match session.is_pooled() {
            false => Pooler::None,
            true if session::keeps_sessions(session.config()).await? => Pooler::KeepsSessions,
            true => Pooler::SharesConnections,
        })
    }

    async fn jobs(&self, connection: &mut PgConnection) -> Result<Jobs, Error> {
        let statements = self.statements()?;
        let query = statements.doctor_jobs.query();
        let rows = session::fetch_all_safely_on(connection, statements.is_pooled, query).await;
        let row = rows.and_then(|rows| rows.into_iter().next().ok_or(sqlx::Error::RowNotFound));
        let jobs = row.and_then(|row| jobs(&row)).context(|| "query the jobs".to_owned())?;
        let query = statements.doctor_limits.query();
        let rows = session::fetch_all_safely_on(connection, statements.is_pooled, query).await;
        let row = rows.and_then(|rows| rows.into_iter().next().ok_or(sqlx::Error::RowNotFound));
        let limits = row.and_then(|row| limits(&row)).context(|| "query the limits".to_owned())?;
        Ok(Jobs { workers: self.list_workers_on(connection, DEAD_AFTER).await?, limits, ..jobs })
    }
}

fn server(row: &PgRow, search_path: Vec<String>) -> sqlx::Result<Server> {
    let json = |column: &str| row.try_get::<String, _>(column);
    let decode = |error: serde_json::Error| sqlx::Error::Decode(error.into());
    Ok(Server {
        version: row.try_get("version")?,
        version_number: row.try_get("version_number")?,
        role: row.try_get("role")?,
        read_only: ReadOnly::read(row)?,
        search_path,
        database: row.try_get("database")?,
        role_limit: row.try_get("role_limit")?,
        role_connections: row.try_get("role_connections")?,
        database_limit: row.try_get("database_limit")?,
        database_connections: row.try_get("database_connections")?,
        autovacuum: row.try_get("autovacuum")?,
        connections: row.try_get("connections")?,
        max_connections: row.try_get("max_connections")?,
        notification_queue_usage: row.try_get("notification_queue_usage")?,
        prepared_transactions: row.try_get("prepared_transactions")?,
        oldest_prepared_seconds: row.try_get("oldest_prepared_seconds")?,
        hidden_sessions: row.try_get("hidden_sessions")?,
        transactions: serde_json::from_str(&json("transactions")?).map_err(decode)?,
        slots: serde_json::from_str(&json("slots")?).map_err(decode)?,
    })
}

fn rights(row: &PgRow) -> sqlx::Result<Rights> {
    Ok(Rights {
        may_use: row.try_get("may_use")?,
        forbidden_functions: row.try_get("forbidden_functions")?,
        may_add_as_owner: row.try_get("may_add_as_owner")?,
        became_definers: row.try_get("became_definers")?,
        lost_definers: row.try_get("lost_definers")?,
        without_search_path: row.try_get("without_search_path")?,
        for_all: row.try_get("for_all")?,
    })
}

fn table(row: &PgRow) -> sqlx::Result<Table> {
    Ok(Table {
        name: row.try_get("name")?,
        bytes: row.try_get("bytes")?,
        total_bytes: row.try_get("total_bytes")?,
        live_rows: row.try_get("live_rows")?,
        dead_rows: row.try_get("dead_rows")?,
        last_vacuum_at: row.try_get("last_vacuum_at")?,
        expected_bytes: row.try_get("expected_bytes")?,
        missing_rights: row.try_get("missing_rights")?,
        hidden_rights: row.try_get("hidden_rights")?,
    })
}

fn jobs(row: &PgRow) -> sqlx::Result<Jobs> {
    Ok(Jobs {
        jobs: row.try_get("jobs")?,
        ready: row.try_get("ready")?,
        lag_seconds: row.try_get("lag_seconds")?,
        stale_jobs: row.try_get("stale_jobs")?,
        stale_queues: row.try_get("stale_queues")?,
        failed: row.try_get("failed")?,
        workers: Vec::new(),
        limits: Limits::default(),
    })
}

fn limits(row: &PgRow) -> sqlx::Result<Limits> {
    Ok(Limits {
        all: texts(row, "names")?,
        unused: texts(row, "unused")?,
        long_paused: texts(row, "long_paused")?,
        tripped: texts(row, "tripped")?,
        listeners: row.try_get("listeners")?,
        unnoticed: row.try_get("unnoticed")?,
    })
}

impl Table {
    fn is_ours(&self) -> bool {
        self.name.starts_with("_private_") || self.name.starts_with("_rs_")
    }

    fn cannot_be_read(&self) -> bool {
        self.is_ours() && self.lacks("select")
    }

    fn lacks(&self, right: &str) -> bool {
        self.missing_rights.iter().chain(&self.hidden_rights).any(|lacking| lacking == right)
    }

    /// Whether a worker writes to it.
    fn is_written(&self) -> bool {
        self.is_ours() && self.name != "_rs_additions"
    }
}

/// All checks, in the order of the report. Checks that depend on something missing are left out.
fn judge(facts: &Facts) -> Vec<DoctorCheck> {
    let server = &facts.server;
    let mut checks = vec![version(server), standby(server)];
    checks.extend(facts.pooler.map(connection));
    checks.push(search_path(server));
    checks.extend(read_only(server));
    checks.extend(schema(facts));
    checks.extend(rust_port(facts));
    checks.extend(definers(facts));
    checks.extend(role(facts));
    if let Some(table) = facts.tables.iter().find(|table| table.name == "_private_jobs") {
        checks.push(size(facts));
        checks.push(dead_rows(facts));
        checks.push(bloat(table));
    }
    checks.push(vacuum(&facts.server));
    checks.push(transactions(&facts.server));
    checks.push(prepared_transactions(&facts.server));
    checks.push(replication_slots(&facts.server));
    checks.push(notifications(&facts.server));
    checks.push(connections(&facts.server));
    checks.push(connection_limits(&facts.server));
    match &facts.jobs {
        None => {}
        Some(Err(problem)) => checks.push(DoctorCheck::problem(
            "jobs",
            problem.clone(),
            "See the checks of the schema and the role above.".to_owned(),
        )),
        Some(Ok(jobs)) => {
            checks.extend([workers(jobs), lag(jobs), stale_locks(jobs), failed_jobs(jobs)]);
            checks.push(limit_use(&jobs.limits, &facts.schema));
            checks.push(pauses(&jobs.limits, &facts.schema));
            checks.push(breakers(&jobs.limits, &facts.schema));
            checks.extend(workers_of_limited_jobs(jobs));
            checks.extend(replaced_jobs(&jobs.limits, &facts.schema));
        }
    }
    checks
}

impl DoctorCheck {
    fn ok(name: &'static str, found: String) -> DoctorCheck {
        DoctorCheck { name, level: DoctorLevel::Ok, found, advice: None }
    }

    fn advice(name: &'static str, found: String, advice: String) -> DoctorCheck {
        DoctorCheck { name, level: DoctorLevel::Advice, found, advice: Some(advice) }
    }

    fn problem(name: &'static str, found: String, advice: String) -> DoctorCheck {
        DoctorCheck { name, level: DoctorLevel::Problem, found, advice: Some(advice) }
    }

    /// Judges a measure: advice from one threshold on, a problem from another.
    fn by(
        measure: f64,
        (advice_from, problem_from): (f64, f64),
        name: &'static str,
        found: String,
        advice: impl FnOnce() -> String,
    ) -> DoctorCheck {
        if measure >= problem_from {
            DoctorCheck::problem(name, found, advice())
        } else if measure >= advice_from {
            DoctorCheck::advice(name, found, advice())
        } else {
            DoctorCheck::ok(name, found)
        }
    }
}

fn version(server: &Server) -> DoctorCheck {
    let found = format!("PostgreSQL {}", server.version);
    if server.version_number < LOWEST_POSTGRES {
        let lowest = LOWEST_POSTGRES / 10_000;
        return DoctorCheck::problem("server_version", found, format!("Use PostgreSQL {lowest} or later."));
    }
    DoctorCheck::ok("server_version", found)
}

fn standby(server: &Server) -> DoctorCheck {
    if server.read_only.as_ref().is_some_and(|read_only| read_only.is_standby) {
        let advice = "Connect to the primary: jobs can be neither added nor run here.".to_owned();
        return DoctorCheck::problem("server_role", "a read-only standby".to_owned(), advice);
    }
    DoctorCheck::ok("server_role", "a primary".to_owned())
}

fn connection(pooler: Pooler) -> DoctorCheck {
    match pooler {
        Pooler::None => DoctorCheck::ok("connection", "direct".to_owned()),
        Pooler::KeepsSessions => DoctorCheck::ok("connection", "through a pooler that keeps sessions".to_owned()),
        Pooler::SharesConnections => DoctorCheck::advice(
            "connection",
            "through a pooler that shares server connections; workers poll for jobs".to_owned(),
            "Give workers a direct connection as well (`--direct-connection URL`), so that they start jobs at once."
                .to_owned(),
        ),
    }
}

/// `standby` reports a standby.
fn read_only(server: &Server) -> Option<DoctorCheck> {
    match &server.read_only {
        None => Some(DoctorCheck::ok("read_only", "transactions can write".to_owned())),
        Some(read_only) if read_only.is_standby => None,
        Some(read_only) => Some(DoctorCheck::problem("read_only", read_only.found(), sentence(&read_only.advice()))),
    }
}

/// A database of the Rust port, whose objects are still there.
fn rust_port(facts: &Facts) -> Option<DoctorCheck> {
    let port = facts.examined.as_ref().ok()?.rust_port.as_ref()?;
    let found = "tables, functions and ledger entries of the Rust port, the graphile_worker of crates.io, are left";
    let migrate = format!("{} migrate --from-rust-port", program(&facts.schema));
    if !port.live_workers.is_empty() {
        let found = format!("{found}, and its workers send heartbeats: {}", port.live_workers.join(", "));
        return Some(DoctorCheck::problem("rust_port", found, format!("Stop them, then run `{migrate}`.")));
    }
    if let Some(because) = port.may_run_because() {
        let found = format!("{found}, and its workers may be alive: {because}; {}", port.holds());
        let advice = format!(
            "Stop its workers, then run `{migrate}`. If all of them have ended, add `--force`: their jobs wait for it."
        );
        return Some(DoctorCheck::problem("rust_port", found, advice));
    }
    if port.jobs > 0 {
        let found = format!("{found}, and its dead workers hold jobs for up to 4 hours: {}", port.holds());
        return Some(DoctorCheck::problem("rust_port", found, format!("Run `{migrate}`: it releases these jobs.")));
    }
    let advice = format!(
        "Run `{migrate}` when no worker of the port runs any more: they slow down workers, and Node's worker would skip its own migrations 21 and 22."
    );
    Some(DoctorCheck::advice("rust_port", found.to_owned(), advice))
}

fn sentence(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().into_iter().flat_map(char::to_uppercase).chain(characters).chain(['.']).collect()
}

/// Our statements rely on `pg_catalog` coming first. PostgreSQL searches it first unless the path lists it
/// elsewhere.
fn search_path(server: &Server) -> DoctorCheck {
    let is_temporary = |schema: &&String| schema.starts_with("pg_temp_");
    let before: Vec<&str> = server
        .search_path
        .iter()
        .filter(|schema| !is_temporary(schema))
        .take_while(|schema| *schema != "pg_catalog")
        .map(String::as_str)
        .collect();
    if before.is_empty() {
        return DoctorCheck::ok("search_path", "pg_catalog comes first".to_owned());
    }
    let advice = "Remove pg_catalog from search_path, or list it first: otherwise functions in the other schemas can replace PostgreSQL's own.";
    DoctorCheck::problem("search_path", format!("{} comes before pg_catalog", before.join(", ")), advice.to_owned())
}

fn schema(facts: &Facts) -> Vec<DoctorCheck> {
    let name = &facts.schema;
    let migrate = format!("Run `{} migrate`.", program(name));
    let examined = match &facts.examined {
        Ok(examined) => examined,
        Err(problem) => {
            let advice = "Connect as the owner of the schema, or ask the owner to grant the missing rights.".to_owned();
            return vec![DoctorCheck::problem(
                "schema",
                format!("the schema {name:?} cannot be read: {problem}"),
                advice,
            )];
        }
    };
    if !examined.installed {
        let advice = format!("{migrate} If it is in another schema, use -s.");
        return vec![DoctorCheck::problem("schema", format!("nothing is installed in the schema {name:?}"), advice)];
    }
    let level = examined.level.unwrap_or(0);
    let found = match examined.addition {
        Some(addition) => format!("{name:?} at level {level}, additions at {addition}"),
        None => format!("{name:?} at level {level}, without additions"),
    };
    let schema = match &examined.is_up_to_date {
        Ok(true) => DoctorCheck::ok("schema", found),
        Ok(false) => DoctorCheck::problem("schema", found, format!("{migrate} The schema is not up to date.")),
        Err(error @ Error::RustPortRunning { .. }) => DoctorCheck::problem(
            "schema",
            format!("{found}: {error}"),
            "Stop the workers of the Rust port: jobs run twice while they run.".to_owned(),
        ),
        Err(error) => DoctorCheck::problem("schema", format!("{found}: {error}"), "Use a newer release.".to_owned()),
    };
    let functions = if examined.functions_are_ours {
        DoctorCheck::ok("functions", "as installed".to_owned())
    } else {
        let advice = format!("{migrate} It reinstalls our functions if they match the tables.");
        DoctorCheck::advice("functions", "replaced or changed since they were installed".to_owned(), advice)
    };
    vec![schema, functions]
}

fn role(facts: &Facts) -> Option<DoctorCheck> {
    let role = &facts.server.role;
    if !facts.examined.as_ref().is_ok_and(|examined| examined.installed) && facts.tables.is_empty() {
        return None;
    }
    let schema = crate::db::quote_identifier(&facts.schema);
    let quoted = crate::db::quote_identifier(role);
    if !facts.rights.may_use {
        let advice = format!(
            "Ask the owner to run `{} grant {role} --apply` with --add, --run or --read; or `grant usage on schema {schema} to {quoted}`.",
            program(&facts.schema)
        );
        return Some(DoctorCheck::problem("role", format!("{role} may not use the schema"), advice));
    }
    let ours = || facts.tables.iter().filter(|table| table.is_ours());
    let may_read = !ours().any(Table::cannot_be_read);
    let rights = ["insert", "update", "delete"];
    let may_run = may_read && !ours().any(|table| table.is_written() && rights.iter().any(|right| table.lacks(right)));
    let forbidden = &facts.rights.forbidden_functions;
    if may_run && !forbidden.is_empty() {
        let advice = format!("Ask the owner to run `grant execute on all functions in schema {schema} to {quoted}`.");
        return Some(DoctorCheck::problem("role", format!("{role} may not call {}", forbidden.join(", ")), advice));
    }
    // Each of these is a useful role.
    let may = match (may_run, may_read, facts.rights.may_add_as_owner) {
        (true, _, _) => "can read and change everything",
        (_, true, true) => "can read everything and add jobs",
        (_, true, false) => "can read everything, but change nothing",
        (_, false, true) => "can only add jobs; jobs and workers were not checked",
        (_, false, false) => return Some(has_no_rights(facts, ours())),
    };
    Some(DoctorCheck::ok("role", format!("{role} {may}")))
}

/// A role that may use the schema, but can neither add, run nor read jobs.
fn has_no_rights<'t>(facts: &Facts, ours: impl Iterator<Item = &'t Table> + Clone) -> DoctorCheck {
    let role = &facts.server.role;
    let advice = format!(
        "Ask the owner of the schema to run `{} grant {role} --apply` with --add, --run or --read.",
        program(&facts.schema)
    );
    let missing: Vec<String> = ours
        .clone()
        .filter(|table| !table.missing_rights.is_empty())
        .map(|table| format!("{} {}", table.missing_rights.join(", "), table.name))
        .collect();
    let found = match missing.is_empty() {
        true => format!("{role} sees no rows because of row security"),
        false => format!("{role} may not {}", missing.join("; ")),
    };
    DoctorCheck::problem("role", found, advice)
}

/// Functions that run with other rights than they were installed with.
fn definers(facts: &Facts) -> Option<DoctorCheck> {
    let Rights { became_definers, lost_definers, without_search_path, for_all, .. } = &facts.rights;
    facts.examined.as_ref().ok().filter(|examined| examined.functions_are_ours || examined.installed)?;
    let name = "function_rights";
    let mut found = Vec::new();
    for (functions, what) in [
        (
            became_definers,
            "run as their owner (`security definer`) and should not: every role that can call them has the owner's rights",
        ),
        (lost_definers, "should run as their owner (`security definer`) and do not"),
        (
            without_search_path,
            "run as their owner with the caller's search_path: a caller can make them run other code",
        ),
        (for_all, "can be called by everyone who can use the schema: all of them can add jobs"),
    ] {
        if !functions.is_empty() {
            found.push(format!("{} {what}", functions.join(", ")));
        }
    }
    if found.is_empty() {
        return Some(DoctorCheck::ok(name, "as installed".to_owned()));
    }
    let advice = format!(
        "Run `{} migrate`, which reinstalls our functions. For the others, run `alter function … security invoker` (or `definer`), or `revoke execute on function … from public`. Move your own functions to another schema.",
        program(&facts.schema)
    );
    Some(DoctorCheck::problem(name, found.join("; "), advice))
}

fn size(facts: &Facts) -> DoctorCheck {
    let tables: Vec<String> = facts
        .tables
        .iter()
        .filter(|table| ["_private_jobs", "_private_job_queues", "_private_tasks"].contains(&table.name.as_str()))
        .map(|table| {
            let rows = table.live_rows;
            format!("{} {} (about {rows} rows)", table.name.trim_start_matches("_private_"), bytes(table.total_bytes))
        })
        .collect();
    DoctorCheck::ok("table_sizes", tables.join(", "))
}

fn dead_rows(facts: &Facts) -> DoctorCheck {
    let ours = facts.tables.iter().filter(|table| table.is_ours());
    let worst = ours.max_by_key(|table| table.dead_rows).cloned().unwrap_or_default();
    let vacuumed = match worst.last_vacuum_at {
        Some(time) => format!("last vacuumed {} ago", format_duration((facts.now - time).as_seconds_f64())),
        None => "never vacuumed".to_owned(),
    };
    let (dead, live) = (worst.dead_rows, worst.live_rows);
    let found = format!("at most {dead} in one table ({}, {vacuumed})", worst.name);
    // Autovacuum starts when a fifth of the rows are dead; a busy table always has some.
    let measure = if dead < 50_000 { 0.0 } else { dead as f64 / (live as f64 + 50_000.0) };
    DoctorCheck::by(measure, (1.0, 5.0), "dead_rows", found, || {
        "Vacuum cannot keep up: see below for what blocks it, and whether autovacuum is on.".to_owned()
    })
}

fn bloat(jobs: &Table) -> DoctorCheck {
    let name = "bloat";
    let Some(expected) = jobs.expected_bytes else {
        return DoctorCheck::ok(name, format!("jobs {}; unused space not known yet", bytes(jobs.bytes)));
    };
    let empty = (jobs.bytes as f64 - expected).max(0.0);
    let share = if jobs.bytes > 0 { empty / jobs.bytes as f64 } else { 0.0 };
    let found = format!("jobs {}, about {:.0} % unused", bytes(jobs.bytes), share * 100.0);
    let measure = if empty > 256e6 && share > 0.8 { 1.0 } else { 0.0 };
    DoctorCheck::by(measure, (1.0, 2.0), name, found, || {
        "New jobs reuse the space. To return it to the system, run `vacuum full` on _private_jobs while no worker is running."
            .to_owned()
    })
}

fn vacuum(server: &Server) -> DoctorCheck {
    if !server.autovacuum {
        let advice = "Turn autovacuum and track_counts on: every job leaves dead rows.".to_owned();
        return DoctorCheck::problem("autovacuum", "off".to_owned(), advice);
    }
    DoctorCheck::ok("autovacuum", "on".to_owned())
}

fn transactions(server: &Server) -> DoctorCheck {
    let name = "long_transactions";
    let Some(longest) = server.transactions.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds)) else {
        let hidden = server.hidden_sessions;
        if hidden > 0 {
            let advice = "Ask a superuser to grant pg_monitor to this role, to see other roles' transactions.";
            return DoctorCheck::advice(
                name,
                format!("none visible, but {hidden} sessions are hidden"),
                advice.to_owned(),
            );
        }
        return DoctorCheck::ok(name, "none".to_owned());
    };
    let mut found = format!(
        "the longest is {} old: pid {}, application {:?}, role {}, {}",
        format_duration(longest.seconds),
        longest.pid,
        longest.application_name.as_deref().unwrap_or_default(),
        longest.role.as_deref().unwrap_or("unknown"),
        longest.state,
    );
    if let Some(seconds) = longest.query_seconds {
        found.push_str(&format!(", its last query started {} ago", format_duration(seconds)));
    }
    found.push_str(&format!(", holds back {} transactions", longest.xmin_age));
    let pid = longest.pid;
    DoctorCheck::by(longest.seconds, (5.0 * 60.0, 3_600.0), name, found, || {
        format!("Vacuum cannot remove rows that died since then. End it, or run `select pg_terminate_backend({pid})`.")
    })
}

fn prepared_transactions(server: &Server) -> DoctorCheck {
    let (count, seconds) = (server.prepared_transactions, server.oldest_prepared_seconds);
    if count == 0 {
        return DoctorCheck::ok("prepared_transactions", "none".to_owned());
    }
    let found = format!("{count}, the oldest from {} ago", format_duration(seconds));
    DoctorCheck::by(seconds, (5.0 * 60.0, 3_600.0), "prepared_transactions", found, || {
        "Commit it or roll it back (see pg_prepared_xacts): it blocks vacuum and holds locks.".to_owned()
    })
}

fn replication_slots(server: &Server) -> DoctorCheck {
    let Some(oldest) = server.slots.iter().max_by_key(|slot| slot.xmin_age) else {
        return DoctorCheck::ok("replication_slots", "none that blocks vacuum".to_owned());
    };
    let found = format!("{:?} holds back {} transactions", oldest.name, oldest.xmin_age);
    DoctorCheck::by(oldest.xmin_age as f64, (1e6, 1e8), "replication_slots", found, || {
        "Check whether its standby is still running; drop the slot if not.".to_owned()
    })
}

fn notifications(server: &Server) -> DoctorCheck {
    let used = server.notification_queue_usage;
    let found = format!("{:.1} % used", used * 100.0);
    DoctorCheck::by(used, (0.1, 0.5), "notification_queue", found, || {
        "A listening session stays in a transaction, so the queue cannot be emptied. When it is full, adding jobs fails."
            .to_owned()
    })
}

fn connections(server: &Server) -> DoctorCheck {
    let (connections, most) = (server.connections, server.max_connections.max(1));
    let found = format!("{connections} of {most}");
    DoctorCheck::by(connections as f64 / most as f64, (0.8, 0.95), "connections", found, || {
        "Use smaller pools or a pooler, or raise max_connections.".to_owned()
    })
}

/// The connection limits of the role and of the database; the one with less room counts.
fn connection_limits(server: &Server) -> DoctorCheck {
    let name = "connection_limits";
    let (role, database) = (&server.role, &server.database);
    let (quoted_role, quoted_database) = (quote_identifier(role), quote_identifier(database));
    let limits = [
        (server.role_connections, server.role_limit, format!("the role {role}"), format!("role {quoted_role}")),
        (
            server.database_connections,
            server.database_limit,
            format!("the database {database}"),
            format!("database {quoted_database}"),
        ),
    ];
    let limits = limits.into_iter().filter(|(_, limit, ..)| *limit >= 0);
    let Some((used, limit, what, altered)) = limits.min_by_key(|(used, limit, ..)| limit - used) else {
        return DoctorCheck::ok(name, "none".to_owned());
    };
    let found = format!("connections: {used} of {limit} of {what}");
    let advice = format!(
        "Raise it with `alter {altered} connection limit …`: a worker needs {CONNECTIONS_OF_A_WORKER} connections with a pool of one."
    );
    if limit < CONNECTIONS_OF_A_WORKER {
        return DoctorCheck::problem(name, found, advice);
    }
    DoctorCheck::by(used as f64 / limit as f64, (0.8, 0.95), name, found, || advice)
}

fn workers(jobs: &Jobs) -> DoctorCheck {
    let count = |state| jobs.workers.iter().filter(|worker| worker.state == state).count();
    let (alive, gone) = (count(WorkerState::Alive), count(WorkerState::Stale) + count(WorkerState::Dead));
    let unknown = count(WorkerState::Unknown);
    let silent: Vec<String> = jobs.workers.iter().filter(|w| w.state == WorkerState::Silent).map(silence).collect();
    let mut found = format!("{alive} alive, {gone} dead, {unknown} unregistered");
    let of_rust_port = jobs.workers.iter().filter(|worker| worker.of_rust_port).count();
    if of_rust_port > 0 {
        found.push_str(&format!(" (of the Rust port: {of_rust_port})"));
    }
    if !silent.is_empty() {
        found.push_str(&format!(", {} silent: {}", silent.len(), silent.join("; ")));
    }
    if alive + unknown == 0 && !silent.is_empty() && jobs.ready > 0 {
        let advice = "Check whether that process still runs (`kill -CONT` resumes a stopped one), or start a worker.";
        return DoctorCheck::problem("workers", format!("{found}; due jobs: {}", jobs.ready), advice.to_owned());
    }
    if gone > 0 || !silent.is_empty() {
        let advice = "A live worker with recovery releases their jobs; to do it now, run `graphile-worker sweep --threshold 60s`.";
        return DoctorCheck::advice("workers", found, advice.to_owned());
    }
    if alive + unknown == 0 && jobs.ready > 0 {
        let advice = "Start a worker. Idle workers of Node's are not visible.".to_owned();
        return DoctorCheck::problem("workers", format!("none visible; due jobs: {}", jobs.ready), advice);
    }
    DoctorCheck::ok("workers", found)
}

/// Names a silent worker, and how long it has been silent.
fn silence(worker: &WorkerSummary) -> String {
    let process = match (&worker.host, worker.pid) {
        (Some(host), Some(pid)) => format!(" (process {pid} on {host})"),
        _ => String::new(),
    };
    let seconds = worker.heartbeat_seconds.unwrap_or_default();
    format!(
        "worker {}{process} has sent no heartbeat for {}",
        short_worker_id(&worker.worker_id),
        format_duration(seconds)
    )
}

fn lag(jobs: &Jobs) -> DoctorCheck {
    if jobs.ready == 0 {
        return DoctorCheck::ok("lag", "no job is due".to_owned());
    }
    let found = format!("due jobs: {}, the oldest for {}", jobs.ready, format_duration(jobs.lag_seconds));
    DoctorCheck::by(jobs.lag_seconds, (60.0, 600.0), "lag", found, || {
        "Jobs arrive faster than they are processed, a queue is blocked, or no worker runs the task: see `graphile-worker stats`, `queues` and `why`."
            .to_owned()
    })
}

fn stale_locks(jobs: &Jobs) -> DoctorCheck {
    let (held, queues) = (jobs.stale_jobs, jobs.stale_queues);
    let found = format!("locked for more than 4 hours: jobs {held}, queues {queues}");
    let measure = if held + queues > 0 { 1.0 } else { 0.0 };
    DoctorCheck::by(measure, (1.0, 2.0), "stale_locks", found, || {
        "If their workers are dead, run `graphile-worker unlock WORKER_ID`.".to_owned()
    })
}

fn failed_jobs(jobs: &Jobs) -> DoctorCheck {
    let found = format!("failed permanently: {} of {}", jobs.failed, jobs.jobs);
    let measure = if jobs.failed > 0 { 1.0 } else { 0.0 };
    DoctorCheck::by(measure, (1.0, 2.0), "failed_jobs", found, || {
        "See `graphile-worker list --state failed`; `run-now` retries them, `cleanup DELETE_PERMAFAILED_JOBS` deletes them.".to_owned()
    })
}

fn limit_use(limits: &Limits, schema: &str) -> DoctorCheck {
    let Limits { all, unused, .. } = limits;
    let found = match (all.len(), unused.len()) {
        (0, _) => "none".to_owned(),
        (all, 0) => format!("{all}, all in use"),
        (all, _) => format!("{all}; no job and no worker uses {}", some_of(unused)),
    };
    let measure = if unused.is_empty() { 0.0 } else { 1.0 };
    DoctorCheck::by(measure, (1.0, 2.0), "limits", found, || {
        format!("Check the spelling of the names, or run `{} limit drop NAME`.", program(schema))
    })
}

fn pauses(limits: &Limits, schema: &str) -> DoctorCheck {
    let paused = &limits.long_paused;
    if paused.is_empty() {
        return DoctorCheck::ok("pauses", "none without an end for more than a day".to_owned());
    }
    let found = format!("without an end, for more than a day: {}", some_of(paused));
    let program = program(schema);
    let advice = format!("See `{program} limit list`; to end a pause, run `{program} resume NAME`.");
    DoctorCheck::advice("pauses", found, advice)
}

fn breakers(limits: &Limits, schema: &str) -> DoctorCheck {
    if limits.tripped.is_empty() {
        return DoctorCheck::ok("breakers", "none tripped".to_owned());
    }
    let program = program(schema);
    let advice = format!("See `{program} limit list`. To start jobs now, run `{program} resume NAME`.");
    DoctorCheck::advice("breakers", format!("tripped: {}", some_of(&limits.tripped)), advice)
}

/// Warns of jobs that wait although the jobs that they replace have ended. `None` if there are none.
fn replaced_jobs(limits: &Limits, schema: &str) -> Option<DoctorCheck> {
    let found = format!("waiting although the replaced jobs have ended: {}", limits.unnoticed);
    let advice = format!("Only workers of this release let them start. Start one: {}", program(schema));
    (limits.unnoticed > 0).then(|| DoctorCheck::advice("replaced_jobs", found, advice))
}

/// Whether workers are there that run jobs under limits, and whether others never will. `None` without limits.
fn workers_of_limited_jobs(jobs: &Jobs) -> Option<DoctorCheck> {
    let name = "limited_jobs";
    let limits = jobs.limits.all.iter().any(|limit| limit != "all");
    if !limits {
        return None;
    }
    let is_registered = |worker: &&WorkerSummary| worker.last_heartbeat_at.is_some();
    let is_gone = |worker: &&WorkerSummary| matches!(worker.state, WorkerState::Stale | WorkerState::Dead);
    let with_recovery = jobs.workers.iter().filter(|worker| is_registered(worker) && !is_gone(worker)).count();
    // Behind a pooler, connections have no name.
    let nameless = jobs.workers.iter().filter(|worker| is_registered(worker) && worker.is_connected.is_none()).count();
    let others = jobs.workers.iter().filter(|worker| !worker.worker_id.starts_with("rs-")).count();
    // An idle worker of Node's only listens.
    let nodes = others.max((jobs.limits.listeners - nameless as i64).try_into().unwrap_or(0));
    if nodes > 0 {
        let found = format!("{nodes} of Node's workers in the fleet: they never run jobs that are under a limit");
        let advice = "Run enough workers of this release for these tasks, or drop the limits. A pause of `all` does not stop Node's workers.";
        return Some(DoctorCheck::advice(name, found, advice.to_owned()));
    }
    if with_recovery == 0 {
        let found = "no worker with recovery is registered".to_owned();
        let advice = "Start a worker with recovery: without it, a killed worker takes up its limits for 4 hours.";
        return Some(DoctorCheck::advice(name, found, advice.to_owned()));
    }
    Some(DoctorCheck::ok(name, format!("workers with recovery that run them: {with_recovery}")))
}

/// The first few names.
fn some_of(names: &[String]) -> String {
    let more = if names.len() > 5 { ", …" } else { "" };
    names[..names.len().min(5)].join(", ") + more
}

fn bytes(bytes: i64) -> String {
    let units = ["bytes", "kB", "MB", "GB", "TB"];
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= 1000.0 && unit + 1 < units.len() {
        size /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} bytes") } else { format!("{size:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Server {
        Server {
            version: "17.1".to_owned(),
            version_number: 170_001,
            role: "me".to_owned(),
            autovacuum: true,
            connections: 3,
            max_connections: 100,
            role_limit: -1,
            database_limit: -1,
            ..Server::default()
        }
    }

    fn level(check: DoctorCheck) -> DoctorLevel {
        assert_eq!(check.advice.is_some(), check.level != DoctorLevel::Ok, "{check:?}");
        check.level
    }

    #[test]
    fn a_measure_is_judged_by_two_thresholds() {
        let queue = |used| level(notifications(&Server { notification_queue_usage: used, ..healthy() }));
        assert_eq!((queue(0.0), queue(0.2), queue(0.6)), (DoctorLevel::Ok, DoctorLevel::Advice, DoctorLevel::Problem));
        let full = |connections| level(self::connections(&Server { connections, ..healthy() }));
        assert_eq!((full(79), full(80), full(95)), (DoctorLevel::Ok, DoctorLevel::Advice, DoctorLevel::Problem));
        let prepared = |seconds| {
            let server = Server { prepared_transactions: 1, oldest_prepared_seconds: seconds, ..healthy() };
            level(prepared_transactions(&server))
        };
        assert_eq!(
            (prepared(1.0), prepared(400.0), prepared(4e3)),
            (DoctorLevel::Ok, DoctorLevel::Advice, DoctorLevel::Problem)
        );
        let slot = |xmin_age| {
            let slots = vec![Slot { name: "s".to_owned(), xmin_age }];
            level(replication_slots(&Server { slots, ..healthy() }))
        };
        assert_eq!((slot(10), slot(2_000_000)), (DoctorLevel::Ok, DoctorLevel::Advice));
    }

    #[test]
    fn the_longest_transaction_is_reported_with_how_to_end_it() {
        let transaction = |seconds| Transaction {
            pid: seconds as i32,
            application_name: Some("report".to_owned()),
            role: Some("ann".to_owned()),
            state: "idle in transaction".to_owned(),
            seconds,
            query_seconds: Some(60.0),
            xmin_age: 12,
        };
        let check = transactions(&Server { transactions: vec![transaction(10.0), transaction(4_000.0)], ..healthy() });
        assert_eq!(
            check.found,
            "the longest is 1h 6m old: pid 4000, application \"report\", role ann, idle in transaction, its last query started 1m ago, holds back 12 transactions"
        );
        assert!(check.advice.as_ref().is_some_and(|advice| advice.contains("pg_terminate_backend(4000)")), "{check:?}");
        assert_eq!(level(check), DoctorLevel::Problem);
        assert_eq!(level(transactions(&Server { hidden_sessions: 2, ..healthy() })), DoctorLevel::Advice);
    }

    #[test]
    fn an_old_server_a_standby_and_no_autovacuum_are_problems() {
        assert_eq!(level(version(&Server { version_number: 110_000, ..healthy() })), DoctorLevel::Problem);
        let read_only = Some(ReadOnly { is_standby: true, ..ReadOnly::default() });
        assert_eq!(level(standby(&Server { read_only, ..healthy() })), DoctorLevel::Problem);
        assert_eq!(level(vacuum(&Server { autovacuum: false, ..healthy() })), DoctorLevel::Problem);
    }

    #[test]
    fn the_lower_connection_limit_counts() {
        let limited = |role_limit, database_limit| {
            let server =
                Server { role_connections: 3, database_connections: 10, role_limit, database_limit, ..healthy() };
            let check = connection_limits(&server);
            (check.found.clone(), level(check))
        };
        assert_eq!(limited(-1, -1), ("none".to_owned(), DoctorLevel::Ok));
        assert_eq!(limited(30, 100), ("connections: 3 of 30 of the role me".to_owned(), DoctorLevel::Ok));
        assert_eq!(limited(30, 12), ("connections: 10 of 12 of the database ".to_owned(), DoctorLevel::Advice));
        assert_eq!(limited(4, -1), ("connections: 3 of 4 of the role me".to_owned(), DoctorLevel::Problem));
    }

    #[test]
    fn only_temporary_schemas_may_come_before_postgresqls_own() {
        let path = |schemas: &[&str]| {
            let search_path = schemas.iter().map(|schema| (*schema).to_owned()).collect();
            level(search_path_of(Server { search_path, ..healthy() }))
        };
        assert_eq!(path(&["pg_catalog", "public"]), DoctorLevel::Ok);
        assert_eq!(path(&["pg_temp_3", "pg_catalog"]), DoctorLevel::Ok);
        assert_eq!(path(&["public", "pg_catalog"]), DoctorLevel::Problem);
    }

    fn search_path_of(server: Server) -> DoctorCheck {
        search_path(&server)
    }

    #[test]
    fn a_large_unused_table_gets_advice() {
        let table = |bytes, expected| level(bloat(&Table { bytes, expected_bytes: expected, ..Table::default() }));
        assert_eq!(table(1_000_000_000, Some(1e6)), DoctorLevel::Advice);
        assert_eq!(table(1_000_000, Some(0.0)), DoctorLevel::Ok, "small");
        assert_eq!(table(1_000_000_000, Some(9e8)), DoctorLevel::Ok, "full");
        assert_eq!(table(1_000_000_000, None), DoctorLevel::Ok, "unknown");
    }

    #[test]
    fn limits_that_nothing_uses_and_old_pauses_get_advice() {
        let names = |count: usize| (0..count).map(|n| format!("task:{n}")).collect::<Vec<_>>();
        let limits = Limits {
            all: names(9),
            unused: names(7),
            long_paused: names(1),
            tripped: names(1),
            listeners: 0,
            unnoticed: 0,
        };
        let unused = limit_use(&limits, "graphile_worker");
        assert_eq!(unused.found, "9; no job and no worker uses task:0, task:1, task:2, task:3, task:4, …");
        assert_eq!(level(unused), DoctorLevel::Advice);
        assert_eq!(level(pauses(&limits, "graphile_worker")), DoctorLevel::Advice);
        assert_eq!(level(breakers(&limits, "graphile_worker")), DoctorLevel::Advice);
        for fine in [Limits::default(), Limits { all: names(1), ..Limits::default() }] {
            assert_eq!(level(limit_use(&fine, "graphile_worker")), DoctorLevel::Ok);
            assert_eq!(level(pauses(&fine, "graphile_worker")), DoctorLevel::Ok);
            assert_eq!(level(breakers(&fine, "graphile_worker")), DoctorLevel::Ok);
        }
    }

    #[test]
    fn limited_jobs_need_workers_of_ours_with_recovery() {
        let worker = |worker_id: &str, is_registered: bool| WorkerSummary {
            worker_id: worker_id.to_owned(),
            state: WorkerState::Alive,
            version: None,
            host: None,
            pid: None,
            slots: None,
            tasks: None,
            started_at: None,
            last_heartbeat_at: is_registered.then(|| DateTime::from_timestamp(0, 0).expect("a time")),
            heartbeat_seconds: None,
            is_connected: Some(true),
            jobs: 0,
            queues: 0,
            holds_since: None,
            of_rust_port: false,
        };
        let found = |workers: Vec<WorkerSummary>, listeners| {
            let limits = Limits { all: vec!["task:t".to_owned()], listeners, ..Limits::default() };
            let check = workers_of_limited_jobs(&Jobs { workers, limits, ..Jobs::default() }).expect("a check");
            (check.found.clone(), level(check))
        };
        let (live, unregistered, node) =
            (worker("rs-live-1", true), worker("rs-worker-1", false), worker("worker-1", false));
        assert_eq!(
            found(vec![live.clone()], 0),
            ("workers with recovery that run them: 1".to_owned(), DoctorLevel::Ok)
        );
        assert!(found(vec![unregistered], 0).0.starts_with("no worker with recovery"));
        assert!(found(vec![], 0).0.starts_with("no worker with recovery"));
        assert!(found(vec![live.clone(), node], 1).0.starts_with("1 of Node's workers"));
        assert!(found(vec![live.clone()], 2).0.starts_with("2 of Node's workers"), "idle ones");
        let pooled = WorkerSummary { is_connected: None, ..live };
        assert_eq!(found(vec![pooled], 1).1, DoctorLevel::Ok);
        assert_eq!(workers_of_limited_jobs(&Jobs::default()), None);
    }

    #[test]
    fn due_jobs_without_a_worker_are_a_problem() {
        let jobs = Jobs { jobs: 5, ready: 5, lag_seconds: 700.0, ..Jobs::default() };
        assert_eq!(level(workers(&jobs)), DoctorLevel::Problem);
        assert_eq!(level(lag(&jobs)), DoctorLevel::Problem);
        assert_eq!(level(workers(&Jobs::default())), DoctorLevel::Ok, "nothing to do");
    }
}
