//! Servers other than the one that is installed here, from npm: too old is refused.

#![allow(missing_docs)]

use graphile_worker_devdb::ClusterOptions;
use graphile_worker_interop::modules;
use sqlx::PgPool;

#[tokio::test]
async fn a_server_older_than_the_lowest_version_is_rejected_with_an_explanation() {
    let programs = modules().join("postgres-11/native/bin");
    if !programs.exists() {
        println!("there is no PostgreSQL 11 from npm for this platform: nothing to test");
        return;
    }
    let folder = std::env::temp_dir().join(format!("gw-postgres-11-{}", std::process::id()));
    let cluster = ClusterOptions::new(&folder).programs(programs).durable(false).open().expect("a server");
    let pool = PgPool::connect_with(cluster.options("postgres")).await.expect("a connection");
    let error = graphile_worker::migrate(&pool, "graphile_worker").await.expect_err("a refusal");
    assert_eq!(error.to_string(), "PostgreSQL 11.22 is not supported: version 12 or later is required");
    pool.close().await;
    cluster.stop().expect("stopped");
    let _ = std::fs::remove_dir_all(folder);
}
