//! Workers that die, or are only slow: who is declared dead, and what becomes of their jobs.

use crate::support::{Db, Started, until};
use crate::worker_support::{until_no_jobs, until_true, utils};
use chrono::{DateTime, Utc};
use graphile_worker::{
    Error, FailureReason, HookRegistry, INFRASTRUCTURE_RESILIENT_FLAG, JobInterrupted, JobQuarantined, JobRecovery,
    JobRecoveryResult, SweepStaleWorkersOptions, WorkerContext, WorkerHeartbeatMissed, WorkerOptions, WorkerRecovered,
    WorkerRecoveryConfig,
};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, mpsc};

/// A worker whose last heartbeat was this long ago, with these jobs.
async fn dead_worker(db: &Db, worker: &str, silent_for: &str, ids: &[i64]) {
    db.run(&format!(
        "insert into graphile_worker._rs_workers (worker_id, started_at, last_heartbeat_at)
         values ('{worker}', now() - interval '1 day', now() - interval '{silent_for}')"
    ))
    .await;
    hold(db, worker, ids).await;
}

async fn hold(db: &Db, worker: &str, ids: &[i64]) {
    db.run(&format!(
        "with held as (
           update graphile_worker._private_jobs set locked_by = '{worker}', locked_at = now(), attempts = attempts + 1
           where id = any ('{{{}}}') returning job_queue_id)
         update graphile_worker._private_job_queues as queues set locked_by = '{worker}', locked_at = now()
         from held where queues.id = held.job_queue_id",
        ids.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
    ))
    .await;
}

async fn add(db: &Db, arguments: &str) -> i64 {
    db.add_job(arguments).await["id"].as_i64().unwrap()
}

/// Which jobs are locked by whom.
async fn locks(db: &Db) -> Value {
    db.value("select coalesce(json_object_agg(id, locked_by) filter (where locked_by is not null), '{}') from graphile_worker._private_jobs")
        .await
}

#[tokio::test]
async fn jobs_of_a_worker_without_heartbeats_run_again_later_with_the_attempt_refunded() {
    let db = Db::installed().await;
    let id = add(&db, "'t', queue_name := 'q'").await;
    let other = add(&db, "'t'").await;
    dead_worker(&db, "rs-live-dead", "6 minutes", &[id]).await;
    dead_worker(&db, "rs-live-lives", "4 minutes", &[other]).await;

    let listed = utils(&db).list_active_workers(Duration::from_secs(300)).await.unwrap();
    let stale: Vec<(&str, bool)> = listed.iter().map(|worker| (&*worker.worker_id, worker.is_stale)).collect();
    assert_eq!(stale, [("rs-live-dead", true), ("rs-live-lives", false)]);

    let dry = SweepStaleWorkersOptions::default().dry_run(true);
    let result = utils(&db).sweep_stale_workers(dry).await.unwrap();
    assert_eq!((result.worker_ids, result.recovered_count), (vec!["rs-live-dead".to_owned()], 0));
    assert_eq!(locks(&db).await, json!({ id.to_string(): "rs-live-dead", other.to_string(): "rs-live-lives" }));

    let result = utils(&db).sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!((result.worker_ids, result.recovered_count), (vec!["rs-live-dead".to_owned()], 1));
    assert_eq!(locks(&db).await, json!({ other.to_string(): "rs-live-lives" }));
    let job = format!(
        "select attempts, last_error, run_at > now() + interval '25 seconds' and run_at < now() + interval '31 seconds' as waits,
           (select locked_by from graphile_worker._private_job_queues) as queue
         from graphile_worker._private_jobs where id = {id}"
    );
    assert_eq!(
        db.row(&job).await,
        json!({"attempts": 0, "last_error": "Job recovered after worker interruption", "waits": true, "queue": null})
    );
    assert_eq!(db.value("select json_agg(worker_id) from graphile_worker._rs_workers").await, json!(["rs-live-lives"]));
}

