//! What a handler returns, and what becomes of its job: completion, retries, snoozes, failures and batches.

use crate::support::Db;
use crate::worker_support::{assert_queues_are_unlocked, only_job, options, run_once, utils};
use graphile_worker::{
    BatchTaskHandler, IntoBatchTaskHandlerResult, IntoTaskHandlerResult, JobSpec, JobSpecBuilder, TaskError,
    TaskHandler, TaskOptions, TaskOutcome, WorkerContext,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

#[derive(Serialize, Deserialize)]
struct Greet {
    name: String,
}

impl TaskHandler for Greet {
    const IDENTIFIER: &'static str = "greet";

    async fn run(self, ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        ctx.extension::<mpsc::UnboundedSender<String>>().unwrap().send(self.name).unwrap();
    }

    fn options() -> TaskOptions {
        TaskOptions::default().max_attempts(7)
    }
}

#[tokio::test]
async fn a_typed_job_reaches_its_handler_and_is_gone_afterwards() {
    let db = Db::empty().await;
    let (sender, mut names) = mpsc::unbounded_channel::<String>();
    let worker = options(&db).define_job::<Greet>().add_extension(sender).init().await.unwrap();
    let job = worker.create_utils().add_job(Greet { name: "Ada".to_owned() }, JobSpec::default()).await.unwrap();
    assert_eq!((&*job.task_identifier, job.payload.get(), job.max_attempts), ("greet", r#"{"name":"Ada"}"#, 7));
    worker.run_once().await.unwrap();
    assert_eq!(names.recv().await.unwrap(), "Ada");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_failed_job_keeps_its_error_and_waits_longer_after_each_attempt() {
    let db = Db::installed().await;
    db.add_job("'t', queue_name := 'q'").await;
    for (attempt, seconds) in [(1, 3), (2, 7), (3, 20)] {
        run_once(&db, |_, _| async { Err::<(), _>("no luck") }).await;
        let job = only_job(&db).await;
        assert_eq!((job["attempts"].as_i64(), &job["last_error"]), (Some(attempt), &json!("no luck")));
        assert_eq!(job["delay"], seconds);
        assert_eq!((&job["locked_at"], &job["locked_by"]), (&Value::Null, &Value::Null));
        db.run("update graphile_worker._private_jobs set run_at = now()").await;
    }
    assert_queues_are_unlocked(&db).await;
}

#[tokio::test]
async fn a_handler_sets_the_delay_before_its_retry() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    run_once(&db, |_, _| async { Err::<(), _>(TaskError::retry_after(Duration::from_secs(500), "later")) }).await;
    let job = only_job(&db).await;
    assert_eq!((&job["delay"], &job["attempts"]), (&json!(500), &json!(1)));
}

#[tokio::test]
async fn a_backoff_that_panics_falls_back_to_the_default() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    options(&db)
        .define_task("t", |_: Value, _| async { Err::<(), _>("oops") })
        .task_options("t", TaskOptions::default().backoff(|_| panic!("no idea")))
        .init()
        .await
        .unwrap()
        .run_once()
        .await
        .unwrap();
    let job = only_job(&db).await;
    assert_eq!((&job["last_error"], &job["delay"], &job["locked_by"]), (&json!("oops"), &json!(3), &Value::Null));
}

#[tokio::test]
async fn a_permanent_error_uses_up_all_attempts() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    run_once(&db, |_, _| async { Err::<(), _>(TaskError::permanent("no such user")) }).await;
    let job = only_job(&db).await;
    assert_eq!(
        (&job["attempts"], &job["last_error"], &job["is_available"]),
        (&json!(25), &json!("no such user"), &json!(false))
    );
}

#[tokio::test]
async fn a_snoozed_job_waits_and_uses_no_attempt() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    run_once(&db, |_, _| async { TaskOutcome::Snooze(Duration::from_secs(300)) }).await;
    let snoozed = only_job(&db).await;
    assert_eq!(
        (&snoozed["delay"], &snoozed["attempts"], &snoozed["last_error"]),
        (&json!(300), &json!(0), &Value::Null)
    );
    db.run("update graphile_worker._private_jobs set run_at = now()").await;
    let until = "2031-01-01T00:00:00Z".parse().unwrap();
    run_once(&db, move |_, _| async move { Ok::<_, String>(TaskOutcome::SnoozeUntil(until)) }).await;
    assert_eq!(only_job(&db).await["run_at"], "2031-01-01T00:00:00+00:00");
}

