//! Live upgrades: before a breaking step, a new release asks older workers to finish and waits for them. Also
//! the other side: how a running worker notices that it is the older one.
//!
//! `migrate` defines the steps and applies them.

use super::steps::queries;
use super::steps::{LEVEL, last_addition};
use crate::Error;
use crate::db::session;
use crate::db::{Schema, Statements};
use crate::error::Context;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use std::time::{Duration, Instant};
use tracing::warn;

/// Default wait for older workers to finish.
pub(crate) const DEFAULT_MIGRATION_WAIT: Duration = Duration::from_secs(10 * 60);

/// How often to check whether they have finished.
pub(crate) const OLD_WORKER_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// How often they are asked, and how long a request is valid: if the requester dies, older releases can start
/// again.
const REQUEST_INTERVAL: Duration = Duration::from_secs(5);
const REQUEST_LIFETIME: Duration = Duration::from_secs(20);

/// How long reading the ledgers may take.
const LEDGER_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a waiting migration logs that it waits.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// The authors of the two ledgers.
pub(crate) const NODE: &str = "Node's graphile-worker";
pub(crate) const OURS: &str = "graphile_worker for Rust";

/// Longer waits are recorded as one year.
const MAX_RECORDED_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The breaking steps, and where to find the workers that they affect.
pub(crate) struct Breaking {
    /// Migrations of Node's ledger: they affect all workers.
    pub(crate) migrations: Vec<i32>,
    /// Steps of our ledger: they affect only our workers.
    pub(crate) additions: Vec<i32>,
    /// Whether the current tables exist, in which this release can find locks.
    pub(crate) has_tables: bool,
    /// Whether the table exists in which workers register.
    pub(crate) workers_register: bool,
    /// Whether our own ledger exists. Without it, no worker of ours is running.
    pub(crate) has_additions: bool,
}

/// A migration's request that older workers finish.
pub(crate) struct Request {
    max_wait: Duration,
    began: Instant,
    asked_at: Option<Instant>,
    logged_at: Option<Instant>,
}

impl Request {
    pub(crate) fn new(max_wait: Duration) -> Request {
        Request { max_wait, began: Instant::now(), asked_at: None, logged_at: None }
    }

    /// Asks older workers to finish. Returns whether they have finished, or their time is up.
    pub(crate) async fn is_granted(
        &mut self,
        connection: &mut PgConnection,
        schema: &Schema,
        breaking: &Breaking,
    ) -> Result<bool, Error> {
        if self.asked_at.is_none_or(|asked| asked.elapsed() >= REQUEST_INTERVAL) {
            self.asked_at = Some(Instant::now());
            ask(connection, schema, breaking, self.time_left()).await?;
        }
        let workers = older_workers(connection, schema, breaking).await?;
        if workers.is_empty() {
            return Ok(true);
        }
        if self.waits_for(&workers.join(", ")) {
            return Ok(false);
        }
        warn!(schema = schema.name(), ?workers, "workers of an older release did not finish in time; migrating anyway");
        Ok(true)
    }

    fn time_left(&self) -> Duration {
        self.max_wait.saturating_sub(self.began.elapsed())
    }

    /// Whether there is time left to wait for these workers. Logs it now and then.
    pub(crate) fn waits_for(&mut self, workers: &str) -> bool {
        if self.time_left().is_zero() {
            return false;
        }
        if self.logged_at.is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL) {
            self.logged_at = Some(Instant::now());
            warn!(workers, at_most = ?self.time_left(), "waiting for workers of an older release to finish");
        }
        true
    }
}

async fn ask(
    connection: &mut PgConnection,
    schema: &Schema,
    breaking: &Breaking,
    time_left: Duration,
) -> Result<(), Error> {
    let mut wanted = Vec::new();
    if breaking.has_additions {
        wanted.extend(breaking.migrations.iter().map(|id| (queries::REQUEST_MIGRATION, id)));
        wanted.extend(breaking.additions.iter().map(|step| (queries::REQUEST_ADDITION, step)));
    } else {
        for id in &breaking.migrations {
            announce(connection, schema, *id).await?;
        }
    }
    for (statement, step) in wanted {
        let query = sqlx::query(schema.sql(statement))
            .bind(step)
            .bind(REQUEST_LIFETIME.as_secs_f64())
            .bind(time_left.min(MAX_RECORDED_WAIT).as_secs_f64());
        session::fetch_all_safely_on(connection, true, query)
            .await
            .context(|| format!("ask older workers of {:?} to finish", schema.name()))?;
    }
    Ok(())
}