#[tokio::test]
async fn only_registered_workers_can_be_declared_dead() {
    let db = Db::installed().await;
    let (orphan, nodes, ours) = (add(&db, "'t'").await, add(&db, "'t'").await, add(&db, "'t'").await);
    hold(&db, "rs-live-gone", &[orphan]).await;
    hold(&db, "worker-8a4f5c", &[nodes]).await;
    hold(&db, "rs-worker-without-recovery", &[ours]).await;
    let result = utils(&db).sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!((result.worker_ids, result.recovered_count), (vec!["rs-live-gone".to_owned()], 1));
    assert_eq!(
        locks(&db).await,
        json!({ nodes.to_string(): "worker-8a4f5c", ours.to_string(): "rs-worker-without-recovery" })
    );
}

/// Why closed connections alone do not make a worker dead before the threshold.
#[tokio::test]
async fn a_worker_whose_connections_were_all_closed_is_alive_and_keeps_its_job() {
    let db = Db::installed().await;
    let (begun, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, ends) = (begun.clone(), end.clone());
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
    let options = options.heartbeat_interval(Duration::from_millis(100)).define_task("t", move |_: Value, _| {
        begins.notify_one();
        let ends = ends.clone();
        async move { ends.notified().await }
    });
    let started = Started::new(options).await;
    let id = add(&db, "'t'").await;
    begun.notified().await;
    let holder = locks(&db).await;
    let of_worker = "from pg_stat_activity where datname = current_database() and application_name like 'graphile_worker rs-live-%'";
    let closed = db
        .value(&format!("select json_agg(pid) from (select pid, pg_terminate_backend(pid) {of_worker}) as closed"))
        .await;
    let open = format!("select count(*) {of_worker} and pid = any (array{closed})");
    until("they are closed", async || (db.value(&open).await == 0).then_some(())).await;
    let result = utils(&db).sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!((result.recovered_count, locks(&db).await), (0, holder));
    end.notify_one();
    until_true("the job is completed", &db, &format!("select count(*) = 0 from graphile_worker.jobs where id = {id}"))
        .await;
    started.stop().await;
}

#[tokio::test]
async fn a_worker_with_rare_heartbeats_is_judged_by_its_own_interval() {
    let db = Db::installed().await;
    dead_worker(&db, "rs-live-a", "6 minutes", &[]).await;
    db.run("update graphile_worker._rs_workers set heartbeat_interval = '4 minutes'").await;
    let dry = || SweepStaleWorkersOptions::default().dry_run(true);
    assert!(utils(&db).sweep_stale_workers(dry()).await.unwrap().worker_ids.is_empty());
    db.run("update graphile_worker._rs_workers set heartbeat_interval = '30 seconds'").await;
    assert_eq!(utils(&db).sweep_stale_workers(dry()).await.unwrap().worker_ids, ["rs-live-a"]);
}

#[tokio::test]
async fn workers_with_resilient_jobs_are_given_more_time() {
    let db = Db::installed().await;
    let resilient = add(&db, &format!("'t', flags := array['{INFRASTRUCTURE_RESILIENT_FLAG}']")).await;
    let custom = add(&db, "'t', flags := array['custom']").await;
    dead_worker(&db, "rs-live-a", "6 minutes", &[resilient]).await;
    dead_worker(&db, "rs-live-b", "6 minutes", &[custom]).await;
    let dry = || SweepStaleWorkersOptions::default().dry_run(true);
    assert_eq!(utils(&db).sweep_stale_workers(dry()).await.unwrap().worker_ids, ["rs-live-b"]);
    let config = WorkerRecoveryConfig::default().resilient_job_flags(vec!["custom".to_string()]);
    assert_eq!(utils(&db).sweep_stale_workers_with_config(&config, dry()).await.unwrap().worker_ids, ["rs-live-a"]);
    db.run("update graphile_worker._rs_workers set last_heartbeat_at = now() - interval '16 minutes'").await;
    assert_eq!(utils(&db).sweep_stale_workers(dry()).await.unwrap().worker_ids, ["rs-live-a", "rs-live-b"]);
}

