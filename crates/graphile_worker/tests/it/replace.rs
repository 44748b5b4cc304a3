//! Replacing a job by its key while it runs: the new job starts when the old one has ended.

use crate::support::{Db, Started, until};
use crate::worker_support::{
    Held, assert_queues_are_unlocked, options, run_once, sending, until_a_session_waits_for_a_lock, until_no_jobs,
    until_true, until_worker_listens, utils,
};
use chrono::{TimeDelta, Utc};
use graphile_worker::{
    BeforeJobSchedule, CancelOptions, HookRegistry, JobScheduleResult, JobSpec, JobState, Limit, ReplaceOutcome,
    Replacement, RescheduleJobOptions, RoleRight, SweepStaleWorkersOptions, TaskOptions, WorkerContext, WorkerOptions,
};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

async fn add(db: &Db, arguments: &str) -> i64 {
    db.add_job(arguments).await["id"].as_i64().unwrap()
}

/// Replaces the job with the key `k`.
async fn replace(db: &Db, payload: Value) -> Replacement {
    replace_with(db, payload, JobSpec::default(), CancelOptions::default()).await
}

async fn replace_with(db: &Db, payload: Value, spec: JobSpec, options: CancelOptions) -> Replacement {
    utils(db).replace_raw_job("t", payload, "k", spec, options).await.unwrap()
}

/// State of a job, or `None` if it is gone.
async fn state(db: &Db, id: i64) -> Option<JobState> {
    utils(db).find_job(id).await.unwrap().map(|details| details.job.state)
}

/// The running jobs that this one waits for, as `show` and `list` say.
async fn waits_for(db: &Db, id: i64) -> Vec<i64> {
    let shown = utils(db).find_job(id).await.unwrap().unwrap().job.replaces;
    let listed = utils(db).list_jobs(&graphile_worker::JobFilter::default()).await.unwrap();
    assert_eq!(listed.iter().find(|job| job.id == id).unwrap().replaces, shown);
    shown
}

async fn assert_nothing_waits(db: &Db) {
    assert_eq!(db.value("select count(*) from graphile_worker._rs_successors").await, 0);
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs where run_at = 'infinity'").await, 0);
}

/// What a worker does now and then.
async fn release(db: &Db) -> Value {
    db.row("select * from graphile_worker._rs_release_successors()").await
}

/// A worker whose task `t` runs until it is asked to stop. The receiver gets the payloads of jobs that begin. Panics if two
/// of them run at the same time.
async fn stoppable(options: WorkerOptions) -> (Started, mpsc::UnboundedReceiver<Value>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let running = Arc::new(AtomicUsize::new(0));
    let started = Started::new(options.define_task("t", move |payload: Value, ctx: WorkerContext| {
        let (sender, running) = (sender.clone(), running.clone());
        async move {
            assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "two jobs of the key run at the same time");
            let _ = sender.send(payload);
            ctx.cancelled().await;
            // Like a handler that tidies up.
            tokio::time::sleep(Duration::from_millis(20)).await;
            running.fetch_sub(1, Ordering::SeqCst);
        }
    }))
    .await;
    (started, receiver)
}

/// A running job with the key `k` in a worker of ours that will never report it.
async fn held_by(db: &Db, worker: &str) -> i64 {
    let id = add(db, "'t', '0', job_key := 'k'").await;
    hold(db, id, worker).await;
    id
}

async fn hold(db: &Db, id: i64, worker: &str) {
    db.run(&format!(
        "update graphile_worker._private_jobs set locked_at = now(), locked_by = '{worker}', attempts = 1 where id = {id}"
    ))
    .await;
}

/// Ends the held job, as a worker of ours reports it.
async fn end(db: &Db, id: i64) {
    db.run(&format!("delete from graphile_worker._private_jobs where id = {id} and locked_at is not null")).await;
}

#[tokio::test]
async fn the_new_job_starts_as_soon_as_the_old_one_has_stopped() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db).concurrency(4)).await;
    until_worker_listens(&db).await;
    let old = add(&db, "'t', '1', job_key := 'k'").await;
    assert_eq!(begun.recv().await, Some(json!(1)));

    let options = CancelOptions::default().reason("a newer version".to_owned());
    let replaced = replace_with(&db, json!(2), JobSpec::default(), options).await;
    assert_eq!((replaced.outcome, &replaced.waits_for), (ReplaceOutcome::Stopping, &vec![old]));
    assert_eq!(replaced.worker_id.as_deref(), Some(started.worker.worker_id()));
    assert!(replaced.job.run_at <= Utc::now());
    assert_eq!(begun.recv().await, Some(json!(2)));
    assert_eq!(state(&db, old).await, None, "it has ended without an error, so it is done");

    // Any number of times: each job waits for the one before.
    for n in 3..=8 {
        assert_eq!(replace(&db, json!(n)).await.outcome, ReplaceOutcome::Stopping);
        assert_eq!(begun.recv().await, Some(json!(n)));
    }
    assert_nothing_waits(&db).await;
    started.stop().await;
}

