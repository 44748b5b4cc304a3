//! Repeatable tasks: their jobs run before their claim is written, while a transaction keeps their rows locked.

use crate::support::{Db, Started, claim, until};
use crate::worker_support::{Held, NEVER, options, until_no_jobs, until_true, until_worker_listens, utils};
use graphile_worker::{
    JobComplete, JobEventContext, JobFilter, JobSpec, JobState, RawJobSpec, RescheduleJobOptions, TaskError,
    TaskOptions, TaskOutcome, WorkerContext, WorkerOptions,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;

fn repeatable() -> TaskOptions {
    TaskOptions::default().repeatable(true)
}

/// A worker with a repeatable task `t`, whose jobs run in batches, however few are due.
fn with_t<F, Fut, R>(db: &Db, function: F) -> WorkerOptions
where
    F: Fn(Value, WorkerContext) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = R> + Send + 'static,
    R: graphile_worker::IntoTaskHandlerResult,
{
    with_t_in_batches_under_load(db, function).longest_batch(Duration::from_millis(50))
}

fn with_t_in_batches_under_load<F, Fut, R>(db: &Db, function: F) -> WorkerOptions
where
    F: Fn(Value, WorkerContext) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = R> + Send + 'static,
    R: graphile_worker::IntoTaskHandlerResult,
{
    options(db).define_task("t", function).task_options("t", repeatable())
}

/// Batches end only with their jobs, however slow the machine is.
fn in_long_batches(options: WorkerOptions) -> WorkerOptions {
    options.longest_batch(NEVER)
}

async fn run_once(options: WorkerOptions) {
    options.init().await.unwrap().run_once().await.unwrap();
}

/// A worker whose repeatable task `t` runs until it is released.
async fn held(db: &Db) -> (Started, Held) {
    let held = Held::default();
    let handler = held.clone();
    let started = Started::new(with_t(db, move |_, _| handler.clone().run())).await;
    (started, held)
}

/// The sessions of deferred lanes.
const LANES: &str = "from pg_stat_activity where datname = current_database()
                       and application_name like 'graphile\\_worker % deferred _'";

/// What the only row shows of a claim.
async fn claim_of_only_job(db: &Db) -> Value {
    db.row("select attempts, locked_by is not null as locked from graphile_worker._private_jobs").await
}

async fn until_claim_is_written(db: &Db) {
    until_true("the claim is written", db, "select locked_by is not null from graphile_worker._private_jobs").await;
}

#[tokio::test]
async fn a_short_job_runs_without_a_written_claim() {
    let db = Db::installed().await;
    db.add_job("'t', '{\"n\": 1}'").await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    let lane =
        "select application_name from pg_stat_activity where datname = current_database() and backend_xid is not null
                  and state = 'idle in transaction'";
    run_once(in_long_batches(with_t(&db, move |payload, ctx| {
        let sender = sender.clone();
        async move {
            // The row as others see it while the job runs, and what the job itself sees.
            let query = "select to_json(jobs) from graphile_worker._private_jobs as jobs";
            let row: Value = sqlx::query_scalar(query).fetch_one(ctx.pg_pool()).await.unwrap();
            let lane: String = sqlx::query_scalar(lane).fetch_one(ctx.pg_pool()).await.unwrap();
            let job = ctx.job().clone();
            sender.send((payload, row, lane, job, ctx.worker_id().to_owned())).unwrap();
        }
    })))
    .await;
    let (payload, row, lane, job, worker_id) = seen.recv().await.unwrap();
    assert_eq!(payload, json!({"n": 1}));
    assert_eq!((&row["attempts"], &row["locked_by"], &row["locked_at"]), (&json!(0), &Value::Null, &Value::Null));
    assert!(lane.starts_with(&format!("graphile_worker {worker_id} deferred ")), "{lane}");
    assert_eq!(job.attempts, 1);
    assert!(job.locked_at.is_some_and(|at| at >= job.created_at));
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

#[tokio::test]
async fn the_claim_of_a_lone_job_is_written_and_a_backlog_runs_in_batches() {
    let db = Db::installed().await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    let worker = with_t_in_batches_under_load(&db, move |payload, ctx| {
        let sender = sender.clone();
        async move {
            // What others see while the job runs.
            let query = "select locked_by is not null from graphile_worker._private_jobs where id = $1";
            let is_seen = payload == json!("look");
            let query = sqlx::query_scalar(query).bind(ctx.job().id);
            let written: Option<bool> =
                if is_seen { Some(query.fetch_one(ctx.pg_pool()).await.unwrap()) } else { None };
            sender.send((payload, written)).unwrap();
        }
    });
    let started = Started::new(worker).await;
    until_worker_listens(&db).await;
    db.add_job("'t', '\"look\"'").await;
    assert_eq!(seen.recv().await, Some((json!("look"), Some(true))));
    until_no_jobs(&db).await;
    assert_eq!(db.value(&format!("select count(*) {LANES}")).await, 0, "the lanes have not connected");
    // Jobs are added until one of them sees that it runs in a batch.
    let mut count = 0;
    let mut in_a_batch = false;
    while !in_a_batch {
        db.run(
            "select graphile_worker.add_jobs(array_agg((
               't', to_json(case when n % 500 = 0 then 'look' end), null, null, null, null, null, null)::graphile_worker.job_spec
             )) from generate_series(1, 5000) n",
        )
        .await;
        for _ in 0..5000 {
            let (_, written) = seen.recv().await.unwrap();
            in_a_batch |= written == Some(false);
            count += 1;
        }
    }
    until_no_jobs(&db).await;
    assert_eq!(count % 5000, 0);
    // The worker goes back to written claims when the backlog is over.
    loop {
        db.add_job("'t', '\"look\"'").await;
        if seen.recv().await == Some((json!("look"), Some(true))) {
            break;
        }
    }
    until_no_jobs(&db).await;
    started.stop().await;
    assert!(seen.try_recv().is_err(), "no job has run twice");
}