#[tokio::test]
async fn hooks_decide_how_each_job_is_recovered() {
    let db = Db::installed().await;
    let mut ids = Vec::new();
    for task in ["default", "later", "fails", "stays"] {
        ids.push(add(&db, &format!("'{task}'")).await);
    }
    dead_worker(&db, "rs-live-dead", "1 hour", &ids).await;
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (interrupted, swept) = (heard.clone(), heard.clone());
    let run_at: DateTime<Utc> = "2030-01-01T00:00:00Z".parse().unwrap();
    let mut hooks = HookRegistry::new();
    hooks.on(JobRecovery, move |ctx| async move {
        assert_eq!(ctx.reason, FailureReason::WorkerCrashed);
        assert_eq!((&*ctx.previous_worker_id, &*ctx.worker_id), ("rs-live-dead", "worker-utils"));
        match &*ctx.job.task_identifier {
            "later" => JobRecoveryResult::Reschedule { run_at, attempts: Some(7) },
            "fails" => JobRecoveryResult::FailWithBackoff,
            "stays" => JobRecoveryResult::Skip,
            _ => JobRecoveryResult::Default,
        }
    });
    hooks.on(JobInterrupted, move |ctx| {
        interrupted.lock().unwrap().push(ctx.job.task_identifier.to_string());
        async {}
    });
    hooks.on(WorkerRecovered, move |ctx| {
        swept.lock().unwrap().push(format!("{:?} {}", ctx.worker_ids, ctx.recovered_count));
        async {}
    });
    let utils = utils(&db).with_hooks(Arc::new(hooks));
    let result = utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!(result.recovered_count, 3);
    assert_eq!(*heard.lock().unwrap(), ["default", "later", "fails", "[\"rs-live-dead\"] 3"]);
    let jobs = "select json_object_agg(task_identifier, json_build_array(attempts, last_error, locked_by)) from graphile_worker.jobs";
    assert_eq!(
        db.value(jobs).await,
        json!({
            "default": [0, "Job recovered after worker interruption", null],
            "later": [7, "Job recovered after worker interruption", null],
            "fails": [1, "WorkerCrashed", null],
            "stays": [1, null, "rs-live-dead"],
        })
    );
    assert_eq!(
        db.value("select run_at from graphile_worker.jobs where task_identifier = 'later'").await,
        json!("2030-01-01T00:00:00+00:00")
    );
}

#[tokio::test]
async fn a_job_whose_workers_keep_dying_is_quarantined() {
    let db = Db::installed().await;
    let id = add(&db, "'poison'").await;
    let (sender, mut quarantined) = mpsc::unbounded_channel();
    let mut hooks = HookRegistry::new();
    hooks.on(JobQuarantined, move |ctx| {
        sender.send(ctx.job.id).unwrap();
        async {}
    });
    let utils = utils(&db).with_hooks(Arc::new(hooks));
    let state = "select json_build_array(attempts, last_error) from graphile_worker._private_jobs";
    for time in 1..=6 {
        dead_worker(&db, &format!("rs-live-{time}"), "1 hour", &[id]).await;
        utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
        let job = db.value(state).await;
        if time < 5 {
            assert_eq!(job, json!([0, "Job recovered after worker interruption"]), "time {time}");
        } else {
            assert_eq!(quarantined.recv().await, Some(id));
            let error = format!(
                "Its worker has died {time} times while this job ran: the job itself may be what kills it, so this counts as a failed attempt."
            );
            assert_eq!(job, json!([time - 4, error]), "an attempt is charged");
        }
    }
    // What is gone is forgotten with the next sweep that frees something.
    db.run("delete from graphile_worker._private_jobs").await;
    let next = add(&db, "'t'").await;
    dead_worker(&db, "rs-live-last", "1 hour", &[next]).await;
    utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!(db.value("select json_agg(job_id) from graphile_worker._rs_recoveries").await, json!([next]));
}

