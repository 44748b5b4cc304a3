//! Servers that do not let a worker work: standbys, read-only databases, and those without a connection left. The worker and
//! `doctor` name the problem and say what to do.

use crate::support::{Db, Log, Started, until};
use graphile_worker::{DoctorLevel, DoctorReport, Error, WorkerOptions, WorkerUtils};
use graphile_worker_devdb::ClusterOptions;
use serde_json::Value;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection, PgPool};
use std::time::Duration;

fn check<'c>(report: &'c DoctorReport, name: &str) -> (DoctorLevel, &'c str, &'c str) {
    let check = report.checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("{name}: {report:?}"));
    (check.level, &check.found, check.advice.as_deref().unwrap_or_default())
}

/// With its sources, as it is logged.
fn spoken(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

/// Why a worker does not start.
async fn refusal(pool: PgPool) -> String {
    let options = WorkerOptions::default().pg_pool(pool).listen_os_shutdown_signals(false);
    let options = options.startup_timeout(Duration::from_millis(200));
    let worker = match options.define_task("t", |_: Value, _| async {}).init().await {
        Ok(worker) => worker,
        Err(error) => return spoken(&error),
    };
    spoken(&worker.run().await.expect_err("a worker that cannot work"))
}

async fn pool(options: PgConnectOptions) -> PgPool {
    PgPoolOptions::new().max_connections(2).connect_lazy_with(options)
}

#[tokio::test]
async fn a_standby_is_reported() {
    let folder = std::env::temp_dir().join(format!("gw-standby-{}", std::process::id()));
    let cluster = ClusterOptions::new(&folder).durable(false).open().unwrap();
    let mut connection = PgConnection::connect_with(&cluster.options("postgres")).await.unwrap();
    graphile_worker::migrate(&mut connection, "graphile_worker").await.unwrap();
    connection.close().await.unwrap();
    let data = data_of(&folder);
    cluster.stop().unwrap();
    // A standby without a primary stays a standby.
    std::fs::write(data.join("standby.signal"), "").unwrap();
    let cluster = ClusterOptions::new(&folder).durable(false).open().unwrap();
    let options = cluster.options("postgres");
    let message = refusal(pool(options.clone()).await).await;
    assert!(message.contains("the server is a read-only standby: connect to the primary"), "{message}");
    let utils = WorkerUtils::new(pool(options).await, "graphile_worker");
    let report = utils.doctor().await.unwrap();
    assert_eq!(check(&report, "server_role").0, DoctorLevel::Problem);
    assert!(utils.is_migrated().await.unwrap(), "reading is allowed");
    let error = utils.add_raw_job("t", 1, Default::default()).await.unwrap_err();
    assert!(spoken(&error).contains("Connect to the primary"), "{error}");
    cluster.stop().unwrap();
    let _ = std::fs::remove_dir_all(folder);
}

/// Where the server keeps its data, below the folder.
fn data_of(folder: &std::path::Path) -> std::path::PathBuf {
    let below = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found = below.flat_map(|path| [path.join("data"), path]).filter(|path| path.join("PG_VERSION").exists());
    found.next().expect("the data of the server")
}

#[tokio::test]
async fn a_read_only_database_is_reported() {
    let db = Db::installed().await;
    let name = db.value("select current_database()").await;
    let name = name.as_str().unwrap();
    db.run(&format!("alter database {name} set default_transaction_read_only = on")).await;
    let message = refusal(pool(db.options()).await).await;
    let advice = format!("run `alter database \"{name}\" reset default_transaction_read_only`");
    assert!(message.contains("default_transaction_read_only is on"), "{message}");
    assert!(message.contains(&advice), "{message}");
    let utils = WorkerUtils::new(pool(db.options()).await, "graphile_worker");
    let report = utils.doctor().await.unwrap();
    let (level, found, advised) = check(&report, "read_only");
    assert_eq!(level, DoctorLevel::Problem, "{report:?}");
    assert!(found.contains("default_transaction_read_only is on"), "{found}");
    assert!(advised.to_lowercase().contains(&advice), "{advised}");
    assert_eq!(report.level, DoctorLevel::Problem);
    // Nothing is installed yet, and nothing can be.
    let error = graphile_worker::migrate(&pool(db.options()).await, "elsewhere").await.unwrap_err();
    assert!(matches!(error, Error::ReadOnly { is_standby: false, .. }), "{error:?}");
}

#[tokio::test]
async fn a_writable_database_has_no_problem() {
    let db = Db::installed().await;
    let report = WorkerUtils::new(db.pool.clone(), "graphile_worker").doctor().await.unwrap();
    for name in ["read_only", "search_path", "connection_limits"] {
        assert_eq!(check(&report, name).0, DoctorLevel::Ok, "{:?}", check(&report, name));
    }
}

/// A role of this test, which owns the schema.
async fn owner(db: &Db, with: &str) -> (String, PgConnectOptions) {
    let role = format!("owner_{}", db.value("select current_database()").await.as_str().unwrap());
    db.run(&format!("create role {role} login {with}; create schema own authorization {role}")).await;
    let options = db.options().username(&role);
    (role, options)
}

async fn drop_role(db: &Db, role: &str) {
    db.run(&format!("drop owned by {role} cascade; drop role {role}")).await;
}

#[tokio::test]
async fn a_role_with_one_connection_is_reported() {
    let db = Db::empty().await;
    let (role, options) = owner(&db, "connection limit 1").await;
    let options_of_worker = WorkerOptions::default().pg_pool(pool(options.clone()).await).schema("own");
    let options_of_worker =
        options_of_worker.listen_os_shutdown_signals(false).startup_timeout(Duration::from_millis(200));
    let error = options_of_worker.define_task("t", |_: Value, _| async {}).init().await.err().unwrap();
    let message = spoken(&error);
    assert!(message.contains("the role has reached its connection limit, and a worker needs"), "{message}");
    let utils = WorkerUtils::new(PgPoolOptions::new().max_connections(1).connect_lazy_with(options), "own");
    let report = utils.doctor().await.unwrap();
    let (level, found, advice) = check(&report, "connection_limits");
    assert_eq!(level, DoctorLevel::Problem, "{report:?}");
    assert!(found.contains(&format!("1 of 1 of the role {role}")), "{found}");
    assert!(advice.contains(&format!("alter role \"{role}\" connection limit")), "{advice}");
    utils.migrate().await.unwrap();
    drop(utils);
    db.run(&format!("select pg_terminate_backend(pid) from pg_stat_activity where usename = '{role}'")).await;
    drop_role(&db, &role).await;
}

#[tokio::test]
async fn a_database_with_few_connections_is_reported() {
    let db = Db::empty().await;
    let (role, options) = owner(&db, "").await;
    let name = db.value("select current_database()").await.as_str().unwrap().to_owned();
    // The test's own connections count, too; its pool may open another one.
    let used = db.value("select count(*) from pg_stat_activity where datname = current_database()").await;
    let limit = used.as_i64().unwrap() + 2;
    db.run(&format!("alter database {name} connection limit {limit}")).await;
    let report = WorkerUtils::new(pool(options.clone()).await, "own").doctor().await.unwrap();
    let (level, found, advice) = check(&report, "connection_limits");
    assert_eq!(level, DoctorLevel::Problem, "{report:?}");
    assert!(found.contains(&format!("of {limit} of the database {name}")), "{found}");
    assert!(advice.contains(&format!("alter database \"{name}\" connection limit")), "{advice}");
    db.run(&format!("alter database {name} connection limit 0")).await;
    let error = PgConnection::connect_with(&options).await.unwrap_err();
    let error = Error::database("connect", error);
    assert!(error.to_string().contains("the database has reached its connection limit"), "{error}");
    drop_role(&db, &role).await;
}

#[tokio::test]
async fn a_server_without_free_connections_is_reported() {
    let folder = std::env::temp_dir().join(format!("gw-full-{}", std::process::id()));
    let cluster = ClusterOptions::new(&folder).durable(false).setting("max_connections", "8").open().unwrap();
    let options = cluster.options("postgres");
    let mut taken = vec![PgConnection::connect_with(&options).await.unwrap()];
    sqlx::raw_sql("create role app login; create schema own authorization app").execute(&mut taken[0]).await.unwrap();
    while let Ok(connection) = PgConnection::connect_with(&options).await {
        taken.push(connection);
    }
    let message = refusal(pool(options.clone()).await).await;
    assert!(message.contains("the server has no free connections"), "{message}");
    assert!(message.contains("raise max_connections"), "{message}");
    // When one is free again, the worker gets it.
    let started = async {
        let options = WorkerOptions::default().pg_pool(pool(options).await).listen_os_shutdown_signals(false);
        Started::new(options.define_task("t", |_: Value, _| async {})).await
    };
    let (log, _guard) = Log::start();
    let started = tokio::spawn(started);
    until("the worker waits for a connection", async || log.line("waiting for the database")).await;
    taken.clear();
    started.await.unwrap().stop().await;
    cluster.stop().unwrap();
    let _ = std::fs::remove_dir_all(folder);
}

#[tokio::test]
async fn a_search_path_that_lists_another_schema_before_pg_catalog_is_reported() {
    let db = Db::installed().await;
    let options = db.options().options([("search_path", "public, pg_catalog")]);
    let report = WorkerUtils::new(pool(options).await, "graphile_worker").doctor().await.unwrap();
    let (level, found, advice) = check(&report, "search_path");
    assert_eq!(level, DoctorLevel::Problem, "{report:?}");
    assert_eq!(found, "public comes before pg_catalog");
    assert!(advice.contains("Remove pg_catalog from search_path"), "{advice}");
}
