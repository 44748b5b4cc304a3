//! Cancelling jobs: waiting and running ones, by whom they run, and what is left of them.

use crate::support::{Db, Started, until};
use crate::worker_support::{
    Held, assert_queues_are_unlocked, options, run_once, until_no_jobs, until_true, until_worker_listens, utils,
};
use graphile_worker::{
    CancelOptions, CancelOutcome, Cancellation, HookRegistry, JobCancelled, JobEventContext, JobFailed, JobFilter,
    JobSpec, JobState, RescheduleJobOptions, SweepStaleWorkersOptions, TaskError, TaskOptions, WhyReason,
    WorkerContext, WorkerOptions,
};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

fn because(reason: &str) -> CancelOptions {
    CancelOptions::default().reason(reason.to_owned())
}

async fn add(db: &Db, arguments: &str) -> i64 {
    db.add_job(arguments).await["id"].as_i64().unwrap()
}

/// Cancels one job, and returns what became of it.
async fn cancel(db: &Db, id: i64, options: CancelOptions) -> CancelOutcome {
    let cancelled = utils(db).cancel_jobs(&[id], options).await.unwrap();
    assert_eq!(cancelled.iter().map(|job| job.id).collect::<Vec<_>>(), [id]);
    cancelled[0].outcome
}

/// State, last error and key of a job, and whether it is locked.
async fn outcome(db: &Db, id: i64) -> (JobState, Option<String>, Option<String>, bool) {
    let job = utils(db).find_job(id).await.unwrap().expect("the job stays").job;
    assert!(job.state == JobState::Running || job.attempts == job.max_attempts, "{job:?}");
    (job.state, job.last_error, job.key, job.locked_by.is_some())
}

fn cancelled(error: &str) -> (JobState, Option<String>, Option<String>, bool) {
    (JobState::Cancelled, Some(error.to_owned()), None, false)
}

async fn until_cancelled(db: &Db, id: i64) {
    until("the job is cancelled", async || {
        let job = utils(db).find_job(id).await.unwrap().expect("the job stays").job;
        (job.state == JobState::Cancelled).then_some(())
    })
    .await;
}

/// A worker whose task `t` runs until it is asked to stop, then fails. The receiver gets the ids of jobs that begin.
async fn stoppable(options: WorkerOptions) -> (Started, mpsc::UnboundedReceiver<i64>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let started = Started::new(options.define_task("t", move |_: Value, ctx: WorkerContext| {
        let _ = sender.send(ctx.job().id);
        async move {
            ctx.cancellation_token().cancelled().await;
            Err::<(), _>(TaskError::new("stopped half-way"))
        }
    }))
    .await;
    (started, receiver)
}

/// Nothing is left to run.
async fn runs_nothing(db: &Db) {
    run_once(db, |_, ctx: WorkerContext| async move { assert_eq!(ctx.job().id, 0, "it must not run") }).await;
    let ran = db.value("select count(*) from graphile_worker.jobs where last_error like '%must not run%'").await;
    assert_eq!(ran, 0);
}

#[tokio::test]
async fn a_waiting_job_that_is_cancelled_does_not_run_and_shows_the_reason() {
    let db = Db::installed().await;
    let (due, later) =
        (add(&db, "'t', job_key := 'k'").await, add(&db, "'t', run_at := now() + interval '1 day'").await);
    assert_eq!(cancel(&db, due, because("wrong address")).await, CancelOutcome::Cancelled);
    assert_eq!(cancel(&db, later, CancelOptions::default()).await, CancelOutcome::Cancelled);

    runs_nothing(&db).await;
    assert_eq!(outcome(&db, due).await, cancelled("Cancelled: wrong address"));
    assert_eq!(outcome(&db, later).await, cancelled("Cancelled"));

    let stats = utils(&db).stats().await.unwrap();
    assert_eq!((stats.cancelled, stats.failed, stats.total()), (2, 0, 2));
    let listed = utils(&db).list_jobs(&JobFilter::default().states([JobState::Cancelled])).await.unwrap();
    assert_eq!(listed.len(), 2);
    let why = utils(&db).why(due).await.unwrap();
    assert_eq!(why.reasons[0].to_string(), "It was cancelled. The reason: wrong address");
    assert!(why.fix.unwrap().ends_with(&format!("run-now {due}")));
}

