//! Live upgrades. A release that has to take a step which older workers must not work with asks them to finish, and waits
//! for them. And the other side: how a running worker learns that it is the older one.
//!
//! Which steps there are, and how they are taken, is `migrate`'s.

use crate::Error;
use crate::db::{Schema, Statements, queries};
use crate::error::Doing;
use crate::migrate::{LEVEL, last_addition};
use sqlx::postgres::PgRow;
use sqlx::{Executor, PgConnection, Postgres, Row};
use std::time::{Duration, Instant};
use tracing::warn;

/// How long older workers may take to finish, if nothing else is said.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(10 * 60);

/// How often to look whether they have.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// How often they are asked, and for how long that holds: should the one who asks die, older releases start again.
const ASK_INTERVAL: Duration = Duration::from_secs(5);
const ASKED_FOR: Duration = Duration::from_secs(20);

/// How long the database may take to answer a worker that only wants to be sure.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the log says that we still wait.
const SAY_INTERVAL: Duration = Duration::from_secs(30);

/// The authors of the two ledgers.
pub(crate) const NODE: &str = "Node's graphile-worker";
pub(crate) const OURS: &str = "graphile_worker for Rust";

/// A wait that is longer is recorded as this long: a year.
const LONGEST_RECORDED_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// What older workers must not work with, and how they can be known.
pub(crate) struct Breaking {
    /// Steps of Node's ledger: they concern everybody.
    pub(crate) migrations: Vec<i32>,
    /// Steps of ours: they concern only workers of ours.
    pub(crate) additions: Vec<i32>,
    /// Whether locks are where this release looks for them.
    pub(crate) has_tables: bool,
    /// Whether there is a table where workers register.
    pub(crate) workers_register: bool,
    /// Whether there is our own ledger. Without it, no worker of ours works here.
    pub(crate) has_additions: bool,
}

/// A migration's wish that older workers finish.
pub(crate) struct Request {
    longest_wait: Duration,
    began: Instant,
    asked_at: Option<Instant>,
    said_at: Option<Instant>,
}

impl Request {
    pub(crate) fn new(longest_wait: Duration) -> Request {
        Request { longest_wait, began: Instant::now(), asked_at: None, said_at: None }
    }

    /// Asks older workers to finish; whether they have, or have had time enough.
    pub(crate) async fn is_granted(
        &mut self,
        connection: &mut PgConnection,
        schema: &Schema,
        breaking: &Breaking,
    ) -> Result<bool, Error> {
        if self.asked_at.is_none_or(|asked| asked.elapsed() >= ASK_INTERVAL) {
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
        warn!(
            schema = schema.name(),
            ?workers,
            "workers of an older release have not finished in time: migrating all the same"
        );
        Ok(true)
    }

    fn time_left(&self) -> Duration {
        self.longest_wait.saturating_sub(self.began.elapsed())
    }

    /// Whether there is time left for them.
    pub(crate) fn waits_for(&mut self, workers: &str) -> bool {
        if self.time_left().is_zero() {
            return false;
        }
        if self.said_at.is_none_or(|said| said.elapsed() >= SAY_INTERVAL) {
            self.said_at = Some(Instant::now());
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
        wanted.extend(breaking.migrations.iter().map(|id| (queries::WANT_MIGRATION, id)));
        wanted.extend(breaking.additions.iter().map(|step| (queries::WANT_ADDITION, step)));
    } else {
        for id in &breaking.migrations {
            announce(connection, schema, *id).await?;
        }
    }
    for (statement, step) in wanted {
        sqlx::query(schema.sql(statement))
            .bind(step)
            .bind(ASKED_FOR.as_secs_f64())
            .bind(time_left.min(LONGEST_RECORDED_WAIT).as_secs_f64())
            .execute(&mut *connection)
            .await
            .doing(|| format!("ask older workers of {:?} to finish", schema.name()))?;
    }
    Ok(())
}

/// Tells running workers of a breaking step of Node's ledger.
pub(crate) async fn announce(connection: &mut PgConnection, schema: &Schema, id: i32) -> Result<(), Error> {
    sqlx::query(schema.sql(queries::ANNOUNCE_MIGRATION))
        .bind(id)
        .execute(connection)
        .await
        .map(|_| ())
        .doing(|| format!("announce the migration of {:?}", schema.name()))
}

/// Who has registered and lives, and who holds jobs or queues. One of ours that registers and holds something without
/// being alive is for recovery; one that neither registers nor holds anything has nothing to finish.
async fn older_workers(
    connection: &mut PgConnection,
    schema: &Schema,
    breaking: &Breaking,
) -> Result<Vec<String>, Error> {
    let doing = || format!("look for older workers of {:?}", schema.name());
    let mut workers: Vec<String> = Vec::new();
    if breaking.workers_register {
        let live = sqlx::query_scalar(schema.sql(queries::LIVE_WORKERS));
        workers.extend(live.fetch_all(&mut *connection).await.doing(doing)?);
    }
    if breaking.has_tables {
        let holders = sqlx::query_scalar(schema.sql(queries::LOCK_HOLDERS));
        let holders: Vec<String> = holders.fetch_all(&mut *connection).await.doing(doing)?;
        let concerns_everybody = !breaking.migrations.is_empty();
        workers.extend(
            holders
                .into_iter()
                .filter(|worker| concerns_everybody || worker.starts_with("rs-"))
                .filter(|worker| !worker.starts_with("rs-live-")),
        );
    }
    Ok(workers)
}

/// Why a worker has to leave, and how long its jobs may take to finish, should that be longer than they may anyway.
#[derive(Debug)]
pub(crate) struct Notice {
    pub(crate) reason: Error,
    pub(crate) time_to_finish: Duration,
}

impl From<Error> for Notice {
    fn from(reason: Error) -> Notice {
        Notice { reason, time_to_finish: Duration::ZERO }
    }
}

/// Whether the ledgers say that a worker of this release has to leave. An announcement is only a reason to read them: any
/// role that can connect can send one. None if they cannot be read.
pub(crate) async fn notice_in_ledgers(
    connection: impl Executor<'_, Database = Postgres>,
    statements: &Statements,
) -> Option<Option<Notice>> {
    let query = sqlx::query(statements.newer_steps.sql()).persistent(false).bind(LEVEL).bind(last_addition());
    let row = tokio::time::timeout(ANSWER_TIMEOUT, query.fetch_one(connection)).await.ok()?.ok()?;
    notice_in(&row, statements.schema.name()).ok()
}

fn notice_in(row: &PgRow, schema: &str) -> sqlx::Result<Option<Notice>> {
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
        wanted.map(|step| Notice {
            reason: under_way(schema, step),
            time_to_finish: Duration::try_from_secs_f64(taken_in.unwrap_or(0.0)).unwrap_or_default(),
        })
    })
}

/// A step of our ledger, or a migration of Node's by its negative number, that a newer release waits to take.
pub(crate) fn under_way(schema: String, wanted: i32) -> Error {
    if wanted < 0 {
        Error::UpgradeUnderWay { schema, author: NODE, step: -wanted, known: LEVEL }
    } else {
        Error::UpgradeUnderWay { schema, author: OURS, step: wanted, known: last_addition() }
    }
}