#[tokio::test]
async fn the_claim_of_a_job_that_runs_longer_is_written() {
    let db = Db::installed().await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    let held = Held::default();
    let handler = held.clone();
    let started = Started::new(with_t(&db, move |_, ctx| {
        sender.send(ctx.job().locked_at).unwrap();
        handler.clone().run()
    }))
    .await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    until_claim_is_written(&db).await;
    let row = db.row("select attempts, locked_by, locked_at from graphile_worker._private_jobs").await;
    assert_eq!((&row["attempts"], &row["locked_by"]), (&json!(1), &json!(started.worker.worker_id())));
    let locked_at: chrono::DateTime<chrono::Utc> = row["locked_at"].as_str().unwrap().parse().unwrap();
    assert_eq!(seen.recv().await.unwrap(), Some(locked_at), "the handler has seen the time of the claim");
    until_true(
        "no transaction is open",
        &db,
        &format!("select not exists (select {LANES} and xact_start is not null)"),
    )
    .await;
    held.go_on.notify_one();
    until_no_jobs(&db).await;
    started.stop().await;
    assert_eq!(held.runs(), 1);
}

#[tokio::test]
async fn thousands_of_jobs_run_once_each_and_none_is_left() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n), priority := n % 3) from generate_series(1, 5000) n").await;
    let runs = Arc::new(Mutex::new(HashMap::<i64, usize>::new()));
    let handler = runs.clone();
    let recorded = Arc::new(AtomicUsize::new(0));
    let hook = recorded.clone();
    let worker = with_t(&db, move |n, _| {
        *handler.lock().unwrap().entry(n.as_i64().unwrap()).or_default() += 1;
        async {}
    })
    .on(JobComplete, move |_: JobEventContext| {
        hook.fetch_add(1, Ordering::SeqCst);
        async {}
    });
    run_once(worker).await;
    let runs = runs.lock().unwrap().clone();
    assert_eq!((runs.len(), runs.values().max()), (5000, Some(&1)));
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
    assert_eq!(recorded.load(Ordering::SeqCst), 5000);
}

