//! The plans of the worker's statements, which are made once: they have to serve whatever was known of the table then.

use crate::support::{Db, sql_files};
use sqlx::{AssertSqlSafe, PgConnection};

/// What the worker's own connections are set to, as far as it touches plans.
const SETTINGS: &str =
    "set plan_cache_mode = force_generic_plan; set enable_seqscan = off; set enable_bitmapscan = off;
    set enable_sort = off; set enable_hashjoin = off; set enable_mergejoin = off; set jit = off";

/// The types of the parameters of `exchange_unqueued.sql`.
const SHORT_EXCHANGE: &str =
    "text, bigint[], timestamptz[], int[], int, smallint, timestamptz, bigint, int, timestamptz, float8, text[], text[],
     jsonb, int[], bigint[], timestamptz[], text";

async fn plan(connection: &mut PgConnection) -> Vec<String> {
    let files = sql_files();
    let (_, text) = files.iter().find(|(name, _)| name == "exchange.sql").expect("the file");
    let prepare = format!(
        "{SETTINGS}; deallocate all; prepare exchange(text, bigint[], timestamptz[], bigint[], timestamptz[], text[],
           float8[], timestamptz[], int[], text[], int[], int[], int, text[], timestamptz, text[], int[], float8, int[], int,
           text[], jsonb, int[])
           as {}",
        text.replace(":\"schema\"", "graphile_worker")
    );
    sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
    sqlx::query_scalar(
        "explain (costs off) execute exchange('w', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
           '{1}', 100, null, null, '{}', null, null, '{}', 1000000, null, null, '{1}')",
    )
    .persistent(false)
    .fetch_all(connection)
    .await
    .unwrap()
}

/// The plan of another statement of the worker, with its types and arguments.
async fn plan_of(connection: &mut PgConnection, name: &str, types: &str, arguments: &str) -> Vec<String> {
    let files = sql_files();
    let (_, text) = files.iter().find(|(file, _)| *file == format!("{name}.sql")).expect("the file");
    let text = text.replace(":\"schema\"", "graphile_worker");
    let prepare = format!("{SETTINGS}; deallocate all; prepare {name}({types}) as {text}");
    sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
    let explain = format!("explain (costs off) execute {name}({arguments})");
    sqlx::query_scalar(AssertSqlSafe(explain)).persistent(false).fetch_all(connection).await.unwrap()
}

/// Each scan of a table, with the line after it, which says by what.
fn scans(plan: &[String]) -> Vec<(&str, &str)> {
    let after = plan.iter().skip(1).map(String::as_str).chain([""]);
    plan.iter()
        .map(|line| line.trim())
        .zip(after)
        .filter(|(line, _)| line.contains(" on _private_") && line.contains("Scan"))
        .map(|(line, next)| (line, next.trim()))
        .collect()
}

fn assert_uses_index(plan: &[String], at_least: usize, when: &str) {
    let scans = scans(plan);
    assert!(scans.len() >= at_least, "{when}: {plan:#?}");
    for (scan, by) in scans {
        // Our own indexes are in the order of the claim, and read only as far as they have to be.
        let ours = scan.contains("using _rs_jobs_");
        let by_key = scan.contains("_pkey") && by.starts_with("Index Cond: (id = ");
        let by_place = scan.contains("Tid Scan");
        assert!(ours || by_key || by_place, "{when}: {scan}, {by}\n{plan:#?}");
    }
}

#[tokio::test]
async fn a_batch_is_planned_the_same_whether_the_table_was_empty_or_full() {
    let db = Db::installed().await;
    let mut connection = db.connect().await;
    for when in ["never analyzed", "empty when it was vacuumed", "full when it was vacuumed"] {
        if when.starts_with("full") {
            db.run("select graphile_worker.add_job('t') from generate_series(1, 2000)").await;
        }
        if when != "never analyzed" {
            db.run("vacuum analyze graphile_worker._private_jobs").await;
        }
        for (name, types, arguments) in [
            (
                "deferred_claim",
                "text, int[], int, text[], text[], jsonb, timestamptz, float8, int, smallint, timestamptz, bigint",
                "'w', '{1}', 100, null, null, null, null, null, 1000000, null, null, null",
            ),
            (
                "deferred_end",
                "text, bigint[], bigint[], text[], float8[], timestamptz[], int[], text[], bool[], bigint[], timestamptz,
                 timestamptz, float8, bool",
                "'w', '{1}', '{2}', '{null}', '{null}', '{null}', '{0}', '{null}', '{f}', '{3}', now(), null, null, true",
            ),
            ("deferred_resume", "bigint[], timestamptz[], int[]", "'{1}', '{now}', '{1}'"),
        ] {
            let plan = plan_of(&mut connection, name, types, arguments).await;
            let scans = scans(&plan);
            assert!(!scans.is_empty(), "{name}: {plan:#?}");
            for (scan, by) in scans {
                let ours = scan.contains("using _rs_jobs_unqueued");
                let by_key = scan.contains("_pkey") && by.starts_with("Index Cond: (id = ");
                assert!(ours || by_key, "{name}, {when}: {scan}, {by}\n{plan:#?}");
            }
        }
    }
}

