//! Job keys: the three modes, arrays that merge, removal.

use crate::support::Db;
use serde_json::{Value, json};

const PAST: &str = "run_at := '2020-01-01Z'";

#[tokio::test]
async fn replace_overwrites_everything_but_identity() {
    let db = Db::installed().await;
    let first = db.add_job("'old', '{\"a\": 1}', 'q1', '2030-01-01Z', 3, 'k', 5, array['x']").await;
    let second = db.add_job("'new', '{\"b\": 2}', 'q2', '2031-01-01Z', 4, 'k', 6, array['y']").await;
    assert_eq!(second["id"], first["id"]);
    assert_eq!(second["created_at"], first["created_at"]);
    assert_eq!(second["payload"], json!({"b": 2}));
    assert_eq!(second["run_at"], "2031-01-01T00:00:00+00:00");
    assert_eq!((second["max_attempts"].as_i64(), second["priority"].as_i64()), (Some(4), Some(6)));
    assert_eq!(second["flags"], json!({"y": true}));
    assert_eq!(second["revision"], 1);
    let names = db.row("select task_identifier, queue_name from graphile_worker.jobs").await;
    assert_eq!(names, json!({"task_identifier": "new", "queue_name": "q2"}));
}

#[tokio::test]
async fn a_failed_job_starts_afresh_when_replaced() {
    for mode in ["replace", "preserve_run_at"] {
        let db = Db::installed().await;
        db.add_job("'t', job_key := 'k'").await;
        db.run("update graphile_worker._private_jobs set attempts = 3, last_error = 'oops', run_at = '2030-01-01Z'")
            .await;
        let job = db.add_job(&format!("'t', job_key := 'k', {PAST}, job_key_mode := '{mode}'")).await;
        assert_eq!(job["attempts"], 0);
        assert_eq!(job["last_error"], Value::Null);
        assert_eq!(job["run_at"], "2020-01-01T00:00:00+00:00", "also with {mode}");
    }
}

#[tokio::test]
async fn preserve_run_at_keeps_the_time_of_a_job_that_has_not_been_tried() {
    let db = Db::installed().await;
    db.add_job("'t', '1', job_key := 'k', run_at := '2030-01-01Z'").await;
    let job = db.add_job("'u', '2', job_key := 'k', run_at := '2031-01-01Z', job_key_mode := 'preserve_run_at'").await;
    assert_eq!(job["run_at"], "2030-01-01T00:00:00+00:00");
    assert_eq!(job["payload"], 2);
    assert_eq!(job["revision"], 1);
}

#[tokio::test]
async fn a_running_job_passes_its_key_to_a_new_one_and_never_runs_again() {
    for mode in ["replace", "preserve_run_at"] {
        let db = Db::installed().await;
        let running = db.add_job("'t', '1', job_key := 'k'").await;
        db.claim().await;
        let new = db.add_job(&format!("'t', '2', job_key := 'k', job_key_mode := '{mode}'")).await;
        assert_ne!(new["id"], running["id"]);
        assert_eq!(new["revision"], 0);
        let old = db.row(&format!("select * from graphile_worker._private_jobs where id = {}", running["id"])).await;
        assert_eq!(old["key"], Value::Null);
        assert_eq!(old["attempts"], old["max_attempts"]);
        assert_eq!(old["locked_by"], "a-worker", "it is not taken from the worker that runs it");
        assert_eq!(old["payload"], 1);
    }
}

#[tokio::test]
async fn a_permanently_failed_job_passes_its_key_to_a_new_one() {
    let db = Db::installed().await;
    let failed = db.add_job("'t', '[1]', job_key := 'k', max_attempts := 1").await;
    db.run("update graphile_worker._private_jobs set attempts = 1, last_error = 'oops'").await;
    let new = db.add_job("'t', '[2]', job_key := 'k'").await;
    assert_ne!(new["id"], failed["id"]);
    assert_eq!(new["payload"], json!([2]), "nothing is merged from the dead");
    let old = db.row(&format!("select * from graphile_worker._private_jobs where id = {}", failed["id"])).await;
    assert_eq!((&old["key"], &old["last_error"], &old["is_available"]), (&Value::Null, &json!("oops"), &json!(false)));
}