#[tokio::test]
async fn jobs_that_run_longer_than_a_batch_do_not_keep_others_waiting() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let (sender, mut ran) = mpsc::unbounded_channel();
    let options = with_t(&db, move |payload: Value, _| {
        let (handler, sender) = (handler.clone(), sender.clone());
        async move {
            match payload == "slow" {
                true => handler.run().await,
                false => sender.send(payload).unwrap(),
            }
        }
    });
    let started = Started::new(options).await;
    // Three of four slots never get free.
    db.run("select graphile_worker.add_job('t', '\"slow\"') from generate_series(1, 3)").await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 300) n").await;
    for _ in 0..300 {
        ran.recv().await.unwrap();
    }
    until_true("the others are done", &db, "select count(*) = 3 from graphile_worker._private_jobs").await;
    for _ in 0..3 {
        held.go_on.notify_one();
        until("it ended", async || (held.runs() == 3).then_some(())).await;
        tokio::task::yield_now().await;
    }
    held.go_on.notify_waiters();
    while db.value("select count(*) from graphile_worker._private_jobs").await != 0 {
        held.go_on.notify_one();
    }
    started.stop().await;
    assert_eq!(held.runs(), 3);
}

#[tokio::test]
async fn a_failed_job_is_retried_as_others_are() {
    let db = Db::installed().await;
    db.add_job("'t', max_attempts := 2").await;
    run_once(with_t(&db, |_, _| async { Err::<(), _>("oops") })).await;
    let job = "select attempts, last_error, locked_by, locked_at, is_available,
                 round(extract(epoch from run_at - updated_at)) as delay from graphile_worker._private_jobs";
    let row = db.row(job).await;
    let failed = json!({"attempts": 1, "last_error": "oops", "locked_by": null, "locked_at": null, "is_available": true, "delay": 3});
    assert_eq!(row, failed);
    db.run("update graphile_worker._private_jobs set run_at = now()").await;
    run_once(with_t(
        &db,
        |_, ctx: WorkerContext| async move { Err::<(), _>(format!("attempt {}", ctx.job().attempts)) },
    ))
    .await;
    let row = db.row(job).await;
    assert_eq!(
        (&row["attempts"], &row["last_error"], &row["is_available"]),
        (&json!(2), &json!("attempt 2"), &json!(false))
    );
}

#[tokio::test]
async fn every_outcome_is_recorded_as_for_other_tasks() {
    let db = Db::installed().await;
    for outcome in ["permanent", "last", "later", "snooze", "panic"] {
        db.run(&format!(
            "select graphile_worker.add_job('t', '\"{outcome}\"', max_attempts := {})",
            if outcome == "last" { 1 } else { 5 }
        ))
        .await;
    }
    let handler = |outcome: Value, _| async move {
        match outcome.as_str().unwrap() {
            "permanent" => Err(TaskError::permanent("never")),
            "last" => Err(TaskError::new("last")),
            "later" => Err(TaskError::retry_after(Duration::from_secs(100), "later")),
            "snooze" => Ok(TaskOutcome::Snooze(Duration::from_secs(200))),
            _ => panic!("oh"),
        }
    };
    run_once(with_t(&db, handler)).await;
    let rows = db
        .rows(
            "select payload #>> '{}' as outcome, attempts, last_error, round(extract(epoch from run_at - updated_at)) as delay
             from graphile_worker._private_jobs order by id",
        )
        .await;
    let row = |outcome: &str, attempts: i64, error: Option<&str>, delay: i64| json!({"outcome": outcome, "attempts": attempts, "last_error": error, "delay": delay});
    let expected = [
        row("permanent", 5, Some("never"), 3),
        row("last", 1, Some("last"), 3),
        row("later", 1, Some("later"), 100),
        row("snooze", 0, None, 200),
        row("panic", 1, Some("panicked: oh"), 3),
    ];
    assert_eq!(rows, expected);
}

#[tokio::test]
async fn jobs_with_a_key_or_a_queue_and_jobs_that_failed_before_are_claimed_with_a_write() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', '\"key\"', job_key := 'k'), graphile_worker.add_job('t', '\"queue\"', 'q');
         select graphile_worker.add_job('t', '\"failed\"'), graphile_worker.add_job('t', '\"fresh\"');
         update graphile_worker._private_jobs set attempts = 1, last_error = 'oops' where payload #>> '{}' = 'failed'",
    )
    .await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    run_once(in_long_batches(with_t(&db, move |payload, ctx| {
        let sender = sender.clone();
        async move {
            let query = "select locked_by = $1 and locked_at = $2 from graphile_worker._private_jobs where id = $3";
            let query = sqlx::query_scalar::<_, Option<bool>>(query).bind(ctx.worker_id().to_owned());
            let is_written = query.bind(ctx.job().locked_at).bind(ctx.job().id).fetch_one(ctx.pg_pool()).await.unwrap();
            sender.send((payload, ctx.job().attempts, is_written == Some(true))).unwrap();
        }
    })))
    .await;
    let mut ran = Vec::new();
    while let Some(run) = seen.recv().await {
        ran.push(run);
    }
    ran.sort_by_key(|run| run.0.to_string());
    let run = |payload: &str, attempts, is_written| (json!(payload), attempts, is_written);
    assert_eq!(ran, [run("failed", 2, true), run("fresh", 1, false), run("key", 1, true), run("queue", 1, true)]);
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

