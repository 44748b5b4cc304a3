//! The worker on a real database: what handlers can say, what becomes of their jobs, when it stops.

use crate::support::{Db, Log, Started, until};
use graphile_worker::{
    BatchTaskHandler, Error, IntoBatchTaskHandlerResult, IntoTaskHandlerResult, JobSpec, JobSpecBuilder, TaskError,
    TaskHandler, TaskOptions, TaskOutcome, WorkerContext, WorkerOptions, WorkerUtils,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// So long that a test which depends on polling would never end.
const NEVER: Duration = Duration::from_secs(3600);

fn options(db: &Db) -> WorkerOptions {
    WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .concurrency(4)
        .poll_interval(NEVER)
}

fn utils(db: &Db) -> WorkerUtils {
    WorkerUtils::new(db.pool.clone(), "graphile_worker")
}

async fn job(db: &Db) -> Value {
    db.row("select *, round(extract(epoch from run_at - now())) as waits from graphile_worker._private_jobs").await
}

/// Runs what there is with one task, `t`, that does what the function does.
async fn run_once<F, Fut, R>(db: &Db, function: F)
where
    F: Fn(Value, WorkerContext) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = R> + Send + 'static,
    R: IntoTaskHandlerResult,
{
    options(db).define_task("t", function).init().await.unwrap().run_once().await.unwrap();
}

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
        let job = job(&db).await;
        assert_eq!((job["attempts"].as_i64(), &job["last_error"]), (Some(attempt), &json!("no luck")));
        assert_eq!(job["waits"], seconds);
        assert_eq!((&job["locked_at"], &job["locked_by"]), (&Value::Null, &Value::Null));
        db.run("update graphile_worker._private_jobs set run_at = now()").await;
    }
    assert_eq!(db.value("select locked_by from graphile_worker._private_job_queues").await, Value::Null);
}

#[tokio::test]
async fn a_handler_says_when_to_try_again() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    run_once(&db, |_, _| async { Err::<(), _>(TaskError::retry_after(Duration::from_secs(500), "later")) }).await;
    let job = job(&db).await;
    assert_eq!((&job["waits"], &job["attempts"]), (&json!(500), &json!(1)));
}

#[tokio::test]
async fn a_handler_gives_up_for_good() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    run_once(&db, |_, _| async { Err::<(), _>(TaskError::permanent("no such user")) }).await;
    let job = job(&db).await;
    assert_eq!(
        (&job["attempts"], &job["last_error"], &job["is_available"]),
        (&json!(25), &json!("no such user"), &json!(false))
    );
}

#[tokio::test]
async fn a_snoozed_job_waits_and_keeps_its_attempt() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    run_once(&db, |_, _| async { TaskOutcome::Snooze(Duration::from_secs(300)) }).await;
    let snoozed = job(&db).await;
    assert_eq!(
        (&snoozed["waits"], &snoozed["attempts"], &snoozed["last_error"]),
        (&json!(300), &json!(0), &Value::Null)
    );
    db.run("update graphile_worker._private_jobs set run_at = now()").await;
    let until = "2031-01-01T00:00:00Z".parse().unwrap();
    run_once(&db, move |_, _| async move { Ok::<_, String>(TaskOutcome::SnoozeUntil(until)) }).await;
    assert_eq!(job(&db).await["run_at"], "2031-01-01T00:00:00+00:00");
}

#[tokio::test]
async fn work_and_completion_in_one_transaction_happen_both_or_neither() {
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
        // Meanwhile an operator has freed the job.
        ctx.utils().force_unlock_workers(&[ctx.worker_id()]).await?;
        ctx.complete_in(transaction).await?;
        Ok::<(), TaskError>(())
    })
    .await;
    assert_eq!(db.value("select count(*) from done").await, 1, "the work was rolled back");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 1);
}

#[tokio::test]
async fn a_panic_is_a_failure_with_its_message() {
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
    assert_eq!(job(&db).await["last_error"], "panicked: it's broken", "and the slot went on with the other job");
}

#[tokio::test]
async fn a_job_that_hangs_past_its_timeout_is_cancelled_and_has_failed() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let cancelled = Arc::new(Notify::new());
    let heard = cancelled.clone();
    let worker = options(&db)
        .define_task("t", move |_: Value, ctx: WorkerContext| {
            let heard = heard.clone();
            async move {
                ctx.cancellation_token().cancelled().await;
                heard.notify_one();
                std::future::pending::<()>().await;
            }
        })
        .task_options("t", TaskOptions::default().timeout(Duration::from_millis(20)))
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    cancelled.notified().await;
    assert_eq!(job(&db).await["last_error"], "timed out after 20ms");
}

#[tokio::test]
async fn a_payload_that_is_not_what_the_task_expects_is_a_failure_that_says_so() {
    let db = Db::installed().await;
    db.add_job("'greet', '{\"name\": 1}'").await;
    let (sender, _names) = mpsc::unbounded_channel::<String>();
    options(&db).define_job::<Greet>().add_extension(sender).init().await.unwrap().run_once().await.unwrap();
    let error = job(&db).await["last_error"].as_str().unwrap().to_owned();
    assert!(error.starts_with("the payload does not match the task's type: invalid type: integer `1`"), "{error}");
}

