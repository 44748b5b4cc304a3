//! Debounce and throttle: many calls with one key, few jobs.

use crate::support::{Db, Started};
use crate::worker_support::{run_once, sending, until_no_jobs, utils};
use chrono::TimeDelta;
use graphile_worker::{BeforeJobSchedule, HookRegistry, JobScheduleResult, RoleRight};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// The only job: payload, and seconds until it is due, rounded.
async fn due(db: &Db) -> Value {
    db.row("select payload, round(extract(epoch from run_at - now()))::int as seconds, attempts from graphile_worker._private_jobs").await
}

#[tokio::test]
async fn a_debounced_job_waits_until_the_calls_stop_and_runs_once_with_the_last_payload() {
    let db = Db::installed().await;
    for page in 1..=3 {
        // As if the calls were 50 seconds apart.
        db.run("update graphile_worker._private_jobs set run_at = run_at - interval '50 seconds', created_at = created_at - interval '50 seconds'")
            .await;
        utils(&db).debounce("t", json!({ "page": page }), "k", MINUTE, None).await.unwrap();
        assert_eq!(due(&db).await, json!({ "payload": { "page": page }, "seconds": 60, "attempts": 0 }));
    }
    db.run("update graphile_worker._private_jobs set run_at = now()").await;
    run_once(&db, |payload, _| async move { assert_eq!(payload, json!({ "page": 3 })) }).await;
    until_no_jobs(&db).await;
}

#[tokio::test]
async fn a_debounced_job_runs_at_the_latest_after_max_wait() {
    let db = Db::installed().await;
    for (age, seconds) in [(0, 60), (50, 60), (90, 30), (170, -50)] {
        db.run(&format!("update graphile_worker._private_jobs set created_at = now() - interval '{age} seconds'"))
            .await;
        let job = utils(&db).debounce("t", json!([age]), "k", MINUTE, 2 * MINUTE).await.unwrap();
        assert!(job.run_at - job.created_at <= TimeDelta::minutes(2), "{job:?}");
        assert_eq!(due(&db).await["seconds"], seconds, "{age}");
    }
    // Arrays are joined.
    assert_eq!(due(&db).await["payload"], json!([0, 50, 90, 170]));
}

#[tokio::test]
async fn a_call_during_a_run_or_before_a_retry_begins_again() {
    let db = Db::installed().await;
    utils(&db).debounce("t", json!(1), "k", Duration::ZERO, HOUR).await.unwrap();
    db.claim().await;
    utils(&db).debounce("t", json!(2), "k", MINUTE, HOUR).await.unwrap();
    assert_eq!(
        db.value("select json_agg(payload order by id) from graphile_worker._private_jobs").await,
        json!([1, 2])
    );
    db.run("delete from graphile_worker._private_jobs where payload::text = '1'").await;
    db.run("update graphile_worker._private_jobs set attempts = 1, last_error = 'oops', created_at = now() - interval '1 day'").await;
    utils(&db).debounce("t", json!(3), "k", MINUTE, HOUR).await.unwrap();
    assert_eq!(due(&db).await, json!({ "payload": 3, "seconds": 60, "attempts": 0 }));
}

#[tokio::test]
async fn the_first_throttled_call_is_due_at_once_and_the_others_become_one_job() {
    let db = Db::installed().await;
    utils(&db).throttle("t", json!(1), "k", MINUTE).await.unwrap();
    run_once(&db, |payload, _| async move { assert_eq!(payload, json!(1)) }).await;
    until_no_jobs(&db).await;
    for n in 2..=4 {
        utils(&db).throttle("t", json!(n), "k", MINUTE).await.unwrap();
        let due = due(&db).await;
        assert_eq!(due["payload"], n);
        assert!((50..=60).contains(&due["seconds"].as_i64().unwrap()), "{due}");
    }
    // Another key has its own time.
    let other = utils(&db).throttle("t", json!(5), "other", MINUTE).await.unwrap();
    assert!(other.run_at <= other.created_at + TimeDelta::seconds(5));
}