#[tokio::test]
async fn a_short_exchange_is_planned_the_same_whether_the_table_was_empty_or_full() {
    let db = Db::installed().await;
    let mut connection = db.connect().await;
    for when in ["never analyzed", "empty when it was vacuumed", "full when it was vacuumed"] {
        if when.starts_with("full") {
            db.run("select graphile_worker.add_job('t') from generate_series(1, 2000)").await;
        }
        if when != "never analyzed" {
            db.run("vacuum analyze graphile_worker._private_jobs").await;
        }
        let plan = plan_of(
            &mut connection,
            "exchange_unqueued",
            SHORT_EXCHANGE,
            "'w', '{1}', '{now}', '{1}', 100, 0::smallint, now(), 7, 1000000, null, null, null, null, null, '{1}',
             '{2}', '{now}', '{\"(0,1)\"}'",
        )
        .await;
        assert_uses_index(&plan, 8, when);
    }
}

#[tokio::test]
async fn a_claim_of_the_first_jobs_is_planned_the_same_whether_the_table_was_empty_or_full() {
    let db = Db::installed().await;
    let mut connection = db.connect().await;
    for when in ["never analyzed", "empty when it was vacuumed", "full when it was vacuumed"] {
        if when.starts_with("full") {
            db.run("select graphile_worker.add_job('t') from generate_series(1, 2000)").await;
        }
        if when != "never analyzed" {
            db.run("vacuum analyze graphile_worker._private_jobs").await;
        }
        let types = "text, int[], int, timestamptz, float8, text[], text[], jsonb";
        let arguments = "'w', '{1}', 100, null, null, null, null, null";
        let plan = plan_of(&mut connection, "claim_head", types, arguments).await;
        assert_uses_index(&plan, 6, when);
    }
}

#[tokio::test]
async fn an_exchange_is_planned_the_same_whether_the_table_was_empty_or_full() {
    let db = Db::installed().await;
    let mut connection = db.connect().await;
    assert_uses_index(&plan(&mut connection).await, 13, "never analyzed");
    let care = "vacuum analyze graphile_worker._private_jobs; vacuum analyze graphile_worker._private_job_queues";
    for sql in care.split(';') {
        db.run(sql).await;
    }
    assert_uses_index(&plan(&mut connection).await, 13, "empty when it was vacuumed");
    db.run("select graphile_worker.add_job('t', '1', case when n % 2 = 0 then 'q' || n % 100 end) from generate_series(1, 2000) n")
        .await;
    assert_uses_index(&plan(&mut connection).await, 13, "filled since");
    for sql in care.split(';') {
        db.run(sql).await;
    }
    assert_uses_index(&plan(&mut connection).await, 13, "full when it was vacuumed");
}

/// How many rows of the table an exchange of a worker of the tasks `task_ids` reads, where `limits` says how many jobs of
/// each it may take.
async fn rows_read(connection: &mut PgConnection, task_ids: &str, limits: &str) -> i64 {
    let sql = format!(
        "execute exchange('w', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}',
           '{{}}', '{{}}', '{task_ids}', 10, null, null, '{{}}', {limits}, null, '{{}}', 1000000, null, null, '{task_ids}')"
    );
    rows_read_by(connection, &sql).await
}

async fn rows_read_by(connection: &mut PgConnection, execute: &str) -> i64 {
    let sql = format!("explain (analyze, format json) {execute}");
    let plan: serde_json::Value =
        sqlx::query_scalar(AssertSqlSafe(sql)).persistent(false).fetch_one(connection).await.unwrap();
    fn count(node: &serde_json::Value) -> i64 {
        let number = |name: &str| node[name].as_f64().unwrap_or(0.0);
        let read = if node["Relation Name"] == "_private_jobs" && node["Node Type"] != "ModifyTable" {
            (number("Actual Rows") + number("Rows Removed by Filter") + number("Rows Removed by Index Recheck"))
                * number("Actual Loops")
        } else {
            0.0
        };
        read as i64 + node["Plans"].as_array().into_iter().flatten().map(count).sum::<i64>()
    }
    count(&plan[0]["Plan"])
}