#[tokio::test]
async fn the_newest_payload_of_many_replacements_wins() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-a").await;
    let first = replace(&db, json!(1)).await;
    for n in 2..=4 {
        let next = replace(&db, json!(n)).await;
        assert_eq!((next.outcome, next.job.id), (ReplaceOutcome::Stopping, first.job.id), "one successor");
        assert_eq!(waits_for(&db, next.job.id).await, [old]);
    }
    assert_eq!(release(&db).await, json!({ "released": 0, "others_wait": true }));
    end(&db, old).await;
    assert_eq!(release(&db).await, json!({ "released": 1, "others_wait": false }));
    run_once(&db, |payload, _| async move { assert_eq!(payload, json!(4)) }).await;
    until_no_jobs(&db).await;
}

#[tokio::test]
async fn force_ends_the_old_job_also_in_a_second_call() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let (sender, mut others) = mpsc::unbounded_channel();
    let started = Started::new(options(&db).define_task("t", move |payload: Value, _| {
        let (handler, sender) = (handler.clone(), sender.clone());
        async move {
            if payload == 1 {
                handler.run().await;
            }
            let _ = sender.send(payload);
        }
    }))
    .await;
    until_worker_listens(&db).await;
    let old = add(&db, "'t', '1', job_key := 'k'").await;
    held.begun.notified().await;
    assert_eq!(replace(&db, json!(2)).await.outcome, ReplaceOutcome::Stopping);
    let why = utils(&db).why(old).await.unwrap();
    assert!(why.fix.unwrap().contains("cancel --force"));
    replace_with(&db, json!(3), JobSpec::default(), CancelOptions::default().force(true)).await;
    assert_eq!(others.recv().await, Some(json!(3)));
    assert_eq!(state(&db, old).await, Some(JobState::Cancelled));
    started.stop().await;
}

#[tokio::test]
async fn a_waiting_job_is_replaced_and_without_a_job_one_is_added() {
    let db = Db::installed().await;
    let first = replace(&db, json!(1)).await;
    assert_eq!((first.outcome, first.waits_for), (ReplaceOutcome::Added, vec![]));
    let spec = JobSpec::builder().priority(7).max_attempts(3).queue_name("q").flags(vec!["f".to_owned()]).build();
    let in_a_minute = JobSpec { run_at: Some(Utc::now() + TimeDelta::minutes(1)), ..spec };
    let second = replace_with(&db, json!(2), in_a_minute, CancelOptions::default()).await;
    assert_eq!((second.outcome, second.job.id), (ReplaceOutcome::Replaced, first.job.id));
    let job = utils(&db).find_job(first.job.id).await.unwrap().unwrap();
    assert_eq!((job.job.priority, job.job.max_attempts, job.job.state), (7, 3, JobState::Scheduled));
    assert_eq!((job.job.queue_name.as_deref(), job.job.flags.len(), job.payload.get()), (Some("q"), 1, "2"));

    // A job that has failed permanently keeps its row, and loses the key.
    utils(&db).permanently_fail_jobs(&[first.job.id], "broken").await.unwrap();
    let third = replace(&db, json!(3)).await;
    assert_eq!(third.outcome, ReplaceOutcome::Added);
    assert_ne!(third.job.id, first.job.id);
    assert_eq!(state(&db, first.job.id).await, Some(JobState::Failed));
    assert_eq!(third.job.key.as_deref(), Some("k"));
}

