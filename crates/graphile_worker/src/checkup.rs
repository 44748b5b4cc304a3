//! Whether all is well: server, schema, rights, tables, locks and lag, each judged, with a sentence of advice.
//!
//! What is the case is read first (`Facts`), as far as this role may; judging it is pure (`judge`).

use crate::error::Doing;
use crate::inspect::{WorkerState, WorkerSummary, spoken};
use crate::migrate::{Examined, LOWEST_POSTGRES, examine};
use crate::{Error, WorkerUtils};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use std::fmt;
use std::time::Duration;

/// When a registered worker counts as dead: recovery's default.
const DEAD_AFTER: Duration = Duration::from_secs(5 * 60);

/// What a checkup found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Checkup {
    /// The worst of them.
    pub level: CheckLevel,
    /// One after the other.
    pub checks: Vec<Check>,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// What it is: a name that stays.
    pub name: &'static str,
    /// How it is.
    pub level: CheckLevel,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub advice: Option<String>,
}

/// How bad something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CheckLevel {
    /// As it should be.
    Ok,
    /// Works, and could be better.
    Advice,
    /// Something does not work, or soon will not.
    Problem,
}

impl CheckLevel {
    /// The name it has in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            CheckLevel::Ok => "ok",
            CheckLevel::Advice => "advice",
            CheckLevel::Problem => "problem",
        }
    }
}

impl fmt::Display for CheckLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What is the case. What could not be read says why.
struct Facts {
    now: DateTime<Utc>,
    server: Server,
    schema: String,
    examined: Result<Examined, String>,
    rights: Rights,
    tables: Vec<Table>,
    jobs: Option<Result<Jobs, String>>,
}

#[derive(Debug, Clone, Default)]
struct Server {
    version: String,
    version_number: i32,
    role: String,
    is_standby: bool,
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
    hides_rows: bool,
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
}

impl WorkerUtils {
    /// Looks whether all is well with server and schema. Fails only where the server cannot be asked; a schema that is not
    /// there, or that this role may not read, is something that it finds.
    pub async fn checkup(&self) -> Result<Checkup, Error> {
        let doing = || "look how the server is".to_owned();
        let mut connection = self.pool().acquire().await.doing(doing)?;
        let mut facts = self.facts(&mut connection).await?;
        drop(connection);
        let readable = facts.rights.may_use
            && facts.examined.as_ref().is_ok_and(|examined| examined.installed && examined.addition.is_some())
            && !facts.tables.iter().any(|table| table.cannot_be_read());
        if readable {
            facts.jobs = Some(self.jobs().await.map_err(|error| error.to_string_with_sources()));
        }
        let checks = judge(&facts);
        let level = checks.iter().map(|check| check.level).max().unwrap_or(CheckLevel::Ok);
        Ok(Checkup { level, checks })
    }

    async fn facts(&self, connection: &mut PgConnection) -> Result<Facts, Error> {
        let doing = || "look how the server is".to_owned();
        let statements = self.statements()?;
        let now = sqlx::query_scalar("select now()").fetch_one(&mut *connection).await.doing(doing)?;
        let query = sqlx::query(statements.checkup_server.sql()).fetch_one(&mut *connection);
        let server = query.await.and_then(|row| server(&row)).doing(doing)?;
        let query = sqlx::query(statements.checkup_schema.sql()).fetch_one(&mut *connection);
        let rights = query.await.and_then(|row| rights(&row)).doing(doing)?;
        let query = sqlx::query(statements.checkup_tables.sql()).fetch_all(&mut *connection);
        let tables = query.await.and_then(|rows| rows.iter().map(table).collect()).doing(doing)?;
        let examined = examine(connection, &statements.schema).await.map_err(|error| error.to_string_with_sources());
        Ok(Facts { now, server, schema: statements.schema.name().to_owned(), examined, rights, tables, jobs: None })
    }

    async fn jobs(&self) -> Result<Jobs, Error> {
        let query = sqlx::query(self.statements()?.checkup_jobs.sql()).fetch_one(self.pool());
        let jobs = query.await.and_then(|row| jobs(&row)).doing(|| "look how the jobs are".to_owned())?;
        Ok(Jobs { workers: self.list_workers(DEAD_AFTER).await?, ..jobs })
    }
}