#[tokio::test]
async fn an_infinite_delay_becomes_a_hundred_years_and_does_not_affect_other_outcomes() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 4) n").await;
    run_once(&db, |n, _| async move {
        match n.as_i64() {
            Some(1) => Ok(TaskOutcome::Snooze(Duration::MAX)),
            Some(2) => Ok(TaskOutcome::SnoozeUntil(chrono::DateTime::<chrono::Utc>::MAX_UTC)),
            Some(3) => Err(TaskError::retry_after(Duration::MAX, "no")),
            _ => Ok(TaskOutcome::Done),
        }
    })
    .await;
    let left = db.value("select json_agg(payload order by id) from graphile_worker._private_jobs where run_at > now() + interval '99 years' and locked_by is null").await;
    assert_eq!(left, json!([1, 2, 3]));
}

#[tokio::test]
async fn a_job_that_was_replaced_while_it_ran_does_not_run_again_after_a_snooze() {
    let db = Db::installed().await;
    db.add_job("'t', '1', job_key := 'k', max_attempts := 1").await;
    let ran = Arc::new(AtomicUsize::new(0));
    let runs = ran.clone();
    run_once(&db, move |n, ctx: WorkerContext| {
        runs.fetch_add(1, Ordering::SeqCst);
        async move {
            if n == json!(1) {
                let spec = JobSpec::builder().job_key("k").build();
                ctx.add_raw_job("t", 2, spec).await.unwrap();
                return TaskOutcome::Snooze(Duration::ZERO);
            }
            TaskOutcome::Done
        }
    })
    .await;
    assert_eq!(ran.load(Ordering::SeqCst), 2, "each payload once");
    assert_eq!(only_job(&db).await["is_available"], false);
}

#[tokio::test]
async fn work_and_completion_in_one_transaction_commit_together_or_not_at_all() {
    let db = Db::installed().await;
    db.run("create table done (id bigint)").await;
    db.add_job("'t'").await;
    run_once(&db, |_, ctx: WorkerContext| async move {
        let mut transaction = ctx.pg_pool().begin().await?;
        sqlx::query("insert into done values ($1)").bind(ctx.job().id).execute(&mut *transaction).await?;
        ctx.complete_in(transaction).await?;
        Ok::<(), TaskError>(())
    })
    .await;
    assert_eq!(db.value("select count(*) from done").await, 1);
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);

    db.add_job("'t', max_attempts := 1").await;
    run_once(&db, |_, ctx: WorkerContext| async move {
        let mut transaction = ctx.pg_pool().begin().await?;
        sqlx::query("insert into done values ($1)").bind(ctx.job().id).execute(&mut *transaction).await?;
        // Meanwhile an operator has unlocked the job.
        ctx.utils().force_unlock_workers(&[ctx.worker_id()]).await?;
        ctx.complete_in(transaction).await?;
        Ok::<(), TaskError>(())
    })
    .await;
    assert_eq!(db.value("select count(*) from done").await, 1, "the work was rolled back");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 1);
}

#[tokio::test]
async fn a_panic_fails_the_job_with_the_panic_message() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    db.add_job("'fine'").await;
    let worker = options(&db)
        .concurrency(1)
        .define_task("t", |_: Value, _| async {
            if true {
                panic!("it's {}", "broken")
            }
        })
        .define_task("fine", |_: Value, _| async {})
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(only_job(&db).await["last_error"], "panicked: it's broken", "and the slot ran the other job");
}

