//! The real Node worker on our schema: runs, completes, fails, schedules, administers.

#![allow(missing_docs)]

use graphile_worker_interop::Db;
use serde_json::{Value, json};

/// Releases that know the level of the contract.
const CURRENT: [&str; 2] = ["graphile-worker", "graphile-worker-0.17"];

#[tokio::test]
async fn node_runs_and_completes_jobs_added_through_our_functions() {
    for package in CURRENT {
        let db = Db::ours().await;
        db.run(
            "select graphile_worker.add_job('note', '{\"n\": 1}');
             select graphile_worker.add_job('note', '[1]', job_key := 'k');
             select graphile_worker.add_job('note', '[2]', job_key := 'k');
             select graphile_worker.add_job('note', '{\"n\": 3}', priority := -1);
             select graphile_worker.add_job('note', '{\"n\": 4}', run_at := now() + interval '1 hour');
             select graphile_worker.add_job('note', '{\"n\": 5}', max_attempts := 1, job_key := 'gone');
             select graphile_worker.remove_job('gone')",
        )
        .await;
        db.node_works(package).await;
        let ran = db.value("select json_agg(payload order by payload::text) from ran").await;
        assert_eq!(ran, json!([[1, 2], {"n": 1}, {"n": 3}]), "{package}");
        let left = db.value("select json_agg(payload) from graphile_worker._private_jobs").await;
        assert_eq!(left, json!([{"n": 4}]), "{package}");
    }
}

#[tokio::test]
async fn a_job_that_fails_under_node_waits_for_its_next_attempt() {
    for package in CURRENT {
        let db = Db::ours().await;
        db.run("select graphile_worker.add_job('fail', queue_name := 'q')").await;
        db.node_works(package).await;
        let job = db
            .value(
                "select to_json(job) from (
                   select attempts, last_error, locked_by, run_at > now() as waits, is_available,
                     (select locked_by from graphile_worker._private_job_queues) as queue_locked_by
                   from graphile_worker._private_jobs) as job",
            )
            .await;
        assert_eq!(job["attempts"], 1, "{package}");
        assert!(job["last_error"].as_str().unwrap_or_default().contains("this task always fails"));
        assert_eq!((&job["waits"], &job["is_available"]), (&json!(true), &json!(true)));
        assert_eq!((&job["locked_by"], &job["queue_locked_by"]), (&Value::Null, &Value::Null));
        // The key machinery agrees that it has been attempted.
        db.run("select graphile_worker.add_job('note', '{\"again\": true}', queue_name := 'q')").await;
        db.node_works(package).await;
        assert_eq!(db.value("select count(*) from ran").await, 1);
    }
}

#[tokio::test]
async fn jobs_of_a_queue_run_one_after_the_other_under_node() {
    let db = Db::ours().await;
    db.run("select graphile_worker.add_job('slow', json_build_object('n', n), 'serial') from generate_series(1, 5) n")
        .await;
    db.node_works_until("graphile-worker", 5, "").await;
    let states = db.value("select json_agg(state || (payload ->> 'n') order by id) from ran").await;
    assert_eq!(
        states,
        json!(["start1", "end1", "start2", "end2", "start3", "end3", "start4", "end4", "start5", "end5"])
    );
}

#[tokio::test]
async fn nodes_cron_backfills_through_our_schema() {
    for package in CURRENT {
        let db = Db::ours().await;
        db.run(
            "insert into graphile_worker._private_known_crontabs (identifier, known_since, last_execution)
             values ('every_minute', now() - interval '1 day', date_trunc('minute', now()) - interval '3 minutes')",
        )
        .await;
        db.node_works_until(package, 2, "* * * * * tick ?id=every_minute&fill=1h {n:7}").await;
        let payload = db.value("select payload from ran order by id limit 1").await;
        assert_eq!(payload["n"], 7, "{package}");
        assert_eq!(payload["_cron"]["backfilled"], true);
        let moved = "select last_execution > now() - interval '2 minutes' from graphile_worker._private_known_crontabs";
        assert_eq!(db.value(moved).await, json!(true));
    }
}

#[tokio::test]
async fn nodes_utilities_work_on_our_functions() {
    for package in CURRENT {
        let db = Db::ours().await;
        let got = db.node_utils(package);
        assert_eq!(got["added"]["id"], got["replaced"]["id"]);
        assert_eq!(got["added"]["priority"], 2);
        assert_eq!(got["replaced"]["revision"], 1);
        assert_eq!(got["deduped"]["revision"], 2);
        let numbers: Vec<&Value> =
            got["batch"].as_array().expect("jobs").iter().map(|job| &job["payload"]["n"]).collect();
        assert_eq!(numbers, [1, 2, 3], "in the order given");
        assert_eq!(got["rescheduled"][0]["max_attempts"], 9);
        assert_eq!(got["failed"][0]["last_error"], "no more");
        assert_eq!(got["completed"].as_array().expect("jobs").len(), 1);
        assert_eq!(db.value("select count(*) from graphile_worker.jobs where locked_by is not null").await, 0);
        let again = graphile_worker::migrate(&db.pool, "graphile_worker").await.expect("a migration");
        assert!(!again.changed, "{package} has left our functions alone");
    }
}