/// A lock leaves its transaction in the row, also if nothing was written.
#[tokio::test]
async fn a_job_that_was_locked_before_is_claimed_with_a_write() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let mut crashed = db.connect().await;
    sqlx::raw_sql("begin; select from graphile_worker._private_jobs for update; rollback")
        .execute(&mut crashed)
        .await
        .unwrap();
    let (sender, mut seen) = mpsc::unbounded_channel();
    run_once(with_t(&db, move |_, ctx| {
        let sender = sender.clone();
        async move {
            let query = "select locked_by is not null from graphile_worker._private_jobs";
            sender.send(sqlx::query_scalar::<_, bool>(query).fetch_one(ctx.pg_pool()).await.unwrap()).unwrap();
        }
    }))
    .await;
    assert!(seen.recv().await.unwrap());
}

#[tokio::test]
async fn run_once_runs_the_jobs_that_its_jobs_add() {
    let db = Db::installed().await;
    db.add_job("'t', '5'").await;
    let ran = Arc::new(AtomicUsize::new(0));
    let add = |ran: &Arc<AtomicUsize>, next: &'static str| {
        let ran = ran.clone();
        move |n: Value, ctx: WorkerContext| {
            let ran = ran.clone();
            async move {
                ran.fetch_add(1, Ordering::SeqCst);
                let n = n.as_i64().unwrap();
                if n > 0 {
                    ctx.add_raw_job(next, n - 1, JobSpec::default()).await.unwrap();
                }
            }
        }
    };
    let options = with_t(&db, add(&ran, "ordinary")).define_task("ordinary", add(&ran, "t"));
    run_once(options).await;
    assert_eq!(ran.load(Ordering::SeqCst), 6);
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

#[tokio::test]
async fn an_idle_worker_runs_jobs_when_they_are_added_and_when_they_are_due() {
    let db = Db::installed().await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let options = with_t(&db, move |payload, _| {
        let _ = sender.send(payload);
        async {}
    });
    let started = Started::new(options).await;
    for n in 0..20 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(json!(n)));
    }
    db.add_job("'t', '100', run_at := now() + interval '1.5 seconds'").await;
    assert_eq!(ran.recv().await, Some(json!(100)));
    until_no_jobs(&db).await;
    started.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_sessions_wait_for_a_running_job_only_for_a_moment() {
    let db = Db::installed().await;
    let (started, held) = held(&db).await;
    let ids = |job: Value| [job["id"].as_i64().unwrap()];

    // The functions wait until the claim is written, and then leave the job alone.
    let id = ids(db.add_job("'t'").await);
    held.begun.notified().await;
    let completed = utils(&db).complete_jobs(&id).await.unwrap();
    assert_eq!((completed.len(), claim_of_only_job(&db).await), (0, json!({"attempts": 1, "locked": true})));
    held.go_on.notify_one();
    until_no_jobs(&db).await;

    let id = ids(db.add_job("'t'").await);
    held.begun.notified().await;
    assert!(utils(&db).reschedule_jobs(&id, RescheduleJobOptions::default().priority(3)).await.unwrap().is_empty());
    assert!(utils(&db).permanently_fail_jobs(&id, "no").await.unwrap().is_empty());
    db.run("update graphile_worker._private_jobs set priority = 7").await;
    assert_eq!(claim_of_only_job(&db).await, json!({"attempts": 1, "locked": true}));
    held.go_on.notify_one();
    until_no_jobs(&db).await;
    started.stop().await;
    assert_eq!(held.runs(), 2);
}