#[tokio::test]
async fn an_error_of_ten_megabytes_is_cut() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    run_once(&db, |_, _| async { Err::<(), _>(format!("start \0 {} end", "x".repeat(10_000_000))) }).await;
    let error = job(&db).await["last_error"].as_str().unwrap().to_owned();
    assert!(error.len() < 100_000 && error.starts_with("start") && error.ends_with("end"), "{} bytes", error.len());
}

#[tokio::test]
async fn a_payload_of_fifty_megabytes_arrives() {
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

#[tokio::test]
async fn a_worker_that_ran_small_jobs_fast_does_not_claim_all_the_large_ones_behind_them_at_once() {
    // Stored as they are, or compressed to a hundredth.
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

#[tokio::test]
async fn jobs_of_tasks_this_worker_does_not_know_are_left_alone() {
    let db = Db::installed().await;
    db.add_job("'unknown'").await;
    db.add_job("'unknown', queue_name := 'q'").await;
    db.add_job("'t', queue_name := 'q'").await;
    run_once(&db, |_, _| async {}).await;
    let left = db.rows("select task_identifier, attempts, locked_by from graphile_worker.jobs").await;
    assert_eq!(left, vec![json!({"task_identifier": "unknown", "attempts": 0, "locked_by": null}); 2]);
}

/// What was sent before the last sender was dropped.
async fn all_sent(mut receiver: mpsc::UnboundedReceiver<i64>) -> Vec<i64> {
    let mut all = Vec::new();
    while let Some(n) = receiver.recv().await {
        all.push(n);
    }
    all
}

/// The payloads of the jobs of task `t`, in the order in which they ran.
async fn order_of_one_run(db: &Db, concurrency: usize) -> Vec<i64> {
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
async fn jobs_of_one_moment_run_in_the_order_of_their_ids_wherever_their_rows_are() {
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
async fn thousands_of_queues_behind_a_locked_one_all_have_their_turn() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', '0', 'held') from generate_series(1, 3000);
         update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'somebody else';
         select graphile_worker.add_job('t', to_json(n), 'q' || n) from generate_series(1, 2500) as n",
    )
    .await;
    let mut seen = order_of_one_run(&db, 2).await;
    seen.sort_unstable();
    assert_eq!(seen, (1..=2500).collect::<Vec<_>>());
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 3000);
}

#[tokio::test]
async fn a_queue_runs_one_job_at_a_time_in_order_and_is_free_afterwards() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'q') from generate_series(1, 200) as n").await;
    let (sender, order) = mpsc::unbounded_channel();
    let busy = Arc::new(AtomicUsize::new(0));
    let worker = options(&db)
        .concurrency(8)
        .define_task("t", move |n: i64, _| {
            let (sender, busy) = (sender.clone(), busy.clone());
            async move {
                assert_eq!(busy.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                tokio::task::yield_now().await;
                sender.send(n).unwrap();
                busy.fetch_sub(1, Ordering::SeqCst);
            }
        })
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    drop(worker);
    let seen = all_sent(order).await;
    assert_eq!(seen, (1..=200).collect::<Vec<_>>());
    assert_eq!(db.value("select locked_by from graphile_worker._private_job_queues").await, Value::Null);
}