fn server(row: &PgRow) -> sqlx::Result<Server> {
    let json = |column: &str| row.try_get::<String, _>(column);
    let decode = |error: serde_json::Error| sqlx::Error::Decode(error.into());
    Ok(Server {
        version: row.try_get("version")?,
        version_number: row.try_get("version_number")?,
        role: row.try_get("role")?,
        is_standby: row.try_get("is_standby")?,
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
    Ok(Rights { may_use: row.try_get("may_use")?, forbidden_functions: row.try_get("forbidden_functions")? })
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
        hides_rows: row.try_get("hides_rows")?,
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
    })
}

impl Table {
    fn is_ours(&self) -> bool {
        self.name.starts_with("_private_") || self.name.starts_with("_rs_")
    }

    fn cannot_be_read(&self) -> bool {
        self.is_ours() && (self.hides_rows || self.missing_rights.iter().any(|right| right == "select"))
    }
}

/// All checks, in the order in which they are read. Where something is missing, what rests on it is left out.
fn judge(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![version(&facts.server), standby(&facts.server)];
    checks.extend(schema(facts));
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
    match &facts.jobs {
        None => {}
        Some(Err(problem)) => checks.push(Check::problem(
            "jobs",
            problem.clone(),
            "See what is said of the schema and of the role above.".to_owned(),
        )),
        Some(Ok(jobs)) => checks.extend([workers(jobs), lag(jobs), stale_locks(jobs), failed_jobs(jobs)]),
    }
    checks
}

impl Check {
    fn ok(name: &'static str, found: String) -> Check {
        Check { name, level: CheckLevel::Ok, found, advice: None }
    }

    fn advice(name: &'static str, found: String, advice: String) -> Check {
        Check { name, level: CheckLevel::Advice, found, advice: Some(advice) }
    }

    fn problem(name: &'static str, found: String, advice: String) -> Check {
        Check { name, level: CheckLevel::Problem, found, advice: Some(advice) }
    }

    /// From a measure: advice from one mark on, a problem from another.
    fn by(
        measure: f64,
        (advice_from, problem_from): (f64, f64),
        name: &'static str,
        found: String,
        advice: impl FnOnce() -> String,
    ) -> Check {
        if measure >= problem_from {
            Check::problem(name, found, advice())
        } else if measure >= advice_from {
            Check::advice(name, found, advice())
        } else {
            Check::ok(name, found)
        }
    }
}

fn version(server: &Server) -> Check {
    let found = format!("PostgreSQL {}", server.version);
    if server.version_number < LOWEST_POSTGRES {
        let lowest = LOWEST_POSTGRES / 10_000;
        return Check::problem("server_version", found, format!("Use PostgreSQL {lowest} or later."));
    }
    Check::ok("server_version", found)
}

fn standby(server: &Server) -> Check {
    if server.is_standby {
        let advice = "Connect to the primary: jobs can be neither added nor run here.".to_owned();
        return Check::problem("server_role", "a standby, which can only be read".to_owned(), advice);
    }
    Check::ok("server_role", "a primary".to_owned())
}

fn schema(facts: &Facts) -> Vec<Check> {
    let name = &facts.schema;
    let migrate = match name.as_str() {
        "graphile_worker" => "Run `graphile-worker migrate`.".to_owned(),
        name => format!("Run `graphile-worker -s '{}' migrate`.", name.replace('\'', "'\\''")),
    };
    let examined = match &facts.examined {
        Ok(examined) => examined,
        Err(problem) => {
            let advice = "Connect as the owner of the schema, or have it grant this role what is missing.".to_owned();
            return vec![Check::problem(
                "schema",
                format!("the schema {name:?} cannot be looked at: {problem}"),
                advice,
            )];
        }
    };
    if !examined.installed {
        let advice = format!("{migrate} If it is in another schema, name that with -s.");
        return vec![Check::problem("schema", format!("nothing is installed in {name:?}"), advice)];
    }
    let level = examined.level.unwrap_or(0);
    let found = match examined.addition {
        Some(addition) => format!("{name:?} at level {level}, our additions at {addition}"),
        None => format!("{name:?} at level {level}, without our additions"),
    };
    let schema = match &examined.is_up_to_date {
        Ok(true) => Check::ok("schema", found),
        Ok(false) => Check::problem("schema", found, format!("{migrate} It is not what this release works with.")),
        Err(error) => Check::problem("schema", format!("{found}: {error}"), "Use a newer release.".to_owned()),
    };
    let functions = if examined.functions_are_ours {
        Check::ok("functions", "as we have installed them".to_owned())
    } else {
        let advice = format!("{migrate} It puts ours back, where they fit the tables.");
        Check::advice("functions", "not those that we have installed, or changed since".to_owned(), advice)
    };
    vec![schema, functions]
}

