//! The plan of an exchange, which is made once: it has to serve whatever was known of the table then.

use crate::support::{Db, sql_files};
use sqlx::{AssertSqlSafe, PgConnection};

/// What the worker's own connections are set to, as far as it touches plans.
const SETTINGS: &str =
    "set plan_cache_mode = force_generic_plan; set enable_seqscan = off; set enable_bitmapscan = off;
    set enable_sort = off; set enable_hashjoin = off; set enable_mergejoin = off; set jit = off";

async fn plan(connection: &mut PgConnection) -> Vec<String> {
    let files = sql_files();
    let (_, text) = files.iter().find(|(name, _)| name == "exchange.sql").expect("the file");
    let prepare = format!(
        "{SETTINGS}; deallocate all; prepare exchange(text, bigint[], timestamptz[], bigint[], timestamptz[], text[],
           float8[], timestamptz[], int[], text[], int[], int[], int, text[], timestamptz, text[], int[], float8, int[]) as {}",
        text.replace(":\"schema\"", "graphile_worker")
    );
    sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
    sqlx::query_scalar(
        "explain (costs off) execute exchange('w', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
           '{1}', 100, null, null, '{}', null, null, '{}')",
    )
    .persistent(false)
    .fetch_all(connection)
    .await
    .unwrap()
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

fn assert_goes_by_what_it_looks_for(plan: &[String], when: &str) {
    let scans = scans(plan);
    assert!(scans.len() > 12, "{when}: {plan:#?}");
    for (scan, by) in scans {
        // Our own indexes are in the order of the claim, and read only as far as they have to be.
        let ours = scan.contains("using _rs_jobs_");
        let by_key = scan.contains("_pkey") && by.starts_with("Index Cond: (id = ");
        let by_place = scan.contains("Tid Scan");
        assert!(ours || by_key || by_place, "{when}: {scan}, {by}\n{plan:#?}");
    }
}

#[tokio::test]
async fn an_exchange_is_planned_the_same_whether_the_table_was_empty_or_full() {
    let db = Db::installed().await;
    let mut connection = db.connect().await;
    assert_goes_by_what_it_looks_for(&plan(&mut connection).await, "never analyzed");
    let care = "vacuum analyze graphile_worker._private_jobs; vacuum analyze graphile_worker._private_job_queues";
    for sql in care.split(';') {
        db.run(sql).await;
    }
    assert_goes_by_what_it_looks_for(&plan(&mut connection).await, "empty when it was vacuumed");
    db.run("select graphile_worker.add_job('t', '1', case when n % 2 = 0 then 'q' || n % 100 end) from generate_series(1, 2000) n")
        .await;
    assert_goes_by_what_it_looks_for(&plan(&mut connection).await, "filled since");
    for sql in care.split(';') {
        db.run(sql).await;
    }
    assert_goes_by_what_it_looks_for(&plan(&mut connection).await, "full when it was vacuumed");
}