#[tokio::test]
async fn a_task_runs_no_more_often_at_once_than_it_may() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 60)").await;
    let (busy, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let seen = most.clone();
    let worker = options(&db)
        .concurrency(8)
        .define_task("t", move |_: Value, _| {
            let (busy, most) = (busy.clone(), most.clone());
            async move {
                most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                busy.fetch_sub(1, Ordering::SeqCst);
            }
        })
        .task_options("t", TaskOptions::default().max_concurrent(2))
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    assert!(seen.load(Ordering::SeqCst) <= 2);
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn jobs_with_forbidden_flags_wait() {
    for how in 0..3 {
        let db = Db::installed().await;
        db.run(
            "select graphile_worker.add_job('t', '1', flags := array['slow']);
             select graphile_worker.add_job('t', '2', 'q', flags := array['other', 'slow']);
             select graphile_worker.add_job('t', '3', flags := array['other']);
             select graphile_worker.add_job('t', '4', 'q')",
        )
        .await;
        let options = match how {
            0 => options(&db).forbidden_flags(["slow"]),
            1 => options(&db).forbidden_flags_fn(|| Some(vec!["slow".to_owned()])),
            _ => options(&db).forbidden_flags_async(|| async { Some(vec!["slow".to_owned()]) }),
        };
        options.define_task("t", |_: Value, _| async {}).init().await.unwrap().run_once().await.unwrap();
        let left = db.value("select json_agg(payload order by id) from graphile_worker._private_jobs").await;
        assert_eq!(left, json!([1, 2]));
    }
}

/// Runs jobs with these flags, with and without queues, and returns the flags of those that were left.
async fn left_by(options: impl Fn(WorkerOptions) -> WorkerOptions) -> Vec<String> {
    let kinds = ["null", "'{}'", "'{gpu}'", "'{disk}'", "'{gpu,disk}'", "'{gpu,eu}'", "'{eu}'"];
    let db = Db::installed().await;
    for flags in kinds {
        for queue in ["null", "'q'"] {
            db.run(&format!("select graphile_worker.add_job('t', '1', {queue}, flags := {flags}::text[])")).await;
        }
    }
    let t = |options: WorkerOptions| options.define_task("t", |_: Value, _| async {});
    t(options(self::options(&db))).init().await.unwrap().run_once().await.unwrap();
    let left = "select coalesce(string_agg(flag, '+' order by flag), 'none') as flags
        from graphile_worker._private_jobs as jobs
        left join lateral jsonb_object_keys(jobs.flags) as flag on true group by jobs.id";
    let left = db.rows(&format!("select flags, count(*) as jobs from ({left}) as j group by 1 order by 1")).await;
    // A job without flags, by null or by an empty array, is there twice as often.
    for row in &left {
        assert_eq!(row["jobs"], if row["flags"] == "none" { 4 } else { 2 }, "a queue makes no difference: {left:?}");
    }
    left.iter().map(|row| row["flags"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn jobs_without_an_accepted_flag_wait() {
    let gpu = || vec!["gpu".to_owned()];
    let others = ["disk", "eu", "none"];
    assert_eq!(left_by(|options| options.accepted_flags(["gpu"])).await, others);
    assert_eq!(left_by(|options| options.add_accepted_flag("gpu")).await, others);
    assert_eq!(left_by(|options| options.accepted_flags_fn(move || Some(gpu()))).await, others);
    assert_eq!(left_by(|options| options.accepted_flags_async(move || async move { Some(gpu()) })).await, others);
    // A limited task is claimed in another way.
    let limited = TaskOptions::default().max_concurrent(2);
    assert_eq!(left_by(|options| options.accepted_flags(["gpu"]).task_options("t", limited.clone())).await, others);
    // One of several is enough; a forbidden flag has the last word.
    assert_eq!(left_by(|options| options.accepted_flags(["gpu", "disk"])).await, ["eu", "none"]);
    assert_eq!(
        left_by(|options| options.add_accepted_flag("gpu").add_accepted_flag("disk").add_forbidden_flag("eu")).await,
        ["eu", "eu+gpu", "none"]
    );
    assert!(left_by(|options| options.accepted_flags(Vec::<String>::new())).await.is_empty());
    assert!(left_by(|options| options.accepted_flags_fn(|| None)).await.is_empty());
}

#[tokio::test]
async fn jobs_with_a_flag_that_is_not_in_the_allowlist_wait() {
    assert_eq!(left_by(|options| options.job_flag_allowlist(["gpu", "disk"])).await, ["eu", "eu+gpu"]);
    let limited = TaskOptions::default().max_concurrent(2);
    let both = |options: WorkerOptions| options.job_flag_allowlist(["gpu", "eu"]).accepted_flags(["gpu", "disk"]);
    assert_eq!(left_by(both).await, ["disk", "disk+gpu", "eu", "none"]);
    assert_eq!(
        left_by(|options| both(options).task_options("t", limited.clone())).await,
        ["disk", "disk+gpu", "eu", "none"]
    );
    let none: [&str; 0] = [];
    assert_eq!(left_by(|options| options.job_flag_allowlist(none)).await, ["disk", "disk+gpu", "eu", "eu+gpu", "gpu"]);
    assert_eq!(
        left_by(|options| options.job_flag_allowlist(["gpu", "eu"]).add_forbidden_flag("eu")).await,
        ["disk", "disk+gpu", "eu", "eu+gpu"]
    );
}

#[tokio::test]
async fn flags_that_are_no_object_do_not_stop_a_worker() {
    let db = Db::installed().await;
    for flags in ["'[\"gpu\"]'", "'\"gpu\"'", "'7'", "'null'"] {
        db.run(&format!("select graphile_worker.add_job('t'); update graphile_worker._private_jobs set flags = {flags} where flags is null"))
            .await;
    }
    db.run("select graphile_worker.add_job('t', flags := '{gpu}')").await;
    let options = options(&db).job_flag_allowlist(["gpu"]).define_task("t", |_: Value, _| async {});
    options.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 4);
}

#[tokio::test]
async fn a_running_worker_leaves_jobs_without_an_accepted_flag_to_others() {
    let db = Db::installed().await;
    let (ran, mut runs) = mpsc::unbounded_channel();
    let worker = |name: &'static str, options: WorkerOptions| {
        let ran = ran.clone();
        Started::new(options.define_task("t", move |n: i64, _| {
            let ran = ran.clone();
            async move { ran.send((name, n)).unwrap() }
        }))
    };
    let gpu = worker("gpu", options(&db).accepted_flags(["gpu"])).await;
    let rest = worker("rest", options(&db).forbidden_flags(["gpu"])).await;
    // Enough for both lanes.
    db.run("select graphile_worker.add_job('t', to_json(n), flags := case when n % 2 = 0 then '{gpu}'::text[] end) from generate_series(1, 2000) n")
        .await;
    for _ in 0..2000 {
        let (name, n) = runs.recv().await.unwrap();
        assert_eq!(name, if n % 2 == 0 { "gpu" } else { "rest" }, "job {n}");
    }
    gpu.stop().await;
    rest.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

#[tokio::test]
async fn flags_with_which_no_job_could_run_are_refused() {
    let db = Db::installed().await;
    let refused = async |options: WorkerOptions| options.init().await.expect_err("an error").to_string();
    assert_eq!(
        refused(options(&db).accepted_flags(["gpu"]).job_flag_allowlist(["eu"])).await,
        "accepted_flags [\"gpu\"] match no job: none of them is in job_flag_allowlist [\"eu\"]"
    );
    assert_eq!(
        refused(options(&db).accepted_flags(["gpu"]).forbidden_flags(["gpu", "eu"])).await,
        "accepted_flags [\"gpu\"] match no job: all of them are in forbidden_flags"
    );
    for fine in [
        options(&db).accepted_flags(["gpu", "eu"]).job_flag_allowlist(["eu"]),
        options(&db).accepted_flags(["gpu", "eu"]).forbidden_flags(["eu"]),
        options(&db).job_flag_allowlist(Vec::<String>::new()).forbidden_flags(["eu"]),
    ] {
        fine.init().await.unwrap();
    }
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
async fn only_the_failed_items_of_a_batch_are_tried_again() {
    let db = Db::installed().await;
    let spec = || JobSpecBuilder::new().job_key("batch").build();
    utils(&db).add_batch_job(vec![Item(1), Item(2)], spec()).await.unwrap();
    utils(&db).add_batch_job(vec![Item(3), Item(4)], spec()).await.unwrap();
    options(&db).define_batch_job::<Item>().init().await.unwrap().run_once().await.unwrap();
    let job = job(&db).await;
    assert_eq!((&job["payload"], &job["attempts"]), (&json!([1, 3]), &json!(1)));
    assert_eq!(job["last_error"], "2 of 4 items failed, the first with: 1 is odd");
}

/// A task `t` that sends its payload.
fn sending(db: &Db) -> (WorkerOptions, mpsc::UnboundedReceiver<i64>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let options = options(db).define_task("t", move |n: i64, _| {
        let _ = sender.send(n);
        async {}
    });
    (options, receiver)
}

#[tokio::test]
async fn a_new_job_wakes_an_idle_worker() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    for n in 1..=3 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n));
    }
    started.stop().await;
}