#[tokio::test]
async fn a_job_in_nodes_worker_cannot_be_stopped_and_the_new_one_waits_for_its_end() {
    let db = Db::installed().await;
    let old = held_by(&db, "worker-of-node").await;
    let replaced = replace(&db, json!(2)).await;
    assert_eq!((replaced.outcome, replaced.waits_for), (ReplaceOutcome::Unstoppable, vec![old]));
    assert_eq!(replaced.worker_id.as_deref(), Some("worker-of-node"));
    run_once(&db, |_, _| async {}).await;
    assert_eq!(state(&db, replaced.job.id).await, Some(JobState::Scheduled), "it waits");
    // This is how Node's worker reports a failure.
    db.run(&format!(
        "update graphile_worker._private_jobs set last_error = 'oops',
           run_at = greatest(now(), run_at) + (exp(least(attempts, 10)) * interval '1 second'), locked_by = null, locked_at = null
         where id = {old}"
    ))
    .await;
    run_once(&db, |payload, _| async move { assert_eq!(payload, json!(2)) }).await;
    until_true("only the failed one is left", &db, "select array_agg(id) = '{1}' from graphile_worker.jobs").await;
    assert_eq!(state(&db, old).await, Some(JobState::Failed));
}

#[tokio::test]
async fn recovery_of_a_killed_worker_lets_the_new_job_start() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-live-dead").await;
    db.run("insert into graphile_worker._rs_workers (worker_id, level, last_heartbeat_at) values ('rs-live-dead', 14, now() - interval '1 hour')")
        .await;
    let new = replace(&db, json!(2)).await;
    assert_eq!(new.outcome, ReplaceOutcome::Stopping);
    let swept = utils(&db).sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!(swept.recovered_count, 1);
    run_once(&db, |payload, _| async move { assert_eq!(payload, json!(2)) }).await;
    assert_eq!((state(&db, old).await, state(&db, new.job.id).await), (Some(JobState::Cancelled), None));
}

#[tokio::test]
async fn a_worker_finds_out_by_itself_that_a_job_of_another_one_has_ended() {
    let db = Db::installed().await;
    let old = held_by(&db, "worker-of-node").await;
    let (options, mut receiver) = sending(&db);
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    let new = replace(&db, json!(2)).await;
    // No notification is sent.
    end(&db, old).await;
    assert_eq!(receiver.recv().await, Some(new.job.id));
    started.stop().await;
}

#[tokio::test]
async fn two_jobs_of_a_queue_follow_each_other() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    add(&db, "'t', '1', job_key := 'k', queue_name := 'q'").await;
    begun.recv().await;
    let spec = || JobSpec::builder().queue_name("q").build();
    for n in 2..=4 {
        replace_with(&db, json!(n), spec(), CancelOptions::default()).await;
        assert_eq!(begun.recv().await, Some(json!(n)));
    }
    started.stop().await;
    assert_queues_are_unlocked(&db).await;
}

#[tokio::test]
async fn jobs_under_a_limit_are_replaced_too() {
    let db = Db::installed().await;
    add(&db, "'t', '1', job_key := 'k'").await;
    utils(&db).set_limit(&Limit::task("t").concurrency(1)).await.unwrap();
    let (started, mut begun) = stoppable(options(&db).concurrency(4)).await;
    until_worker_listens(&db).await;
    begun.recv().await;
    for n in 2..=4 {
        let spec = if n == 3 { JobSpec::builder().queue_name("q").build() } else { JobSpec::default() };
        replace_with(&db, json!(n), spec, CancelOptions::default()).await;
        assert_eq!(begun.recv().await, Some(json!(n)));
    }
    assert_nothing_waits(&db).await;
    started.stop().await;
}

#[tokio::test]
async fn a_job_of_a_repeatable_task_is_replaced_while_only_its_row_is_locked() {
    let db = Db::installed().await;
    let options = options(&db).task_options("t", TaskOptions::default().repeatable(true)).concurrency(4);
    let (started, mut begun) = stoppable(options.longest_batch(Duration::from_millis(50))).await;
    until_worker_listens(&db).await;
    add(&db, "'t', '1', job_key := 'k'").await;
    begun.recv().await;
    for n in 2..=4 {
        assert_eq!(replace(&db, json!(n)).await.outcome, ReplaceOutcome::Stopping);
        assert_eq!(begun.recv().await, Some(json!(n)));
    }
    started.stop().await;
}