#[tokio::test]
async fn a_running_job_is_asked_to_stop_and_is_not_retried() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    let id = add(&db, "'t', job_key := 'k'").await;
    assert_eq!(begun.recv().await, Some(id));

    let answer = utils(&db).cancel_jobs(&[id], because("too slow")).await.unwrap();
    assert_eq!(answer[0].outcome, CancelOutcome::Stopping);
    assert_eq!(answer[0].worker_id.as_deref(), Some(started.worker.worker_id()));
    until_cancelled(&db, id).await;
    // Its own error does not replace the reason.
    assert_eq!(outcome(&db, id).await, cancelled("Cancelled: too slow"));
    started.stop().await;
    assert!(begun.recv().await.is_none(), "it ran once");
}

#[tokio::test]
async fn a_job_that_succeeds_although_it_was_cancelled_is_done() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let started = Started::new(options(&db).define_task("t", move |_: Value, _| handler.clone().run())).await;
    let id = add(&db, "'t'").await;
    held.begun.notified().await;
    assert_eq!(cancel(&db, id, CancelOptions::default()).await, CancelOutcome::Stopping);
    held.go_on.notify_one();
    until_no_jobs(&db).await;
    started.stop().await;
    assert_eq!(cancel(&db, id, CancelOptions::default()).await, CancelOutcome::Unknown);
}

#[tokio::test]
async fn a_job_that_ignores_the_request_is_ended_by_force() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let started = Started::new(options(&db).define_task("t", move |_: Value, _| handler.clone().run())).await;
    until_worker_listens(&db).await;
    let id = add(&db, "'t'").await;
    held.begun.notified().await;
    assert_eq!(cancel(&db, id, because("first")).await, CancelOutcome::Stopping);

    let why = utils(&db).why(id).await.unwrap();
    assert!(
        matches!(&why.reasons[0], WhyReason::BeingCancelled { cancel_reason: Some(reason), .. } if reason == "first")
    );
    assert!(why.fix.unwrap().ends_with(&format!("cancel --force {id}")));

    // A second request without a reason keeps the first one.
    assert_eq!(cancel(&db, id, CancelOptions::default().force(true)).await, CancelOutcome::Stopping);
    until_cancelled(&db, id).await;
    assert_eq!(outcome(&db, id).await, cancelled("Cancelled: first"));
    started.stop().await;
    assert_eq!(held.runs(), 1);
}

#[tokio::test]
async fn force_shortens_no_job_that_was_not_cancelled() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let started = Started::new(options(&db).define_task("t", move |_: Value, _| handler.clone().run())).await;
    until_worker_listens(&db).await;
    let other = add(&db, "'t'").await;
    held.begun.notified().await;
    let id = add(&db, "'t'").await;
    held.begun.notified().await;
    cancel(&db, id, CancelOptions::default().force(true)).await;
    until_cancelled(&db, id).await;
    assert_eq!(utils(&db).find_job(other).await.unwrap().unwrap().job.state, JobState::Running);
    held.go_on.notify_one();
    until_true("the other job is done", &db, "select count(*) = 1 from graphile_worker.jobs").await;
    started.stop().await;
}

#[tokio::test]
async fn the_key_of_a_cancelled_job_is_free() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    let running = add(&db, "'t', job_key := 'k'").await;
    begun.recv().await;
    cancel(&db, running, CancelOptions::default()).await;
    let waiting = add(&db, "'t', job_key := 'k', run_at := now() + interval '1 day'").await;
    assert_ne!(running, waiting);
    cancel(&db, waiting, CancelOptions::default()).await;
    let another = add(&db, "'t', job_key := 'k', run_at := now() + interval '1 day'").await;
    assert!(![running, waiting].contains(&another));
    until_cancelled(&db, running).await;
    started.stop().await;
}

#[tokio::test]
async fn a_queue_goes_on_after_its_cancelled_jobs() {
    let db = Db::installed().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(add(&db, "'t', queue_name := 'q'").await);
    }
    // The worker claims all four at once, and runs one.
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    assert_eq!(begun.recv().await, Some(ids[0]));
    until_true(
        "all are claimed",
        &db,
        "select count(*) = 4 from graphile_worker._private_jobs where locked_at is not null",
    )
    .await;
    let answer = utils(&db).cancel_jobs(&[ids[1], ids[0]], because("q")).await.unwrap();
    assert!(answer.iter().all(|job| job.outcome == CancelOutcome::Stopping), "{answer:?}");
    assert_eq!(begun.recv().await, Some(ids[2]), "the second one never starts");
    for id in &ids[..2] {
        until_cancelled(&db, *id).await;
        assert_eq!(outcome(&db, *id).await, cancelled("Cancelled: q"));
    }
    utils(&db).cancel_jobs(&ids[2..], CancelOptions::default()).await.unwrap();
    until_cancelled(&db, ids[2]).await;
    until_cancelled(&db, ids[3]).await;
    started.stop().await;
    assert_queues_are_unlocked(&db).await;
}