#[tokio::test]
async fn an_idle_worker_wakes_when_a_job_of_the_future_is_due() {
    let db = Db::installed().await;
    db.add_job("'t', '1', run_at := now() + interval '300 milliseconds'").await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    assert_eq!(ran.recv().await, Some(1));
    db.add_job("'t', '2', run_at := now() + interval '300 milliseconds', queue_name := 'q'").await;
    assert_eq!(ran.recv().await, Some(2));
    started.stop().await;
}

/// A server may log every statement: an idle worker must not fill its disk.
#[tokio::test]
async fn an_idle_worker_polls_with_a_short_statement_and_claims_only_what_is_due() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options.poll_interval(Duration::from_millis(10))).await;
    let last_statement = format!(
        "select query from pg_stat_activity
         where datname = current_database() and application_name = 'graphile_worker {}'",
        started.worker.worker_id()
    );
    let polls = async || {
        until("it polls", async || {
            let statements = db.rows(&last_statement).await;
            let statement = statements.first()?["query"].as_str()?.to_owned();
            (statement.contains("priorities") && !statement.contains("contended")).then_some(statement)
        })
        .await
    };
    let statement = polls().await;
    assert!(statement.len() < 1200, "{} bytes: {statement}", statement.len());
    for (n, run_at) in [(1, "now()"), (2, "'-infinity'"), (3, "now() + interval '30 milliseconds'")] {
        polls().await;
        // Without a notification.
        db.run(&format!(
            "insert into graphile_worker._private_jobs (task_id, payload, run_at)
             select id, to_json({n}), {run_at} from graphile_worker._private_tasks where identifier = 't'"
        ))
        .await;
        assert_eq!(ran.recv().await, Some(n), "{run_at}");
    }
    db.run("insert into graphile_worker._private_jobs (task_id, run_at) select id, 'infinity' from graphile_worker._private_tasks")
        .await;
    polls().await;
    started.stop().await;
}

async fn until_worker_listens(db: &Db) {
    let listens = "select count(*) from pg_stat_activity where datname = current_database() and query like 'LISTEN%'";
    while db.value(listens).await == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_listening_connection_that_was_killed_is_replaced() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    for n in 1..=3 {
        let listens =
            "select count(*) from pg_stat_activity where datname = current_database() and query like 'LISTEN%'";
        while db.value(listens).await == 0 {
            tokio::task::yield_now().await;
        }
        db.run("select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and query like 'LISTEN%'").await;
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n));
    }
    started.stop().await;
}

