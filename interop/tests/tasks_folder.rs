//! A folder of tasks as projects have it, run by Node's own worker and by ours: what is noted, what is left and why are
//! the same.

#![allow(missing_docs)]

use graphile_worker::{HostOptions, WorkerOptions};
use graphile_worker_interop::{Db, node_program, project};
use serde_json::{Value, json};

/// Every task of the folder once, and some twice.
const JOBS: &str = r#"
  create table noted (task text, value jsonb);
  select graphile_worker.add_job('hello', '{"name": "Bobby Tables"}');
  select graphile_worker.add_job('nested/module', '{"text": "loud"}');
  select graphile_worker.add_job('typed', '{"count": 21}');
  select graphile_worker.add_job('throws');
  select graphile_worker.add_job('throws_text');
  select graphile_worker.add_job('transaction', '{"n": 1}');
  select graphile_worker.add_job('transaction', '{"n": 2, "fails": true}');
  select graphile_worker.add_job('batch', '[{"id": 1}, {"id": 2, "bad": true}, {"id":  3}]');
  select graphile_worker.add_job('adds', '{"b": 1, "a": 2}');
  select graphile_worker.add_job('described', queue_name := 'q', job_key := 'k', priority := 4, max_attempts := 9, flags := array['f']);
"#;

/// What is noted and what is left. Of errors the first line, for ours go on to say where; but for a batch, which each
/// worker words in its own way, and for what is thrown and no error, of which Node's does not keep the text.
async fn outcome(db: &Db) -> Value {
    db.value(
        "select json_build_object(
           'noted', (select json_agg(noted order by task, value) from noted),
           'left', (select json_agg(json_build_array(
               task_identifier, queue_name, priority, attempts, max_attempts, key, revision, flags,
               (select payload::jsonb from graphile_worker._private_jobs p where p.id = j.id),
               case when task_identifier not in ('batch', 'throws_text') then split_part(last_error, E'\n', 1) end,
               last_error like '%item 2 is bad%',
               case when task_identifier = 'unknown' then run_at > now() + interval '1 year' end
             ) order by task_identifier, priority, key) from graphile_worker.jobs j))",
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn both_workers_make_the_same_of_a_folder() {
    let nodes = Db::ours().await;
    nodes.run(JOBS).await;
    nodes.node_runs_folder_once("graphile-worker", &project());

    let ours = Db::ours().await;
    ours.run(JOBS).await;
    let worker = WorkerOptions::default()
        .pg_pool(ours.pool.clone())
        .listen_os_shutdown_signals(false)
        .tasks_dir(project().join("tasks"))
        .host_options(HostOptions::default().node(node_program()));
    worker.init().await.expect("a worker").run_once().await.expect("a run");

    let (nodes, ours) = (outcome(&nodes).await, outcome(&ours).await);
    assert_eq!(ours["noted"], nodes["noted"]);
    assert_eq!(ours["left"], nodes["left"]);
    assert_eq!(ours["noted"].as_array().map(Vec::len), Some(5), "{ours}");
    let count = |task: &str| ours["left"].as_array().map(|left| left.iter().filter(|job| job[0] == task).count());
    assert_eq!((count("throws"), count("batch"), count("unknown")), (Some(1), Some(1), Some(3)), "{ours}");
    assert_eq!(count("transaction"), Some(1), "{ours}");
    assert!(ours["noted"].to_string().contains(&json!({"doubled": 42}).to_string()), "{ours}");
}