#[tokio::test]
async fn a_cancelled_job_of_a_killed_worker_does_not_run_again() {
    let db = Db::installed().await;
    let ids = [add(&db, "'t', queue_name := 'q'").await, add(&db, "'t', max_attempts := 3").await];
    db.run(&format!(
        "insert into graphile_worker._rs_workers (worker_id, level, last_heartbeat_at)
         values ('rs-live-dead', 14, now() - interval '1 hour');
         update graphile_worker._private_jobs set locked_by = 'rs-live-dead', locked_at = now(), attempts = 1
         where id in ({}, {});
         update graphile_worker._private_job_queues set locked_by = 'rs-live-dead', locked_at = now()",
        ids[0], ids[1]
    ))
    .await;
    for id in ids {
        assert_eq!(cancel(&db, id, because("gone")).await, CancelOutcome::Stopping);
    }
    let swept = utils(&db).sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!(swept.recovered_count, 2);
    for id in ids {
        assert_eq!(outcome(&db, id).await, cancelled("Cancelled: gone"));
    }
    runs_nothing(&db).await;
    assert_queues_are_unlocked(&db).await;
}

#[tokio::test]
async fn a_cancelled_job_that_the_stopping_worker_interrupts_is_cancelled() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let options = options(&db).shutdown_grace_period(Duration::from_millis(50));
    let started = Started::new(options.define_task("t", move |_: Value, _| handler.clone().run())).await;
    let id = add(&db, "'t'").await;
    held.begun.notified().await;
    cancel(&db, id, because("maintenance")).await;
    started.stop().await;
    assert_eq!(outcome(&db, id).await, cancelled("Cancelled: maintenance"));
}

#[tokio::test]
async fn a_job_that_nodes_worker_runs_is_not_retried_and_the_answer_says_that_it_cannot_be_stopped() {
    let db = Db::installed().await;
    let id = add(&db, "'t', job_key := 'k'").await;
    db.claim().await;
    let answer = utils(&db).cancel_jobs(&[id], because("stop")).await.unwrap();
    assert_eq!((answer[0].outcome, answer[0].worker_id.as_deref()), (CancelOutcome::Unstoppable, Some("a-worker")));
    // The way in which Node's worker reports a failure.
    db.run(
        "update graphile_worker._private_jobs set last_error = 'oops',
           run_at = greatest(now(), run_at) + (exp(least(attempts, 10)) * interval '1 second'), locked_by = null, locked_at = null",
    )
    .await;
    runs_nothing(&db).await;
    assert_eq!(outcome(&db, id).await, (JobState::Failed, Some("oops".to_owned()), None, false));
}

#[tokio::test]
async fn a_worker_of_an_older_release_cannot_stop_jobs() {
    let db = Db::installed().await;
    let id = add(&db, "'t'").await;
    db.run("insert into graphile_worker._rs_workers (worker_id, level) values ('rs-live-old', 12)").await;
    db.run("update graphile_worker._private_jobs set locked_by = 'rs-live-old', locked_at = now(), attempts = 1").await;
    assert_eq!(cancel(&db, id, CancelOptions::default()).await, CancelOutcome::Unstoppable);
}