#[tokio::test]
async fn an_exchange_whose_connection_was_killed_loses_nothing() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 3000) as n").await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    let kill = format!(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity
         where datname = current_database() and application_name like 'graphile_worker {}%'",
        started.worker.worker_id()
    );
    let mut killed = 0;
    let mut seen = std::collections::HashSet::new();
    for received in 1..=3000 {
        assert!(seen.insert(ran.recv().await.unwrap()), "no job ran twice");
        if received % 500 == 0 {
            killed += db.value(&kill).await.as_i64().unwrap();
        }
    }
    assert!(killed > 0, "no connection was killed");
    started.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_job_whose_row_somebody_holds_does_not_keep_others_from_being_reported() {
    let db = Db::installed().await;
    db.add_job("'t', '{\"waits\": true}', queue_name := 'q'").await;
    let (began, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let told = (began.clone(), go.clone());
    let task = move |payload: Value, _| {
        let (began, go) = told.clone();
        async move {
            if payload["waits"] == true {
                began.notify_one();
                go.notified().await;
            }
        }
    };
    let started = Started::new(options(&db).define_task("t", task)).await;
    began.notified().await;
    let mut blocker = db.connect().await;
    sqlx::raw_sql("begin; select from graphile_worker._private_jobs for update").execute(&mut blocker).await.unwrap();
    go.notify_one();
    for job in ["'t'", "'t'", "'t', queue_name := 'q'"] {
        db.add_job(job).await;
    }
    let left = async || {
        db.rows("select queue_name, locked_by is not null as locked from graphile_worker.jobs order by id").await
    };
    let only_those_of_the_queue =
        [json!({"queue_name": "q", "locked": true}), json!({"queue_name": "q", "locked": false})];
    until("the others are reported", async || Some(left().await).filter(|left| *left == only_those_of_the_queue)).await;
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    until("the queue goes on", async || Some(left().await).filter(Vec::is_empty)).await;
    started.stop().await;
    assert_eq!(
        db.value("select count(*) from graphile_worker._private_job_queues where locked_by is not null").await,
        0
    );
}

#[tokio::test]
async fn an_open_transaction_that_adds_a_task_delays_no_other_task() {
    let db = Db::installed().await;
    let mut blocker = db.connect().await;
    sqlx::raw_sql("begin; select graphile_worker.add_job('t', '7')").execute(&mut blocker).await.unwrap();
    let (options, mut sent) = sending(&db);
    let others = Arc::new(Notify::new());
    let other = others.clone();
    let options = options.define_task("other", move |_: Value, _| {
        other.notify_one();
        async {}
    });
    let started = Started::new(options).await;
    db.add_job("'other'").await;
    others.notified().await;
    sqlx::raw_sql("commit").execute(&mut blocker).await.unwrap();
    assert_eq!(sent.recv().await, Some(7));
    started.stop().await;
}

#[tokio::test]
async fn an_open_transaction_that_adds_a_task_again_delays_no_other_task() {
    let db = Db::installed().await;
    let (options, mut sent) = sending(&db);
    let started = Started::new(options.define_task("rare", |_: Value, _| async {})).await;
    db.add_job("'t', '1'").await;
    assert_eq!(sent.recv().await, Some(1));
    // The name has no jobs, and is deleted; somebody is about to add it again.
    let mut blocker = db.connect().await;
    sqlx::raw_sql(
        "delete from graphile_worker._private_tasks where identifier = 'rare'; notify \"worker:tasks\", 'graphile_worker';
         begin; select graphile_worker.add_job('rare')",
    )
    .execute(&mut blocker)
    .await
    .unwrap();
    for n in 2..6 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(sent.recv().await, Some(n));
    }
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    started.stop().await;
}

#[tokio::test]
async fn a_worker_that_stops_waits_for_rows_that_somebody_holds() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let mut blocker = db.connect().await;
    let (began, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let told = (began.clone(), go.clone());
    let task = move |_: Value, _| {
        let (began, go) = told.clone();
        async move {
            began.notify_one();
            go.notified().await;
        }
    };
    let (log, _guard) = Log::start();
    let started = Started::new(options(&db).define_task("t", task)).await;
    began.notified().await;
    sqlx::raw_sql("begin; select from graphile_worker._private_jobs for update").execute(&mut blocker).await.unwrap();
    go.notify_one();
    until("the worker says so", async || log.line("their outcomes are recorded when it ends")).await;
    started.worker.request_shutdown();
    until("it is leaving", async || log.line("waiting for running jobs to finish")).await;
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    started.running.await.unwrap().unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

#[tokio::test]
async fn tasks_that_exhaust_the_pool_do_not_keep_jobs_from_being_settled() {
    let db = Db::installed().await;
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_with(db.options()).await.unwrap();
    let release = Arc::new(Notify::new());
    let released = release.clone();
    let options = WorkerOptions::default()
        .pg_pool(pool)
        .listen_os_shutdown_signals(false)
        .concurrency(2)
        .define_task("hog", move |_: Value, ctx: WorkerContext| {
            let released = released.clone();
            async move {
                let _connection = ctx.pg_pool().acquire().await.unwrap();
                released.notified().await;
            }
        })
        .define_task("quick", |_: Value, _| async {});
    let started = Started::new(options).await;
    db.add_job("'hog'").await;
    while db.value("select count(*) from graphile_worker.jobs where locked_by is not null").await == 0 {
        tokio::task::yield_now().await;
    }
    db.add_job("'quick'").await;
    while db.value("select count(*) from graphile_worker.jobs").await == 2 {
        tokio::task::yield_now().await;
    }
    release.notify_one();
    started.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_worker_that_stops_lets_jobs_finish_and_gives_back_what_has_not_begun() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', to_json(n), case when n > 3 then 'q' end) from generate_series(1, 6) n",
    )
    .await;
    let (begun, mut begins) = mpsc::unbounded_channel();
    let options = options(&db).concurrency(2).define_task("t", move |n: i64, ctx: WorkerContext| {
        let begun = begun.clone();
        async move {
            begun.send(n).unwrap();
            ctx.cancellation_token().cancelled().await;
        }
    });
    let started = Started::new(options).await;
    begins.recv().await.unwrap();
    begins.recv().await.unwrap();
    started.stop().await;
    let left = db.rows("select id, attempts, locked_by, last_error from graphile_worker.jobs order by id").await;
    let untouched = |id: i64| json!({"id": id, "attempts": 0, "locked_by": null, "last_error": null});
    assert_eq!(left, (3..=6).map(untouched).collect::<Vec<_>>());
    assert_eq!(db.value("select locked_by from graphile_worker._private_job_queues").await, Value::Null);
}