fn role(facts: &Facts) -> Option<Check> {
    let role = &facts.server.role;
    if !facts.examined.as_ref().is_ok_and(|examined| examined.installed) && facts.tables.is_empty() {
        return None;
    }
    let schema = crate::db::quote_identifier(&facts.schema);
    let quoted = crate::db::quote_identifier(role);
    if !facts.rights.may_use {
        let advice = format!("Have the owner run `grant usage on schema {schema} to {quoted}`.");
        return Some(Check::problem("role", format!("{role} may not use the schema"), advice));
    }
    let ours = || facts.tables.iter().filter(|table| table.is_ours());
    let missing: Vec<String> = ours()
        .filter(|table| !table.missing_rights.is_empty())
        .map(|table| format!("{} {}", table.missing_rights.join(", "), table.name))
        .collect();
    if !missing.is_empty() {
        let advice = "Work as the owner of the schema: row security hides the tables from all others.".to_owned();
        return Some(Check::problem("role", format!("{role} may not {}", missing.join("; ")), advice));
    }
    if ours().any(|table| table.hides_rows) {
        let advice =
            format!("Work as the owner of the schema, or have a superuser run `alter role {quoted} bypassrls`.");
        return Some(Check::problem("role", format!("{role} sees no rows: row security hides them"), advice));
    }
    let forbidden = &facts.rights.forbidden_functions;
    if !forbidden.is_empty() {
        let advice = format!("Have the owner run `grant execute on all functions in schema {schema} to {quoted}`.");
        return Some(Check::problem("role", format!("{role} may not call {}", forbidden.join(", ")), advice));
    }
    Some(Check::ok("role", format!("{role} may read and change everything")))
}

fn size(facts: &Facts) -> Check {
    let tables: Vec<String> = facts
        .tables
        .iter()
        .filter(|table| ["_private_jobs", "_private_job_queues", "_private_tasks"].contains(&table.name.as_str()))
        .map(|table| {
            let rows = table.live_rows;
            format!("{} {} (about {rows} rows)", table.name.trim_start_matches("_private_"), bytes(table.total_bytes))
        })
        .collect();
    Check::ok("table_sizes", tables.join(", "))
}

fn dead_rows(facts: &Facts) -> Check {
    let ours = facts.tables.iter().filter(|table| table.is_ours());
    let worst = ours.max_by_key(|table| table.dead_rows).cloned().unwrap_or_default();
    let vacuumed = match worst.last_vacuum_at {
        Some(time) => format!("last vacuumed {} ago", spoken((facts.now - time).as_seconds_f64())),
        None => "never vacuumed".to_owned(),
    };
    let (dead, live) = (worst.dead_rows, worst.live_rows);
    let found = format!("at most {dead} in a table ({}, {vacuumed})", worst.name);
    // Autovacuum comes when a fifth of the rows are dead; a busy table has its share of them at any time.
    let measure = if dead < 50_000 { 0.0 } else { dead as f64 / (live as f64 + 50_000.0) };
    Check::by(measure, (1.0, 5.0), "dead_rows", found, || {
        "Vacuum does not keep up: look for what holds it back below, and whether autovacuum runs.".to_owned()
    })
}

fn bloat(jobs: &Table) -> Check {
    let name = "bloat";
    let Some(expected) = jobs.expected_bytes else {
        return Check::ok(name, format!("jobs {}; how much of it is empty is not known yet", bytes(jobs.bytes)));
    };
    let empty = (jobs.bytes as f64 - expected).max(0.0);
    let share = if jobs.bytes > 0 { empty / jobs.bytes as f64 } else { 0.0 };
    let found = format!("jobs {}, of which about {:.0} % are empty or dead", bytes(jobs.bytes), share * 100.0);
    let measure = if empty > 256e6 && share > 0.8 { 1.0 } else { 0.0 };
    Check::by(measure, (1.0, 2.0), name, found, || {
        "New jobs fill the room again. To give it back, run `vacuum full` on _private_jobs while no worker runs."
            .to_owned()
    })
}

fn vacuum(server: &Server) -> Check {
    if !server.autovacuum {
        let advice = "Switch autovacuum and track_counts on: every job leaves dead rows behind.".to_owned();
        return Check::problem("autovacuum", "off".to_owned(), advice);
    }
    Check::ok("autovacuum", "on".to_owned())
}

