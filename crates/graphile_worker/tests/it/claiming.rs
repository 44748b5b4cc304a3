//! Which jobs a worker claims, in which order, and how many at once.

use crate::support::{Db, Started, sql_files};
use crate::worker_support::{all_sent, options, run_once, sending, utils};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgConnection, Row};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

/// The payloads of the jobs of task `t`, in the order in which they ran.
pub(crate) async fn order_of_one_run(db: &Db, concurrency: usize) -> Vec<i64> {
    let (sender, order) = mpsc::unbounded_channel();
    let worker = options(db)
        .concurrency(concurrency)
        .define_task("t", move |n: i64, _| {
            sender.send(n).unwrap();
            async {}
        })
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    drop(worker);
    all_sent(order).await
}

#[tokio::test]
async fn jobs_run_in_order_of_priority_then_time_then_id() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', '3', priority := 1);
         select graphile_worker.add_job('t', '4', priority := 1);
         select graphile_worker.add_job('t', '2', priority := 1, run_at := now() - interval '1 hour');
         select graphile_worker.add_job('t', '1', priority := -5, queue_name := 'q');
         select graphile_worker.add_job('t', '5', priority := 2, queue_name := 'q');
         select graphile_worker.add_job('t', '6', priority := 3, queue_name := 'r')",
    )
    .await;
    let seen = order_of_one_run(&db, 1).await;
    assert_eq!(seen, [1, 2, 3, 4, 5, 6]);
}

#[tokio::test]
async fn jobs_with_the_same_run_at_run_in_order_of_their_ids_wherever_their_rows_are() {
    let db = Db::installed().await;
    // The rows of the later ids lie where those of the earlier ones were.
    db.run(
        "select graphile_worker.add_job('t', to_json(n), run_at := '2020-01-01') from generate_series(-200, -1) as n;
         delete from graphile_worker._private_jobs",
    )
    .await;
    db.run("vacuum graphile_worker._private_jobs").await;
    db.run(
        "select setval(pg_get_serial_sequence('graphile_worker._private_jobs', 'id'), 1000);
         select graphile_worker.add_job('t', to_json(n), run_at := '2020-01-01') from generate_series(201, 400) as n;
         select setval(pg_get_serial_sequence('graphile_worker._private_jobs', 'id'), 500);
         select graphile_worker.add_job('t', to_json(n), run_at := '2020-01-01') from generate_series(1, 200) as n",
    )
    .await;
    assert_eq!(order_of_one_run(&db, 1).await, (1..=400).collect::<Vec<_>>());
}

#[tokio::test]
async fn jobs_of_unknown_tasks_are_not_claimed() {
    let db = Db::installed().await;
    db.add_job("'unknown'").await;
    db.add_job("'unknown', queue_name := 'q'").await;
    db.add_job("'t', queue_name := 'q'").await;
    run_once(&db, |_, _| async {}).await;
    let left = db.rows("select task_identifier, attempts, locked_by from graphile_worker.jobs").await;
    assert_eq!(left, vec![json!({"task_identifier": "unknown", "attempts": 0, "locked_by": null}); 2]);
}