#[tokio::test]
async fn a_job_can_complete_itself_in_its_own_transaction() {
    let db = Db::installed().await;
    db.run("create table done (job bigint); select graphile_worker.add_job('t') from generate_series(1, 20)").await;
    run_once(with_t(&db, |_, ctx| async move {
        let mut transaction = ctx.pg_pool().begin().await.unwrap();
        let insert = "insert into done values ($1)";
        sqlx::query(insert).bind(ctx.job().id).execute(&mut *transaction).await.unwrap();
        ctx.complete_in(transaction).await
    }))
    .await;
    assert_eq!(db.value("select count(distinct job) from done").await, 20);
    assert_eq!(db.value("select count(*) from done").await, 20);
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

#[tokio::test]
async fn workers_that_do_not_know_of_batches_skip_their_rows() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let started = Started::new(in_long_batches(with_t(&db, move |_, _| handler.clone().run()))).await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    assert_eq!(claim_of_only_job(&db).await, json!({"attempts": 0, "locked": false}));
    assert_eq!(claim(&mut db.connect().await, "another").await, None);
    let elsewhere = Held::default();
    let handler = elsewhere.clone();
    run_once(options(&db).define_task("t", move |_: Value, _| handler.clone().run())).await;
    assert_eq!(elsewhere.runs(), 0);
    held.go_on.notify_one();
    until_no_jobs(&db).await;
    started.stop().await;
}

/// As a firewall or an administrator does it.
async fn terminate_lanes(db: &Db) {
    let pids = db.value(&format!("select coalesce(json_agg(pid), '[]') {LANES}")).await.to_string();
    let of_pids = format!("from pg_stat_activity where '{pids}'::jsonb @> to_jsonb(pid)");
    db.run(&format!("select pg_terminate_backend(pid) {of_pids}")).await;
    until("their connections are closed", async || {
        (db.value(&format!("select count(*) {of_pids}")).await == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_outcome_of_a_job_whose_connection_was_lost_is_recorded() {
    let db = Db::installed().await;
    let ended = Held::default();
    let handler = ended.clone();
    let started = Started::new(with_t(&db, move |payload: Value, _| {
        let handler = handler.clone();
        async move {
            handler.run().await;
            if payload == "fails" { Err("oops") } else { Ok(()) }
        }
    }))
    .await;
    for payload in ["works", "fails"] {
        db.add_job(&format!("'t', '\"{payload}\"'")).await;
        ended.begun.notified().await;
        terminate_lanes(&db).await;
        ended.go_on.notify_one();
        // Either may run twice, and the second time under a claim that was written.
        until("the first job has ended", async || {
            ended.go_on.notify_one();
            let no_job_works = "select not exists (select from graphile_worker.jobs where id = 1)";
            (db.value(no_job_works).await == true).then_some(())
        })
        .await;
    }
    let failed = "select coalesce(bool_and(last_error = 'oops' and locked_by is null), false) from graphile_worker._private_jobs";
    until("the failure is recorded", async || {
        ended.go_on.notify_one();
        (db.value(failed).await == true).then_some(())
    })
    .await;
    started.stop().await;
    assert_eq!(db.value("select attempts from graphile_worker._private_jobs").await, 1);
}

#[tokio::test]
async fn lost_connections_under_load_lose_no_job() {
    let db = Db::installed().await;
    let ran = Arc::new(Mutex::new(HashMap::<i64, usize>::new()));
    let handler = ran.clone();
    let options = with_t(&db, move |n, _| {
        let handler = handler.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            *handler.lock().unwrap().entry(n.as_i64().unwrap()).or_default() += 1;
        }
    });
    let started = Started::new(options.poll_interval(Duration::from_millis(100))).await;
    let jobs: Vec<RawJobSpec> = (0..3000)
        .map(|n| RawJobSpec { identifier: "t".to_owned(), payload: json!(n), spec: JobSpec::default() })
        .collect();
    utils(&db).add_raw_jobs(&jobs).await.unwrap();
    for runs in [200, 500, 800, 1100, 1400] {
        until("some jobs have run", async || (ran.lock().unwrap().len() >= runs).then_some(())).await;
        terminate_lanes(&db).await;
    }
    until_no_jobs(&db).await;
    started.stop().await;
    assert_eq!(ran.lock().unwrap().len(), 3000);
}

/// The lanes have a thread of their own.
#[test]
fn a_handler_that_blocks_its_thread_does_not_keep_its_row_locked() {
    let (database, db) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let observer = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let db = Db::installed().await;
            database.send(db.url().to_owned()).unwrap();
            db.run("select graphile_worker.add_job('t')").await;
            until_claim_is_written(&db).await;
            release.send(()).unwrap();
            until_no_jobs(&db).await;
            db
        })
    });
    let url = db.recv().unwrap();
    let released = Arc::new(Mutex::new(released));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let worker = WorkerOptions::default()
            .database_url(&url)
            .listen_os_shutdown_signals(false)
            .define_task("t", move |_: Value, _| {
                let released = released.clone();
                async move { released.lock().unwrap().recv().unwrap() }
            })
            .task_options("t", repeatable())
            .init()
            .await
            .unwrap();
        let worker = Arc::new(worker);
        let running = tokio::spawn({
            let worker = worker.clone();
            async move { worker.run().await }
        });
        // The database is dropped with `_db`, and the worker may connect until it has stopped.
        let _db = tokio::task::spawn_blocking(|| observer.join().unwrap()).await.unwrap();
        worker.request_shutdown();
        running.await.unwrap().unwrap();
    });
}