#[tokio::test]
async fn what_does_not_finish_in_time_is_handed_back_to_run_later() {
    for insist in [false, true] {
        let db = Db::installed().await;
        db.add_job("'t', queue_name := 'q'").await;
        let begun = Arc::new(Notify::new());
        let begins = begun.clone();
        let grace = if insist { NEVER } else { Duration::from_millis(50) };
        let options = options(&db)
            .shutdown_grace_period(grace)
            .interrupted_job_retry_delay(Duration::from_secs(100))
            .define_task("t", move |_: Value, _| {
                begins.notify_one();
                std::future::pending::<()>()
            });
        let started = Started::new(options).await;
        begun.notified().await;
        if insist {
            started.worker.request_shutdown();
        }
        started.stop().await;
        let job = job(&db).await;
        assert_eq!((&job["attempts"], &job["waits"], &job["locked_by"]), (&json!(0), &json!(100), &Value::Null));
        assert_eq!(job["last_error"], "the worker was shut down before the job finished");
        assert_eq!(db.value("select locked_by from graphile_worker._private_job_queues").await, Value::Null);
    }
}

#[tokio::test]
async fn a_worker_stops_when_its_own_future_says_so() {
    let db = Db::installed().await;
    let stop = Arc::new(Notify::new());
    let stopped = stop.clone();
    let options = options(&db).shutdown_signal(async move { stopped.notified().await });
    let started = Started::new(options.define_task("t", |_: Value, _| async {})).await;
    stop.notify_one();
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_worker_leaves_when_a_breaking_migration_is_announced() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    db.add_job("'t', '1'").await;
    ran.recv().await.unwrap();
    until_worker_listens(&db).await;
    db.run("select pg_notify('worker:migrate', '{\"migrationNumber\":21,\"breaking\":false}')").await;
    db.add_job("'t', '2'").await;
    ran.recv().await.unwrap();
    // As Node does it: the entry and the announcement in one transaction.
    db.run(
        "begin;
         insert into graphile_worker.migrations (id, breaking) values (22, true);
         select pg_notify('worker:migrate', '{\"migrationNumber\":22,\"breaking\":true}');
         commit",
    )
    .await;
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_worker_leaves_when_a_breaking_migration_is_recorded_only_after_it_is_announced() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    db.run("select pg_notify('worker:migrate', '{\"migrationNumber\":22,\"breaking\":true}')").await;
    db.add_job("'t', '1'").await;
    assert_eq!(ran.recv().await, Some(1), "nothing is recorded yet");
    db.run("insert into graphile_worker.migrations (id, breaking) values (22, true)").await;
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_worker_leaves_when_a_newer_release_waits_to_apply_a_breaking_migration_of_nodes() {
    let db = Db::installed().await;
    let (options, _ran) = sending(&db);
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    db.run(
        "insert into graphile_worker._rs_additions (id, breaking, ts, wanted_until)
           values (-21, true, now() + interval '1 minute', now() + interval '1 minute');
         select pg_notify('worker:migrate', '{\"migrationNumber\":21,\"breaking\":true,\"schema\":\"graphile_worker\"}')",
    )
    .await;
    let worker = started.worker.clone();
    started.running.await.unwrap().unwrap();
    assert!(worker.exit_reason().is_some_and(|why| why.contains("(step 21 of Node's graphile-worker")));
}

#[tokio::test]
async fn forged_announcements_do_not_stop_a_worker() {
    let db = Db::installed().await;
    let role = db.value("select 'forger_' || current_database()").await.as_str().unwrap().to_owned();
    db.run(&format!("drop role if exists {role}; create role {role} login")).await;
    let mut forger = db.connect_as(&role).await;
    assert!(sqlx::query("select from graphile_worker.jobs").execute(&mut forger).await.is_err(), "it has no rights");
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    let forged = [
        r#"{"migrationNumber":21,"breaking":true}"#,
        r#"{"migrationNumber":2147483647,"breaking":true,"schema":"graphile_worker"}"#,
        r#"{"breaking":true}"#,
        r#"{"breaking":false,"schema":"graphile_worker","addition":2147483647,"waits":0}"#,
        r#"{"addition":-21,"waits":1e308}"#,
        r#"{"breaking":"yes"}"#,
        "[]",
        "null",
        "breaking",
        "",
    ];
    for (n, message) in forged.into_iter().enumerate() {
        sqlx::query("select pg_notify('worker:migrate', $1)").bind(message).execute(&mut forger).await.unwrap();
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n as i64), "after {message}");
    }
    assert_eq!(started.worker.exit_reason(), None);
    started.stop().await;
    drop(forger);
    db.run(&format!("drop role {role}")).await;
}