#[tokio::test]
async fn other_adds_with_the_key_change_the_waiting_job_and_it_still_waits() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-a").await;
    let new = replace(&db, json!(1)).await.job.id;
    let real = "select round(extract(epoch from run_at - now()) / 60)::int from graphile_worker._rs_successors";
    for (add, payload, minutes) in [
        ("add_job('t', '2', job_key := 'k')", json!(2), 0),
        ("add_job('t', '3', job_key := 'k', run_at := now() + interval '1 hour')", json!(3), 60),
        ("add_job('t', '4', job_key := 'k', job_key_mode := 'preserve_run_at')", json!(4), 60),
        ("add_job('t', '5', job_key := 'k', job_key_mode := 'unsafe_dedupe')", json!(4), 60),
        ("add_jobs(array[('t', '6', null, null, null, 'k', null, null)::graphile_worker.job_spec])", json!(6), 0),
        ("_rs_debounce('t', '7', 'k', '1 minute')", json!(7), 1),
        ("_rs_debounce('t', '7', 'k', '1 hour', '1 hour')", json!(7), 60),
        ("_rs_throttle('t', '7', 'k', '1 minute')", json!(7), 60),
    ] {
        assert_eq!(db.row(&format!("select id from graphile_worker.{add}")).await["id"], new, "{add}");
        assert_eq!(waits_for(&db, new).await, [old], "{add}");
        let job = db.row(&format!("select payload, run_at from graphile_worker._private_jobs where id = {new}")).await;
        assert_eq!(job, json!({ "payload": payload, "run_at": "infinity" }), "{add}");
        assert_eq!(db.value(real).await, minutes, "{add}");
    }
    utils(&db).reschedule_jobs(&[new], RescheduleJobOptions::default().run_at(Utc::now())).await.unwrap();
    assert_eq!((db.value(real).await, waits_for(&db, new).await), (json!(0), vec![old]));
    end(&db, old).await;
    run_once(&db, |payload, _| async move { assert_eq!(payload, json!(7)) }).await;
    until_no_jobs(&db).await;
    assert_nothing_waits(&db).await;
}

#[tokio::test]
async fn the_waiting_job_keeps_its_time() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-a").await;
    let at = Utc::now() + TimeDelta::hours(1);
    let spec = JobSpec::builder().run_at(at).build();
    let new = replace_with(&db, json!(1), spec, CancelOptions::default()).await;
    assert_eq!(new.job.run_at.timestamp_millis(), at.timestamp_millis());
    let shown = utils(&db).find_job(new.job.id).await.unwrap().unwrap().job;
    assert_eq!((shown.run_at.timestamp_millis(), shown.state), (at.timestamp_millis(), JobState::Scheduled));
    end(&db, old).await;
    assert_eq!(release(&db).await["released"], 1);
    assert_eq!(db.value("select extract(epoch from run_at - now()) > 3500 from graphile_worker.jobs").await, true);
}

#[tokio::test]
async fn a_waiting_job_that_is_removed_or_cancelled_does_not_run_and_the_next_one_waits_again() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-a").await;
    replace(&db, json!(1)).await;
    assert!(utils(&db).remove_job("k").await.unwrap().is_some());
    let second = replace(&db, json!(2)).await;
    assert_eq!((second.outcome, second.waits_for), (ReplaceOutcome::Stopping, vec![old]));
    utils(&db).cancel_jobs(&[second.job.id], CancelOptions::default()).await.unwrap();
    assert_eq!(state(&db, second.job.id).await, Some(JobState::Cancelled));
    let third = replace(&db, json!(3)).await;
    assert_eq!((third.outcome, third.waits_for), (ReplaceOutcome::Stopping, vec![old]));
    end(&db, old).await;
    run_once(&db, |payload, _| async move { assert_eq!(payload, json!(3)) }).await;
    assert_eq!((state(&db, second.job.id).await, state(&db, third.job.id).await), (Some(JobState::Cancelled), None));
    assert_nothing_waits(&db).await;
    // The cancelled one can be run again.
    let again = RescheduleJobOptions::default().run_at(Utc::now()).attempts(0);
    utils(&db).reschedule_jobs(&[second.job.id], again).await.unwrap();
    run_once(&db, |payload, _| async move { assert_eq!(payload, json!(2)) }).await;
    until_no_jobs(&db).await;
}

#[tokio::test]
async fn a_job_that_was_cancelled_by_hand_and_still_runs_is_waited_for() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-a").await;
    utils(&db).cancel_jobs(&[old], CancelOptions::default().reason("by hand".to_owned())).await.unwrap();
    let new = replace(&db, json!(1)).await;
    assert_eq!((new.outcome, new.waits_for), (ReplaceOutcome::Stopping, vec![old]));
    assert_eq!(
        utils(&db).find_job(old).await.unwrap().unwrap().job.last_error.as_deref(),
        Some("Cancelled: by hand"),
        "the reason stays"
    );
    // Once it has ended and runs again without the key, no job waits for it.
    db.run(&format!("update graphile_worker._private_jobs set locked_at = null, locked_by = null where id = {old}"))
        .await;
    assert_eq!(release(&db).await["released"], 1);
    let again = RescheduleJobOptions::default().run_at(Utc::now()).attempts(0);
    utils(&db).reschedule_jobs(&[old], again).await.unwrap();
    hold(&db, old, "rs-a").await;
    assert_eq!(replace(&db, json!(2)).await.outcome, ReplaceOutcome::Replaced);
}