/// Notifies running workers of a breaking migration in Node's ledger.
pub(crate) async fn announce(connection: &mut PgConnection, schema: &Schema, id: i32) -> Result<(), Error> {
    session::fetch_all_safely_on(connection, true, sqlx::query(schema.sql(queries::ANNOUNCE_MIGRATION)).bind(id))
        .await
        .map(drop)
        .context(|| format!("announce the migration of {:?}", schema.name()))
}

/// Registered live workers, and workers that hold jobs or queues. Dead registered workers are left to
/// recovery; workers that neither register nor hold anything have nothing to finish.
async fn older_workers(
    connection: &mut PgConnection,
    schema: &Schema,
    breaking: &Breaking,
) -> Result<Vec<String>, Error> {
    let context = || format!("find older workers of {:?}", schema.name());
    let mut workers: Vec<String> = Vec::new();
    if breaking.workers_register {
        workers.extend(names(connection, schema.sql(queries::LIVE_WORKERS)).await.context(context)?);
    }
    if breaking.has_tables {
        let holders = names(connection, schema.sql(queries::LOCK_HOLDERS)).await.context(context)?;
        let affects_node_workers = !breaking.migrations.is_empty();
        workers.extend(
            holders
                .into_iter()
                .filter(|worker| affects_node_workers || worker.starts_with("rs-"))
                .filter(|worker| !worker.starts_with("rs-live-")),
        );
    }
    Ok(workers)
}

async fn names(connection: &mut PgConnection, sql: AssertSqlSafe<String>) -> sqlx::Result<Vec<String>> {
    session::read(connection, sql).await?.iter().map(|row| row.try_get(0)).collect()
}

/// Why a worker must stop, and how long its jobs may take to finish, if that is longer than its own grace
/// period.
#[derive(Debug)]
pub(crate) struct LeaveNotice {
    pub(crate) reason: Error,
    pub(crate) time_to_finish: Duration,
}

impl From<Error> for LeaveNotice {
    fn from(reason: Error) -> LeaveNotice {
        LeaveNotice { reason, time_to_finish: Duration::ZERO }
    }
}

/// Whether the ledgers require a worker of this release to stop. An announcement only triggers the check,
/// because any role that can connect can send one. Returns `None` if the ledgers cannot be read.
pub(crate) async fn notice_in_ledgers(
    connection: &mut PgConnection,
    statements: &Statements,
) -> Option<Option<LeaveNotice>> {
    let query = statements.newer_steps.query().persistent(false).bind(LEVEL).bind(last_addition());
    let reading = session::fetch_all_on(connection, statements.is_pooled, query);
    let rows = tokio::time::timeout(LEDGER_TIMEOUT, reading).await.ok()?.ok()?;
    notice_in(rows.first()?, statements.schema.name()).ok()
}

fn notice_in(row: &PgRow, schema: &str) -> sqlx::Result<Option<LeaveNotice>> {
    let schema = schema.to_owned();
    let migrations: Vec<i32> = row.try_get("migrations")?;
    let additions: Vec<i32> = row.try_get("additions")?;
    let wanted: Option<i32> = row.try_get("wanted")?;
    let taken_in: Option<f64> = row.try_get("taken_in")?;
    Ok(if !migrations.is_empty() {
        Some(Error::SchemaTooNew { schema, author: NODE, unknown: migrations, known: LEVEL }.into())
    } else if !additions.is_empty() {
        Some(Error::SchemaTooNew { schema, author: OURS, unknown: additions, known: last_addition() }.into())
    } else {
        wanted.map(|step| LeaveNotice {
            reason: under_way(schema, step),
            time_to_finish: Duration::try_from_secs_f64(taken_in.unwrap_or(0.0)).unwrap_or_default(),
        })
    })
}

/// The error for a step that a newer release waits to apply: one of our ledger, or a migration of Node's by
/// its negative number.
pub(crate) fn under_way(schema: String, wanted: i32) -> Error {
    if wanted < 0 {
        Error::UpgradeUnderWay { schema, author: NODE, step: -wanted, known: LEVEL }
    } else {
        Error::UpgradeUnderWay { schema, author: OURS, step: wanted, known: last_addition() }
    }
}
