//! complete_jobs, permanently_fail_jobs, reschedule_jobs, force_unlock_workers.

use crate::support::{Db, Listener};
use serde_json::{Value, json};

/// Four jobs: 1 waits, 2 is locked, 3 has a stale lock, 4 failed for good.
async fn four_jobs() -> Db {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t') from generate_series(1, 4);
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w1', attempts = 1 where id = 2;
         update graphile_worker._private_jobs
         set locked_at = now() - interval '4 hours 1 second', locked_by = 'w2', attempts = 1 where id = 3;
         update graphile_worker._private_jobs set attempts = max_attempts, last_error = 'oops' where id = 4",
    )
    .await;
    db
}

fn ids(mut rows: Vec<Value>) -> Vec<i64> {
    rows.sort_by_key(|row| row["id"].as_i64());
    rows.iter().map(|row| row["id"].as_i64().unwrap()).collect()
}

#[tokio::test]
async fn complete_jobs_deletes_all_but_the_running() {
    let db = four_jobs().await;
    let deleted = db.rows("select * from graphile_worker.complete_jobs(array[4, 3, 2, 1, 99, 1])").await;
    assert_eq!(ids(deleted), [1, 3, 4]);
    assert_eq!(ids(db.rows("select * from graphile_worker.jobs").await), [2]);
}

#[tokio::test]
async fn permanently_fail_jobs_uses_up_the_attempts_of_all_but_the_running() {
    let db = four_jobs().await;
    let failed = db.rows("select * from graphile_worker.permanently_fail_jobs(array[1, 2, 3, 4], 'given up')").await;
    for job in &failed {
        assert_eq!(job["attempts"], job["max_attempts"]);
        assert_eq!(job["last_error"], "given up");
        assert_eq!(job["locked_by"], Value::Null);
    }
    assert_eq!(ids(failed), [1, 3, 4]);
    let running = db.row("select * from graphile_worker.jobs where id = 2").await;
    assert_eq!((&running["attempts"], &running["last_error"]), (&json!(1), &Value::Null));
}

#[tokio::test]
async fn permanently_fail_jobs_has_a_default_reason() {
    let db = four_jobs().await;
    let failed = db.row("select * from graphile_worker.permanently_fail_jobs(array[1])").await;
    assert_eq!(failed["last_error"], "Manually marked as failed");
}

#[tokio::test]
async fn reschedule_jobs_changes_what_is_given_and_nothing_else() {
    let db = four_jobs().await;
    let before = db.row("select * from graphile_worker._private_jobs where id = 1").await;
    let changes = [
        ("run_at := '2030-01-01Z'", "run_at", json!("2030-01-01T00:00:00+00:00")),
        ("priority := 5", "priority", json!(5)),
        ("attempts := 2", "attempts", json!(2)),
        ("max_attempts := 7", "max_attempts", json!(7)),
    ];
    let mut expected = before.clone();
    for (argument, column, value) in changes {
        let mut job = db.row(&format!("select * from graphile_worker.reschedule_jobs(array[1], {argument})")).await;
        expected[column] = value;
        job["updated_at"] = expected["updated_at"].clone();
        assert_eq!(job, expected, "{argument}");
    }
}

#[tokio::test]
async fn reschedule_jobs_revives_the_failed_and_the_stuck_but_not_the_running() {
    let db = four_jobs().await;
    let mut listener = Listener::on(&db, "jobs:insert").await;
    let jobs = db.rows("select * from graphile_worker.reschedule_jobs(array[1, 2, 3, 4], now(), 0, 0, 5)").await;
    assert!(jobs.iter().all(|job| job["is_available"] == json!(true) && job["attempts"] == json!(0)));
    assert_eq!(ids(jobs), [1, 3, 4]);
    assert_eq!(listener.received(&db).await.len(), 1, "workers are notified");
}

#[tokio::test]
async fn reschedule_jobs_rejects_numbers_out_of_range() {
    let db = four_jobs().await;
    for (argument, code, message) in [
        ("priority := 40000", "22003", "Job priority must be between -32768 and 32767, found 40000."),
        ("attempts := -1", "22003", "Job attempts must be between 0 and 32767, found -1."),
        ("attempts := 40000", "22003", "found 40000."),
        ("max_attempts := 0", "GWBMA", "Job maximum attempts must be at least 1, found 0."),
    ] {
        let failure = db.failure(&format!("select graphile_worker.reschedule_jobs(array[1, 3, 4], {argument})")).await;
        assert_eq!(failure.0, code);
        assert!(failure.1.contains(message), "{}", failure.1);
    }
}

#[tokio::test]
async fn force_unlock_workers_unlocks_jobs_and_queues_of_the_named_workers() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', queue_name := 'q' || i) from generate_series(1, 3) i;
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w' || id, attempts = 1;
         update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'w' || id",
    )
    .await;
    let mut listener = Listener::on(&db, "jobs:insert").await;
    db.run("select graphile_worker.force_unlock_workers(array['w1', 'w2', 'nobody'])").await;
    let state = "json_agg(json_build_array(id, locked_by, is_available) order by id)";
    let expected = json!([[1, null, true], [2, null, true], [3, "w3", false]]);
    assert_eq!(db.value(&format!("select {state} from graphile_worker._private_jobs")).await, expected);
    assert_eq!(db.value(&format!("select {state} from graphile_worker._private_job_queues")).await, expected);
    assert_eq!(db.value("select sum(attempts) from graphile_worker._private_jobs").await, 3, "the attempt counts");
    assert_eq!(listener.received(&db).await.len(), 1);
}
