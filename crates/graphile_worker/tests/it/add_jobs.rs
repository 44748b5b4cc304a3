//! Many jobs in one call.

use crate::support::{Db, Listener};
use serde_json::{Value, json};

/// A spec for each `(identifier, payload, queue, key)`; empty means null.
fn specs(items: &[(&str, &str, &str, &str)]) -> String {
    let text = |value: &str| if value.is_empty() { "null".to_owned() } else { format!("'{value}'") };
    let rows: Vec<String> = items
        .iter()
        .map(|(identifier, payload, queue, key)| {
            format!("({}, {}, {}, null, null, {}, null, null)", text(identifier), text(payload), text(queue), text(key))
        })
        .collect();
    format!("array[{}]::graphile_worker.job_spec[]", rows.join(", "))
}

async fn add_jobs(db: &Db, items: &[(&str, &str, &str, &str)]) -> Vec<Value> {
    db.rows(&format!("select * from graphile_worker.add_jobs({})", specs(items))).await
}

fn column(rows: &[Value], name: &str) -> Vec<Value> {
    rows.iter().map(|row| row[name].clone()).collect()
}

#[tokio::test]
async fn rows_come_back_in_the_order_given() {
    let db = Db::installed().await;
    let items: Vec<(String, String)> =
        (0..500).map(|i| (format!("task{}", (i * 7) % 13), format!("queue{}", (i * 5) % 11))).collect();
    let items: Vec<(&str, &str, &str, &str)> =
        items.iter().map(|(task, queue)| (task.as_str(), "{}", queue.as_str(), "")).collect();
    for _ in 0..2 {
        let rows = add_jobs(&db, &items).await;
        let ids: Vec<i64> = column(&rows, "id").iter().map(|id| id.as_i64().unwrap()).collect();
        assert!(ids.is_sorted(), "ids follow the order of the specs");
        let names = db
            .rows(&format!(
                "select task_identifier, queue_name from graphile_worker.jobs where id >= {} order by id",
                ids[0]
            ))
            .await;
        for (name, item) in names.iter().zip(&items) {
            assert_eq!((name["task_identifier"].as_str(), name["queue_name"].as_str()), (Some(item.0), Some(item.2)));
        }
    }
}

#[tokio::test]
async fn keyed_and_unkeyed_jobs_in_one_batch_keep_their_order() {
    let db = Db::installed().await;
    db.add_job("'old', job_key := 'm'").await;
    let rows = add_jobs(
        &db,
        &[("t", "1", "", "z"), ("t", "2", "", ""), ("t", "3", "", "m"), ("t", "4", "", "a"), ("t", "5", "", "")],
    )
    .await;
    assert_eq!(column(&rows, "payload"), [1, 2, 3, 4, 5]);
    assert_eq!(column(&rows, "key"), [json!("z"), Value::Null, json!("m"), json!("a"), Value::Null]);
    assert_eq!(rows[2]["id"], 1, "the job that held the key was changed, not replaced");
    let ids: Vec<i64> = [0, 1, 3, 4].map(|i: usize| rows[i]["id"].as_i64().unwrap()).to_vec();
    assert!(ids.is_sorted(), "new ids follow the order of the specs: {ids:?}");
}

#[tokio::test]
async fn the_same_key_twice_is_as_if_added_one_after_the_other() {
    let db = Db::installed().await;
    let rows =
        add_jobs(&db, &[("first", "{\"n\": 1}", "", "k"), ("other", "", "", ""), ("second", "{\"n\": 2}", "", "k")])
            .await;
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[0], rows[2]);
    assert_eq!(rows[0]["payload"], json!({"n": 2}));
    assert_eq!(rows[0]["revision"], 1);
    assert_eq!(db.value("select task_identifier from graphile_worker.jobs where key = 'k'").await, "second");

    let rows = add_jobs(&db, &[("t", "[1]", "", "list"), ("t", "[2, 3]", "", "list"), ("t", "[4]", "", "list")]).await;
    assert_eq!(rows[0]["payload"], json!([1, 2, 3, 4]));
}

