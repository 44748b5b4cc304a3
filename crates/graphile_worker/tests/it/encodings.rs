//! Databases with another encoding than UTF-8, or with none. A text that cannot be converted costs its own job only.

use crate::support::{Db, until};
use graphile_worker::{
    JobFilter, JobSpec, SweepStaleWorkersOptions, TaskOptions, WorkerContext, WorkerOptions, WorkerUtils,
    allow_invalid_utf8,
};
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A database beside that of a test, with an encoding of its own.
struct Encoded {
    beside: Db,
    name: String,
    pool: PgPool,
}

impl Encoded {
    async fn new(encoding: &str) -> Encoded {
        let beside = Db::empty().await;
        let name = format!("{}_{encoding}", beside.value("select current_database()").await.as_str().unwrap());
        let name = name.to_lowercase();
        beside
            .run(&format!(
                "create database {name} encoding '{encoding}' lc_collate 'C' lc_ctype 'C' template template0"
            ))
            .await;
        let pool = PgPoolOptions::new().connect_with(beside.options().database(&name)).await.unwrap();
        Encoded { beside, name, pool }
    }

    fn utils(&self) -> WorkerUtils {
        WorkerUtils::new(self.pool.clone(), "graphile_worker")
    }

    /// Runs statements in a session that sends and receives bytes as they are.
    async fn run(&self, sql: &str) {
        let mut connection = PgConnection::connect_with(&self.beside.options().database(&self.name)).await.unwrap();
        allow_invalid_utf8(&mut connection).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap_or_else(|e| panic!("{e}\n{sql}"));
    }

    async fn value(&self, sql: &str) -> Value {
        sqlx::query_scalar(AssertSqlSafe(format!("select to_json(({sql}))"))).fetch_one(&self.pool).await.unwrap()
    }

    async fn drop(self) {
        self.pool.close().await;
        self.beside.run(&format!("drop database {}", self.name)).await;
    }
}

fn options(pool: &PgPool) -> WorkerOptions {
    WorkerOptions::default().pg_pool(pool.clone()).listen_os_shutdown_signals(false).concurrency(2)
}

#[tokio::test]
async fn a_latin1_database_is_installed_and_works() {
    let db = Encoded::new("LATIN1").await;
    let utils = db.utils();
    utils.migrate().await.unwrap();
    utils.add_raw_job("echo", json!("h\u{e9}"), JobSpec::default()).await.unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sees = seen.clone();
    let options = options(&db.pool).define_task("echo", move |payload: Value, _: WorkerContext| {
        sees.lock().unwrap().push(payload);
        async {}
    });
    options.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [json!("h\u{e9}")]);
    utils.doctor().await.unwrap();
    db.drop().await;
}

#[tokio::test]
async fn an_error_that_the_encoding_lacks_characters_for_is_written_in_ascii() {
    for repeatable in [false, true] {
        errors_are_written_in_ascii(TaskOptions::default().repeatable(repeatable)).await;
    }
}

async fn errors_are_written_in_ascii(of_tasks: TaskOptions) {
    let db = Encoded::new("LATIN1").await;
    let utils = db.utils();
    utils.migrate().await.unwrap();
    for (task, payload) in [("latin", json!(1)), ("crab", json!(2)), ("works", json!(3))] {
        utils.add_raw_job(task, payload, JobSpec::default()).await.unwrap();
    }
    let options = options(&db.pool)
        .task_options("latin", of_tasks.clone())
        .task_options("crab", of_tasks.clone())
        .task_options("works", of_tasks)
        .define_task("latin", |_: Value, _| async { Err::<(), _>("h\u{e9}") })
        .define_task("crab", |_: Value, _| async { Err::<(), _>("a \u{1F980} \u{2026}") })
        .define_task("works", |_: Value, _| async {});
    options.init().await.unwrap().run_once().await.unwrap();
    let errors = db
        .value("select json_agg(json_build_array(task_identifier, last_error) order by id) from graphile_worker.jobs");
    let errors = errors.await;
    assert_eq!(errors[1], json!(["crab", "a \\u{1f980} \\u{2026}"]));
    assert!([json!("h\u{e9}"), json!("h\\u{e9}")].contains(&errors[0][1]), "{errors}");
    assert_eq!(errors.as_array().unwrap().len(), 2);
    db.drop().await;
}

/// Jobs of the task `t` in a database that stores any bytes: two with bytes that are not UTF-8, and two others.
async fn without_encoding() -> Encoded {
    let db = Encoded::new("SQL_ASCII").await;
    db.utils().migrate().await.unwrap();
    db.run(
        r#"select graphile_worker.add_job('t', '1');
           select graphile_worker.add_job('t', ('"caf' || E'\xe9' || '"')::json);
           select graphile_worker.add_job('t', '2', job_key := E'k\xe9', queue_name := E'q\xe9', flags := array[E'f\xe9']);
           update graphile_worker._private_jobs set last_error = E'\xff\xfe' where id = 3;
           select graphile_worker.add_job('t', '"ö"')"#,
    )
    .await;
    db
}