#[tokio::test]
async fn a_job_removed_while_it_ran_is_not_recovered_but_a_replaced_one_is() {
    let db = Db::installed().await;
    let removed = add(&db, "'t', job_key := 'removed'").await;
    let replaced = add(&db, "'t', job_key := 'replaced'").await;
    let last_attempt = add(&db, "'t', max_attempts := 1").await;
    dead_worker(&db, "rs-live-dead", "1 hour", &[removed, replaced, last_attempt]).await;
    db.run("select graphile_worker.remove_job('removed'); select graphile_worker.add_job('t', job_key := 'replaced')")
        .await;
    utils(&db).sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    let available = "select json_agg(id order by id) from graphile_worker._private_jobs where is_available";
    // The replaced one may never have begun, and its event is in no other job.
    assert_eq!(db.value(available).await, json!([replaced, last_attempt, last_attempt + 1]));
}

#[tokio::test]
async fn a_job_that_was_removed_hours_ago_is_not_recovered() {
    let db = Db::installed().await;
    let began = Arc::new(Notify::new());
    let begins = began.clone();
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
    let options = options.heartbeat_interval(Duration::from_millis(200)).shutdown_grace_period(Duration::ZERO);
    let options = options.keep_locks_fresh_after(Duration::from_millis(20)).define_task("t", move |_: Value, _| {
        begins.notify_one();
        std::future::pending::<()>()
    });
    let started = Started::new(options).await;
    add(&db, "'t', job_key := 'k'").await;
    began.notified().await;
    // It was claimed two hours ago, and removed half an hour later. The worker keeps the lock fresh, so the removal is
    // older than `locked_at` when the worker dies. (One transaction: the worker may refresh the lock at any time.)
    db.run(
        "begin;
         update graphile_worker._private_jobs set locked_at = locked_at - interval '2 hours';
         select graphile_worker.remove_job('k');
         update graphile_worker._private_jobs set updated_at = now() - interval '90 minutes';
         commit",
    )
    .await;
    until("its lock is kept fresh", async || {
        let fresh = "select locked_at > now() - interval '1 hour' from graphile_worker._private_jobs";
        (db.value(fresh).await == true).then_some(())
    })
    .await;
    let id = started.worker.worker_id().to_owned();
    started.running.abort();
    let _ = started.running.await;
    db.run(&format!(
        "update graphile_worker._rs_workers set last_heartbeat_at = now() - interval '1 hour' where worker_id = '{id}'"
    ))
    .await;
    let result = utils(&db).sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!(result.recovered_count, 1);
    assert_eq!(db.value("select is_available from graphile_worker._private_jobs").await, false);
}

#[tokio::test]
async fn a_hook_that_panics_leaves_the_job_to_the_default() {
    let db = Db::installed().await;
    let id = add(&db, "'t'").await;
    dead_worker(&db, "rs-live-dead", "1 hour", &[id]).await;
    let mut hooks = HookRegistry::new();
    hooks.on(JobRecovery, |_| async { panic!("no idea") });
    hooks.on(JobInterrupted, |_| async { panic!("nor here") });
    let utils = utils(&db).with_hooks(Arc::new(hooks));
    let result = utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!(result.recovered_count, 1);
    assert_eq!(locks(&db).await, json!({}));
}

#[tokio::test]
async fn only_one_session_sweeps_at_a_time() {
    let db = Db::installed().await;
    let id = add(&db, "'t'").await;
    dead_worker(&db, "rs-live-dead", "1 hour", &[id]).await;
    let mut sweeper = db.pool.begin().await.unwrap();
    let ours: bool =
        sqlx::query_scalar("select graphile_worker._rs_sweep_lock()").fetch_one(&mut *sweeper).await.unwrap();
    assert!(ours);
    let result = utils(&db).sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!((result.worker_ids.len(), result.recovered_count), (0, 0));
    sweeper.rollback().await.unwrap();
    let (one, other) = (utils(&db), utils(&db));
    let both = tokio::join!(one.sweep_stale_workers(Default::default()), other.sweep_stale_workers(Default::default()));
    assert_eq!(both.0.unwrap().recovered_count + both.1.unwrap().recovered_count, 1);
}