#[tokio::test]
async fn jobs_that_do_not_exist_or_have_failed_before_are_left_alone() {
    let db = Db::installed().await;
    let failed = add(&db, "'t'").await;
    utils(&db).permanently_fail_jobs(&[failed], "broken").await.unwrap();
    let waiting = add(&db, "'t'").await;
    let before = db.row(&format!("select * from graphile_worker._private_jobs where id = {failed}")).await;
    let answer = utils(&db).cancel_jobs(&[99_999, waiting, failed, failed], CancelOptions::default()).await.unwrap();
    let outcomes: Vec<_> = answer.iter().map(|job: &Cancellation| (job.id, job.outcome)).collect();
    assert_eq!(
        outcomes,
        [(failed, CancelOutcome::Failed), (waiting, CancelOutcome::Cancelled), (99_999, CancelOutcome::Unknown)]
    );
    assert_eq!(db.row(&format!("select * from graphile_worker._private_jobs where id = {failed}")).await, before);
    // A cancelled job is not cancelled again: it keeps its reason.
    assert_eq!(cancel(&db, waiting, because("again")).await, CancelOutcome::Failed);
    assert_eq!(outcome(&db, waiting).await, cancelled("Cancelled"));
    assert!(utils(&db).cancel_jobs(&[], CancelOptions::default()).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_cancelled_job_runs_again_if_somebody_wants_it_to() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    let id = add(&db, "'t'").await;
    begun.recv().await;
    cancel(&db, id, CancelOptions::default()).await;
    until_cancelled(&db, id).await;
    utils(&db).reschedule_jobs(&[id], RescheduleJobOptions::default().attempts(0)).await.unwrap();
    assert_eq!(begun.recv().await, Some(id));
    // The old request does not stop the new run, whoever cancels what.
    let other = add(&db, "'t'").await;
    begun.recv().await;
    cancel(&db, other, CancelOptions::default()).await;
    until_cancelled(&db, other).await;
    assert_eq!(utils(&db).find_job(id).await.unwrap().unwrap().job.state, JobState::Running);
    started.stop().await;
}

#[tokio::test]
async fn all_jobs_that_match_a_filter_are_cancelled() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    let running = add(&db, "'t', '{\"customer\": 7}'").await;
    begun.recv().await;
    db.run("select graphile_worker.add_job('t', '{\"customer\": 7}', run_at := now() + interval '1 day') from generate_series(1, 1500)")
        .await;
    let other = add(&db, "'other', '{\"customer\": 8}'").await;
    let filter = JobFilter::default().task_identifier("t".to_owned()).search("\"customer\": 7".to_owned()).limit(1);
    let all = utils(&db).cancel_matching_jobs(&filter, because("left")).await.unwrap();
    assert_eq!(all.len(), 1501);
    until_cancelled(&db, running).await;
    let stats = utils(&db).stats().await.unwrap();
    assert_eq!((stats.cancelled, stats.ready), (1501, 1));
    assert_eq!(utils(&db).find_job(other).await.unwrap().unwrap().job.state, JobState::Ready);
    // Nothing is left to cancel.
    assert!(utils(&db).cancel_matching_jobs(&filter, CancelOptions::default()).await.unwrap().is_empty());
    started.stop().await;
}

#[tokio::test]
async fn a_cancellation_that_is_rolled_back_never_happened() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    let (rolled_back, other) = (add(&db, "'t'").await, add(&db, "'t'").await);
    begun.recv().await;
    begun.recv().await;
    let mut transaction = db.pool.begin().await.unwrap();
    let all = [rolled_back, other];
    utils(&db).within(&mut transaction).cancel_jobs(&all, CancelOptions::default()).await.unwrap();
    transaction.rollback().await.unwrap();
    cancel(&db, other, CancelOptions::default()).await;
    until_cancelled(&db, other).await;
    assert_eq!(utils(&db).find_job(rolled_back).await.unwrap().unwrap().job.state, JobState::Running);
    started.stop().await;
}

