//! Databases that older releases of Node's worker made, with jobs in them: nothing is lost.

#![allow(missing_docs)]

use graphile_worker::{Error, migrate, migrate_with_max_wait};
use graphile_worker_interop::Db;
use serde_json::{Value, json};
use std::time::Duration;

const RELEASES: [(&str, i32); 6] = [
    ("graphile-worker-0.13", 10),
    ("graphile-worker-0.14", 14),
    ("graphile-worker-0.15", 14),
    ("graphile-worker-0.16", 18),
    ("graphile-worker-0.17", 19),
    ("graphile-worker", 20),
];

/// Until level 14 the jobs were in a table `jobs`; since then it is a view.
fn table(level: i32) -> &'static str {
    if level < 15 { "graphile_worker.jobs" } else { "graphile_worker._private_jobs" }
}

/// A dozen jobs in every state that a job at rest can be in, added as a user of that release would.
async fn fill(db: &Db, level: i32) {
    let table = table(level);
    db.run(
        "select graphile_worker.add_job('note', json_build_object('n', n)) from generate_series(1, 4) n;
         select graphile_worker.add_job('note', '{\"n\": 5}', 'a queue', now() + interval '1 day', 3, 'a key', -4, array['x', 'y']);
         select graphile_worker.add_job('note', '{\"n\": 6}', job_key := 'changed');
         select graphile_worker.add_job('note', '{\"n\": 7}', job_key := 'changed', priority := 9);
         select graphile_worker.add_job('note', '{\"n\": 8}', queue_name := 'a queue');
         select graphile_worker.add_job('note', '{\"n\": 9}', queue_name := 'another queue');
         select graphile_worker.add_job('never heard of', '{\"n\":   10, \"text\": \"it''s \\u00e9\"}')",
    )
    .await;
    db.run(&format!(
        "update {table} set attempts = 2, last_error = 'failed twice', run_at = run_at - interval '1 minute'
           where payload ->> 'n' = '8';
         update {table} set attempts = max_attempts, last_error = 'given up' where payload ->> 'n' = '9';
         update {table} set created_at = '2020-01-01Z' where payload ->> 'n' = '1';
         delete from {table} where payload ->> 'n' = '3'"
    ))
    .await;
}

/// All that must be kept, read from the tables of that level.
async fn jobs(db: &Db, level: i32) -> Value {
    let (queues, tasks) = match level {
        ..=10 => ("", ""),
        11..=14 => ("graphile_worker.job_queues", "graphile_worker.tasks"),
        _ => ("graphile_worker._private_job_queues", "graphile_worker._private_tasks"),
    };
    let (task, queue) = if level <= 10 {
        ("task_identifier".to_owned(), "queue_name".to_owned())
    } else {
        (
            format!("(select identifier from {tasks} t where t.id = task_id)"),
            format!("(select queue_name from {queues} q where q.id = job_queue_id)"),
        )
    };
    let table = table(level);
    db.value(&format!(
        "select json_agg(json_build_object('id', id, 'task', {task}, 'queue', {queue}, 'payload', payload::text,
           'priority', priority, 'run_at', run_at, 'attempts', attempts, 'max_attempts', max_attempts,
           'last_error', last_error, 'key', key, 'flags', flags, 'created_at', created_at, 'revision', revision) order by id)
         from {table}"
    ))
    .await
}

#[tokio::test]
async fn every_job_of_an_older_release_is_kept_and_runs_under_nodes_newest() {
    for (package, level) in RELEASES {
        let db = Db::nodes(package).await;
        fill(&db, level).await;
        let before = jobs(&db, level).await;
        assert_eq!(before.as_array().expect("jobs").len(), 8, "{package}");
        let last_id = before[7]["id"].as_i64().expect("an id");

        let migration = migrate(&db.pool, "graphile_worker").await.expect("a migration");
        assert_eq!((migration.from, migration.level), (Some(level), 20), "{package}");
        assert_eq!(jobs(&db, 20).await, before, "{package}");
        let next = db.value("select id from graphile_worker.add_job('note', '{\"n\": 11}')").await;
        assert!(next.as_i64().expect("an id") > last_id, "{package}: ids continue");

        db.node_works("graphile-worker").await;
        let ran = db.value("select json_agg(payload -> 'n' order by (payload ->> 'n')::int) from ran").await;
        assert_eq!(ran, json!([1, 2, 4, 7, 8, 11]), "{package}");
        let left = db.value("select json_agg(payload -> 'n' order by id) from graphile_worker._private_jobs").await;
        assert_eq!(left, json!([5, 9, 10]), "{package}: future, failed for good, unknown task");
    }
}

#[tokio::test]
async fn an_older_layout_with_a_running_job_is_rejected_until_the_job_has_ended() {
    for (package, level) in [("graphile-worker-0.13", 10), ("graphile-worker-0.14", 14), ("graphile-worker-0.15", 14)] {
        let db = Db::nodes(package).await;
        fill(&db, level).await;
        db.run("update graphile_worker.jobs set locked_at = now(), locked_by = 'worker-7' where id = 2").await;
        let before = jobs(&db, level).await;
        let error = migrate_with_max_wait(Duration::ZERO, &db.pool, "graphile_worker").await.expect_err("a refusal");
        assert!(matches!(&error, Error::JobsRunning { workers, .. } if workers == "worker-7"), "{error}");
        assert_eq!(jobs(&db, level).await, before, "{package}");
        // It is still a database that the old release can work with.
        db.run("update graphile_worker.jobs set locked_at = null, locked_by = null").await;
        db.node_works(package).await;
        migrate(&db.pool, "graphile_worker").await.expect("a migration");
    }
}

#[tokio::test]
async fn a_running_job_of_the_current_layout_continues_during_the_migration() {
    for (package, level) in RELEASES.into_iter().filter(|(_, level)| *level >= 15) {
        let db = Db::nodes(package).await;
        fill(&db, level).await;
        db.run("update graphile_worker._private_jobs set locked_at = now(), locked_by = 'worker-7', attempts = 1 where id = 2").await;
        migrate_with_max_wait(Duration::ZERO, &db.pool, "graphile_worker").await.expect("a migration");
        let locked = db.value("select json_agg(id) from graphile_worker.jobs where locked_by = 'worker-7'").await;
        assert_eq!(locked, json!([2]), "{package}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn installing_at_the_same_moment_as_node_succeeds() {
    for round in 0..6_u64 {
        let db = std::sync::Arc::new(Db::empty().await);
        let nodes = {
            let db = db.clone();
            // Node may lose the race, and then says so; what matters is what we do.
            std::thread::spawn(move || db.node_tries_to_migrate("graphile-worker"))
        };
        // Somewhere in the middle of Node's twenty steps.
        while db.value("select to_regclass('graphile_worker.migrations') is null").await == json!(true) {
            tokio::task::yield_now().await;
        }
        let level = "select coalesce(max(id), 0) from graphile_worker.migrations";
        while db.value(level).await.as_u64().expect("a level") < round * 3 {
            tokio::task::yield_now().await;
        }
        migrate(&db.pool, "graphile_worker").await.expect("our migration");
        nodes.join().expect("Node's migration");
        migrate(&db.pool, "graphile_worker").await.expect("our migration, again");
        db.run("select graphile_worker.add_job('note', '{\"n\": 1}', job_key := 'k')").await;
        db.node_works("graphile-worker").await;
        assert_eq!(db.value("select count(*) from ran").await, 1);
    }
}