#[tokio::test]
async fn a_worker_that_did_not_hear_of_a_breaking_migration_finds_it_when_it_listens_again() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options).await;
    db.add_job("'t', '1'").await;
    ran.recv().await.unwrap();
    until_worker_listens(&db).await;
    db.run(
        "insert into graphile_worker.migrations (id, breaking) values (21, true);
         select pg_terminate_backend(pid) from pg_stat_activity
         where datname = current_database() and query like 'LISTEN%'",
    )
    .await;
    started.running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_worker_whose_schema_is_gone_ends_with_a_sentence() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options.poll_interval(Duration::from_millis(50))).await;
    db.add_job("'t', '1'").await;
    ran.recv().await.unwrap();
    // The worker polls meanwhile, and one of the two may have to give way.
    while sqlx::raw_sql("drop schema graphile_worker cascade").execute(&db.pool).await.is_err() {}
    let error = started.running.await.unwrap().unwrap_err();
    let sentences = [
        "could not exchange jobs with the database",
        "could not look up the tasks",
        "could not look up the jobs and queues of this worker",
    ];
    assert!(sentences.contains(&&*error.to_string()), "{error}");
}

#[tokio::test]
async fn a_job_that_runs_for_hours_keeps_its_lock_and_its_queues_fresh_and_is_completed() {
    for in_transaction in [false, true] {
        let db = Db::installed().await;
        let (started_running, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (runs, ends) = (started_running.clone(), end.clone());
        let options = options(&db).keep_locks_fresh_after(Duration::from_millis(20));
        let started = Started::new(options.define_task("t", move |_: Value, ctx: WorkerContext| {
            let (runs, ends) = (runs.clone(), ends.clone());
            async move {
                runs.notify_one();
                ends.notified().await;
                if in_transaction {
                    ctx.complete_in(ctx.pg_pool().begin().await.unwrap()).await.unwrap();
                }
            }
        }))
        .await;
        db.add_job("'t', '1', 'q'").await;
        started_running.notified().await;
        // Long ago, but not so long that the worker's first look for stale locks would find it.
        db.run(
            "update graphile_worker._private_jobs set locked_at = locked_at - interval '3 hours';
             update graphile_worker._private_job_queues set locked_at = locked_at - interval '3 hours'",
        )
        .await;
        let fresh = "select (select locked_at > now() - interval '1 hour' from graphile_worker._private_jobs)
                       and (select locked_at > now() - interval '1 hour' from graphile_worker._private_job_queues)";
        while db.value(fresh).await != true {}
        end.notify_one();
        while db.value("select count(*) from graphile_worker.jobs").await != 0 {}
        started.stop().await;
    }
}

#[tokio::test]
async fn locks_of_workers_that_died_hours_ago_are_freed() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', '1', 'q');
         update graphile_worker._private_jobs set locked_at = now() - interval '5 hours', locked_by = 'dead', attempts = 1;
         update graphile_worker._private_job_queues set locked_at = now() - interval '5 hours', locked_by = 'dead'",
    )
    .await;
    let (options, mut ran) = sending(&db);
    let started = Started::new(options.poll_interval(Duration::from_millis(100))).await;
    assert_eq!(ran.recv().await, Some(1));
    started.stop().await;
}

#[tokio::test]
async fn a_worker_that_cannot_listen_or_prepare_works_all_the_same() {
    let db = Db::installed().await;
    let (options, mut ran) = sending(&db);
    let options =
        options.use_notifications(false).use_prepared_statements(false).poll_interval(Duration::from_millis(20));
    let started = Started::new(options).await;
    for n in 1..=20 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n));
    }
    started.stop().await;
}

#[tokio::test]
async fn wrong_settings_are_errors_with_a_sentence() {
    let db = Db::empty().await;
    let t = |options: WorkerOptions| options.define_task("t", |_: Value, _| async {});
    for (options, message) in [
        (options(&db).concurrency(0), "concurrency is 0, must be at least 1"),
        (options(&db).poll_interval(Duration::ZERO), "poll_interval is zero, must be greater than zero"),
        (options(&db).schema(""), "the schema name \"\" is empty"),
        (t(t(options(&db))), "the task \"t\" is defined twice: define each task once"),
        (
            t(options(&db)).task_options("u", TaskOptions::default()),
            "task_options names \"u\", which is not a defined task",
        ),
    ] {
        assert_eq!(options.init().await.err().unwrap().to_string(), message);
    }
}