#[tokio::test]
async fn a_job_with_an_infinite_run_at_does_not_affect_other_jobs() {
    let db = Db::installed().await;
    db.add_job("'t', '1', run_at := 'infinity'").await;
    db.add_job("'t', '2', run_at := '-infinity'").await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    assert_eq!(ran.recv().await, Some(2));
    db.add_job("'t', '3'").await;
    assert_eq!(ran.recv().await, Some(3));
    started.stop().await;
    assert_eq!(utils(&db).complete_jobs(&[1]).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_worker_that_ran_many_small_jobs_claims_large_jobs_a_few_at_a_time() {
    // Payloads stored as they are, or compressed to a hundredth.
    for storage in ["external", "extended"] {
        let db = Db::installed().await;
        db.run(&format!("alter table graphile_worker._private_jobs alter column payload set storage {storage}")).await;
        db.run("select graphile_worker.add_job('t', '1') from generate_series(1, 4000)").await;
        db.run("select graphile_worker.add_job('t', to_json(repeat('x', 500000))) from generate_series(1, 150)").await;
        let pool = db.pool.clone();
        let (most, large) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (most_seen, large_seen) = (most.clone(), large.clone());
        run_once(&db, move |payload: Value, _| {
            let (pool, most, large) = (pool.clone(), most_seen.clone(), large_seen.clone());
            async move {
                if payload.is_string() && large.fetch_add(1, Ordering::SeqCst) % 10 == 0 {
                    let claimed: i64 = sqlx::query_scalar(
                        "select coalesce(sum(octet_length(payload::text)), 0) from graphile_worker._private_jobs
                         where locked_at is not null",
                    )
                    .fetch_one(&pool)
                    .await?;
                    most.fetch_max(usize::try_from(claimed).expect("a sum of sizes"), Ordering::SeqCst);
                }
                Ok::<(), sqlx::Error>(())
            }
        })
        .await;
        assert_eq!(large.load(Ordering::SeqCst), 150);
        let most = most.load(Ordering::SeqCst);
        assert!(most < 40_000_000, "{storage}: {most} bytes of payloads claimed at once");
    }
}

/// One short exchange of a worker that wants ten jobs of task 1: the ids that it claims. `start` is where the claim starts.
async fn short_claim(connection: &mut PgConnection, worker: &str, start: &str) -> Vec<i64> {
    let files = sql_files();
    let (_, text) = files.iter().find(|(name, _)| name == "exchange_unqueued.sql").expect("the file");
    let prepare = format!(
        "deallocate all; prepare exchange(text, bigint[], timestamptz[], int[], int, smallint, timestamptz, bigint, int,
           timestamptz, float8, text[], text[], jsonb, int[], bigint[], timestamptz[], text) as {}",
        text.replace(":\"schema\"", "graphile_worker")
    );
    sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
    let execute = format!(
        "execute exchange('{worker}', '{{}}', '{{}}', '{{1}}', 10, {start}, 1000000, null, null, null, null, null, '{{1}}',
           '{{}}', '{{}}', '{{}}')"
    );
    let rows = sqlx::query(AssertSqlSafe(execute)).persistent(false).fetch_all(connection).await.unwrap();
    let mut ids: Vec<i64> = rows.iter().filter_map(|row| row.get("id")).collect();
    ids.sort_unstable();
    ids
}

const HEAD: &str = "null, null, null";

#[tokio::test]
async fn claims_at_the_same_moment_take_different_jobs_without_meeting() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 60)").await;
    let mut open = Vec::new();
    for first in [1, 11, 21] {
        let mut transaction = db.pool.begin().await.unwrap();
        let claimed = short_claim(&mut transaction, "a", HEAD).await;
        assert_eq!(claimed, (first..first + 10).collect::<Vec<i64>>());
        open.push(transaction);
    }
    // The second claim ends without its jobs: the next one takes its turn, behind the first job that is left.
    open.remove(1).rollback().await.unwrap();
    let mut transaction = db.pool.begin().await.unwrap();
    assert_eq!(short_claim(&mut transaction, "b", HEAD).await, (11..21).collect::<Vec<i64>>());
    transaction.commit().await.unwrap();
    for transaction in open {
        transaction.commit().await.unwrap();
    }
    assert_eq!(short_claim(&mut db.connect().await, "c", HEAD).await, (31..41).collect::<Vec<i64>>());
    let twice = "select count(*) - count(distinct id) from graphile_worker._private_jobs where locked_by is not null";
    assert_eq!(db.value(twice).await, 0);
}

#[tokio::test]
async fn a_claim_that_starts_behind_the_head_leaves_earlier_jobs_to_one_that_starts_there() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', run_at => '2026-01-01'::timestamptz + n * interval '1 second') from generate_series(1, 30) n")
        .await;
    let start = "0::smallint, '2026-01-01 00:00:21Z'::timestamptz, 21::bigint";
    let mut connection = db.connect().await;
    assert_eq!(short_claim(&mut connection, "a", start).await, (21..31).collect::<Vec<i64>>());
    assert_eq!(short_claim(&mut connection, "a", start).await, Vec::<i64>::new());
    assert_eq!(short_claim(&mut connection, "a", HEAD).await, (1..11).collect::<Vec<i64>>());
}

/// The payloads of the claimed jobs, whether no other job is due, and whether none waits.
type HeadClaim = (Vec<i64>, bool, bool);

/// A claim of the first jobs by a worker of task 1.
async fn head_claim(connection: &mut PgConnection, wanted: i32) -> HeadClaim {
    let files = sql_files();
    let (_, text) = files.iter().find(|(name, _)| name == "claim_head.sql").expect("the file");
    let text = text.replace(":\"schema\"", "graphile_worker");
    let prepare = format!(
        "deallocate all; prepare claim(text, int[], int, timestamptz, float8, text[], text[], jsonb) as {text}"
    );
    sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
    let execute = format!("execute claim('w', '{{1}}', {wanted}, null, null, '{{forbidden}}', null, null)");
    let rows = sqlx::query(AssertSqlSafe(execute)).persistent(false).fetch_all(connection).await.unwrap();
    let (about, jobs) = rows.split_last().expect("the last row");
    let number =
        |payload: String| -> Option<i64> { payload.trim_start_matches('[').split(',').next()?.trim().parse().ok() };
    let mut payloads: Vec<i64> = jobs.iter().filter_map(|row| number(row.get("payload"))).collect();
    payloads.sort_unstable();
    (payloads, about.get("is_conclusive"), about.get("nothing_waits"))
}

