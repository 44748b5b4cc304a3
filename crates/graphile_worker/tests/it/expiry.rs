//! Jobs that expire: they fail if they have not started in time.

use crate::support::{Db, Started, rows, until};
use crate::worker_support::{Held, all_sent, options, sending, until_no_jobs, until_worker_listens, utils};
use chrono::Utc;
use graphile_worker::{
    JobExpired, JobSpec, JobState, RawJobSpec, TaskOptions, WhyReason, WorkerContext, WorkerOptions,
};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::mpsc;

const EXPIRED: &str = "Expired: it had not started by 2000-01-01T00:00:00Z";

/// Adds a job that has expired when it is added.
async fn add_expired(db: &Db, arguments: &str) -> i64 {
    let sql = format!(
        "select job.id, graphile_worker._rs_expire_job(job.id, '2000-01-01Z') from graphile_worker.add_job({arguments}) as job"
    );
    let row = db.row(&sql).await;
    assert_eq!(row["_rs_expire_job"], true);
    row["id"].as_i64().unwrap()
}

async fn until_failed(db: &Db, id: i64) -> String {
    until("the job has expired", async || {
        let job = utils(db).find_job(id).await.unwrap().expect("the job stays").job;
        (job.state == JobState::Failed).then_some(job.last_error.unwrap_or_default())
    })
    .await
}

async fn expiries(db: &Db) -> Value {
    db.value("select count(*) from graphile_worker._rs_expiries").await
}

#[tokio::test]
async fn a_job_that_has_not_started_in_time_fails_as_expired() {
    let db = Db::installed().await;
    let (options, seen) = sending(&db);
    let (sender, mut expired) = mpsc::unbounded_channel();
    let options = options.on(JobExpired, move |ctx| {
        let _ = sender.send((ctx.job.id, ctx.error.clone(), ctx.will_retry));
        async {}
    });
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    // Due in an hour, expires at once: nothing else wakes the worker.
    let id = add_expired(&db, "'t', '1', run_at := now() + interval '1 hour', queue_name := 'q'").await;
    assert_eq!(until_failed(&db, id).await, EXPIRED);
    assert_eq!(expired.recv().await, Some((id, Some(EXPIRED.to_owned()), false)));
    assert_eq!(expiries(&db).await, 0);
    let why = utils(&db).why(id).await.unwrap();
    assert!(matches!(&why.reasons[0], WhyReason::AttemptsUsedUp { last_error: Some(error), .. } if error == EXPIRED));
    assert_eq!(why.reasons[0].to_string(), format!("It did not start in time. {EXPIRED}"));
    started.stop().await;
    assert!(all_sent(seen).await.is_empty());
}

#[tokio::test]
async fn a_job_expires_at_its_time_and_not_before() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let options = options(&db).concurrency(1).define_task("t", move |_: Value, _| handler.clone().run());
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    let at = Utc::now() + chrono::TimeDelta::seconds(2);
    let spec = JobSpec::builder().expires_at(at).build();
    let id = utils(&db).add_raw_job("t", json!({}), spec).await.unwrap().id;
    until_failed(&db, id).await;
    assert!(Utc::now() >= at);
    held.go_on.notify_one();
    until("the other job is done", async || {
        (db.value("select count(*) from graphile_worker.jobs").await == 1).then_some(())
    })
    .await;
    started.stop().await;
    assert_eq!(held.runs(), 1);
}

#[tokio::test]
async fn a_worker_does_not_start_a_job_that_it_has_claimed_after_it_expired() {
    for repeatable in [false, true] {
        let db = Db::installed().await;
        let (options, seen) = sending(&db);
        let options = options.task_options("t", TaskOptions::default().repeatable(repeatable));
        // No sweep finds it: `check_at` is later. So only the claim can.
        let id = add_expired(&db, "'t', '1'").await;
        let fine = db.add_job("'t', '2'").await["id"].as_i64().unwrap();
        db.run("update graphile_worker._rs_expiries set check_at = now() + interval '2.5 seconds'").await;
        options.init().await.unwrap().run_once().await.unwrap();
        assert_eq!(all_sent(seen).await, [2], "repeatable: {repeatable}");
        assert_eq!(until_failed(&db, id).await, EXPIRED);
        assert!(utils(&db).find_job(fine).await.unwrap().is_none());
    }
}

#[tokio::test]
async fn an_expired_job_of_a_queue_does_not_block_it() {
    let db = Db::installed().await;
    let expired = add_expired(&db, "'t', '1', queue_name := 'q'").await;
    db.add_job("'t', '2', queue_name := 'q'").await;
    db.run("update graphile_worker._rs_expiries set check_at = now() + interval '2.5 seconds'").await;
    let (options, seen) = sending(&db);
    options.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(all_sent(seen).await, [2]);
    until_failed(&db, expired).await;
    crate::worker_support::assert_queues_are_unlocked(&db).await;
}