#[tokio::test]
async fn a_waiting_job_that_expires_fails() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-a").await;
    let spec = JobSpec::builder().expires_in(Duration::from_secs(60)).build();
    let new = replace_with(&db, json!(1), spec, CancelOptions::default()).await.job.id;
    db.run("update graphile_worker._rs_expiries set expires_at = now(), check_at = now()").await;
    assert_eq!(db.rows("select id from graphile_worker._rs_expire_due_jobs()").await, [json!({ "id": new })]);
    end(&db, old).await;
    release(&db).await;
    assert_eq!(state(&db, new).await, Some(JobState::Failed));
    assert_nothing_waits(&db).await;
}

#[tokio::test]
async fn a_replacement_that_is_rolled_back_never_happened() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    let old = add(&db, "'t', '1', job_key := 'k'").await;
    begun.recv().await;
    let mut transaction = db.pool.begin().await.unwrap();
    let within = utils(&db).within(&mut transaction);
    let new = within.replace_raw_job("t", json!(2), "k", JobSpec::default(), CancelOptions::default()).await.unwrap();
    assert_eq!((new.outcome, new.waits_for), (ReplaceOutcome::Stopping, vec![old]));
    transaction.rollback().await.unwrap();
    assert_eq!((state(&db, old).await, state(&db, new.job.id).await), (Some(JobState::Running), None));
    replace(&db, json!(3)).await;
    assert_eq!(begun.recv().await, Some(json!(3)));
    started.stop().await;
}

#[tokio::test]
async fn sessions_that_replace_at_the_same_time_leave_one_job_that_waits() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-a").await;
    let mut transaction = db.pool.begin().await.unwrap();
    let within = utils(&db).within(&mut transaction);
    let first = within.replace_raw_job("t", json!(1), "k", JobSpec::default(), CancelOptions::default()).await.unwrap();
    let second = {
        let utils = utils(&db);
        tokio::spawn(async move {
            utils.replace_raw_job("t", json!(2), "k", JobSpec::default(), CancelOptions::default()).await.unwrap()
        })
    };
    until_a_session_waits_for_a_lock(&db).await;
    transaction.commit().await.unwrap();
    let second = second.await.unwrap();
    assert_eq!((second.job.id, second.outcome), (first.job.id, ReplaceOutcome::Stopping));
    assert_eq!(waits_for(&db, first.job.id).await, [old]);

    // Also if no job exists.
    db.run("delete from graphile_worker._private_jobs").await;
    release(&db).await;
    let calls = (0..20).map(|n| {
        let utils = utils(&db);
        tokio::spawn(async move {
            utils.replace_raw_job("t", json!(n), "k", JobSpec::default(), CancelOptions::default()).await.unwrap()
        })
    });
    let calls: Vec<_> = calls.collect();
    let mut outcomes = Vec::new();
    for call in calls {
        outcomes.push(call.await.unwrap().outcome);
    }
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == ReplaceOutcome::Added).count(), 1, "{outcomes:?}");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 1);
}