#[tokio::test]
async fn a_stopping_worker_writes_the_claims_of_running_jobs_and_frees_the_others() {
    let db = Db::installed().await;
    let (started, held) = held(&db).await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 20)").await;
    held.begun.notified().await;
    started.worker.request_shutdown();
    until_true(
        "the claims are written, and the other jobs are free",
        &db,
        "select count(*) filter (where locked_by is not null) between 1 and 4 and count(*) > 10
           and count(*) = (select count(*) from (select from graphile_worker._private_jobs for update skip locked) as free)
         from graphile_worker._private_jobs",
    )
    .await;
    let stopping = tokio::spawn(started.stop());
    while !stopping.is_finished() {
        held.go_on.notify_waiters();
        tokio::task::yield_now().await;
    }
    stopping.await.unwrap();
    let left = db.row("select count(*) as jobs, count(locked_by) as locked, max(attempts) as attempts from graphile_worker._private_jobs").await;
    assert_eq!(left, json!({"jobs": 20 - held.runs(), "locked": 0, "attempts": 0}));
}

#[tokio::test]
async fn a_job_that_does_not_stop_in_time_is_interrupted() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let options = with_t(&db, move |_, _| handler.clone().run()).shutdown_grace_period(Duration::ZERO);
    let started = Started::new(options).await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    started.stop().await;
    let row = db.row("select attempts, locked_by, last_error from graphile_worker._private_jobs").await;
    let error = "the worker was shut down before the job finished";
    assert_eq!(row, json!({"attempts": 0, "locked_by": null, "last_error": error}));
}

#[tokio::test]
async fn flags_and_local_time_count_for_repeatable_tasks() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', '1', flags := '{a}'), graphile_worker.add_job('t', '2'),
           graphile_worker.add_job('t', '3', run_at := now() + interval '1 hour')",
    )
    .await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let options = with_t(&db, move |n, _| {
        let _ = sender.send(n);
        async {}
    });
    run_once(options.use_local_time(true).add_forbidden_flag("a")).await;
    assert_eq!((ran.recv().await, ran.recv().await), (Some(json!(2)), None));
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 2);
}

#[tokio::test]
async fn a_task_with_a_limit_is_claimed_like_others() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let options = options(&db)
        .define_task("t", move |_: Value, _| handler.clone().run())
        .task_options("t", repeatable().max_concurrent(1));
    let started = Started::new(options).await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    assert_eq!(claim_of_only_job(&db).await, json!({"attempts": 1, "locked": true}));
    assert_eq!(db.value(&format!("select count(*) {LANES}")).await, 0);
    held.go_on.notify_one();
    until_no_jobs(&db).await;
    started.stop().await;
}

#[tokio::test]
async fn a_worker_whose_lanes_cannot_connect_claims_like_others() {
    let db = Db::installed().await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let options = with_t(&db, move |payload, _| {
        let _ = sender.send(payload);
        async {}
    });
    let started = Started::new(options).await;
    until_worker_listens(&db).await;
    let mut elsewhere = PgConnection::connect_with(&db.options().database("postgres")).await.unwrap();
    let name = db.value("select current_database()").await;
    // The test itself needs connections that are open already.
    let open: Vec<_> = futures_util::future::join_all((0..4).map(|_| db.pool.acquire())).await;
    drop(open);
    for allowed in [false, true] {
        let sql = format!("alter database \"{}\" allow_connections {allowed}", name.as_str().unwrap());
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut elsewhere).await.unwrap();
        db.add_job(&format!("'t', '{allowed}'")).await;
        assert_eq!(ran.recv().await, Some(json!(allowed)));
        until_no_jobs(&db).await;
    }
    started.stop().await;
}