#[tokio::test]
async fn jobs_of_one_key_are_due_at_least_the_interval_apart() {
    let db = Db::installed().await;
    let mut times = Vec::new();
    for _ in 0..4 {
        for _ in 0..3 {
            times.push(utils(&db).throttle("t", json!({}), "k", MINUTE).await.unwrap().run_at);
        }
        // The job has run, exactly when it was due.
        db.run("delete from graphile_worker._private_jobs").await;
    }
    times.dedup();
    assert_eq!(times.len(), 2, "what has not run when it was due has not started: {times:?}");
    assert!(times[1] - times[0] >= TimeDelta::minutes(1));
    // As if two minutes had passed.
    db.run("update graphile_worker._rs_throttles set starts_at = starts_at - interval '2 minutes'").await;
    let again = utils(&db).throttle("t", json!({}), "k", MINUTE).await.unwrap();
    assert!(again.run_at <= again.created_at + TimeDelta::seconds(5), "{again:?}");
}

#[tokio::test]
async fn a_throttled_job_that_is_late_takes_the_new_payload_and_stays_due() {
    let db = Db::installed().await;
    let first = utils(&db).throttle("t", json!(1), "k", MINUTE).await.unwrap();
    let second = utils(&db).throttle("t", json!(2), "k", MINUTE).await.unwrap();
    assert_eq!((first.id, first.run_at), (second.id, second.run_at));
    let start = db.value("select starts_at from graphile_worker._rs_throttles").await;
    assert_eq!(start, db.value("select run_at from graphile_worker._private_jobs").await);
}

#[tokio::test]
async fn many_callers_at_once_make_one_job() {
    let db = Db::installed().await;
    let calls = |throttles: bool| {
        let db = &db;
        async move {
            let call = |n: i32| async move {
                let key = if throttles { "throttled" } else { "debounced" };
                if throttles {
                    utils(db).throttle("t", json!([n]), key, HOUR).await.unwrap()
                } else {
                    utils(db).debounce("t", json!([n]), key, HOUR, 2 * HOUR).await.unwrap()
                }
            };
            futures_util::future::join_all((0..60).map(call)).await
        }
    };
    for throttles in [false, true] {
        let jobs = calls(throttles).await;
        assert!(jobs.iter().all(|job| job.id == jobs[0].id));
        assert!(jobs.iter().all(|job| !throttles || job.run_at == jobs[0].run_at));
        let key = if throttles { "throttled" } else { "debounced" };
        let sql = format!("select json_array_length(payload) from graphile_worker._private_jobs where key = '{key}'");
        assert_eq!(db.value(&sql).await, 60, "every call is in the job");
    }
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 2);
}

#[tokio::test]
async fn many_callers_beside_a_running_worker_lose_no_call_and_start_no_job_too_early() {
    let db = Db::installed().await;
    let (options, mut seen) = sending(&db);
    let started = Started::new(options).await;
    let every = Duration::from_millis(200);
    let began = std::time::Instant::now();
    let mut last = 0;
    while began.elapsed() < Duration::from_secs(2) {
        let calls = (0..8).map(|n| {
            let (utils, n) = (utils(&db), last + n);
            async move { utils.throttle("t", json!(n), "k", every).await.unwrap() }
        });
        futures_util::future::join_all(calls).await;
        last += 8;
    }
    let final_call = utils(&db).throttle("t", json!(last), "k", every).await.unwrap();
    until_no_jobs(&db).await;
    let took = began.elapsed();
    started.stop().await;
    let mut ran = Vec::new();
    while let Ok(n) = seen.try_recv() {
        ran.push(n);
    }
    assert_eq!(ran.last(), Some(&i64::from(last)), "the last call is not lost: {final_call:?}");
    let most = took.as_millis() / every.as_millis() + 2;
    assert!(ran.len() as u128 <= most, "{} runs in {took:?}", ran.len());
}