#[tokio::test]
async fn an_operator_can_sweep_from_psql() {
    let db = Db::installed().await;
    let id = add(&db, "'t'").await;
    dead_worker(&db, "rs-live-dead", "6 minutes", &[id]).await;
    let dry = "select * from graphile_worker._rs_sweep_stale_workers(dry_run := true)";
    assert_eq!(db.rows(dry).await, [json!({"worker_id": "rs-live-dead", "job_ids": []})]);
    let sweep = "select * from graphile_worker._rs_sweep_stale_workers()";
    assert_eq!(db.rows(sweep).await, [json!({"worker_id": "rs-live-dead", "job_ids": [id]})]);
    assert_eq!(locks(&db).await, json!({}));
    assert_eq!(db.rows(sweep).await, Vec::<Value>::new());
}

#[tokio::test]
async fn settings_that_would_declare_live_workers_dead_are_rejected() {
    let refused = async |config: WorkerRecoveryConfig| {
        let options = WorkerOptions::default().database_url("postgres://nowhere.invalid/").worker_recovery(config);
        options.init().await.err().unwrap().to_string()
    };
    let config = WorkerRecoveryConfig::default;
    assert_eq!(
        refused(config().sweep_threshold(Duration::from_secs(40))).await,
        "sweep_threshold is 40s, must be at least twice heartbeat_interval (30s), or live workers would be declared dead"
    );
    assert_eq!(
        refused(config().sweep_interval(Duration::ZERO)).await,
        "sweep_interval is zero, must be greater than zero"
    );
    assert!(!config().enabled && config().heartbeat_interval(Duration::from_secs(1)).enabled);
    assert!(!config().sweep_interval(Duration::from_secs(1)).enabled(false).enabled);
}

/// Quick recovery.
fn options(db: &Db) -> WorkerOptions {
    WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .concurrency(1)
        .heartbeat_interval(Duration::from_millis(50))
        .sweep_interval(Duration::from_millis(200))
        .sweep_threshold(Duration::from_secs(20))
        .recovery_delay(Duration::ZERO)
}

#[tokio::test]
async fn a_worker_registers_and_deregisters() {
    let db = Db::installed().await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let started = Started::new(options(&db).define_task("t", move |_: Value, ctx: WorkerContext| {
        sender.send(ctx.worker_id().to_owned()).unwrap();
        async {}
    }))
    .await;
    db.add_job("'t'").await;
    let worker = ran.recv().await.unwrap();
    assert!(worker.starts_with("rs-live-"), "{worker}");
    let workers = utils(&db).list_active_workers(Duration::from_secs(20)).await.unwrap();
    assert_eq!((&*workers[0].worker_id, workers[0].is_stale), (&*worker, false));
    assert_eq!(workers[0].version.as_deref(), Some(env!("CARGO_PKG_VERSION")));
    let before = workers[0].last_heartbeat_at;
    until("the next heartbeat", async || {
        let workers = utils(&db).list_active_workers(Duration::from_secs(20)).await.unwrap();
        (workers[0].last_heartbeat_at != before).then_some(())
    })
    .await;
    started.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker._rs_workers").await, 0);
}