#[tokio::test]
async fn many_sessions_replace_a_running_job_while_workers_run_it_and_never_two_at_a_time() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db).concurrency(8)).await;
    until_worker_listens(&db).await;
    let calls = (0..8).map(|session| {
        let utils = utils(&db);
        tokio::spawn(async move {
            for n in 0..10 {
                let payload = json!([session, n]).to_string();
                utils.replace_raw_job("t", payload, "k", JobSpec::default(), CancelOptions::default()).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    let last = replace(&db, json!("last")).await;
    until("the last one runs", async || (begun.recv().await? == "last").then_some(())).await;
    assert_eq!(state(&db, last.job.id).await, Some(JobState::Running));
    let failed = "select count(*) from graphile_worker.jobs where last_error like '%same time%'";
    assert_eq!(db.value(failed).await, 0);
    assert_nothing_waits(&db).await;
    started.stop().await;
}

#[tokio::test]
async fn a_job_that_another_session_holds_is_released_later() {
    let db = Db::installed().await;
    let old = held_by(&db, "rs-a").await;
    let new = replace(&db, json!(1)).await.job.id;
    end(&db, old).await;
    let mut transaction = db.pool.begin().await.unwrap();
    let lock = format!("select from graphile_worker._private_jobs where id = {new} for update");
    sqlx::query(sqlx::AssertSqlSafe(lock)).execute(&mut *transaction).await.unwrap();
    assert_eq!(release(&db).await, json!({ "released": 0, "others_wait": true }));
    transaction.rollback().await.unwrap();
    assert_eq!(release(&db).await, json!({ "released": 1, "others_wait": false }));
}

#[tokio::test]
async fn a_role_that_may_only_add_jobs_replaces_them_and_reads_nothing() {
    let db = Db::installed().await;
    db.run("create role replacing_app login").await;
    utils(&db).grant("replacing_app", &[RoleRight::Add]).await.unwrap();
    let old = held_by(&db, "rs-a").await;
    let mut app = db.connect_as("replacing_app").await;
    let sql = "select (job).payload, outcome, waits_for from graphile_worker._rs_replace_job('t', '[2]', 'k', reason => 'newer')";
    let replaced = crate::support::rows(&mut app, sql).await.unwrap();
    assert_eq!(replaced, [json!({ "payload": [2], "outcome": "stopping", "waits_for": [old] })]);
    let sql = sql.replace("[2]", "[3]");
    let again = crate::support::rows(&mut app, &sql).await.unwrap();
    assert_eq!(again[0]["payload"], json!([3]), "not the stored one, which has both");
    assert_eq!(state(&db, old).await, Some(JobState::Running));
    let denied = crate::support::rows(&mut app, "select * from graphile_worker._rs_successors").await;
    assert!(denied.unwrap_err().to_string().contains("permission denied"));
    drop(app);
    utils(&db).revoke("replacing_app").await.unwrap();
    db.run("drop role replacing_app").await;
}

#[tokio::test]
async fn a_job_without_a_key_replaces_nothing() {
    let db = Db::installed().await;
    let (code, message) = db.failure("select graphile_worker._rs_replace_job('t')").await;
    assert_eq!((&*code, &*message), ("GWBJK", "A job that replaces another needs a job key, found null."));
    let (code, _) = db.failure("select graphile_worker._rs_replace_job('', null, 'k')").await;
    assert_eq!(code, "GWBID");
    let none = utils(&db).replace_raw_job("t", (), "", JobSpec::default(), CancelOptions::default()).await;
    assert!(format!("{:?}", none.unwrap_err()).contains("Job key is empty"));
}

#[tokio::test]
async fn hooks_can_change_the_new_job() {
    let db = Db::installed().await;
    let mut hooks = HookRegistry::new();
    hooks.on(BeforeJobSchedule, |mut job| async move {
        job.payload = json!("changed");
        JobScheduleResult::Add(job)
    });
    let utils = utils(&db).with_hooks(Arc::new(hooks));
    let added = utils.replace_raw_job("t", json!(1), "k", JobSpec::default(), CancelOptions::default()).await.unwrap();
    assert_eq!(added.job.payload.get(), "\"changed\"");
}

#[tokio::test]
async fn why_says_which_job_a_waiting_one_replaces() {
    let db = Db::installed().await;
    let old = held_by(&db, "worker-of-node").await;
    let new = replace(&db, json!(1)).await.job.id;
    let why = utils(&db).why(new).await.unwrap();
    let reason = why.reasons[0].to_string();
    assert_eq!(
        reason,
        format!(
            "It waits until job {old}, which it replaces, has ended in worker worker-of-node, which cannot stop it."
        )
    );

    hold(&db, old, "rs-a").await;
    let why = utils(&db).why(new).await.unwrap();
    assert_eq!(
        why.reasons[0].to_string(),
        format!("It waits until job {old}, which it replaces, has stopped in worker rs-a, which was asked to stop it.")
    );
    assert!(why.fix.unwrap().ends_with(&format!("cancel --force {old}")));

    end(&db, old).await;
    let why = utils(&db).why(new).await.unwrap();
    assert_eq!(
        why.reasons[0].to_string(),
        "The job that it replaces has ended, but no worker has noticed yet. Only workers of this release check for that, every second."
    );
    let doctor = utils(&db).doctor().await.unwrap();
    let check = doctor.checks.iter().find(|check| check.name == "replaced_jobs").expect("advice");
    assert_eq!(check.found, "waiting although the replaced jobs have ended: 1");
}