#[tokio::test]
async fn unsafe_dedupe_touches_only_the_revision_whatever_state_the_job_is_in() {
    for state in
        ["locked_at = null", "locked_at = now(), locked_by = 'w'", "attempts = max_attempts, last_error = 'oops'"]
    {
        let db = Db::installed().await;
        let first = db.add_job("'t', '[1]', 'q', '2030-01-01Z', 3, 'k', 5, array['x'], 'unsafe_dedupe'").await;
        db.run(&format!("update graphile_worker._private_jobs set {state}")).await;
        let before = db.row("select * from graphile_worker._private_jobs").await;
        let mut second = db.add_job("'u', '[2]', job_key := 'k', job_key_mode := 'unsafe_dedupe'").await;
        assert_eq!(second["id"], first["id"]);
        assert_eq!(second["revision"], 1);
        assert_ne!(second["updated_at"], before["updated_at"]);
        second["revision"] = before["revision"].clone();
        second["updated_at"] = before["updated_at"].clone();
        assert_eq!(second, before);
        assert_eq!(
            db.value("select count(*) from graphile_worker._private_tasks").await,
            1,
            "not even its task is made"
        );
    }
}

#[tokio::test]
async fn arrays_are_joined_and_anything_else_is_replaced() {
    let db = Db::installed().await;
    for (number, (first, second, joined)) in [
        ("[1]", "[2, 3]", "[1,2, 3]"),
        (" [ {\"b\": 1, \"a\": 2} ] ", "\n[[4]]\t", "[ {\"b\": 1, \"a\": 2} ,[4]]"),
        ("[]", "[1]", "[1]"),
        ("[1]", "[ ]", "[1]"),
        ("[\"\\u0000\"]", "[\"]\"]", "[\"\\u0000\",\"]\"]"),
        ("[1]", "{\"a\": 1}", "{\"a\": 1}"),
        ("{\"a\": 1}", "[1]", "[1]"),
        ("[1]", "null", "null"),
    ]
    .into_iter()
    .enumerate()
    {
        for mode in ["replace", "preserve_run_at"] {
            let key = format!("{mode} {number}");
            db.add_job(&format!("'t', e'{}', job_key := '{key}'", first.replace('\\', "\\\\"))).await;
            db.add_job(&format!(
                "'t', e'{}', job_key := '{key}', job_key_mode := '{mode}'",
                second.replace('\\', "\\\\")
            ))
            .await;
            let stored =
                db.value(&format!("select payload::text from graphile_worker._private_jobs where key = '{key}'")).await;
            assert_eq!(stored.as_str().unwrap().trim(), joined, "{first} and {second}");
        }
    }
}

#[tokio::test]
async fn remove_job_deletes_a_job_that_does_not_run() {
    let db = Db::installed().await;
    let job = db.add_job("'t', job_key := 'k'").await;
    let removed = db.row("select * from graphile_worker.remove_job('k')").await;
    assert_eq!(removed, job);
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn remove_job_deletes_a_permanently_failed_job() {
    let db = Db::installed().await;
    db.add_job("'t', job_key := 'k'").await;
    db.run("update graphile_worker._private_jobs set attempts = max_attempts").await;
    db.run("select graphile_worker.remove_job('k')").await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn remove_job_keeps_a_running_job_from_running_again() {
    let db = Db::installed().await;
    db.add_job("'t', job_key := 'k'").await;
    db.claim().await;
    let kept = db.row("select * from graphile_worker.remove_job('k')").await;
    assert_eq!(kept["key"], Value::Null);
    assert_eq!(kept["attempts"], kept["max_attempts"]);
    assert_eq!(kept["locked_by"], "a-worker");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 1);
}

#[tokio::test]
async fn remove_job_deletes_a_job_whose_lock_is_stale() {
    let db = Db::installed().await;
    db.add_job("'t', job_key := 'k'").await;
    db.claim().await;
    db.run("update graphile_worker._private_jobs set locked_at = now() - interval '4 hours 1 second'").await;
    db.run("select graphile_worker.remove_job('k')").await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn remove_job_of_an_unused_key_returns_null() {
    let db = Db::installed().await;
    db.add_job("'t', job_key := 'other'").await;
    assert_eq!(db.value("select graphile_worker.remove_job('k')").await, Value::Null);
    assert_eq!(db.value("select graphile_worker.remove_job(null)").await, Value::Null);
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 1);
}