#[tokio::test]
async fn a_payload_that_is_not_utf_8_fails_its_own_job_only() {
    for (prepared, repeatable) in [(true, false), (false, false), (true, true)] {
        let db = without_encoding().await;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sees = seen.clone();
        let options = options(&db.pool)
            .use_prepared_statements(prepared)
            .task_options("t", TaskOptions::default().repeatable(repeatable));
        let options = options.define_task("t", move |payload: Value, _: WorkerContext| {
            sees.lock().unwrap().push(payload.to_string());
            async {}
        });
        options.init().await.unwrap().run_once().await.unwrap();
        seen.lock().unwrap().sort();
        assert_eq!(*seen.lock().unwrap(), ["\"ö\"", "1", "2"]);
        let left = db
            .value("select json_agg(json_build_array(id, attempts, last_error, locked_at)) from graphile_worker.jobs");
        let problem = "the payload is not valid UTF-8: correct it in the database, then retry the job";
        assert_eq!(left.await, json!([[2, 1, problem, null]]));
        db.drop().await;
    }
}

#[tokio::test]
async fn many_jobs_beside_a_payload_that_is_not_utf_8_all_run() {
    let db = without_encoding().await;
    db.run("select graphile_worker.add_job('t', '7') from generate_series(1, 3000)").await;
    let options = options(&db.pool).concurrency(4).define_task("t", |_: Value, _| async {});
    let options = options.task_options("t", TaskOptions::default());
    let worker = Arc::new(options.init().await.unwrap());
    let runs = worker.clone();
    let running = tokio::spawn(async move { runs.run().await });
    until("all have run", async || {
        assert!(!running.is_finished(), "the worker ended");
        let left =
            db.value("select json_agg(json_build_array(id, attempts, locked_at is null)) from graphile_worker.jobs");
        (left.await == json!([[2, 1, true]])).then_some(())
    })
    .await;
    worker.request_shutdown();
    running.await.unwrap().unwrap();
    db.drop().await;
}

#[tokio::test]
async fn a_sweep_releases_jobs_whatever_bytes_they_contain() {
    let db = without_encoding().await;
    db.run(
        "update graphile_worker._private_jobs set locked_by = 'rs-live-dead', locked_at = now();
         insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at) values ('rs-live-dead', '-infinity')",
    )
    .await;
    let swept = db.utils().sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!(swept.recovered_count, 4);
    let encoding = db.value("select current_setting('client_encoding')").await;
    assert_eq!(encoding, "UTF8", "the application's connections stay as they were");
    db.drop().await;
}

#[tokio::test]
async fn operators_see_invalid_utf_8_on_connections_that_allow_it() {
    let db = without_encoding().await;
    let pool = PgPoolOptions::new()
        .after_connect(|connection, _| Box::pin(allow_invalid_utf8(connection)))
        .connect_with(db.beside.options().database(&db.name))
        .await
        .unwrap();
    let utils = WorkerUtils::new(pool.clone(), "graphile_worker");
    let jobs = utils.list_jobs(&JobFilter::default()).await.unwrap();
    assert_eq!(jobs.len(), 4);
    assert_eq!(jobs[2].key.as_deref(), Some("k\u{fffd}"));
    assert_eq!(jobs[2].queue_name.as_deref(), Some("q\u{fffd}"));
    assert_eq!(jobs[2].last_error.as_deref(), Some("\u{fffd}\u{fffd}"));
    assert_eq!(jobs[2].flags, ["f\u{fffd}"]);
    assert_eq!(utils.find_job(2).await.unwrap().unwrap().payload.get(), "\"caf\u{fffd}\"");
    for id in 1..=4 {
        utils.why(id).await.unwrap();
    }
    assert_eq!(utils.list_queues(10).await.unwrap()[0].queue_name, "q\u{fffd}");
    utils.stats().await.unwrap();
    utils.list_workers(Duration::from_secs(1)).await.unwrap();
    utils.doctor().await.unwrap();
    assert_eq!(utils.permanently_fail_jobs(&[2, 3], "not UTF-8").await.unwrap().len(), 2);
    assert_eq!(utils.complete_jobs(&[2, 3]).await.unwrap().len(), 2);
    pool.close().await;
    db.drop().await;
}

#[tokio::test]
async fn connections_to_utf_8_databases_are_not_changed() {
    let db = Db::empty().await;
    let mut connection = db.connect().await;
    allow_invalid_utf8(&mut connection).await.unwrap();
    let encoding: String =
        sqlx::query_scalar("select current_setting('client_encoding')").fetch_one(&mut connection).await.unwrap();
    assert_eq!(encoding, "UTF8");
}
