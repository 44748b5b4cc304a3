//! What a task in JavaScript or Python receives: the payload, the job and the helpers.

use crate::helpers::{Project, failed, jobs, options, run_once};
use crate::support::Db;
use graphile_worker::{JobSpec, Worker};
use graphile_worker_scripts::{HostOptions, TasksDir};
use serde_json::{Value, json};

#[tokio::test]
async fn commonjs_and_modules_get_the_payload_and_the_job() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("common.js", "module.exports = async (payload, { job }) => note('common', [payload, job]);");
    project.task("named.cjs", "exports.default = (payload) => { note('named', payload) };");
    project.task(
        "sub/module.mjs",
        "export default async (payload, helpers) => note('module', [payload, Object.keys(helpers)]);",
    );
    project.file("tasks/package.json", "{}");
    db.add_job("'common', '{\"a\":\n 1}', job_key := 'k', priority := -3, max_attempts := 7, queue_name := 'q', run_at := '2024-02-03T04:05:06.789Z'").await;
    db.add_job("'named', '[1, 2]'").await;
    db.add_job("'sub/module', '\"text\"'").await;
    run_once(&db, &project).await;
    assert_eq!(jobs(&db).await, [] as [Value; 0]);
    let common = &project.notes("common")[0];
    assert_eq!(common[0], json!({"a": 1}));
    let job = &common[1];
    for (name, value) in [
        ("id", json!("1")),
        ("task_identifier", json!("common")),
        ("payload", json!({"a": 1})),
        ("key", json!("k")),
        ("priority", json!(-3)),
        ("attempts", json!(1)),
        ("max_attempts", json!(7)),
        ("run_at", json!("2024-02-03T04:05:06.789Z")),
        ("last_error", json!(null)),
        ("revision", json!(0)),
    ] {
        assert_eq!(job[name], value, "{name} of {job}");
    }
    assert!(job["locked_by"].as_str().unwrap().starts_with("rs-"), "{job}");
    assert_eq!(project.notes("named"), [json!([1, 2])]);
    let keys = [
        "job",
        "logger",
        "abortSignal",
        "abortPromise",
        "addJob",
        "addJobs",
        "getQueueName",
        "withPgClient",
        "query",
        "debug",
    ];
    assert_eq!(project.notes("module"), [json!(["text", keys])]);
}

#[tokio::test]
async fn a_script_receives_a_payload_of_several_megabytes() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("large.js", "module.exports = async ({ text }, { addJob }) => { await addJob('more', { text: text + 'é' }); note('large', text.length); };");
    project.task("large_py.py", "def task(payload, helpers):\n  note('large', len(payload['text']))");
    for task in ["large", "large_py"] {
        db.add_job(&format!("'{task}', json_build_object('text', repeat('é', 3000000))")).await;
    }
    run_once(&db, &project).await;
    assert_eq!(project.notes("large"), [json!(3_000_000), json!(3_000_000)]);
    let sql = "select length(payload->>'text') from graphile_worker._private_jobs";
    assert_eq!(db.value(sql).await, 3_000_001);
}