#[tokio::test]
async fn a_claim_of_the_first_jobs_keeps_their_order_and_says_whether_more_may_be_due() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', job_key => 'k'), graphile_worker.remove_job('k')").await;
    let large = r#"json_build_array(2, (select string_agg(md5(n::text), '') from generate_series(1, 10000) n))"#;
    let large = format!("'t', {large}");
    let later = "run_at => now() + interval '1 hour'";
    let (four_later, other) = (format!("'t', '9', {later}"), "'other', '9'");
    // What is in the table, how many jobs the worker wants, and what the claim says.
    let cases: [(&str, &[&str], i32, HeadClaim); 13] = [
        ("nothing", &[], 10, (vec![], true, true)),
        ("one job", &["'t', '1'"], 10, (vec![1], true, true)),
        ("one more than it wants", &["'t', '1'", "'t', '2'"], 1, (vec![1], true, false)),
        ("a job that is due later", &["'t', '1'", &format!("'t', '2', {later}")], 10, (vec![1], true, false)),
        ("only jobs that are due later", &[&*four_later; 5], 10, (vec![], true, false)),
        (
            "behind four that are due later, one of another priority",
            &[&[&*four_later; 4][..], &["'t', '1', priority => 5"]].concat(),
            10,
            (vec![], false, false),
        ),
        ("more than it reads", &["'t', '1'", "'t', '2'", "'t', '3'", "'t', '4'"], 10, (vec![1, 2, 3, 4], false, true)),
        ("a job of another task", &[other, "'t', '1'"], 10, (vec![1], false, false)),
        ("only jobs of another task", &[other; 5], 10, (vec![], false, false)),
        ("a job with a forbidden flag", &["'t', '2', flags => '{forbidden}'", "'t', '1'"], 10, (vec![1], false, false)),
        ("a job with a queue", &["'t', '1'", "'t', '2', queue_name => 'q'"], 10, (vec![], false, false)),
        (
            "a job with a queue that is due later",
            &["'t', '1'", &format!("'t', '2', queue_name => 'q', {later}")],
            10,
            (vec![1], true, false),
        ),
        ("a large job in front", &[&format!("{large}, priority => -1"), "'t', '1'"], 10, (vec![2], false, false)),
    ];
    for (what, jobs, wanted, claimed) in cases {
        let mut transaction = db.pool.begin().await.unwrap();
        for job in jobs {
            let add = format!("select graphile_worker.add_job({job})");
            sqlx::raw_sql(AssertSqlSafe(add)).execute(&mut *transaction).await.unwrap();
        }
        assert_eq!(head_claim(&mut transaction, wanted).await, claimed, "{what}");
        transaction.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn a_claim_of_the_first_jobs_waits_for_no_other_claim() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 3) n").await;
    let mut other = db.pool.begin().await.unwrap();
    let lock = "select from graphile_worker._private_jobs where id = 1 for update";
    sqlx::raw_sql(lock).execute(&mut *other).await.unwrap();
    let mut connection = db.connect().await;
    assert_eq!(head_claim(&mut connection, 1).await, (vec![], false, false), "it reads further");
    assert_eq!(head_claim(&mut connection, 10).await, (vec![2, 3], true, false));
}

