//! Every SQL file is a statement that PostgreSQL can prepare, as it stands, against our schema.

use crate::support::{Db, Started, sql_files, until};
use graphile_worker::WorkerOptions;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Executor, SqlSafeStr};

#[tokio::test]
async fn every_query_can_be_prepared() {
    let db = Db::installed().await;
    // The renamed tables of an old layout, and the tables of the Rust port.
    db.run(
        "create table graphile_worker._private_workers (id text, last_heartbeat_at timestamptz);
         create table graphile_worker._private_job_retirements (id bigint);
         create table graphile_worker._old_jobs (locked_at timestamptz, locked_by text);
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
fn every_file_begins_with_its_purpose() {
    for (name, text) in sql_files() {
        assert!(text.starts_with("-- "), "{name} has no header");
    }
}

#[tokio::test]
async fn comments_are_not_sent_to_the_server() {
    let db = Db::installed().await;
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
    let started = Started::new(options.define_task("t", |_: Value, _| async {})).await;
    db.add_job("'t'").await;
    let queries = "select query from pg_stat_activity
        where datname = current_database() and application_name like 'graphile\\_worker %' and query <> ''";
    let seen = until("the exchange was seen", async || {
        let seen = db.rows(queries).await;
        seen.iter().any(|row| row["query"].as_str().unwrap().contains("_private_jobs")).then_some(seen)
    })
    .await;
    for row in seen {
        let query = row["query"].as_str().unwrap();
        assert!(!query.contains("--") && !query.contains("  "), "{query}");
    }
    started.stop().await;
}
