//! One job at a time: arguments, defaults, limits, notifications.

use crate::support::{Db, Listener, claim};
use serde_json::{Value, json};

#[tokio::test]
async fn a_job_gets_the_documented_defaults() {
    let db = Db::installed().await;
    let job = db.add_job("'hello'").await;
    assert_eq!(job["payload"], json!({}));
    assert_eq!(job["priority"], 0);
    assert_eq!(job["attempts"], 0);
    assert_eq!(job["max_attempts"], 25);
    assert_eq!(job["revision"], 0);
    assert_eq!(job["run_at"], job["created_at"]);
    assert_eq!(job["is_available"], true);
    for nothing in ["job_queue_id", "last_error", "key", "locked_at", "locked_by", "flags"] {
        assert_eq!(job[nothing], Value::Null, "{nothing}");
    }
}

#[tokio::test]
async fn positional_and_named_arguments_mean_the_same() {
    let db = Db::installed().await;
    db.add_job("'t', '{\"a\": 1}', 'q', '2030-01-02 03:04:05Z', 7, 'k1', 3, array['x', 'y'], 'replace'").await;
    db.add_job(
        "job_key_mode := 'replace', flags := array['x', 'y'], priority := 3, job_key := 'k2', max_attempts := 7,
         run_at := '2030-01-02 03:04:05Z', queue_name := 'q', payload := '{\"a\": 1}', identifier := 't'",
    )
    .await;
    let jobs = db
        .rows(
            "select queue_name, task_identifier, priority, run_at, max_attempts, jobs.flags, payload::text
             from graphile_worker.jobs join graphile_worker._private_jobs using (id, priority, run_at, max_attempts)",
        )
        .await;
    assert_eq!(jobs.len(), 2);
    assert_eq!(jobs[0], jobs[1]);
    assert_eq!(jobs[0]["flags"], json!({"x": true, "y": true}));
    assert_eq!(jobs[0]["queue_name"], "q");
    assert_eq!(jobs[0]["run_at"], "2030-01-02T03:04:05+00:00");
}

#[tokio::test]
async fn null_means_default_for_every_optional_argument() {
    let db = Db::installed().await;
    let job = db.add_job("'t', null, null, null, null, null, null, null, null").await;
    assert_eq!(job["max_attempts"], 25);
    assert_eq!(job["payload"], json!({}));
}

#[tokio::test]
async fn any_json_is_a_payload_and_is_stored_unchanged() {
    let db = Db::installed().await;
    for payload in ["null", "1.50", "\"text\"", "[1,  2]", r#"{"b":1, "a":2, "b":3}"#, r#""\u0000""#] {
        db.add_job(&format!("'t', '{payload}'")).await;
        let stored = db.value("select payload::text from graphile_worker._private_jobs order by id desc limit 1").await;
        assert_eq!(stored, payload);
    }
}

#[tokio::test]
async fn invalid_json_is_rejected() {
    let db = Db::installed().await;
    let (code, _) = db.failure("select graphile_worker.add_job('t', '{oops')").await;
    assert_eq!(code, "22P02");
    let (code, message) = db.failure("select graphile_worker.add_job('t', '{}'::jsonb)").await;
    assert_eq!(code, "42883");
    assert!(message.contains("graphile_worker.add_job(unknown, jsonb) does not exist"), "{message}");
}