#[tokio::test]
async fn a_running_worker_recovers_jobs_and_queues_of_dead_workers() {
    let db = Db::installed().await;
    let first = add(&db, "'t', queue_name := 'q'").await;
    add(&db, "'t', queue_name := 'q'").await;
    dead_worker(&db, "rs-live-dead", "1 hour", &[first]).await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let started = Started::new(options(&db).define_task("t", move |_: Value, ctx: WorkerContext| {
        sender.send((ctx.job().id, ctx.job().attempts)).unwrap();
        async {}
    }))
    .await;
    let mut ran = [ran.recv().await.unwrap(), ran.recv().await.unwrap()];
    ran.sort();
    assert_eq!(ran, [(first, 1), (first + 1, 1)]);
    started.stop().await;
}

#[tokio::test]
async fn a_slow_worker_that_was_declared_dead_writes_nothing_and_continues_under_a_new_id() {
    let db = Db::installed().await;
    let (sender, mut runs) = mpsc::unbounded_channel();
    // The first run may still wait when the second one begins.
    let release = Arc::new(Semaphore::new(0));
    let released = release.clone();
    let started = Started::new(options(&db).define_task("t", move |_: Value, ctx: WorkerContext| {
        sender.send((ctx.worker_id().to_owned(), ctx.job().attempts)).unwrap();
        let released = released.clone();
        async move { released.acquire().await.unwrap().forget() }
    }))
    .await;
    let id = add(&db, "'t'").await;
    let (first, _) = runs.recv().await.unwrap();
    // As a sweep does that finds only an old heartbeat. It does nothing while the worker itself is sweeping.
    until("the worker is declared dead", async || {
        db.run(
            "begin; update graphile_worker._rs_workers set last_heartbeat_at = now() - interval '1 hour';
             select graphile_worker._rs_sweep_stale_workers(recovery_delay := '0'); commit",
        )
        .await;
        let is_registered =
            format!("select exists (select from graphile_worker._rs_workers where worker_id = '{first}')");
        (db.value(&is_registered).await == false).then_some(())
    })
    .await;
    let (second, attempts) = runs.recv().await.unwrap();
    assert_ne!(first, second);
    assert_eq!(attempts, 1, "refunded");
    assert_eq!(
        db.value("select count(*) from graphile_worker._private_jobs").await,
        1,
        "the first has written nothing"
    );
    assert_eq!(locks(&db).await, json!({ id.to_string(): second }));
    release.add_permits(2);
    until_no_jobs(&db).await;
    started.stop().await;
    assert!(runs.try_recv().is_err(), "it ran twice, and no more");
}

#[tokio::test]
async fn a_worker_whose_heartbeat_is_old_claims_nothing() -> Result<(), Error> {
    let db = Db::installed().await;
    let worker = options(&db)
        .heartbeat_interval(Duration::from_secs(10))
        .define_task("t", |_: Value, _| async {})
        .poll_interval(Duration::from_millis(20))
        .init()
        .await?;
    let worker = Arc::new(worker);
    let runs = worker.clone();
    let running = tokio::spawn(async move { runs.run().await });
    until_true("the worker is registered", &db, "select count(*) = 1 from graphile_worker._rs_workers").await;
    // As if the process had been stopped, and claims before it sends the next heartbeat.
    db.run("update graphile_worker._rs_workers set last_heartbeat_at = now() - interval '16 seconds'").await;
    db.add_job("'t'").await;
    // Each state is read by one statement: until the next heartbeat, the job stays and is not locked.
    let claimed_too_early = "select last_heartbeat_at < now() - interval '15 seconds'
          and not exists (select from graphile_worker._private_jobs where locked_by is null)
        from graphile_worker._rs_workers";
    until("the job is completed after the next heartbeat", async || {
        assert_eq!(db.value(claimed_too_early).await, false);
        (db.value("select count(*) from graphile_worker._private_jobs").await == 0).then_some(())
    })
    .await;
    worker.request_shutdown();
    running.await.unwrap()
}

const HEARTBEATS: &str = "from pg_stat_activity
    where datname = current_database() and application_name like 'graphile_worker rs-live-% heartbeat'";

