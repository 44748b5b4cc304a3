//! The operator's commands: what they are called, and which one does what.

use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print_line;
use clap::Subcommand;

/// Looks at jobs, or changes them.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Install the database schema, or bring it up to date
    Migrate,
}

/// Does it.
pub(crate) async fn run(command: Command, database: &Database) -> Result<(), Failure> {
    match command {
        Command::Migrate => migrate(database).await,
    }
}

/// Installs the schema, or brings it up to date, and says which.
pub(crate) async fn migrate(database: &Database) -> Result<(), Failure> {
    let mut connection = database.connect().await?;
    let migration = graphile_worker::migrate(&mut connection, database.schema()).await?;
    let name: String = sqlx::query_scalar("select current_database()::text").fetch_one(&mut connection).await?;
    let _ = sqlx::Connection::close(connection).await;
    print_line(&format!("{migration}, in the database {name:?} on {}", database.server()))
}