/// The ids that a worker of the tasks `tasks`, which must not run jobs with the flag `slow`, claims in the transaction of
/// `connection`, in several claims of at most `wanted` jobs, each as a set. Begins with the short exchange, as a worker does.
async fn claims_until_none_is_left(connection: &mut PgConnection, tasks: &str, wanted: usize) -> Vec<Vec<i64>> {
    let files = sql_files();
    let text = |file: &str| {
        let (_, text) = files.iter().find(|(name, _)| name == file).expect("the file");
        text.replace(":\"schema\"", "graphile_worker")
    };
    let prepare = format!(
        "set local plan_cache_mode = force_generic_plan; set local enable_seqscan = off; set local enable_bitmapscan = off; set local enable_sort = off;
         set local enable_hashjoin = off; set local enable_mergejoin = off; set local jit = off; deallocate all;
         prepare short(text, bigint[], timestamptz[], int[], int, smallint, timestamptz, bigint, int, timestamptz, float8,
           text[], text[], jsonb, int[], bigint[], timestamptz[], text) as {};
         prepare long(text, bigint[], timestamptz[], bigint[], timestamptz[], text[], float8[], timestamptz[], int[], text[],
           int[], int[], int, text[], timestamptz, text[], int[], float8, int[], int, text[], jsonb, int[]) as {}",
        text("exchange_unqueued.sql"),
        text("exchange.sql").trim_end().trim_end_matches(';'),
    );
    sqlx::raw_sql(AssertSqlSafe(prepare.replace(";;", ";"))).execute(&mut *connection).await.unwrap();
    let mut claims = Vec::new();
    let mut is_short = true;
    loop {
        let execute = if is_short {
            format!(
                "execute short('w', '{{}}', '{{}}', '{tasks}', {wanted}, null, null, null, 8000000, null, null, '{{slow}}',
                   null, null, '{tasks}', '{{}}', '{{}}', '{{}}')"
            )
        } else {
            format!(
                "execute long('w', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{tasks}',
                   {wanted}, '{{slow}}', null, '{{}}', null, null, '{{}}', 8000000, null, null, '{tasks}')"
            )
        };
        let rows = sqlx::query(AssertSqlSafe(execute)).persistent(false).fetch_all(&mut *connection).await.unwrap();
        let ids: Vec<i64> = rows.iter().filter_map(|row| row.get("id")).collect();
        let needs_long: bool = rows.last().expect("the last row").get("queued_wait");
        if ids.is_empty() && is_short != needs_long {
            return claims;
        }
        is_short = !needs_long;
        claims.push(ids);
    }
}

#[tokio::test]
async fn jobs_behind_many_that_the_worker_cannot_take_are_claimed_in_order() {
    let db = Db::installed().await;
    for n in 1..=8 {
        db.run(&format!("select graphile_worker.add_job('t{n}'); delete from graphile_worker._private_jobs")).await;
    }
    // Jobs of eight tasks, of three priorities, with flags or without, added together or one by one, some of them for later.
    db.run(
        "insert into graphile_worker._private_jobs (task_id, priority, run_at, flags)
         select
           case when n < 1500 then 7 + n % 2 else 1 + n * 7 % 8 end, n * 5 % 3,
           case
             when n % 11 = 0 then now() + interval '1 hour'
             when n < 2000 then '2026-01-01' else '2026-01-01'::timestamptz + n * 37 % 1000 * interval '1 second'
           end,
           case n * 13 % 6 when 0 then '{\"slow\": true}' when 1 then '{\"slow\": true, \"b\": true}'
             when 2 then jsonb_build_object('f' || n % 20, true) when 3 then '{}' end::jsonb
         from generate_series(1, 4000) as n",
    )
    .await;
    for (tasks, tasks_wanted) in
        [("{2,3,5,6}", "2, 3, 5, 6"), ("{6}", "6"), ("{1,2,3,4,5,6,7,8}", "1, 2, 3, 4, 5, 6, 7, 8")]
    {
        let expected = db
            .value(&format!(
                "select json_agg(id order by priority, run_at, id) from graphile_worker._private_jobs
                 where task_id in ({tasks_wanted}) and run_at <= now() and (flags ? 'slow') is not true"
            ))
            .await;
        let expected: Vec<i64> = serde_json::from_value(expected).unwrap();
        assert!(expected.len() > 50, "{}", expected.len());
        for wanted in [3, 40, 1000] {
            let mut transaction = db.pool.begin().await.unwrap();
            let mut left = expected.as_slice();
            let claims = claims_until_none_is_left(&mut transaction, tasks, wanted).await;
            for mut claim in claims {
                let (first, rest) = left.split_at(claim.len());
                let mut first = first.to_vec();
                claim.sort_unstable();
                first.sort_unstable();
                assert_eq!(claim, first, "{tasks}, {wanted} at a time");
                left = rest;
            }
            assert_eq!(left, [0; 0], "{tasks}, {wanted} at a time");
            transaction.rollback().await.unwrap();
        }
    }
}

#[tokio::test]
async fn jobs_of_many_kinds_behind_jobs_of_other_tasks_all_run() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('elsewhere') from generate_series(1, 3000)").await;
    db.run(
        "select graphile_worker.add_job('t', to_json(n), flags => array['f' || n]) from generate_series(1, 2500) as n",
    )
    .await;
    let mut seen = order_of_one_run(&db, 10).await;
    seen.sort_unstable();
    assert_eq!(seen, (1..=2500).collect::<Vec<i64>>());
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 3000);
}