#[tokio::test]
async fn wrong_values_are_rejected_with_what_to_do() {
    let db = Db::installed().await;
    for (sql, code, message) in [
        ("_rs_debounce('t', '{}', null, '1 s')", "GWBJK", "A debounced job needs a job key, found null."),
        ("_rs_debounce('t', '{}', 'k', '-1 s')", "22023", "`wait` must be 0 or longer, found -00:00:01."),
        ("_rs_debounce('t', '{}', 'k', null)", "22023", "`wait` must be 0 or longer, found null."),
        (
            "_rs_debounce('t', '{}', 'k', '10 s', '5 s')",
            "22023",
            "`max_wait` must be at least `wait` (00:00:10), found 00:00:05.",
        ),
        ("_rs_throttle('t', '{}', null, '1 s')", "GWBJK", "A throttled job needs a job key, found null."),
        ("_rs_throttle('t', '{}', 'k', '0 s')", "22023", "`every` must be longer than 0, found 00:00:00."),
        ("_rs_throttle('', '{}', 'k', '1 s')", "GWBID", "Task identifier is empty, expected 1 to 128 characters."),
    ] {
        let (found_code, found) = db.failure(&format!("select graphile_worker.{sql}")).await;
        assert_eq!((&*found_code, &*found), (code, message), "{sql}");
    }
    assert_eq!(db.value("select count(*) from graphile_worker._rs_throttles").await, 0);
}

#[tokio::test]
async fn old_throttles_are_forgotten() {
    let db = Db::installed().await;
    db.run("insert into graphile_worker._rs_throttles select 'old ' || n, now() - interval '2 h', now() - interval '1 h' from generate_series(1, 10) as n").await;
    for n in 0..10 {
        utils(&db).throttle("t", json!({}), &format!("new {n}"), MINUTE).await.unwrap();
    }
    assert_eq!(
        db.value("select json_agg(distinct left(key, 3)) from graphile_worker._rs_throttles").await,
        json!(["new"])
    );
}

#[tokio::test]
async fn hooks_and_transactions_apply_and_a_role_that_only_adds_jobs_may_call_them() {
    let db = Db::installed().await;
    let mut hooks = HookRegistry::new();
    hooks.on(BeforeJobSchedule, |mut job| async move {
        job.payload = json!("changed");
        JobScheduleResult::Add(job)
    });
    let utils = utils(&db).with_hooks(Arc::new(hooks));
    let mut transaction = db.pool.begin().await.unwrap();
    utils.within(&mut transaction).throttle("t", json!({}), "k", MINUTE).await.unwrap();
    transaction.rollback().await.unwrap();
    let job = utils.throttle("t", json!({}), "k", MINUTE).await.unwrap();
    assert_eq!(job.payload.get(), "\"changed\"");
    assert!(job.run_at <= job.created_at + TimeDelta::seconds(5), "the rolled back call does not count");

    let role = format!("debounces {}", std::process::id());
    db.run(&format!("create role \"{role}\" login")).await;
    utils.grant(&role, &[RoleRight::Add]).await.unwrap();
    let mut connection = db.connect_as(&role).await;
    let within = utils.within(&mut connection);
    within.debounce("t", json!({}), "secret", MINUTE, None).await.unwrap();
    db.run("update graphile_worker._private_jobs set payload = '[1]', last_error = 'secret' where key = 'secret'")
        .await;
    let job = within.debounce("t", json!({}), "secret", MINUTE, None).await.unwrap();
    assert_eq!((job.payload.get(), job.last_error), ("\"changed\"", None));
    within.throttle("t", json!({}), "k", MINUTE).await.unwrap();
    drop(within);
    drop(connection);
    utils.revoke(&role).await.unwrap();
    db.run(&format!("drop role \"{role}\"")).await;
}