#[tokio::test]
async fn a_worker_that_was_declared_dead_writes_no_claim() {
    let db = Db::installed().await;
    let held = Held::default();
    let handler = held.clone();
    let options = with_t(&db, move |_, _| handler.clone().run()).heartbeat_interval(Duration::from_secs(1000));
    let started = Started::new(options.sweep_threshold(Duration::from_secs(3000))).await;
    // Its registration is gone, and its next heartbeat has not told it.
    until_worker_listens(&db).await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    db.run("delete from graphile_worker._rs_workers").await;
    until_true("the batch has ended", &db, &format!("select not exists (select {LANES} and xact_start is not null)"))
        .await;
    assert_eq!(claim_of_only_job(&db).await, json!({"attempts": 0, "locked": false}));
    held.go_on.notify_one();
    started.stop().await;
    assert_eq!(held.runs(), 1);
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 1, "the outcome was rejected");
}

#[tokio::test]
async fn behind_a_pooler_repeatable_jobs_are_claimed_like_others() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&[("pool_mode", "transaction"), ("default_pool_size", "3")]);
    let held = Held::default();
    let handler = held.clone();
    let options = WorkerOptions::default()
        .database_url(&url)
        .listen_os_shutdown_signals(false)
        .poll_interval(Duration::from_millis(100))
        .define_task("t", move |_: Value, _| handler.clone().run())
        .task_options("t", repeatable());
    let started = Started::new(options).await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    assert_eq!(claim_of_only_job(&db).await, json!({"attempts": 1, "locked": true}));
    held.go_on.notify_one();
    until_no_jobs(&db).await;
    started.stop().await;
}

#[tokio::test]
async fn list_stats_and_why_say_that_such_a_job_runs() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 2)").await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    run_once(in_long_batches(
        with_t(&db, move |_, ctx| {
            let sender = sender.clone();
            async move {
                let utils = ctx.utils();
                let jobs = utils.list_jobs(&JobFilter::default().states([JobState::Running])).await.unwrap();
                let stats = utils.stats().await.unwrap();
                let why = utils.why(ctx.job().id).await.unwrap();
                sender.send((ctx.job().id, ctx.worker_id().to_owned(), jobs, stats, why)).unwrap();
            }
        })
        .concurrency(1),
    ))
    .await;
    let (id, worker_id, jobs, stats, why) = seen.recv().await.unwrap();
    assert_eq!(jobs[0].id, id);
    assert_eq!(jobs[0].locked_by, Some(worker_id.clone()));
    assert_eq!(jobs.len() as i64 + stats.ready, 2);
    assert_eq!(jobs.len() as i64, stats.running);
    let reason = why.reasons[0].to_string();
    assert!(reason.starts_with(&format!("It is running in worker {worker_id}")), "{reason}");
}

#[tokio::test]
async fn tasks_are_repeatable_by_name_too() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('report/a'), graphile_worker.add_job('other')").await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    let mut options = options(&db).repeatable_tasks(["report/*"]);
    for task in ["report/a", "other"] {
        let sender = sender.clone();
        options = options.define_task(task, move |_: Value, ctx: WorkerContext| {
            let sender = sender.clone();
            async move {
                let query = "select locked_by is not null from graphile_worker._private_jobs where id = $1";
                let query = sqlx::query_scalar::<_, bool>(query).bind(ctx.job().id);
                let is_written = query.fetch_one(ctx.pg_pool()).await.unwrap();
                sender.send((ctx.job().task_identifier.to_string(), is_written)).unwrap();
            }
        });
    }
    drop(sender);
    run_once(in_long_batches(options)).await;
    let mut ran = [seen.recv().await.unwrap(), seen.recv().await.unwrap()];
    ran.sort();
    assert_eq!(ran, [("other".to_owned(), true), ("report/a".to_owned(), false)]);
}
