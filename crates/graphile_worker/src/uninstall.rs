//! Taking the schema away again: what would go, and that it goes.

use crate::db::Statements;
use crate::error::Doing;
use crate::{Error, WorkerUtils};
use serde::Serialize;
use sqlx::{PgConnection, Row};

/// What [`WorkerUtils::uninstall`] found, and whether it is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Uninstall {
    /// The schema.
    pub schema: String,
    /// Whether Graphile Worker is, or was, in it.
    pub installed: bool,
    /// Whether it has been dropped.
    pub dropped: bool,
    /// How many jobs are, or were, in it.
    pub jobs: i64,
    /// How many of these a worker holds.
    pub running: i64,
    /// Its tables.
    pub tables: Vec<String>,
    /// How many functions it has.
    pub functions: i64,
    /// Tables and views in it that are not Graphile Worker's.
    pub strangers: Vec<String>,
    /// What stands elsewhere, rests on it and goes with it: views, foreign keys, triggers.
    pub dependents: Vec<String>,
}

impl WorkerUtils {
    /// Drops the schema with all jobs in it, or only says what that would take away. A schema that is not Graphile Worker's
    /// is left alone; one that others have tables in is not dropped.
    pub async fn uninstall(&self, dry_run: bool) -> Result<Uninstall, Error> {
        let statements = self.statements()?;
        let doing = || format!("uninstall the schema {:?}", statements.schema.name());
        let mut transaction = self.pool().begin().await.doing(doing)?;
        let mut found = look(&mut transaction, statements).await.doing(doing)?;
        if found.installed && !dry_run {
            if !found.strangers.is_empty() {
                return Err(Error::SchemaShared { schema: found.schema, strangers: found.strangers.join(", ") });
            }
            sqlx::query(statements.uninstall.sql()).execute(&mut *transaction).await.doing(doing)?;
            found.dropped = true;
        }
        transaction.commit().await.doing(doing)?;
        Ok(found)
    }
}

async fn look(connection: &mut PgConnection, statements: &Statements) -> sqlx::Result<Uninstall> {
    let row = sqlx::query(statements.uninstall_look.sql()).fetch_one(&mut *connection).await?;
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
        let row = sqlx::query(statements.uninstall_jobs.sql()).fetch_one(connection).await?;
        (found.jobs, found.running) = (row.try_get("jobs")?, row.try_get("running")?);
    }
    Ok(found)
}