#[tokio::test]
async fn hooks_observe_cancelled_jobs_and_not_failed_ones() {
    let db = Db::installed().await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    let failed = Arc::new(AtomicUsize::new(0));
    let counted = failed.clone();
    let record = move |ctx: JobEventContext| {
        let _ = sender.send((ctx.job.id, ctx.worker_id.to_string(), ctx.will_retry));
        async {}
    };
    let mut hooks = HookRegistry::new();
    hooks.on(JobCancelled, record.clone());
    let options = options(&db).on(JobCancelled, record).on(JobFailed, move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        async {}
    });
    let (started, mut begun) = stoppable(options).await;
    until_worker_listens(&db).await;
    let worker_id = started.worker.worker_id().to_owned();
    let running = add(&db, "'t', max_attempts := 1").await;
    begun.recv().await;
    cancel(&db, running, CancelOptions::default()).await;
    assert_eq!(seen.recv().await, Some((running, worker_id, false)));
    let waiting = add(&db, "'t', run_at := now() + interval '1 day'").await;
    utils(&db).with_hooks(Arc::new(hooks)).cancel_jobs(&[waiting], CancelOptions::default()).await.unwrap();
    assert_eq!(seen.recv().await, Some((waiting, "worker-utils".to_owned(), false)));
    started.stop().await;
    assert_eq!(failed.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_job_of_a_repeatable_task_stops_when_it_is_cancelled() {
    let db = Db::installed().await;
    let options = options(&db).task_options("t", TaskOptions::default().repeatable(true));
    let options = options.longest_batch(Duration::from_millis(50));
    let (started, mut begun) = stoppable(options).await;
    until_worker_listens(&db).await;
    let id = add(&db, "'t'").await;
    assert_eq!(begun.recv().await, Some(id));
    // Its row is only locked at first. Cancelling it waits until the batch has written the claim.
    assert_eq!(cancel(&db, id, because("batch")).await, CancelOutcome::Stopping);
    until_cancelled(&db, id).await;
    assert_eq!(outcome(&db, id).await, cancelled("Cancelled: batch"));
    started.stop().await;
}

#[tokio::test]
async fn a_worker_that_cannot_listen_stops_the_job_at_its_next_poll() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&[("pool_mode", "transaction")]);
    let options = WorkerOptions::default()
        .database_url(&url)
        .listen_os_shutdown_signals(false)
        .concurrency(1)
        .poll_interval(Duration::from_millis(100));
    let (started, mut begun) = stoppable(options).await;
    let id = add(&db, "'t'").await;
    assert_eq!(begun.recv().await, Some(id));
    assert_eq!(cancel(&db, id, CancelOptions::default()).await, CancelOutcome::Stopping);
    until_cancelled(&db, id).await;
    started.stop().await;
}

#[tokio::test]
async fn a_running_job_that_was_removed_vanishes_even_if_its_last_error_begins_like_that_of_a_cancelled_one() {
    let db = Db::installed().await;
    let id = add(&db, "'t', job_key := 'k'").await;
    db.run("update graphile_worker._private_jobs set last_error = 'Cancelled: by the partner', locked_by = 'w', locked_at = now(), attempts = 1")
        .await;
    utils(&db).remove_job("k").await.unwrap();
    assert_eq!(
        db.value("select graphile_worker._rs_is_removed(locked_at, run_at) from graphile_worker._private_jobs").await,
        true
    );
    assert_eq!(
        db.value(
            "select graphile_worker._rs_is_cancelled(locked_at, run_at, last_error) from graphile_worker._private_jobs"
        )
        .await,
        false
    );
    assert_eq!(db.value("select last_error from graphile_worker._private_jobs").await, Value::Null);
    // Cancelling it makes it visible again.
    assert_eq!(cancel(&db, id, because("seen")).await, CancelOutcome::Unstoppable);
    assert_eq!(db.value("select last_error from graphile_worker._private_jobs").await, json!("Cancelled: seen"));
}

#[tokio::test]
async fn requests_of_jobs_that_have_ended_are_forgotten() {
    let db = Db::installed().await;
    let (started, mut begun) = stoppable(options(&db)).await;
    until_worker_listens(&db).await;
    for _ in 0..3 {
        let id = add(&db, "'t'").await;
        begun.recv().await;
        cancel(&db, id, CancelOptions::default()).await;
        until_cancelled(&db, id).await;
    }
    assert_eq!(db.value("select count(*) from graphile_worker._rs_cancellations").await, 1);
    started.stop().await;
}

#[tokio::test]
async fn a_job_added_and_cancelled_by_its_own_kind_is_cancelled() {
    let db = Db::installed().await;
    let started = Started::new(options(&db).define_task("t", |_: Value, ctx: WorkerContext| async move {
        let id = ctx.job().id;
        ctx.utils().cancel_jobs(&[id], CancelOptions::default().reason("by itself".to_owned())).await.unwrap();
        ctx.cancelled().await;
        Err::<(), _>(TaskError::new("stopped"))
    }))
    .await;
    until_worker_listens(&db).await;
    let id = utils(&db).add_raw_job("t", json!({}), JobSpec::default()).await.unwrap().id;
    until_cancelled(&db, id).await;
    assert_eq!(outcome(&db, id).await, cancelled("Cancelled: by itself"));
    started.stop().await;
}
