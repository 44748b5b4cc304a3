//! Many jobs in one call.

use crate::support::{Db, Listener, rows};
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

#[tokio::test]
async fn a_batch_treats_an_existing_key_as_a_single_add_does() {
    let db = Db::installed().await;
    let states = [
        "select 'no job'",
        "select graphile_worker.add_job('old', OLD, 'q', '2030-01-01Z', 3, 'k', 7, array['f'])",
        "WAITING; update graphile_worker._private_jobs set attempts = 1, last_error = 'oops'",
        "WAITING; update graphile_worker._private_jobs set attempts = 3, last_error = 'oops'",
        "WAITING; update graphile_worker._private_jobs set attempts = 1, locked_at = now(), locked_by = 'w'",
    ];
    let spec = "('new', NEW, 'other', '2031-01-01Z', 9, 'k', 1, array['g', 'h'])::graphile_worker.job_spec";
    let twice = "('t', '1', null, null, null, 'twice', null, null)::graphile_worker.job_spec";
    let ways = [
        "add_job('new', NEW, 'other', '2031-01-01Z', 9, 'k', 1, array['g', 'h'], 'MODE')".to_owned(),
        format!("add_jobs(array[{spec}], 'MODE' = 'preserve_run_at')"),
        // A key that is there twice is added one by one.
        format!("add_jobs(array[{twice}, {spec}, {twice}], 'MODE' = 'preserve_run_at')"),
    ];
    let mut seen = Vec::new();
    for state in states.map(|state| state.replace("WAITING", states[1])) {
        for mode in ["replace", "preserve_run_at"] {
            for (old, new) in [("'[1]'", "'[2]'"), ("'[1]'", "'{\"n\": 2}'"), ("null", "null")] {
                let fill = |sql: &str| sql.replace("OLD", old).replace("NEW", new).replace("MODE", mode);
                let mut after = Vec::new();
                for way in &ways {
                    db.run("truncate graphile_worker._private_jobs").await;
                    db.run(&fill(&state)).await;
                    db.run(&format!("select graphile_worker.{}", fill(way))).await;
                    let left = "select json_agg(
                        to_jsonb(job) - array['id', 'created_at', 'updated_at', 'locked_at'] order by id
                      ) from graphile_worker._private_jobs as job where key is distinct from 'twice'";
                    after.push(db.value(left).await);
                }
                assert_eq!(after[0], after[1], "{mode}, {old} and {new}, after {state}");
                assert_eq!(after[0], after[2], "{mode}, {old} and {new}, after {state}");
                seen.push(after.swap_remove(0).to_string());
            }
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 15, "the cases differ: {seen:#?}");
}

#[tokio::test]
async fn a_batch_changes_waiting_jobs_and_adds_new_ones_for_running_and_missing_ones() {
    let db = Db::installed().await;
    for key in ["waiting", "running", "failed"] {
        db.add_job(&format!("'t', '[\"{key}\"]', job_key := '{key}'")).await;
    }
    db.run(
        "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w', attempts = 1 where key = 'running';
         update graphile_worker._private_jobs set attempts = max_attempts where key = 'failed'",
    )
    .await;
    let keys = ["new", "failed", "", "running", "waiting"];
    let rows = add_jobs(&db, &keys.map(|key| ("t", "[2]", "", key))).await;
    let expected = keys.map(|key| if key.is_empty() { Value::Null } else { json!(key) });
    assert_eq!(column(&rows, "key"), expected);
    assert_eq!(
        column(&rows, "payload"),
        [json!([2]), json!([2]), json!([2]), json!([2]), json!(["waiting", 2])],
        "only the waiting job is still free to be changed"
    );
    let ids: Vec<i64> = rows[..4].iter().map(|row| row["id"].as_i64().unwrap()).collect();
    assert!(ids.is_sorted() && ids[0] > 3, "new jobs in the order given: {ids:?}");
    assert_eq!(rows[4]["id"], 1);
    let replaced = db.rows("select * from graphile_worker._private_jobs where id in (2, 3) order by id").await;
    for (job, payload) in replaced.iter().zip([json!(["running"]), json!(["failed"])]) {
        assert_eq!((&job["key"], &job["payload"]), (&Value::Null, &payload));
        assert_eq!(job["attempts"], job["max_attempts"]);
    }
}

#[tokio::test]
async fn a_batch_creates_missing_names_and_uses_up_no_id_for_the_others() {
    let db = Db::installed().await;
    let add = |last: i32| {
        format!(
            "select count(*) from graphile_worker.add_jobs(array(
               select ('task' || n % 50, null, case when n % 3 > 0 then 'queue' || n end, null, null, null, null, null)
                 ::graphile_worker.job_spec
               from generate_series(1, {last}) as n order by hashint4(n)))"
        )
    };
    for (last, tasks, queues) in [(30, 30, 20), (30, 30, 20), (600, 50, 400), (601, 50, 401)] {
        assert_eq!(db.value(&add(last)).await, last);
        let names = db
            .row(
                "select (select json_build_array(count(*), max(id)) from graphile_worker._private_tasks) as tasks,
                        (select json_build_array(count(*), max(id)) from graphile_worker._private_job_queues) as queues",
            )
            .await;
        assert_eq!(names["tasks"], json!([tasks, tasks]));
        assert_eq!(names["queues"], json!([queues, queues]));
    }
}

#[tokio::test]
async fn adding_a_batch_never_reads_all_jobs_whatever_is_known_of_the_table() {
    let db = Db::installed().await;
    let mut connection = db.connect().await;
    let care =
        ["graphile_worker._private_jobs", "graphile_worker._private_tasks", "graphile_worker._private_job_queues"];
    for round in 0..3 {
        // At first nothing is known; then PostgreSQL takes the table for empty; then it knows its size.
        if round > 0 {
            for table in care {
                db.run(&format!("vacuum analyze {table}")).await;
            }
        }
        if round == 1 {
            db.run(
                "select graphile_worker.add_job('t' || n % 50, 'null', 'q' || n % 200, job_key := 'k' || n)
                    from generate_series(1, 3000) as n",
            )
            .await;
        }
        for key in ["null", "'new' || n || '.' || $1", "'k' || n", "'twice' || n / 2"] {
            let add = format!(
                "select count(*) from graphile_worker.add_jobs(array(
                   select ('t' || n % 50, null, 'q' || n % 200, null, null, {key}, null, null)::graphile_worker.job_spec
                   from generate_series(1, 100) as n))"
            );
            // Often enough for a generic plan.
            for call in 0..8 {
                let name = format!("{round}.{call}");
                sqlx::raw_sql("begin").execute(&mut connection).await.unwrap();
                rows(&mut connection, &add.replace("$1", &format!("'{name}'"))).await.unwrap();
                let scans =
                    "select sum(seq_scan) as scans from pg_stat_xact_user_tables where relname like '\\_private\\_%'";
                let scans = rows(&mut connection, scans).await.unwrap();
                assert_eq!(scans[0]["scans"], 0, "round {round}, key {key}, call {call}");
                sqlx::raw_sql("commit").execute(&mut connection).await.unwrap();
            }
        }
    }
}