#[tokio::test]
async fn scripts_add_jobs_through_the_worker() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "adds.js",
        "module.exports = async (_, { addJob, addJobs, getQueueName, job }) => {
           const added = await addJob('later', { b: 2, a: 1 }, { queueName: 'q', runAt: new Date('2030-01-01'), priority: 5, maxAttempts: 3, jobKey: 'k', jobKeyMode: 'preserve_run_at', flags: ['f'] });
           const many = await addJobs([{ identifier: 'many', payload: { n: 1 } }, { identifier: 'many', jobKey: 'm' }]);
           const refused = await addJob('later', {}, { maxAttempts: 1e9 }).catch((error) => error.message);
           note('added', [added.id, added.run_at instanceof Date, added.task_identifier, many.length, many[1].key, refused, await getQueueName(), await getQueueName(added.job_queue_id)]);
         };",
    );
    project.task(
        "adds_py.py",
        "def task(payload, helpers):
  job = helpers.add_job('later_py', {'b': 2, 'a': 1}, job_key='kp', priority=4)
  many = helpers.add_jobs([{'identifier': 'many_py', 'payload': {'n': 1}}, {'identifier': 'many_py'}])
  note('added_py', [job.id, job['task_identifier'], str(job.run_at.tzinfo), len(many), helpers.get_queue_name()])",
    );
    project.task(
        "adds_async.py",
        "async def task(payload, helpers):
  job = await helpers.add_job('later_async')
  many = await helpers.add_jobs([{'identifier': 'many_async'}])
  note('added_async', [job.payload, len(many), await helpers.get_queue_name()])",
    );
    db.add_job("'adds', queue_name := 'mine'").await;
    db.add_job("'adds_py', queue_name := 'mine'").await;
    db.add_job("'adds_async'").await;
    run_once(&db, &project).await;
    let added = &project.notes("added")[0];
    let added = added.as_array().unwrap();
    assert_eq!(added[1..5], [json!(true), json!("later"), json!(2), json!("m")], "{added:?}");
    assert!(added[5].as_str().unwrap().contains("invalid parameters"), "{added:?}");
    assert_eq!((&added[6], &added[7]), (&json!("mine"), &json!("q")));
    let rows = db.rows("select t.identifier, j.payload::text as payload, j.key, j.priority, j.max_attempts, j.flags, j.run_at > now() as future from graphile_worker._private_jobs j join graphile_worker._private_tasks t on t.id = j.task_id order by j.id").await;
    let later = rows.iter().find(|row| row["identifier"] == "later").unwrap();
    assert_eq!(
        *later,
        json!({"identifier": "later", "payload": "{\"b\":2,\"a\":1}", "key": "k", "priority": 5, "max_attempts": 3, "flags": {"f": true}, "future": true})
    );
    let count = |task: &str| rows.iter().filter(|row| row["identifier"] == task).count();
    assert_eq!((count("many"), count("later_py"), count("many_py")), (2, 1, 2));
    assert_eq!((count("later_async"), count("many_async")), (1, 1));
    let python = project.notes("added_py")[0].as_array().unwrap().clone();
    assert_eq!(python[1..], [json!("later_py"), json!("UTC"), json!(2), json!("mine")]);
    assert_eq!(project.notes("added_async")[0], json!([{}, 1, null]));
}

#[tokio::test]
async fn scripts_and_rust_tasks_add_jobs_for_each_other() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task(
        "script.js",
        "module.exports = async (payload, { addJob }) => { await addJob('rust', { n: payload.n + 1 }); };",
    );
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let worker = options(&db, &project).define_task("rust", move |payload: Value, _| {
        sender.send(payload).unwrap();
        async {}
    });
    let worker: Worker = worker.init().await.unwrap();
    worker.create_utils().add_raw_job("script", json!({"n": 1}), JobSpec::default()).await.unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(receiver.recv().await, Some(json!({"n": 2})));
    worker.create_utils().add_raw_job("script", json!({"n": 5}), JobSpec::default()).await.unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(receiver.recv().await, Some(json!({"n": 6})), "a new host starts for the second run");
}

#[tokio::test]
async fn a_query_without_a_driver_fails_with_the_package_to_install() {
    let db = Db::installed().await;
    let project = Project::new();
    project.task("query.js", "module.exports = (_, { query }) => query('select 1');");
    project.task("query_py.py", "def task(payload, helpers):\n  helpers.query('select 1')");
    project.task("query_async.py", "async def task(payload, helpers):\n  await helpers.query('select 1')");
    for task in ["query", "query_py", "query_async"] {
        db.add_job(&format!("'{task}'")).await;
    }
    let python = HostOptions::default().python(project.virtual_environment().join("bin/python"));
    options(&db, &project)
        .task_source(TasksDir::new(project.tasks()).host_options(python))
        .init()
        .await
        .unwrap()
        .run_once()
        .await
        .unwrap();
    let errors = failed(&db, 3).await;
    assert!(errors[0].contains("need the package pg") && errors[0].contains("npm install pg"), "{}", errors[0]);
    assert!(errors[1].contains("helpers.query needs psycopg"), "{}", errors[1]);
    assert!(errors[2].contains("helpers.query needs psycopg or asyncpg"), "{}", errors[2]);
}

#[tokio::test]
async fn the_projects_virtual_environment_runs_its_python_files() {
    let db = Db::installed().await;
    let project = Project::new();
    let environment = project.virtual_environment();
    project.task(
        "where.py",
        "import lib_of_project\ndef task(payload, helpers):\n  note('where', [sys.prefix, lib_of_project.NAME])",
    );
    project.file("lib_of_project.py", "NAME = 'lib'");
    db.add_job("'where'").await;
    run_once(&db, &project).await;
    // An active virtual environment takes precedence.
    let environment = std::env::var("VIRTUAL_ENV").unwrap_or_else(|_| environment.to_str().unwrap().to_owned());
    assert_eq!(project.notes("where"), [json!([environment, "lib"])]);
}
