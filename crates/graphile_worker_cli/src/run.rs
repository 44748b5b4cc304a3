//! Running jobs.

use crate::connection::Database;
use crate::failure::Failure;
use crate::settings::RunSettings;

pub(crate) async fn run(_settings: RunSettings, database: &Database) -> Result<(), Failure> {
    let _ = database.pool(1).await?;
    Err(Failure::because("this release can only install the schema: add --schema-only"))
}
