//! Every SQL file is a statement that PostgreSQL can prepare, as it stands, against our schema.

use crate::support::{Db, sql_files};
use sqlx::{AssertSqlSafe, Executor, SqlSafeStr};

#[tokio::test]
async fn every_query_can_be_prepared() {
    let db = Db::installed().await;
    // What an old layout looks like once it has been set aside.
    db.run(
        "create table graphile_worker._old_jobs (locked_at timestamptz, locked_by text);
         create table graphile_worker._old_job_queues (locked_at timestamptz, locked_by text)",
    )
    .await;
    let queries: Vec<_> = sql_files().into_iter().filter(|(name, _)| !name.starts_with(char::is_numeric)).collect();
    assert!(queries.len() >= 8, "the folder was found");
    for (name, text) in queries {
        let text = text.replace(":\"schema\"", "graphile_worker").replace(":'schema'", "'graphile_worker'");
        if let Err(error) = db.connect().await.prepare(AssertSqlSafe(text).into_sql_str()).await {
            panic!("{name}: {error}");
        }
    }
}

#[test]
fn every_file_begins_with_what_it_is_for() {
    for (name, text) in sql_files() {
        assert!(text.starts_with("-- "), "{name} has no header");
    }
}