fn transactions(server: &Server) -> Check {
    let name = "long_transactions";
    let Some(longest) = server.transactions.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds)) else {
        let hidden = server.hidden_sessions;
        if hidden > 0 {
            let advice = "Have a superuser run `grant pg_monitor` to this role, to see the transactions of others.";
            return Check::advice(
                name,
                format!("none to be seen, but {hidden} sessions are hidden"),
                advice.to_owned(),
            );
        }
        return Check::ok(name, "none".to_owned());
    };
    let mut found = format!(
        "the longest is {} old: pid {}, application {:?}, role {}, {}",
        spoken(longest.seconds),
        longest.pid,
        longest.application_name.as_deref().unwrap_or_default(),
        longest.role.as_deref().unwrap_or("unknown"),
        longest.state,
    );
    if let Some(seconds) = longest.query_seconds {
        found.push_str(&format!(", its last query began {} ago", spoken(seconds)));
    }
    found.push_str(&format!(", holds back {} transactions", longest.xmin_age));
    let pid = longest.pid;
    Check::by(longest.seconds, (5.0 * 60.0, 3_600.0), name, found, || {
        format!("Vacuum cannot take away what died since then. End it, or run `select pg_terminate_backend({pid})`.")
    })
}

fn prepared_transactions(server: &Server) -> Check {
    let (count, seconds) = (server.prepared_transactions, server.oldest_prepared_seconds);
    if count == 0 {
        return Check::ok("prepared_transactions", "none".to_owned());
    }
    let found = format!("{count}, the oldest from {} ago", spoken(seconds));
    Check::by(seconds, (5.0 * 60.0, 3_600.0), "prepared_transactions", found, || {
        "Commit or roll it back (see pg_prepared_xacts): it holds vacuum back, and its locks.".to_owned()
    })
}

fn replication_slots(server: &Server) -> Check {
    let Some(oldest) = server.slots.iter().max_by_key(|slot| slot.xmin_age) else {
        return Check::ok("replication_slots", "none that holds vacuum back".to_owned());
    };
    let found = format!("{:?} holds back {} transactions", oldest.name, oldest.xmin_age);
    Check::by(oldest.xmin_age as f64, (1e6, 1e8), "replication_slots", found, || {
        "See whether its standby still follows; drop the slot if it is gone.".to_owned()
    })
}

fn notifications(server: &Server) -> Check {
    let used = server.notification_queue_usage;
    let found = format!("{:.1} % of its room used", used * 100.0);
    Check::by(used, (0.1, 0.5), "notification_queue", found, || {
        "A session that listens stays in a transaction, so nothing can be taken out; when it is full, adding jobs fails."
            .to_owned()
    })
}

fn connections(server: &Server) -> Check {
    let (connections, most) = (server.connections, server.max_connections.max(1));
    let found = format!("{connections} of {most}");
    Check::by(connections as f64 / most as f64, (0.8, 0.95), "connections", found, || {
        "Use smaller pools or a pooler, or raise max_connections.".to_owned()
    })
}

fn workers(jobs: &Jobs) -> Check {
    let count = |state| jobs.workers.iter().filter(|worker| worker.state == state).count();
    let (alive, gone) = (count(WorkerState::Alive), count(WorkerState::Stale) + count(WorkerState::Dead));
    let unknown = count(WorkerState::Unknown);
    let found = format!("{alive} alive, {gone} dead, {unknown} that do not register");
    if gone > 0 {
        let advice = "Workers sweep by themselves where recovery is on; or run `graphile-worker sweep`.".to_owned();
        return Check::advice("workers", found, advice);
    }
    if alive + unknown == 0 && jobs.ready > 0 {
        let advice = "Start a worker; idle workers of Node's cannot be seen.".to_owned();
        return Check::problem("workers", format!("none to be seen, and jobs that are due: {}", jobs.ready), advice);
    }
    Check::ok("workers", found)
}

fn lag(jobs: &Jobs) -> Check {
    if jobs.ready == 0 {
        return Check::ok("lag", "no job waits that could run".to_owned());
    }
    let found = format!("jobs that could run: {}, the first for {}", jobs.ready, spoken(jobs.lag_seconds));
    Check::by(jobs.lag_seconds, (60.0, 600.0), "lag", found, || {
        "More comes than is worked off, or a queue is blocked, or nobody knows the task: see `graphile-worker stats`, `queues` and `why`."
            .to_owned()
    })
}