#[tokio::test]
async fn a_hook_that_panics_fails_the_job_and_not_the_slot() {
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
    let job = job(&db).await;
    assert_eq!(job["payload"], 1);
    assert!(job["last_error"].as_str().unwrap().starts_with("panicked: "), "{job}");
}

#[tokio::test]
async fn a_worker_told_to_stop_while_the_database_does_not_answer_writes_what_it_can_afterwards() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 8) n").await;
    let (begun, mut begins) = mpsc::unbounded_channel();
    let finish = Arc::new(Notify::new());
    let finished = finish.clone();
    let options = options(&db).concurrency(4).shutdown_grace_period(Duration::from_millis(300)).define_task(
        "t",
        move |n: i64, _| {
            let (begun, finished) = (begun.clone(), finished.clone());
            async move {
                begun.send(n).unwrap();
                finished.notified().await;
            }
        },
    );
    let started = Started::new(options).await;
    for _ in 0..4 {
        begins.recv().await.unwrap();
    }
    // Nobody can write: the report of the job that now ends has to wait, and the grace period with it.
    let mut lock = db.connect().await;
    sqlx::raw_sql("begin; lock table graphile_worker._private_jobs in access exclusive mode")
        .execute(&mut lock)
        .await
        .unwrap();
    finish.notify_one();
    let waits = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    while db.value(waits).await == 0 {
        tokio::task::yield_now().await;
    }
    started.worker.request_shutdown();
    tokio::time::sleep(Duration::from_millis(600)).await;
    sqlx::raw_sql("rollback").execute(&mut lock).await.unwrap();
    started.stop().await;
    let left = db.rows("select attempts, locked_by from graphile_worker.jobs").await;
    assert_eq!(left, vec![json!({"attempts": 0, "locked_by": null}); 7], "one is done, the others are handed back");
}

#[tokio::test]
async fn a_job_whose_time_is_infinite_harms_nobody() {
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
async fn a_wait_without_end_is_a_hundred_years_and_spoils_nothing_for_others() {
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
async fn a_task_at_its_limit_does_not_keep_others_waiting() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('slow') from generate_series(1, 50)").await;
    db.run("select graphile_worker.add_job('slow', queue_name := 'q' || n) from generate_series(1, 50) n").await;
    db.add_job("'t', '1'").await;
    let (options, mut ran) = sending(&db);
    let options = options
        .define_task("slow", |_: Value, _| std::future::pending::<()>())
        .task_options("slow", TaskOptions::default().max_concurrent(1))
        .shutdown_grace_period(Duration::ZERO);
    let started = Started::new(options).await;
    assert_eq!(ran.recv().await, Some(1));
    assert_eq!(
        db.value("select count(*) from graphile_worker.jobs where attempts > 0 and task_identifier = 'slow'").await,
        1,
        "and none is hoarded"
    );
    started.stop().await;
}

#[tokio::test]
async fn a_running_job_that_was_replaced_does_not_come_back_by_a_refund() {
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
    assert_eq!(ran.load(Ordering::SeqCst), 2, "each once");
    assert_eq!(job(&db).await["is_available"], false);
}

#[tokio::test]
async fn jobs_of_a_queue_that_were_given_back_keep_their_order() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'q') from generate_series(1, 12) n").await;
    let (sender, order) = mpsc::unbounded_channel();
    let worker = options(&db)
        .define_task("t", move |n: i64, _| {
            sender.send(n).unwrap();
            // Longer than a claimed job may wait in hand.
            async move { tokio::time::sleep(Duration::from_millis(if n == 1 { 1700 } else { 0 })).await }
        })
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    drop(worker);
    assert_eq!(all_sent(order).await, (1..=12).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_job_that_becomes_due_while_another_runs_is_started_in_time() {
    let db = Db::installed().await;
    db.add_job("'for_ever'").await;
    db.add_job("'t', '1', run_at := now() + interval '500 milliseconds'").await;
    let (options, mut ran) = sending(&db);
    let options = options
        .define_task("for_ever", |_: Value, _| std::future::pending::<()>())
        .use_notifications(false)
        .shutdown_grace_period(Duration::ZERO);
    let started = Started::new(options).await;
    assert_eq!(ran.recv().await, Some(1));
    started.stop().await;
}

#[tokio::test]
async fn a_backoff_that_panics_leaves_the_standard_one() {
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
    let job = job(&db).await;
    assert_eq!((&job["last_error"], &job["waits"], &job["locked_by"]), (&json!("oops"), &json!(3), &Value::Null));
}

#[tokio::test]
async fn a_function_for_flags_that_hangs_or_panics_does_not_hold_the_worker() {
    let db = Db::installed().await;
    let (options, _ran) = sending(&db);
    Started::new(options.forbidden_flags_async(std::future::pending)).await.stop().await;
    let (options, _ran) = sending(&db);
    let started = Started::new(options.forbidden_flags_fn(|| panic!("no idea"))).await;
    assert!(matches!(started.running.await.unwrap().unwrap_err(), Error::ForbiddenFlagsPanicked));
    let (options, _ran) = sending(&db);
    let started = Started::new(options.accepted_flags_fn(|| panic!("no idea"))).await;
    assert!(matches!(started.running.await.unwrap().unwrap_err(), Error::AcceptedFlagsPanicked));
}