#[tokio::test]
async fn a_job_that_has_begun_is_left_alone() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let options = options(&db).define_task("t", move |_: Value, _| handler.clone().run());
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    let spec = JobSpec::builder().expires_in(Duration::from_secs(3600)).build();
    let id = utils(&db).add_raw_job("t", json!({}), spec).await.unwrap().id;
    held.begun.notified().await;
    // Now it expires. A worker looks at it, and later again.
    db.run("update graphile_worker._rs_expiries set expires_at = now(), check_at = now(); notify \"jobs:expire\", 'graphile_worker'").await;
    until("it was looked at", async || {
        (db.value("select check_at > expires_at from graphile_worker._rs_expiries").await == true).then_some(())
    })
    .await;
    assert_eq!(utils(&db).find_job(id).await.unwrap().unwrap().job.state, JobState::Running);
    held.go_on.notify_one();
    until_no_jobs(&db).await;
    started.stop().await;
    // One that waits for its second attempt has begun, too.
    let retrying = add_expired(&db, "'t'").await;
    db.run(
        "update graphile_worker._private_jobs set attempts = 1, last_error = 'oops', run_at = now() + interval '1 day'",
    )
    .await;
    assert!(db.rows("select graphile_worker._rs_expire_due_jobs()").await.is_empty());
    assert_eq!(utils(&db).find_job(retrying).await.unwrap().unwrap().job.state, JobState::Retrying);
    until("its expiry is forgotten", async || {
        db.rows("select graphile_worker._rs_expire_due_jobs()").await;
        (expiries(&db).await == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_sweep_waits_for_no_row() {
    let db = Db::installed().await;
    let (locked, free) = (add_expired(&db, "'t'").await, add_expired(&db, "'t'").await);
    let mut busy = db.pool.begin().await.unwrap();
    rows(&mut busy, &format!("select id from graphile_worker._private_jobs where id = {locked} for update"))
        .await
        .unwrap();
    let expired = db.rows("select id from graphile_worker._rs_expire_due_jobs()").await;
    assert_eq!(expired, [json!({ "id": free })]);
    busy.rollback().await.unwrap();
    db.run("update graphile_worker._rs_expiries set check_at = now()").await;
    assert_eq!(db.rows("select id from graphile_worker._rs_expire_due_jobs()").await, [json!({ "id": locked })]);
}

#[tokio::test]
async fn jobs_of_a_batch_expire_each_at_its_own_time() {
    let db = Db::installed().await;
    let at = Utc::now() + chrono::TimeDelta::hours(1);
    let job = |position: usize| {
        let expires_at = position.is_multiple_of(2).then_some(at);
        RawJobSpec {
            identifier: "t".to_owned(),
            payload: json!(position),
            spec: JobSpec { expires_at, ..JobSpec::default() },
        }
    };
    for count in [3, 1000] {
        let added = utils(&db).add_raw_jobs(&(0..count).map(job).collect::<Vec<_>>()).await.unwrap();
        let mut transaction = db.pool.begin().await.unwrap();
        let within =
            utils(&db).within(&mut transaction).add_raw_jobs(&(0..count).map(job).collect::<Vec<_>>()).await.unwrap();
        transaction.commit().await.unwrap();
        for jobs in [added, within] {
            let expected: Vec<i64> = jobs.iter().step_by(2).map(|job| job.id).collect();
            let sql = format!(
                "select json_agg(job_id order by job_id) from graphile_worker._rs_expiries where job_id between {} and {}",
                jobs[0].id,
                jobs[count - 1].id
            );
            assert_eq!(db.value(&sql).await, json!(expected));
        }
    }
}

#[tokio::test]
async fn an_expiry_can_be_changed_and_removed() {
    let db = Db::installed().await;
    let id = add_expired(&db, "'t'").await;
    let set = async |at: &str| db.value(&format!("select graphile_worker._rs_expire_job({id}, {at})")).await;
    assert_eq!(set("now() + interval '1 day'").await, true);
    assert!(db.rows("select graphile_worker._rs_expire_due_jobs()").await.is_empty());
    assert_eq!(set("null").await, true);
    assert_eq!(expiries(&db).await, 0);
    assert_eq!(set("null").await, false);
    assert_eq!(db.value("select graphile_worker._rs_expire_job(99999, now())").await, false);
    let (code, message) = db.failure("select graphile_worker._rs_expire_jobs('{1,2}', '{now}')").await;
    assert_eq!((&*code, &*message), ("22023", "Expected as many times as job ids, found 1 times for 2 ids."));
}

#[tokio::test]
async fn a_worker_that_cannot_listen_expires_jobs_at_its_next_poll() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&[("pool_mode", "transaction")]);
    let options = WorkerOptions::default()
        .database_url(&url)
        .listen_os_shutdown_signals(false)
        .poll_interval(Duration::from_millis(100))
        .define_task("t", |_: Value, _: WorkerContext| async {});
    let started = Started::new(options).await;
    let id = add_expired(&db, "'t', run_at := now() + interval '1 hour'").await;
    assert_eq!(until_failed(&db, id).await, EXPIRED);
    started.stop().await;
}
