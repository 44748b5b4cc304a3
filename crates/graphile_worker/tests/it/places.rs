//! A short exchange deletes completed jobs at the places that their claim returned: only the same row, under the same claim,
//! and only if no other transaction has locked it.

use crate::support::{Db, Log, Started, sql_files, until};
use crate::worker_support::options;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Notify;

/// A claimed job: id, time of the claim, and place.
type Claimed = (i64, String, String);

/// The reported jobs that an exchange did not write.
#[derive(Debug, Default, PartialEq)]
struct NotWritten {
    missed: Vec<i64>,
    blocked: Vec<i64>,
    rejected: Vec<i64>,
}

/// A connection of the worker `w`, which runs task 1. A statement that waits for a lock fails.
async fn worker(db: &Db) -> PgConnection {
    let mut connection = db.connect().await;
    let files = sql_files();
    let (_, text) = files.iter().find(|(name, _)| name == "exchange_unqueued.sql").expect("the file");
    let prepare = format!(
        "set lock_timeout = '1ms'; prepare exchange(text, bigint[], timestamptz[], int[], int, smallint, timestamptz, bigint,
           int, timestamptz, float8, text[], text[], jsonb, int[], bigint[], timestamptz[], text) as {}",
        text.replace(":\"schema\"", "graphile_worker")
    );
    sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut connection).await.unwrap();
    connection
}

fn array<'a>(values: impl Iterator<Item = &'a str>) -> String {
    let values: Vec<String> = values.map(|value| format!("\"{value}\"")).collect();
    format!("'{{{}}}'", values.join(","))
}

async fn exchange(
    connection: &mut PgConnection,
    by_id: &[Claimed],
    by_place: &[Claimed],
    jobs: usize,
) -> (Vec<Claimed>, NotWritten) {
    let ids =
        |of: &[Claimed]| array(of.iter().map(|(id, ..)| id.to_string()).collect::<Vec<_>>().iter().map(|id| &**id));
    let times = |of: &[Claimed]| array(of.iter().map(|(_, at, _)| &**at));
    let places = array(by_place.iter().map(|(.., place)| &**place));
    let (done, done_at, placed, placed_at) = (ids(by_id), times(by_id), ids(by_place), times(by_place));
    let execute = format!(
        "execute exchange('w', {done}, {done_at}, '{{1}}', {jobs}, null, null, null, 1000000, null, null, null, null, null,
           '{{1}}', {placed}, {placed_at}, {places})"
    );
    let rows = sqlx::query(AssertSqlSafe(execute)).persistent(false).fetch_all(&mut *connection).await.unwrap();
    let (about, claimed) = rows.split_last().expect("the last row");
    let mut jobs = Vec::new();
    for row in claimed {
        let (id, place): (i64, Vec<u8>) = (row.get("id"), row.get("place"));
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let at = sqlx::query_scalar("select locked_at::text from graphile_worker._private_jobs where id = $1");
        let at = at.bind(id).fetch_one(&mut *connection).await.unwrap();
        jobs.push((id, at, format!("({},{})", number(&place[..4]), number(&place[4..]))));
    }
    jobs.sort();
    let not_written = NotWritten {
        missed: about.get("missed_jobs"),
        blocked: about.get("blocked_jobs"),
        rejected: about.get("rejected_jobs"),
    };
    (jobs, not_written)
}

async fn claim(connection: &mut PgConnection, jobs: usize) -> Vec<Claimed> {
    exchange(connection, &[], &[], jobs).await.0
}

async fn report_by_place(connection: &mut PgConnection, jobs: &[Claimed]) -> NotWritten {
    exchange(connection, &[], jobs, 0).await.1
}

async fn report_by_id(connection: &mut PgConnection, jobs: &[Claimed]) -> NotWritten {
    exchange(connection, jobs, &[], 0).await.1
}

fn missed(jobs: &[i64]) -> NotWritten {
    NotWritten { missed: jobs.to_vec(), ..NotWritten::default() }
}

async fn left(db: &Db) -> Value {
    db.value("select coalesce(json_agg(id order by id), '[]') from graphile_worker._private_jobs").await
}