#[tokio::test]
async fn preserve_run_at_holds_for_the_whole_batch() {
    let db = Db::installed().await;
    db.add_job("'t', job_key := 'a', run_at := '2030-01-01Z'").await;
    db.add_job("'t', job_key := 'b', run_at := '2030-01-01Z'").await;
    let specs = specs(&[("t", "1", "", "a"), ("t", "2", "", "b"), ("t", "3", "", "c")]);
    let rows = db.rows(&format!("select * from graphile_worker.add_jobs({specs}, true)")).await;
    assert_eq!(rows[0]["run_at"], "2030-01-01T00:00:00+00:00");
    assert_eq!(rows[1]["run_at"], "2030-01-01T00:00:00+00:00");
    assert_eq!(rows[2]["run_at"], rows[2]["created_at"]);
    let rows =
        db.rows(&format!("select * from graphile_worker.add_jobs({specs}, job_key_preserve_run_at := false)")).await;
    assert_ne!(rows[0]["run_at"], "2030-01-01T00:00:00+00:00");
}

#[tokio::test]
async fn every_field_of_a_spec_arrives() {
    let db = Db::installed().await;
    let job = db
        .row(
            "select * from graphile_worker.add_jobs(array[
               ('t', '{\"a\": 1}', 'q', '2030-01-01Z', 3, 'k', -5, array['x'])
             ]::graphile_worker.job_spec[])",
        )
        .await;
    assert_eq!(job["payload"], json!({"a": 1}));
    assert_eq!(job["run_at"], "2030-01-01T00:00:00+00:00");
    assert_eq!(job["max_attempts"], 3);
    assert_eq!(job["key"], "k");
    assert_eq!(job["priority"], -5);
    assert_eq!(job["flags"], json!({"x": true}));
    assert_eq!(db.value("select queue_name from graphile_worker.jobs").await, "q");
}

#[tokio::test]
async fn an_empty_batch_does_nothing_at_all() {
    let db = Db::installed().await;
    let mut listener = Listener::on(&db, "jobs:insert").await;
    assert!(db.rows("select * from graphile_worker.add_jobs('{}')").await.is_empty());
    assert!(db.rows("select * from graphile_worker.add_jobs(null)").await.is_empty());
    assert!(listener.received(&db).await.is_empty());
}

#[tokio::test]
async fn a_batch_wakes_the_workers_once() {
    let db = Db::installed().await;
    let mut listener = Listener::on(&db, "jobs:insert").await;
    add_jobs(&db, &[("t", "", "", ""), ("t", "", "", "k"), ("t", "", "", "")]).await;
    let received = listener.received(&db).await;
    assert_eq!(received.len(), 1);
    assert_eq!(received[0]["count"], 3);
}

#[tokio::test]
async fn one_invalid_job_rejects_the_batch_and_is_named_in_the_error() {
    let db = Db::installed().await;
    for (bad, code, message) in [
        (("", "", "", ""), "GWBID", "Job 2 of 3: Task identifier is empty"),
        (("t", "", "x".repeat(129).as_str(), ""), "GWBQN", "Job 2 of 3: Job queue name is too long (max length: 128)"),
        (("t", "", "", "x".repeat(513).as_str()), "GWBJK", "Job 2 of 3: Job key is too long (max length: 512)"),
    ] {
        let specs = specs(&[("fine", "", "", ""), bad, ("fine", "", "", "")]);
        let (found_code, found_message) = db.failure(&format!("select graphile_worker.add_jobs({specs})")).await;
        assert_eq!(found_code, code);
        assert!(found_message.contains(message), "{found_message}");
    }
    let zero = "select graphile_worker.add_jobs(array[('t', null, null, null, 0, null, null, null)]::graphile_worker.job_spec[])";
    assert_eq!(db.failure(zero).await.0, "GWBMA");
    let too_large = zero.replace("null, 0,", "null, 40000,");
    assert_eq!(db.failure(&too_large).await.0, "22003");
    assert_eq!(db.failure("select graphile_worker.add_jobs(array[null]::graphile_worker.job_spec[])").await.0, "GWBID");
}
