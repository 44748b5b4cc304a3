//! Tasks in Python reach PostgreSQL through the real drivers: psycopg in a `def`, asyncpg in an `async def`. The folder is
//! `projects/python`, with one file for each that do the same.

#![allow(missing_docs)]

use graphile_worker_interop::{AtWork, CommandLine, Db, project, python_modules};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const OURS: CommandLine = CommandLine::Ours(env!("CARGO_BIN_EXE_ours"));

async fn database() -> Db {
    let db = Db::ours().await;
    db.run("create table noted (id serial, task text, value jsonb)").await;
    db
}

fn start(db: &Db, arguments: &[&str]) -> AtWork {
    start_with(db, arguments, &python_modules())
}

fn start_with(db: &Db, arguments: &[&str], modules: &Path) -> AtWork {
    let environment = [("PYTHONPATH", modules.to_str().expect("text")), ("GRAPHILE_WORKER_PYTHON", "python3")];
    OURS.start_with(db, &project("python"), arguments, &environment)
}

/// Adds a job for each of the two files, without retries.
async fn add(db: &Db, payload: &Value) {
    let sql = format!(
        "select graphile_worker.add_job(task, $payload${payload}$payload$, queue_name := task, max_attempts := 1)"
    );
    db.run(&format!("{sql} from unnest(array['plain', 'awaits']) as task")).await;
}

async fn noted(db: &Db, task: &str) -> Value {
    db.value(&format!("select coalesce(json_agg(value order by id), '[]') from noted where task = '{task}'")).await
}

/// What is left of the jobs of a task, without where it happened.
async fn errors(db: &Db, task: &str) -> Value {
    let sql =
        r"select coalesce(json_agg(split_part(last_error, E'\n', 1) order by id), '[]') from graphile_worker.jobs";
    // A job that has just ended may still be there.
    db.value(&format!("{sql} where task_identifier = '{task}' and last_error is not null")).await
}