#[tokio::test]
async fn every_limit_has_its_code_and_says_what_it_found() {
    let db = Db::installed().await;
    for (arguments, code, message) in [
        ("null", "GWBID", "Task identifier is empty"),
        ("''", "GWBID", "Task identifier is empty"),
        ("repeat('x', 129)", "GWBID", "Task identifier is too long (max length: 128), this one has 129."),
        ("'t', queue_name := ''", "GWBQN", "Job queue name is empty"),
        (
            "'t', queue_name := repeat('é', 129)",
            "GWBQN",
            "Job queue name is too long (max length: 128), this one has 129.",
        ),
        ("'t', job_key := ''", "GWBJK", "Job key is empty"),
        ("'t', job_key := repeat('x', 513)", "GWBJK", "Job key is too long (max length: 512), this one has 513."),
        ("'t', max_attempts := 0", "GWBMA", "Job maximum attempts must be at least 1, found 0."),
        ("'t', max_attempts := -3", "GWBMA", "must be at least 1, found -3."),
        ("'t', max_attempts := 32768", "GWBMA", "must be at most 32767, found 32768."),
        ("'t', priority := 40000", "22003", "Job priority must be between -32768 and 32767, found 40000."),
        ("'t', priority := -40000", "22003", "found -40000."),
        ("'t', flags := array['a', null]", "22004", "Job flags must not contain null."),
        (
            "'t', job_key := 'k', job_key_mode := 'Replace'",
            "GWBKM",
            "Invalid job_key_mode value 'Replace', expected 'replace', 'preserve_run_at' or 'unsafe_dedupe'.",
        ),
        ("'t', job_key_mode := 'debounce'", "GWBKM", "Invalid job_key_mode value 'debounce'"),
    ] {
        let (found_code, found_message) = db.failure(&format!("select graphile_worker.add_job({arguments})")).await;
        assert_eq!(found_code, code, "{arguments}: {found_message}");
        assert!(found_message.contains(message), "{arguments}: {found_message}");
    }
}

#[tokio::test]
async fn names_keys_and_numbers_at_their_limits_are_accepted() {
    let db = Db::installed().await;
    let job = db
        .add_job(
            "repeat('é', 128), queue_name := repeat('q', 128), job_key := repeat('k', 512),
             max_attempts := 32767, priority := -32768",
        )
        .await;
    assert_eq!((job["max_attempts"].as_i64(), job["priority"].as_i64()), (Some(32767), Some(-32768)));
}

#[tokio::test]
async fn flags_become_an_object_and_no_flags_become_null() {
    let db = Db::installed().await;
    assert_eq!(db.add_job("'t', flags := array['b', 'a', 'b']").await["flags"], json!({"a": true, "b": true}));
    assert_eq!(db.add_job("'t', flags := '{}'").await["flags"], Value::Null);
}

#[tokio::test]
async fn adding_wakes_the_workers() {
    let db = Db::installed().await;
    let mut listener = Listener::on(&db, "jobs:insert").await;
    db.add_job("'t'").await;
    db.add_job("'t', job_key := 'k'").await;
    let received = listener.received(&db).await;
    assert_eq!(received.len(), 2);
    for payload in received {
        assert_eq!(payload["count"], 1);
        assert!(payload["r"].is_number());
    }
}

#[tokio::test]
async fn a_job_of_a_transaction_that_rolls_back_never_existed() {
    let db = Db::installed().await;
    let mut listener = Listener::on(&db, "jobs:insert").await;
    db.run("begin; select graphile_worker.add_job('t', job_key := 'k', queue_name := 'q'); rollback").await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
    assert!(listener.received(&db).await.is_empty());
}

#[tokio::test]
async fn names_that_exist_use_up_no_ids() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', queue_name := 'q', job_key := 'k' || i % 3) from generate_series(1, 50) i;
         select graphile_worker.add_job('t', queue_name := 'q') from generate_series(1, 50) i;
         select graphile_worker.add_job('t', queue_name := 'q', job_key := 'd', job_key_mode := 'unsafe_dedupe')
         from generate_series(1, 50) i;
         select count(*) from generate_series(1, 50) i, graphile_worker.add_jobs(
           array[('t', null, 'q', null, null, null, null, null), ('t', null, 'q', null, null, 'k', null, null)]
           ::graphile_worker.job_spec[]);
         select graphile_worker.add_job('u', queue_name := 'r')",
    )
    .await;
    assert_eq!(db.value("select max(id) from graphile_worker._private_tasks").await, 2);
    assert_eq!(db.value("select max(id) from graphile_worker._private_job_queues").await, 2);
}

#[tokio::test]
async fn the_view_shows_a_job_with_its_names_and_without_its_payload() {
    let db = Db::installed().await;
    db.add_job("'t', '{\"secret\": 1}', 'q'").await;
    claim(&mut db.connect().await, "w1").await;
    let job = db.row("select * from graphile_worker.jobs").await;
    assert_eq!(job["task_identifier"], "t");
    assert_eq!(job["queue_name"], "q");
    assert_eq!(job["locked_by"], "w1");
    assert_eq!(job["attempts"], 1);
    assert!(job.get("payload").is_none());
}