#[tokio::test]
async fn jobs_of_a_task_at_its_limit_are_not_read() {
    // Without a queue, and each in a queue of its own. A claim below the limit then tries the queues in front, which are all
    // of the limited task, and the next claim gets the others.
    for (queue, free_jobs) in [("null", 38), ("identifier || n", 20)] {
        let db = Db::installed().await;
        let mut connection = db.connect().await;
        plan(&mut connection).await;
        for (identifier, jobs) in [("limited", 5000), ("free", 100)] {
            db.run(&format!(
                "select graphile_worker.add_job(identifier, queue_name => {queue})
                 from (values ('{identifier}')) as task (identifier), generate_series(1, {jobs}) as n"
            ))
            .await;
        }
        for analyzed in [false, true] {
            if analyzed {
                db.run("vacuum analyze graphile_worker._private_jobs").await;
                plan(&mut connection).await;
            }
            let free = db.value("select id from graphile_worker._private_tasks where identifier = 'free'").await;
            let limited = db.value("select id from graphile_worker._private_tasks where identifier = 'limited'").await;
            let at_its_limit = rows_read(&mut connection, &format!("{{{free}}}"), "'{null}'").await;
            assert!((10..200).contains(&at_its_limit), "{queue}: {at_its_limit} rows read (analyzed: {analyzed})");
            let below_it = rows_read(&mut connection, &format!("{{{limited},{free}}}"), "'{1,null}'").await;
            assert!((10..500).contains(&below_it), "{queue}: {below_it} rows read (analyzed: {analyzed})");
        }
        let claimed = "select json_object_agg(identifier, jobs) from (
                         select identifier, count(*) as jobs from graphile_worker._private_jobs as jobs
                         join graphile_worker._private_tasks as tasks on tasks.id = jobs.task_id
                         where locked_by = 'w' group by 1) as claimed";
        assert_eq!(db.value(claimed).await, serde_json::json!({"free": free_jobs, "limited": 2}), "{queue}");
    }
}

#[tokio::test]
async fn jobs_that_a_worker_cannot_take_are_not_read() {
    for in_front in [
        "select graphile_worker.add_job('elsewhere' || n % 3)",
        "select graphile_worker.add_job('t', flags => '{slow}')",
    ] {
        let db = Db::installed().await;
        let mut connection = db.connect().await;
        db.run("select graphile_worker.add_job('t'); delete from graphile_worker._private_jobs").await;
        db.run(&format!("{in_front} from generate_series(1, 20000) n")).await;
        db.run("select graphile_worker.add_job('t') from generate_series(1, 100)").await;
        for analyzed in [false, true] {
            if analyzed {
                db.run("vacuum analyze graphile_worker._private_jobs").await;
            }
            plan(&mut connection).await;
            for wanted in [1, 20] {
                let execute = format!(
                    "execute exchange('w', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}',
                       '{{1}}', {wanted}, '{{slow}}', null, '{{}}', null, null, '{{}}', 1000000, null, null, '{{1}}')"
                );
                let read = rows_read_by(&mut connection, &execute).await;
                assert!((1..600).contains(&read), "{in_front}: {read} rows read for {wanted} (analyzed: {analyzed})");
            }
            plan_of(
                &mut connection,
                "exchange_unqueued",
                SHORT_EXCHANGE,
                "'w', '{}', '{}', '{1}', 1, null, null, null, 1000000, null, null, null, null, null, '{1}',
                 '{}', '{}', '{}'",
            )
            .await;
            let execute = "execute exchange_unqueued('w', '{}', '{}', '{1}', 10, null, null, null, 1000000, null, null,
                             '{slow}', null, null, '{1}', '{}', '{}', '{}')";
            let read = rows_read_by(&mut connection, execute).await;
            assert!(
                (1..600).contains(&read),
                "{in_front}: {read} rows read by the short exchange (analyzed: {analyzed})"
            );
        }
        let claimed = "select count(*) from graphile_worker._private_jobs where locked_by = 'w'";
        assert_eq!(db.value(claimed).await, 42, "{in_front}");
    }
}
