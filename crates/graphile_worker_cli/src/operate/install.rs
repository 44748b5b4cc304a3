//! `migrate` and `uninstall`: installs, updates or drops the schema. The library holds the migrations.

use super::{OutputFormat, counted, print_json};
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use crate::table::{Screen, Table, wrapped};
use clap::Args;
use graphile_worker::Migration;
use serde_json::json;
use sqlx::Row;
use std::time::Duration;

/// Options of `migrate`.
#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// Seconds to wait for workers of older releases to stop before a breaking migration [default: 600]
    #[arg(long, value_name = "SECONDS", value_parser = crate::arguments::whole::<u64>)]
    max_migration_wait: Option<u64>,
    /// Also remove the tables, functions and migration entries of the Rust port (graphile_worker on crates.io up to
    /// 0.14), and release the jobs of its workers; stop them first
    #[arg(long, conflicts_with = "max_migration_wait")]
    from_rust_port: bool,
    /// With --from-rust-port: also if workers of the port seem to be alive; their jobs may run twice
    #[arg(long, requires = "from_rust_port")]
    force: bool,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `uninstall`.
#[derive(Debug, Args)]
pub(crate) struct Uninstall {
    /// Drop the schema, with all jobs
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    output: OutputFormat,
}

/// Installs or updates the schema, and prints what changed.
pub(crate) async fn migrate(wait: Option<Duration>, database: &Database) -> Result<(), Failure> {
    print_migration(&migrated(wait, None, database).await?, database)
}

fn print_migration((migration, name): &(Migration, String), database: &Database) -> Result<(), Failure> {
    let summary = format!("{migration}, in the database {name:?} on {}", database.server());
    print_line(&wrapped(&summary, Screen::of_stdout().width))
}

pub(super) async fn run_migrate(args: Migrate, database: &Database) -> Result<(), Failure> {
    let wait = args.max_migration_wait.map(Duration::from_secs);
    let from_rust_port = args.from_rust_port.then_some(Force(args.force));
    let migrated = migrated(wait, from_rust_port, database).await?;
    if !args.output.json {
        return print_migration(&migrated, database);
    }
    let (migration, name) = migrated;
    print_json(&json!({
        "schema": migration.schema,
        "from": migration.from,
        "level": migration.level,
        "changed": migration.changed,
        "moved_jobs": migration.moved_jobs,
        "removed_rust_port": migration.removed_rust_port,
        "released_jobs": migration.released_jobs,
        "database": name,
        "server": database.server(),
    }))
}

/// Whether workers of the Rust port count as dead although they seem to be alive.
#[derive(Debug, Clone, Copy)]
struct Force(bool);

/// Migrates, and returns what changed and the name of the database.
async fn migrated(
    wait: Option<Duration>,
    from_rust_port: Option<Force>,
    database: &Database,
) -> Result<(Migration, String), Failure> {
    let mut connection = database.connect().await?;
    let row = sqlx::raw_sql("select pg_catalog.current_database()::pg_catalog.text").fetch_one(&mut connection).await?;
    let name: String = row.try_get(0)?;
    let _ = sqlx::Connection::close(connection).await;
    let utils = database.utils(1).await?;
    let migration = match (from_rust_port, wait) {
        (Some(Force(true)), _) => utils.force_migrate_from_rust_port().await?,
        (Some(Force(false)), _) => utils.migrate_from_rust_port().await?,
        (None, Some(wait)) => utils.migrate_with_max_wait(wait).await?,
        (None, None) => utils.migrate().await?,
    };
    Ok((migration, name))
}

pub(super) async fn uninstall(args: Uninstall, database: &Database) -> Result<(), Failure> {
    let utils = database.utils(1).await?;
    let found = if args.yes { utils.uninstall().await? } else { utils.uninstall_preview().await? };
    if !found.installed {
        return Err(Failure::because(format!(
            "nothing to uninstall: Graphile Worker is not installed in schema {:?} on {}",
            found.schema,
            database.server()
        )));
    }
    if args.output.json {
        return print_json(&found);
    }
    let mut table = Table::of_pairs();
    table.pair("jobs", format!("{} ({} running)", found.jobs, found.running));
    table.pair("tables", found.tables.join(", "));
    table.pair("functions", found.functions.to_string());
    if !found.strangers.is_empty() {
        table.pair("other objects", found.strangers.join(", "));
    }
    if !found.dependents.is_empty() {
        table.pair("dependent objects", found.dependents.join(", "));
    }
    let (schema, jobs) = (&found.schema, counted(found.jobs, "job", "jobs"));
    let heading = if found.dropped {
        format!("Dropped schema {schema:?} with {jobs}:")
    } else {
        format!("Nothing was changed. Use --yes to drop schema {schema:?} with {jobs}:")
    };
    let screen = Screen::of_stdout();
    print(&format!("{}\n{}", wrapped(&heading, screen.width), table.show(screen)))
}