#[tokio::test]
async fn jobs_are_deleted_at_their_places_in_the_exchange_that_claims_the_next_ones() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 5)").await;
    let mut connection = worker(&db).await;
    let first = claim(&mut connection, 3).await;
    let (second, not_written) = exchange(&mut connection, &[], &first, 3).await;
    assert_eq!(not_written, NotWritten::default());
    assert_eq!(second.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), [4, 5]);
    assert_eq!(left(&db).await, serde_json::json!([4, 5]));
    assert_eq!(report_by_place(&mut connection, &second).await, NotWritten::default());
    assert_eq!(left(&db).await, serde_json::json!([]));
    // The answer was lost, and the worker reports again.
    assert_eq!(report_by_place(&mut connection, &second).await, missed(&[4, 5]));
    let rejected = NotWritten { rejected: vec![4, 5], ..NotWritten::default() };
    assert_eq!(report_by_id(&mut connection, &second).await, rejected);
}

#[tokio::test]
async fn a_report_does_not_wait_for_a_row_that_other_transactions_have_locked() {
    // With two lockers, `xmax` is the number of a group of transactions.
    for lockers in [1, 2] {
        for (lock, then) in [("for key share", "commit"), ("for share", "rollback"), ("for share", "commit")] {
            let db = Db::installed().await;
            db.run("select graphile_worker.add_job('t') from generate_series(1, 3)").await;
            let mut connection = worker(&db).await;
            let jobs = claim(&mut connection, 3).await;
            let mut blockers = Vec::new();
            for _ in 0..lockers {
                let mut blocker = db.connect().await;
                let begin = format!("begin; select from graphile_worker._private_jobs where id = 2 {lock}");
                sqlx::raw_sql(AssertSqlSafe(begin)).execute(&mut blocker).await.unwrap();
                blockers.push(blocker);
            }
            assert_eq!(report_by_place(&mut connection, &jobs).await, missed(&[2]), "{lock}");
            assert_eq!(left(&db).await, serde_json::json!([2]));
            let second = &jobs[1..2];
            let blocked = NotWritten { blocked: vec![2], ..NotWritten::default() };
            assert_eq!(report_by_id(&mut connection, second).await, blocked, "{lock}");
            for mut blocker in blockers {
                sqlx::raw_sql(then).execute(&mut blocker).await.unwrap();
                blocker.close().await.unwrap();
            }
            // The row shows the lock of the past.
            assert_eq!(report_by_place(&mut connection, second).await, missed(&[2]), "{lock}");
            assert_eq!(report_by_id(&mut connection, second).await, NotWritten::default(), "{lock}");
            assert_eq!(left(&db).await, serde_json::json!([]));
        }
    }
}

#[tokio::test]
async fn a_row_that_another_transaction_is_changing_is_not_waited_for() {
    for change in [
        "update graphile_worker._private_jobs set priority = 7 where id = 1",
        "delete from graphile_worker._private_jobs where id = 1",
    ] {
        let db = Db::installed().await;
        db.add_job("'t'").await;
        let mut connection = worker(&db).await;
        let jobs = claim(&mut connection, 1).await;
        let mut blocker = db.pool.begin().await.unwrap();
        sqlx::query(change).execute(&mut *blocker).await.unwrap();
        assert_eq!(report_by_place(&mut connection, &jobs).await, missed(&[1]), "{change}");
        blocker.rollback().await.unwrap();
        assert_eq!(report_by_place(&mut connection, &jobs).await, missed(&[1]), "{change}");
        assert_eq!(report_by_id(&mut connection, &jobs).await, NotWritten::default(), "{change}");
        assert_eq!(left(&db).await, serde_json::json!([]));
    }
}