/// Two workers, each with all of its handlers, claims and sweeps on one thread.
#[test]
fn a_handler_that_blocks_its_thread_keeps_its_job_while_other_workers_sweep() {
    let single_thread = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let test = single_thread();
    let db = test.block_on(Db::installed());
    let (runs, at_once, most) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let release = Arc::new((Mutex::new(false), Condvar::new()));
    let workers = [(); 2].map(|()| {
        let (runs, at_once, most, release) = (runs.clone(), at_once.clone(), most.clone(), release.clone());
        let options = WorkerOptions::default()
            .database_url(db.url())
            .listen_os_shutdown_signals(false)
            .concurrency(1)
            .heartbeat_interval(Duration::from_millis(250))
            .sweep_interval(Duration::from_millis(250))
            .sweep_threshold(Duration::from_secs(2))
            .recovery_delay(Duration::ZERO)
            .poll_interval(Duration::from_millis(100))
            .define_task("blocks", move |_: Value, _: WorkerContext| {
                runs.fetch_add(1, Ordering::SeqCst);
                most.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                let (released, changed) = &*release;
                drop(changed.wait_while(released.lock().unwrap(), |released| !*released).unwrap());
                at_once.fetch_sub(1, Ordering::SeqCst);
                async {}
            });
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            single_thread().block_on(async {
                let worker = Arc::new(options.init().await.unwrap());
                sender.send(worker.clone()).unwrap();
                worker.run().await.unwrap();
            });
        });
        (receiver.recv().unwrap(), thread)
    });
    test.block_on(async {
        until("both workers are registered", async || {
            (db.value("select count(*) from graphile_worker._rs_workers").await == 2).then_some(())
        })
        .await;
        db.add_job("'blocks'").await;
        // Long enough that the other worker would have recovered the job, and has looked for that.
        let swept = "select coalesce(bool_or(swept_at > jobs.locked_at + interval '4 seconds'), false)
                     from graphile_worker._rs_workers, graphile_worker._private_jobs as jobs";
        until("the job has run for long, or runs again", async || {
            (runs.load(Ordering::SeqCst) > 1 || db.value(swept).await == true).then_some(())
        })
        .await;
        *release.0.lock().unwrap() = true;
        release.1.notify_all();
        until("the job is completed", async || {
            (db.value("select count(*) from graphile_worker._private_jobs").await == 0).then_some(())
        })
        .await;
    });
    for (worker, thread) in workers {
        worker.request_shutdown();
        thread.join().unwrap();
    }
    assert_eq!((runs.load(Ordering::SeqCst), most.load(Ordering::SeqCst)), (1, 1), "runs, and runs at once");
}

#[tokio::test]
async fn hooks_for_missed_heartbeats_run_on_the_applications_runtime() {
    let db = Db::installed().await;
    let (sender, mut missed) = mpsc::unbounded_channel();
    let options = options(&db).define_task("t", |_: Value, _| async {}).on(WorkerHeartbeatMissed, move |ctx| {
        sender.send((std::thread::current().id(), ctx.error.clone())).unwrap();
        async {}
    });
    let started = Started::new(options).await;
    until("the worker is registered", async || {
        (db.value("select count(*) from graphile_worker._rs_workers").await == 1).then_some(())
    })
    .await;
    db.run(&format!("select pg_terminate_backend(pid) {HEARTBEATS}")).await;
    let (thread, error) = missed.recv().await.unwrap();
    assert_eq!(thread, std::thread::current().id());
    assert!(error.is_some());
    started.stop().await;
}

#[tokio::test]
async fn the_heartbeat_ends_when_its_worker_is_dropped() {
    let db = Db::installed().await;
    let started = Started::new(options(&db).define_task("t", |_: Value, _| async {})).await;
    let heartbeats = format!("select count(*) {HEARTBEATS}");
    until("the heartbeat is connected", async || (db.value(&heartbeats).await == 1).then_some(())).await;
    started.running.abort();
    until("the heartbeat has ended", async || (db.value(&heartbeats).await == 0).then_some(())).await;
}