#[tokio::test]
async fn a_hook_that_panics_fails_its_job_and_the_slot_continues() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 3) n").await;
    let worker = options(&db)
        .concurrency(1)
        .on(graphile_worker::JobStart, |ctx| async move { assert_ne!(ctx.job.payload.get(), "1", "not this one") })
        .on(graphile_worker::JobSuccess, |_| async { panic!("never mind") })
        .define_task("t", |_: Value, _| async {})
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    let job = only_job(&db).await;
    assert_eq!(job["payload"], 1);
    assert!(job["last_error"].as_str().unwrap().starts_with("panicked: "), "{job}");
}

#[tokio::test]
async fn a_job_past_its_timeout_is_cancelled_and_fails() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let cancelled = Arc::new(Notify::new());
    let is_cancelled = cancelled.clone();
    let worker = options(&db)
        .define_task("t", move |_: Value, ctx: WorkerContext| {
            let is_cancelled = is_cancelled.clone();
            async move {
                ctx.cancellation_token().cancelled().await;
                is_cancelled.notify_one();
                std::future::pending::<()>().await;
            }
        })
        .task_options("t", TaskOptions::default().timeout(Duration::from_millis(20)))
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    cancelled.notified().await;
    assert_eq!(only_job(&db).await["last_error"], "timed out after 20ms");
}

#[tokio::test]
async fn a_payload_of_the_wrong_type_fails_the_job_with_the_reason() {
    let db = Db::installed().await;
    db.add_job("'greet', '{\"name\": 1}'").await;
    let (sender, _names) = mpsc::unbounded_channel::<String>();
    options(&db).define_job::<Greet>().add_extension(sender).init().await.unwrap().run_once().await.unwrap();
    let error = only_job(&db).await["last_error"].as_str().unwrap().to_owned();
    assert!(error.starts_with("the payload does not match the task's type: invalid type: integer `1`"), "{error}");
}

#[tokio::test]
async fn an_error_of_ten_megabytes_is_truncated() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    run_once(&db, |_, _| async { Err::<(), _>(format!("start \0 {} end", "x".repeat(10_000_000))) }).await;
    let error = only_job(&db).await["last_error"].as_str().unwrap().to_owned();
    assert!(error.len() < 100_000 && error.starts_with("start") && error.ends_with("end"), "{} bytes", error.len());
}

#[tokio::test]
async fn a_payload_of_fifty_megabytes_reaches_its_handler() {
    let db = Db::installed().await;
    let text = "x".repeat(50_000_000);
    utils(&db).add_raw_job("t", &text, JobSpec::default()).await.unwrap();
    let length = Arc::new(AtomicUsize::new(0));
    let seen = length.clone();
    run_once(&db, move |payload, _| {
        seen.store(payload.as_str().unwrap().len(), Ordering::SeqCst);
        async {}
    })
    .await;
    assert_eq!(length.load(Ordering::SeqCst), 50_000_000);
}

#[derive(Serialize, Deserialize)]
struct Item(i64);

impl BatchTaskHandler for Item {
    const IDENTIFIER: &'static str = "items";

    async fn run_batch(items: Vec<Item>, _ctx: WorkerContext) -> impl IntoBatchTaskHandlerResult {
        let answer = |Item(n): Item| if n % 2 == 0 { Ok(()) } else { Err(format!("{n} is odd")) };
        items.into_iter().map(answer).collect::<Vec<_>>()
    }
}

#[tokio::test]
async fn only_the_failed_items_of_a_batch_are_retried() {
    let db = Db::installed().await;
    let spec = || JobSpecBuilder::new().job_key("batch").build();
    utils(&db).add_batch_job(vec![Item(1), Item(2)], spec()).await.unwrap();
    utils(&db).add_batch_job(vec![Item(3), Item(4)], spec()).await.unwrap();
    options(&db).define_batch_job::<Item>().init().await.unwrap().run_once().await.unwrap();
    let job = only_job(&db).await;
    assert_eq!((&job["payload"], &job["attempts"]), (&json!([1, 3]), &json!(1)));
    assert_eq!(job["last_error"], "2 of 4 items failed, the first with: 1 is odd");
}
