//! The schema: installing it, bringing it up to date, and taking it away.

use super::{Form, counted, print_json};
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use crate::table::{Screen, Table, wrapped};
use clap::Args;
use graphile_worker::{Migration, WorkerUtils};
use serde_json::json;
use std::time::Duration;

/// For `migrate`.
#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// How many seconds to wait for workers of older releases to finish, where the schema changes under them [default: 600]
    #[arg(long, value_name = "SECONDS", value_parser = crate::arguments::whole::<u64>)]
    max_migration_wait: Option<u64>,
    #[command(flatten)]
    form: Form,
}

/// For `uninstall`.
#[derive(Debug, Args)]
pub(crate) struct Uninstall {
    /// Really drop it, with all jobs
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    form: Form,
}

/// Installs the schema, or brings it up to date, and says which.
pub(crate) async fn migrate(wait: Option<Duration>, database: &Database) -> Result<(), Failure> {
    let (migration, name) = migrated(wait, database).await?;
    let said = format!("{migration}, in the database {name:?} on {}", database.server());
    print_line(&wrapped(&said, Screen::of_stdout().width))
}

pub(super) async fn run_migrate(asked: Migrate, database: &Database) -> Result<(), Failure> {
    let wait = asked.max_migration_wait.map(Duration::from_secs);
    if !asked.form.json {
        return migrate(wait, database).await;
    }
    let (migration, name) = migrated(wait, database).await?;
    print_json(&json!({
        "schema": migration.schema,
        "from": migration.from,
        "level": migration.level,
        "changed": migration.changed,
        "moved_jobs": migration.moved_jobs,
        "database": name,
        "server": database.server(),
    }))
}

/// What was done, and the name of the database.
async fn migrated(wait: Option<Duration>, database: &Database) -> Result<(Migration, String), Failure> {
    let mut connection = database.connect().await?;
    let migration = match wait {
        Some(wait) => graphile_worker::migrate_within(wait, &mut connection, database.schema()).await?,
        None => graphile_worker::migrate(&mut connection, database.schema()).await?,
    };
    let name: String = sqlx::query_scalar("select current_database()::text").fetch_one(&mut connection).await?;
    let _ = sqlx::Connection::close(connection).await;
    Ok((migration, name))
}

pub(super) async fn uninstall(asked: Uninstall, database: &Database) -> Result<(), Failure> {
    let utils = WorkerUtils::new(database.pool(1).await?, database.schema());
    let found = utils.uninstall(!asked.yes).await?;
    if !found.installed {
        return Err(Failure::because(format!(
            "nothing to uninstall: Graphile Worker is not in the schema {:?} on {}",
            found.schema,
            database.server()
        )));
    }
    if asked.form.json {
        return print_json(&found);
    }
    let mut table = Table::of_pairs();
    let are = if found.running == 1 { "is" } else { "are" };
    table.pair("jobs", format!("{}, of which {} {are} running", found.jobs, found.running));
    table.pair("tables", found.tables.join(", "));
    table.pair("functions", found.functions.to_string());
    if !found.strangers.is_empty() {
        table.pair("not ours", found.strangers.join(", "));
    }
    if !found.dependents.is_empty() {
        table.pair("elsewhere", found.dependents.join(", "));
    }
    let (schema, jobs) = (&found.schema, counted(found.jobs, "job", "jobs"));
    let said = if found.dropped {
        format!("Dropped the schema {schema:?} with {jobs}:")
    } else {
        format!("Nothing was changed. With --yes this drops the schema {schema:?} with {jobs}:")
    };
    let screen = Screen::of_stdout();
    print(&format!("{}\n{}", wrapped(&said, screen.width), table.show(screen)))
}