fn stale_locks(jobs: &Jobs) -> Check {
    let (held, queues) = (jobs.stale_jobs, jobs.stale_queues);
    let found = format!("held for more than 4 hours: jobs {held}, queues {queues}");
    let measure = if held + queues > 0 { 1.0 } else { 0.0 };
    Check::by(measure, (1.0, 2.0), "stale_locks", found, || {
        "If their workers are dead, run `graphile-worker unlock WORKER_ID`.".to_owned()
    })
}

fn failed_jobs(jobs: &Jobs) -> Check {
    let found = format!("failed for good: {} of {}", jobs.failed, jobs.jobs);
    let measure = if jobs.failed > 0 { 1.0 } else { 0.0 };
    Check::by(measure, (1.0, 2.0), "failed_jobs", found, || {
        "See `graphile-worker list --state failed`; `run-now` tries them again, `cleanup DELETE_PERMAFAILED_JOBS` deletes them.".to_owned()
    })
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
            ..Server::default()
        }
    }

    fn level(check: Check) -> CheckLevel {
        assert_eq!(check.advice.is_some(), check.level != CheckLevel::Ok, "{check:?}");
        check.level
    }

    #[test]
    fn a_measure_is_judged_by_two_marks() {
        let queue = |used| level(notifications(&Server { notification_queue_usage: used, ..healthy() }));
        assert_eq!((queue(0.0), queue(0.2), queue(0.6)), (CheckLevel::Ok, CheckLevel::Advice, CheckLevel::Problem));
        let full = |connections| level(self::connections(&Server { connections, ..healthy() }));
        assert_eq!((full(79), full(80), full(95)), (CheckLevel::Ok, CheckLevel::Advice, CheckLevel::Problem));
        let prepared = |seconds| {
            let server = Server { prepared_transactions: 1, oldest_prepared_seconds: seconds, ..healthy() };
            level(prepared_transactions(&server))
        };
        assert_eq!(
            (prepared(1.0), prepared(400.0), prepared(4e3)),
            (CheckLevel::Ok, CheckLevel::Advice, CheckLevel::Problem)
        );
        let slot = |xmin_age| {
            let slots = vec![Slot { name: "s".to_owned(), xmin_age }];
            level(replication_slots(&Server { slots, ..healthy() }))
        };
        assert_eq!((slot(10), slot(2_000_000)), (CheckLevel::Ok, CheckLevel::Advice));
    }

    #[test]
    fn the_longest_transaction_is_named_with_how_to_end_it() {
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
            "the longest is 1h 6m old: pid 4000, application \"report\", role ann, idle in transaction, its last query began 1m ago, holds back 12 transactions"
        );
        assert!(check.advice.as_ref().is_some_and(|advice| advice.contains("pg_terminate_backend(4000)")), "{check:?}");
        assert_eq!(level(check), CheckLevel::Problem);
        assert_eq!(level(transactions(&Server { hidden_sessions: 2, ..healthy() })), CheckLevel::Advice);
    }

    #[test]
    fn an_old_server_a_standby_and_no_autovacuum_are_problems() {
        assert_eq!(level(version(&Server { version_number: 110_000, ..healthy() })), CheckLevel::Problem);
        assert_eq!(level(standby(&Server { is_standby: true, ..healthy() })), CheckLevel::Problem);
        assert_eq!(level(vacuum(&Server { autovacuum: false, ..healthy() })), CheckLevel::Problem);
    }

    #[test]
    fn a_large_table_with_nothing_in_it_is_worth_a_word() {
        let table = |bytes, expected| level(bloat(&Table { bytes, expected_bytes: expected, ..Table::default() }));
        assert_eq!(table(1_000_000_000, Some(1e6)), CheckLevel::Advice);
        assert_eq!(table(1_000_000, Some(0.0)), CheckLevel::Ok, "small");
        assert_eq!(table(1_000_000_000, Some(9e8)), CheckLevel::Ok, "full");
        assert_eq!(table(1_000_000_000, None), CheckLevel::Ok, "not known");
    }

    #[test]
    fn jobs_that_are_due_and_nobody_to_run_them_are_a_problem() {
        let jobs = Jobs { jobs: 5, ready: 5, lag_seconds: 700.0, ..Jobs::default() };
        assert_eq!(level(workers(&jobs)), CheckLevel::Problem);
        assert_eq!(level(lag(&jobs)), CheckLevel::Problem);
        assert_eq!(level(workers(&Jobs::default())), CheckLevel::Ok, "nothing to do");
    }
}
