//! Behind one PgBouncer in transaction mode: our worker with tasks in JavaScript and Python, which query through the real
//! drivers, beside Node's worker, which leaves a LISTEN in server connections.

#![allow(missing_docs)]

use graphile_worker_interop::{CommandLine, Db, project, python_modules};
use serde_json::json;

const OURS: CommandLine = CommandLine::Ours(env!("CARGO_BIN_EXE_ours"));
const NODES: CommandLine = CommandLine::Nodes("graphile-worker");

#[tokio::test(flavor = "multi_thread")]
async fn our_worker_and_nodes_share_the_jobs_and_do_none_twice() {
    let db = Db::ours().await;
    db.run("create table noted (task text, value jsonb)").await;
    let (_pooler, url) = db.pgbouncer();
    let environment = [("DATABASE_URL", url.as_str())];
    let fast = ["--jobs", "4", "--poll-interval", "100"];
    let ours = OURS.start_with(&db, &project("realistic"), &fast, &environment);
    let nodes = NODES.start_with(
        &db,
        &project("realistic"),
        &[&fast[..], &["--no-prepared-statements"]].concat(),
        &environment,
    );
    ours.says("connected through a pooler").await;
    // One by one, so that there is a notification for each.
    for n in 1..=300 {
        db.run(&format!("select graphile_worker.add_job('transaction', '{{\"n\": {n}}}', max_attempts := 1)")).await;
    }
    db.until("not exists (select from graphile_worker.jobs where locked_by is not null or attempts < max_attempts)")
        .await;
    ours.signal("TERM");
    nodes.signal("TERM");
    let (ended, _) = (ours.ended().await, nodes.ended().await);
    assert!(ended.status.success(), "{ended:?}");
    let completed = ended.log.matches("job completed").count();
    assert!((1..300).contains(&completed), "each has had some: {completed}");
    let left = "select coalesce(json_agg(last_error), '[]') from graphile_worker.jobs";
    assert_eq!(db.value(left).await, json!([]));
    assert_eq!(
        db.value("select json_build_array(count(*), count(distinct value)) from noted").await,
        json!([300, 300])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_of_tasks_in_python_get_through_with_either_driver() {
    let db = Db::ours().await;
    db.run("create table noted (id serial, task text, value jsonb)").await;
    let (_pooler, url) = db.pgbouncer();
    for task in ["plain", "awaits"] {
        let add = "select graphile_worker.add_job(task, '{\"do\": \"types\", \"sql\": \"select now() as time, 1 as n\"}', max_attempts := 1)";
        db.run(&format!("{add} from generate_series(1, 100), (values ('{task}')) as t (task)")).await;
    }
    let modules = python_modules();
    let environment = [
        ("DATABASE_URL", url.as_str()),
        ("PYTHONPATH", modules.to_str().expect("text")),
        ("GRAPHILE_WORKER_PYTHON", "python3"),
    ];
    let ended = OURS.start_with(&db, &project("python"), &["--once", "--jobs", "8"], &environment).ended().await;
    assert!(ended.status.success(), "{ended:?}");
    let left = "select coalesce(json_agg(last_error), '[]') from graphile_worker.jobs";
    assert_eq!(db.value(left).await, json!([]));
    assert_eq!(db.value("select json_build_array(count(*), count(distinct id)) from noted").await, json!([200, 200]));
}