/// Runs the jobs, one after the other, and returns what both files noted.
async fn run(payloads: &[Value]) -> (Db, [Value; 2]) {
    let db = database().await;
    for payload in payloads {
        add(&db, payload).await;
    }
    let ended = start(&db, &["--once"]).ended().await;
    assert!(ended.status.success(), "{ended:?}");
    let both = [noted(&db, "plain").await, noted(&db, "awaits").await];
    (db, both)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_takes_parameters_and_returns_rows_by_column_name() {
    let (db, [plain, awaits]) = run(&[json!({"do": "parameters"})]).await;
    assert_eq!((errors(&db, "plain").await, errors(&db, "awaits").await), (json!([]), json!([])));
    let row = |n: i32| json!({"n": n, "text": "it's", "percent": "100%"});
    assert_eq!(plain, json!([[[row(1), row(2), {"n": 3}, {"n": "100%"}], [], []]]));
    assert_eq!(plain, awaits);
}

#[tokio::test(flavor = "multi_thread")]
async fn values_have_the_types_of_the_drivers() {
    let sql = r#"select '{"a": 1.10}'::json as json, array[1, null, 3] as list, 1.10 as number, null as nothing,
                        '2024-02-03 04:05:06.789+00'::timestamptz as time, '2024-02-03'::date as day, true as yes"#;
    let (db, [plain, awaits]) = run(&[json!({"do": "types", "sql": sql})]).await;
    assert_eq!((errors(&db, "plain").await, errors(&db, "awaits").await), (json!([]), json!([])));
    let with_json = |json: Value| {
        json!([{
            "json": json,
            "list": ["list", "[1, None, 3]"],
            "number": ["Decimal", "1.10"],
            "nothing": ["NoneType", "None"],
            "time": ["datetime", "2024-02-03 04:05:06.789000+00:00"],
            "day": ["date", "2024-02-03"],
            "yes": ["bool", "True"],
        }])
    };
    assert_eq!(plain, with_json(json!(["dict", "{'a': 1.1}"])));
    assert_eq!(awaits, with_json(json!(["str", r#"{"a": 1.10}"#])));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_fails_or_is_left_open_leaves_nothing_and_the_next_job_is_not_in_it() {
    let (db, both) = run(&[
        json!({"do": "transaction", "fails": true}),
        json!({"do": "leaves_open"}),
        json!({"do": "transaction", "fails": false}),
    ])
    .await;
    for (task, noted) in ["plain", "awaits"].iter().zip(both) {
        assert_eq!(noted, json!(["in a transaction"]), "{task}");
        assert_eq!(errors(&db, task).await, json!(["rolled back"]), "{task}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_database_fails_only_its_own_job() {
    let (db, both) = run(&[json!({"do": "is_wrong"}), json!({"do": "who"})]).await;
    for (task, noted) in ["plain", "awaits"].iter().zip(both) {
        assert_eq!(noted.as_array().map(Vec::len), Some(1), "{task}");
        assert_eq!(errors(&db, task).await, json!(["column \"nothing\" does not exist"]), "{task}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_become_the_payload_of_a_job() {
    let (db, [plain, awaits]) = run(&[json!({"do": "adds"})]).await;
    assert_eq!((plain, awaits), (json!([["added", true]]), json!([["added", true]])));
    let added = "select json_agg(json_build_array(queue_name, max_attempts, payload) order by queue_name)
                 from graphile_worker.jobs join graphile_worker._private_jobs using (id, max_attempts)
                 where task_identifier = 'added'";
    // What JSON has no word for is text.
    let payload =
        json!([{"n": 1, "quarters": "0.25000000000000000000"}, {"n": 2, "quarters": "0.50000000000000000000"}]);
    assert_eq!(db.value(added).await, json!([["by awaits", 3, payload], ["by plain", 3, payload]]));
}

/// Waits until both files have noted so much.
async fn until_noted(db: &Db, count: usize) {
    db.until(&format!(
        "select count(*) = 2 from (select from noted group by task having count(*) = {count}) as as_many_each"
    ))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_was_closed_costs_at_most_the_job_that_uses_it() {
    let db = database().await;
    let worker = start(&db, &[]);
    add(&db, &json!({"do": "who"})).await;
    until_noted(&db, 1).await;

    // It was idle when it was closed: no job notices.
    db.run("select pg_terminate_backend(value::int, 60000) from noted").await;
    add(&db, &json!({"do": "who"})).await;
    until_noted(&db, 2).await;
    assert_eq!((errors(&db, "plain").await, errors(&db, "awaits").await), (json!([]), json!([])));

    add(&db, &json!({"do": "ends_its_connection"})).await;
    db.until("select count(*) = 2 from graphile_worker.jobs where last_error is not null").await;
    add(&db, &json!({"do": "who"})).await;
    until_noted(&db, 3).await;
    for task in ["plain", "awaits"] {
        let errors = errors(&db, task).await;
        assert!(errors[0].as_str().is_some_and(|error| error.contains("terminating connection")), "{task}: {errors}");
        let distinct = format!("select count(distinct value) from noted where task = '{task}'");
        assert_eq!(db.value(&distinct).await, json!(3), "{task}");
    }
    worker.signal("TERM");
    assert!(worker.ended().await.status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_share_the_maximum_number_of_connections() {
    let db = database().await;
    let jobs = "select graphile_worker.add_job(task, '{\"do\": \"who\", \"seconds\": 0.1}')";
    db.run(&format!("{jobs} from unnest(array['plain', 'awaits']) as task, generate_series(1, 8)")).await;
    let ended = start(&db, &["--once", "--jobs", "16", "--max-pool-size", "2"]).ended().await;
    assert!(ended.status.success(), "{ended:?}");
    for task in ["plain", "awaits"] {
        let sql =
            format!("select json_build_array(count(*), count(distinct value) <= 2) from noted where task = '{task}'");
        assert_eq!(db.value(&sql).await, json!([8, true]), "{task}");
    }
}

/// A folder with links to all packages but asyncpg.
struct WithoutAsyncpg(PathBuf);

impl WithoutAsyncpg {
    fn new() -> WithoutAsyncpg {
        let folder = std::env::temp_dir().join(format!("gw-interop-{}-without-asyncpg", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for package in std::fs::read_dir(python_modules()).expect("packages") {
            let package = package.expect("a package");
            if package.file_name() != "asyncpg" {
                std::os::unix::fs::symlink(package.path(), folder.join(package.file_name())).expect("a link");
            }
        }
        WithoutAsyncpg(folder)
    }
}

impl Drop for WithoutAsyncpg {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn psycopg_is_used_if_asyncpg_is_not_installed() {
    let db = database().await;
    let jobs = "select graphile_worker.add_job('without_asyncpg', max_attempts := 1, queue_name := 'one by one',
                  payload := json_build_object('n', n, 'leaves_open', n = 1, 'fails', n = 2))";
    db.run(&format!("{jobs} from generate_series(1, 3) as n")).await;
    let modules = WithoutAsyncpg::new();
    let ended = start_with(&db, &["--once"], &modules.0).ended().await;
    assert!(ended.status.success() && ended.log.contains("left a transaction open"), "{ended:?}");
    assert_eq!(noted(&db, "without_asyncpg").await, json!([2, 3, 4]));
    assert_eq!(errors(&db, "without_asyncpg").await, json!(["column \"nothing\" does not exist"]));
}