#[tokio::test]
async fn a_row_that_has_moved_is_found_by_its_id() {
    for change in [
        "update graphile_worker._private_jobs set updated_at = now()",
        "update graphile_worker._private_jobs set locked_at = locked_at + interval '2 hours'",
        "vacuum full graphile_worker._private_jobs",
    ] {
        let db = Db::installed().await;
        // Dead rows in front, so that `vacuum full` moves the others.
        db.run("select graphile_worker.add_job('x') from generate_series(1, 9)").await;
        db.run("update graphile_worker._private_tasks set identifier = 't'").await;
        let mut connection = worker(&db).await;
        let gone = claim(&mut connection, 6).await;
        assert_eq!(report_by_place(&mut connection, &gone).await, NotWritten::default());
        let jobs = claim(&mut connection, 3).await;
        db.run(change).await;
        let ids: Vec<i64> = jobs.iter().map(|(id, ..)| *id).collect();
        assert_eq!(report_by_place(&mut connection, &jobs).await, missed(&ids), "{change}");
        assert_eq!(report_by_id(&mut connection, &jobs).await, NotWritten::default(), "{change}");
        assert_eq!(left(&db).await, serde_json::json!([]), "{change}");
    }
}

#[tokio::test]
async fn another_job_at_the_place_of_a_removed_one_is_left_alone() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 9)").await;
    let mut connection = worker(&db).await;
    let old = claim(&mut connection, 9).await;
    db.run("delete from graphile_worker._private_jobs").await;
    db.run("vacuum graphile_worker._private_jobs").await;
    // The new rows, first unclaimed and then claimed, get the places of the old ones.
    db.run("select graphile_worker.add_job('t') from generate_series(1, 9)").await;
    let new = claim(&mut connection, 9).await;
    assert!(new.iter().any(|(.., place)| old.iter().any(|(.., of_old)| of_old == place)), "{old:?} {new:?}");
    let ids: Vec<i64> = (1..10).collect();
    assert_eq!(report_by_place(&mut connection, &old).await, missed(&ids));
    let rejected = NotWritten { rejected: ids, ..NotWritten::default() };
    assert_eq!(report_by_id(&mut connection, &old).await, rejected);
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 9);
    assert_eq!(report_by_place(&mut connection, &new).await, NotWritten::default());
}

#[tokio::test]
async fn the_outcome_of_an_earlier_claim_is_not_written_at_the_place_of_the_present_one() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let mut connection = worker(&db).await;
    let (_, first_at, _) = claim(&mut connection, 1).await.remove(0);
    db.run("update graphile_worker._private_jobs set locked_at = null, locked_by = null").await;
    let (_, _, place) = claim(&mut connection, 1).await.remove(0);
    let zombie = [(1, first_at, place)];
    assert_eq!(report_by_place(&mut connection, &zombie).await, missed(&[1]));
    let rejected = NotWritten { rejected: vec![1], ..NotWritten::default() };
    assert_eq!(report_by_id(&mut connection, &zombie).await, rejected);
    // Nor is that of another worker.
    db.run("update graphile_worker._private_jobs set locked_by = 'another'").await;
    let query = sqlx::query("select id, locked_at::text as at, ctid::text as place from graphile_worker._private_jobs");
    let row = query.fetch_one(&db.pool).await.unwrap();
    let of_another = [(row.get("id"), row.get("at"), row.get("place"))];
    assert_eq!(report_by_place(&mut connection, &of_another).await, missed(&[1]));
    assert_eq!(left(&db).await, serde_json::json!([1]));
}

#[tokio::test]
async fn a_worker_completes_jobs_whose_rows_have_changed_while_they_ran() {
    let (log, _guard) = Log::start();
    let db = Db::installed().await;
    let (running, all_run) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (begun, go_on) = (running.clone(), all_run.clone());
    let task = move |waits: bool, _| {
        let (begun, go_on) = (begun.clone(), go_on.clone());
        async move {
            if waits {
                let notified = go_on.notified();
                begun.fetch_add(1, Ordering::SeqCst);
                notified.await;
            }
        }
    };
    let worker = Started::new(options(&db).concurrency(50).define_task("t", task)).await;
    // The second time, the worker knows that no job has a queue.
    for waits in [false, true] {
        db.run(&format!("select graphile_worker.add_job('t', '{waits}') from generate_series(1, 50)")).await;
        if waits {
            until("all jobs run", async || (running.load(Ordering::SeqCst) == 50).then_some(())).await;
            db.run("update graphile_worker._private_jobs set updated_at = now() where id % 2 = 0").await;
            all_run.notify_waiters();
        }
        until("the jobs are completed", async || (left(&db).await == serde_json::json!([])).then_some(())).await;
    }
    worker.stop().await;
    assert_eq!(log.lines("outcome rejected"), "");
}
