//! Uninstalling: what dropping the schema would remove, and dropping it.

use crate::Error;
use crate::db::{Statements, session};
use crate::error::Context;
use serde::Serialize;
use sqlx::{PgConnection, PgPool, Row};

/// What [`WorkerUtils::uninstall`](crate::WorkerUtils::uninstall) found, and whether it dropped it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Uninstall {
    /// The schema.
    pub schema: String,
    /// Whether Graphile Worker was installed in the schema.
    pub installed: bool,
    /// Whether the schema was dropped.
    pub dropped: bool,
    /// Number of jobs.
    pub jobs: i64,
    /// Number of jobs that a worker holds.
    pub running: i64,
    /// Its tables.
    pub tables: Vec<String>,
    /// Number of functions.
    pub functions: i64,
    /// Tables and views in the schema that are not Graphile Worker's.
    pub strangers: Vec<String>,
    /// Objects outside the schema that depend on it and are dropped with it: views, foreign keys, triggers.
    pub dependents: Vec<String>,
}

/// Reports what the schema contains, and drops it if `for_real`.
pub(crate) async fn drop_schema(pool: &PgPool, statements: &Statements, for_real: bool) -> Result<Uninstall, Error> {
    let context = || format!("uninstall the schema {:?}", statements.schema.name());
    let mut transaction = pool.begin_with(session::BEGIN).await.context(context)?;
    let mut found = inspect(&mut transaction, statements).await.context(context)?;
    if found.installed && for_real {
        if !found.strangers.is_empty() {
            return Err(Error::SchemaShared { schema: found.schema, strangers: found.strangers.join(", ") });
        }
        statements.uninstall.query().execute(&mut *transaction).await.context(context)?;
        found.dropped = true;
    }
    session::commit(transaction).await.context(context)?;
    Ok(found)
}

async fn inspect(connection: &mut PgConnection, statements: &Statements) -> sqlx::Result<Uninstall> {
    let row = statements.uninstall_contents.query().fetch_one(&mut *connection).await?;
    let mut found = Uninstall {
        schema: statements.schema.name().to_owned(),
        installed: row.try_get("is_ours")?,
        dropped: false,
        jobs: 0,
        running: 0,
        tables: row.try_get("tables")?,
        functions: row.try_get("functions")?,
        strangers: row.try_get("strangers")?,
        dependents: row.try_get("dependents")?,
    };
    if found.installed {
        let row = statements.uninstall_jobs.query().fetch_one(connection).await?;
        (found.jobs, found.running) = (row.try_get("jobs")?, row.try_get("running")?);
    }
    Ok(found)
}
