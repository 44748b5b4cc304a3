//! PgBouncer between the worker and the database, with its defaults: only the mode differs, and the pool is small, so that
//! server connections are really shared with strangers.

use crate::support::{Db, Log, Started, until};
use crate::worker_support::until_no_jobs;
use graphile_worker::{
    CleanupTask, DoctorLevel, Error, JobFilter, JobSpec, ListenSuccess, RawJobSpec, RescheduleJobOptions,
    SweepStaleWorkersOptions, TaskError, TaskOptions, TestClock, WorkerContext, WorkerOptions, WorkerRecoveryConfig,
    WorkerState, WorkerUtils,
};
use serde_json::{Value, json};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection, PgPool};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

/// A pool of three connections for everybody.
const TRANSACTION_MODE: [(&str, &str); 2] = [("pool_mode", "transaction"), ("default_pool_size", "3")];

fn worker(url: &str) -> WorkerOptions {
    WorkerOptions::default()
        .database_url(url)
        .listen_os_shutdown_signals(false)
        .poll_interval(Duration::from_millis(100))
        .concurrency(4)
}

/// How a stranger connects.
fn through(url: &str) -> PgConnectOptions {
    url.parse::<PgConnectOptions>().unwrap().extra_float_digits(None)
}

async fn connect(url: &str) -> PgConnection {
    PgConnection::connect_with(&through(url)).await.unwrap()
}

fn utils(url: &str) -> WorkerUtils {
    let pool = PgPoolOptions::new().max_connections(5).connect_lazy_with(through(url));
    WorkerUtils::new(pool, "graphile_worker").with_prepared_statements(false)
}

/// Other clients of the same pooler, who do what they should not in transaction mode: they prepare statements under the
/// names that our driver uses, listen, and change their sessions. What they ask may fail.
struct Strangers(JoinSet<()>);

impl Strangers {
    fn start(url: &str) -> Strangers {
        let mut strangers = JoinSet::new();
        for number in 0..4 {
            let url = url.to_owned();
            strangers.spawn(async move {
                let mut connection = connect(&url).await;
                for round in 0.. {
                    let sql = match (number + round) % 4 {
                        0 => "prepare sqlx_s_1 as select 'a statement of a stranger'",
                        1 => r#"listen "jobs:insert"; listen "worker:tasks""#,
                        2 => "set search_path to pg_catalog; set work_mem to '1MB'; set enable_indexscan to off",
                        _ => "select pg_sleep(0.005)",
                    };
                    if matches!(sqlx::raw_sql(sql).execute(&mut connection).await, Err(sqlx::Error::Io(_))) {
                        connection = connect(&url).await;
                    }
                    // Named or not, its parse and bind may go to different servers.
                    let query = sqlx::query("select $1::int").bind(1).persistent(round % 2 == 0);
                    let _ = query.execute(&mut connection).await;
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            });
        }
        Strangers(strangers)
    }

    async fn stop(mut self) {
        self.0.shutdown().await;
    }
}

/// What sessions hold that a client may have left behind: of each server connection, as far as the pooler has any.
async fn left_behind(url: &str, servers: usize) -> BTreeMap<i32, Value> {
    let mut left = BTreeMap::new();
    let mut clients = Vec::new();
    for _ in 0..servers {
        // An open transaction keeps its server connection, so that the next one gets another.
        let mut client = connect(url).await;
        sqlx::raw_sql("begin").execute(&mut client).await.unwrap();
        let (process, found): (i32, Value) = sqlx::query_as(
            "select pg_backend_pid(), json_build_object(
               'statements', (select count(*) from pg_prepared_statements),
               'channels', (select count(*) from pg_listening_channels()),
               'locks', (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()),
               'settings', (
                 select coalesce(json_agg(name), '[]') from pg_settings
                 where source = 'session' and setting <> reset_val
                   and name not in ('application_name', 'DateStyle', 'TimeZone', 'client_encoding')))",
        )
        .persistent(false)
        .fetch_one(&mut client)
        .await
        .unwrap();
        left.insert(process, found);
        clients.push(client);
    }
    left
}

async fn assert_nothing_left(url: &str, servers: usize) {
    for (process, left) in left_behind(url, servers).await {
        assert_eq!(
            left,
            json!({"statements": 0, "channels": 0, "locks": 0, "settings": []}),
            "server connection {process}"
        );
    }
}

#[tokio::test]
async fn a_worker_starts_through_pgbouncer_with_its_default_settings() {
    for mode in ["session", "transaction"] {
        let db = Db::empty().await;
        let (_pooler, url) = db.pgbouncer(&[("pool_mode", mode)]);
        let (log, _guard) = Log::start();
        let started = Started::new(worker(&url).define_task("t", |_: i64, _: WorkerContext| async {})).await;
        db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 50) n").await;
        until_no_jobs(&db).await;
        started.stop().await;
        assert_eq!(log.lines("connected through a pooler").lines().count(), 1, "{}", log.text());
    }
}

#[tokio::test]
async fn a_pooler_that_ignores_settings_instead_of_refusing_them_is_detected_too() {
    let db = Db::installed().await;
    let (_pooler, url) =
        db.pgbouncer(&[("pool_mode", "transaction"), ("ignore_startup_parameters", "extra_float_digits,options")]);
    let (log, _guard) = Log::start();
    let started = Started::new(worker(&url).define_task("t", |_: i64, _: WorkerContext| async {})).await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 50) n").await;
    until_no_jobs(&db).await;
    started.stop().await;
    assert!(log.line("connected through a pooler").is_some(), "{}", log.text());
    assert_nothing_left(&url, 2).await;
}

#[tokio::test]
async fn a_direct_connection_is_not_taken_for_a_pooler() {
    let db = Db::installed().await;
    let (log, _guard) = Log::start();
    let started = Started::new(worker(db.url()).define_task("t", |_: i64, _: WorkerContext| async {})).await;
    started.stop().await;
    assert_eq!(log.line("pooler"), None);
    let report = WorkerUtils::new(db.pool.clone(), "graphile_worker").doctor().await.unwrap();
    let check = report.checks.iter().find(|check| check.name == "connection").unwrap();
    assert_eq!((check.level, &*check.found), (DoctorLevel::Ok, "direct"));
}

#[tokio::test]
async fn in_session_mode_a_worker_is_woken_through_the_pooler() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&[("pool_mode", "session")]);
    is_woken(&db, worker(&url)).await;
    let report = utils(&url).doctor().await.unwrap();
    let check = report.checks.iter().find(|check| check.name == "connection").unwrap();
    assert_eq!((check.level, &*check.found), (DoctorLevel::Ok, "through a pooler that keeps sessions"));
}

#[tokio::test]
async fn in_transaction_mode_a_worker_is_woken_through_its_direct_connection() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    is_woken(&db, worker(&url).direct_database_url(db.url())).await;
    assert_nothing_left(&url, 3).await;
}

/// Nothing but a notification can start a job here.
async fn is_woken(db: &Db, options: WorkerOptions) {
    let (listening, mut listens) = tokio::sync::mpsc::unbounded_channel();
    let (sender, mut ran) = tokio::sync::mpsc::unbounded_channel();
    let options = options
        .poll_interval(Duration::from_secs(3600))
        .on(ListenSuccess, move |_| {
            let _ = listening.send(());
            async {}
        })
        .define_task("t", move |n: i64, _: WorkerContext| {
            sender.send(n).unwrap();
            async {}
        });
    let started = Started::new(options).await;
    assert_eq!(listens.recv().await, Some(()));
    for n in 1..=3 {
        db.add_job(&format!("'t', '{n}'")).await;
        assert_eq!(ran.recv().await, Some(n));
    }
    started.stop().await;
}

#[tokio::test]
async fn in_transaction_mode_without_a_direct_connection_a_worker_polls_and_logs_it() {
    for with_another_pooler in [false, true] {
        let db = Db::installed().await;
        let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
        let (log, _guard) = Log::start();
        let options = worker(&url).define_task("t", |_: i64, _: WorkerContext| async {});
        let (options, said) = if with_another_pooler {
            (options.direct_database_url(&url), "the direct connection also goes through a pooler")
        } else {
            (options, "the pooler shares server connections, so the worker cannot listen: polling for jobs")
        };
        let started = Started::new(options).await;
        until("it says so", async || log.line(said)).await;
        db.add_job("'t', '1'").await;
        until_no_jobs(&db).await;
        started.stop().await;
        assert_nothing_left(&url, 3).await;
        let report = utils(&url).doctor().await.unwrap();
        let check = report.checks.iter().find(|check| check.name == "connection").unwrap();
        assert_eq!(check.level, DoctorLevel::Advice, "{check:?}");
        assert!(check.advice.as_ref().unwrap().contains("--direct-connection"), "{check:?}");
    }
}

/// How often each job ran, and what was wrong with the order.
#[derive(Default)]
struct Seen {
    runs: Mutex<HashMap<i64, usize>>,
    queues: Mutex<HashMap<i64, i64>>,
    running: AtomicUsize,
    problems: Mutex<Vec<String>>,
}

impl Seen {
    fn ran(&self, ctx: &WorkerContext) {
        *self.runs.lock().unwrap().entry(ctx.job().id).or_default() += 1;
    }

    fn problem(&self, problem: String) {
        self.problems.lock().unwrap().push(problem);
    }
}

fn busy_worker(url: &str, seen: &Arc<Seen>) -> WorkerOptions {
    let (plain, queued, failing, limited, parent, child) =
        (seen.clone(), seen.clone(), seen.clone(), seen.clone(), seen.clone(), seen.clone());
    worker(url)
        .worker_recovery(WorkerRecoveryConfig::default().enabled(true))
        .define_task("plain", move |_: Value, ctx: WorkerContext| {
            plain.ran(&ctx);
            async {}
        })
        .define_task("queued", move |(queue, n): (i64, i64), ctx: WorkerContext| {
            let seen = queued.clone();
            async move {
                seen.ran(&ctx);
                let before = seen.queues.lock().unwrap().insert(queue, n);
                if before.unwrap_or_default() + 1 != n {
                    seen.problem(format!("queue {queue}: {n} after {before:?}"));
                }
            }
        })
        .define_task("failing", move |_: Value, ctx: WorkerContext| {
            let seen = failing.clone();
            async move {
                seen.ran(&ctx);
                if ctx.job().attempts < 2 { Err(TaskError::new("the first time")) } else { Ok(()) }
            }
        })
        .define_task("limited", move |_: Value, ctx: WorkerContext| {
            let seen = limited.clone();
            async move {
                seen.ran(&ctx);
                if seen.running.fetch_add(1, Ordering::SeqCst) >= 2 {
                    seen.problem("more than one of a limited task in each of two workers".to_owned());
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
                seen.running.fetch_sub(1, Ordering::SeqCst);
            }
        })
        // Adds another job, and writes in a transaction of its own, which completes this one.
        .define_task("parent", move |n: i64, ctx: WorkerContext| {
            let seen = parent.clone();
            async move {
                seen.ran(&ctx);
                ctx.add_raw_job("child", n, JobSpec::builder().job_key(format!("child {n}")).build()).await?;
                let mut transaction = ctx.pg_pool().begin().await?;
                let query = sqlx::query("insert into public.written values ($1)").persistent(false).bind(n);
                query.execute(&mut *transaction).await?;
                ctx.complete_in(transaction).await?;
                Ok::<(), TaskError>(())
            }
        })
        .define_task("child", move |_: i64, ctx: WorkerContext| {
            child.ran(&ctx);
            async {}
        })
        .task_options("failing", TaskOptions::default().backoff(|_| Duration::ZERO))
        .task_options("limited", TaskOptions::default().max_concurrent(1))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_beside_other_clients_lose_nothing_and_run_nothing_twice() {
    let db = Db::installed().await;
    db.run("create table written (n int primary key)").await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    let strangers = Strangers::start(&url);
    let seen = Arc::new(Seen::default());
    let clock = TestClock::at("2026-03-10T08:00:30Z".parse().unwrap());
    let recurring = busy_worker(&url, &seen).cron_clock(&clock).with_cron("* * * * * plain ?id=every_minute").unwrap();
    let (first, second) = (Started::new(recurring).await, Started::new(busy_worker(&url, &seen)).await);

    let adding = utils(&url);
    let job = |identifier: &str, payload: Value, spec: JobSpec| RawJobSpec {
        identifier: identifier.to_owned(),
        payload,
        spec,
    };
    let mut jobs: Vec<RawJobSpec<Value>> = Vec::new();
    jobs.extend((0..1500).map(|n| job("plain", json!(n), JobSpec::default())));
    jobs.extend((0..300).map(|n| job("failing", json!(n), JobSpec::default())));
    jobs.extend((0..300).map(|n| job("limited", json!(n), JobSpec::default())));
    jobs.extend((0..200).map(|n| job("parent", json!(n), JobSpec::default())));
    for (queue, n) in (1..=60).flat_map(|n| (0..10).map(move |queue| (queue, n))) {
        let spec = JobSpec::builder().queue_name(format!("queue {queue}")).build();
        jobs.push(job("queued", json!([queue, n]), spec));
    }
    let added = adding.add_raw_jobs(&jobs).await.unwrap();
    let mut expected: HashMap<i64, usize> =
        added.iter().map(|job| (job.id, if &*job.task_identifier == "failing" { 2 } else { 1 })).collect();
    // One by one, at the same time: they are merged.
    let mut callers = JoinSet::new();
    for n in 0..200 {
        let adding = adding.clone();
        callers.spawn(async move { adding.add_raw_job("plain", n, JobSpec::default()).await.unwrap().id });
    }
    expected.extend(callers.join_all().await.into_iter().map(|id| (id, 1)));
    for minute in 1..=5 {
        clock.set(format!("2026-03-10T08:0{minute}:10Z").parse().unwrap());
        let ticked = format!(
            "select count(*) from graphile_worker._private_known_crontabs where last_execution = '2026-03-10T08:0{minute}:00Z'"
        );
        until("the tick is added", async || (db.value(&ticked).await == 1).then_some(())).await;
    }
    until_no_jobs(&db).await;
    first.stop().await;
    second.stop().await;
    strangers.stop().await;

    assert_eq!(*seen.problems.lock().unwrap(), Vec::<String>::new());
    let mut runs = seen.runs.lock().unwrap().clone();
    let wrong: Vec<_> = expected.iter().filter(|(id, times)| runs.remove(*id) != Some(**times)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    assert_eq!(runs.len(), 200 + 5, "children and ticks");
    assert!(runs.values().all(|times| *times == 1), "{runs:?}");
    assert_eq!(db.value("select count(*) from written").await, 200);
    assert_eq!(db.value("select count(*) from graphile_worker._rs_workers").await, 0, "both have signed off");
    assert_eq!(
        db.value("select count(*) from graphile_worker._private_job_queues where locked_by is not null").await,
        0
    );
}

#[tokio::test]
async fn workers_and_utilities_leave_nothing_in_server_connections() {
    let db = Db::empty().await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    let utils = utils(&url);
    assert!(utils.migrate().await.unwrap().changed);
    db.run("create table written (n int primary key)").await;
    let seen = Arc::new(Seen::default());
    let options = busy_worker(&url, &seen).with_cron("* * * * * plain").unwrap();
    let started = Started::new(options).await;
    let job = |n: i64| RawJobSpec { identifier: "parent".to_owned(), payload: n, spec: JobSpec::default() };
    utils.add_raw_jobs(&(0..250).map(job).collect::<Vec<_>>()).await.unwrap();
    until_no_jobs(&db).await;
    everything_utilities_can_do(&utils).await;
    assert_nothing_left(&url, 3).await;
    started.stop().await;
    assert_nothing_left(&url, 3).await;
    assert!(utils.uninstall().await.unwrap().dropped);
    assert_nothing_left(&url, 3).await;
}

/// Each statement of the utilities.
async fn everything_utilities_can_do(utils: &WorkerUtils) {
    let later = || JobSpec::builder().queue_name("later").run_at("2100-01-01T00:00:00Z".parse().unwrap());
    let kept = utils.add_raw_job("nobody's", 1, later().job_key("kept").build()).await.unwrap();
    let failed = utils.add_raw_job("nobody's", 2, later().build()).await.unwrap();
    let done = utils.add_raw_job("nobody's", 3, later().build()).await.unwrap();
    assert!(utils.is_migrated().await.unwrap());
    assert_eq!(utils.list_jobs(&JobFilter::default()).await.unwrap().len(), 3);
    assert_eq!(utils.find_job(kept.id).await.unwrap().unwrap().job.key.as_deref(), Some("kept"));
    assert!(!utils.why(kept.id).await.unwrap().reasons.is_empty());
    utils.stats().await.unwrap();
    utils.job_counters().await.unwrap();
    assert!(utils.list_queues(10).await.unwrap().iter().any(|queue| queue.queue_name == "later"));
    utils.list_workers(Duration::from_secs(60)).await.unwrap();
    utils.list_active_workers(Duration::from_secs(60)).await.unwrap();
    let options = RescheduleJobOptions::default().priority(7);
    assert_eq!(utils.reschedule_jobs(&[kept.id], options).await.unwrap()[0].priority, 7);
    assert_eq!(utils.permanently_fail_jobs(&[failed.id], "a reason").await.unwrap().len(), 1);
    assert_eq!(utils.complete_jobs(&[done.id]).await.unwrap().len(), 1);
    assert!(utils.remove_job("kept").await.unwrap().is_some());
    utils.force_unlock_workers(&["nobody"]).await.unwrap();
    utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    let tidy = [CleanupTask::DeletePermanentlyFailedJobs, CleanupTask::GcJobQueues, CleanupTask::GcTaskIdentifiers];
    assert!(utils.cleanup(&tidy).await.unwrap() >= 3);
    utils.doctor().await.unwrap();
}

#[tokio::test]
async fn utilities_work_beside_other_clients() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    let strangers = Strangers::start(&url);
    let utils = utils(&url);
    for _ in 0..10 {
        everything_utilities_can_do(&utils).await;
    }
    let job = graphile_worker::add_job(&url, "t", 1, JobSpec::default()).await.unwrap();
    assert_eq!(db.value("select id from graphile_worker.jobs").await, job.id);
    strangers.stop().await;
}

#[tokio::test]
async fn a_transaction_of_the_application_adds_jobs_through_a_pooler_with_either_driver() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    let utils = utils(&url);
    let mut connection = connect(&url).await;
    let mut transaction = connection.begin().await.unwrap();
    utils.within(&mut transaction).add_raw_job("t", 1, JobSpec::default()).await.unwrap();
    transaction.commit().await.unwrap();
    #[cfg(feature = "tokio-postgres")]
    {
        let (mut client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let transaction = client.transaction().await.unwrap();
        let spec = JobSpec::builder().queue_name("q").job_key("k").build();
        utils.within_tokio_postgres(&transaction).add_raw_job("t", 2, spec).await.unwrap();
        transaction.commit().await.unwrap();
        assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 2);
    }
    assert_nothing_left(&url, 3).await;
}

#[tokio::test]
async fn jobs_of_a_dead_worker_are_recovered_through_a_pooler() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    let strangers = Strangers::start(&url);
    db.add_job("'t', '1', 'q'").await;
    db.run(
        "insert into graphile_worker._rs_workers (worker_id, started_at, last_heartbeat_at)
           values ('rs-live-dead', now() - interval '1 day', now() - interval '1 hour');
         update graphile_worker._private_jobs set locked_by = 'rs-live-dead', locked_at = now(), attempts = 1;
         update graphile_worker._private_job_queues set locked_by = 'rs-live-dead', locked_at = now()",
    )
    .await;
    let options = worker(&url)
        .heartbeat_interval(Duration::from_millis(100))
        .sweep_interval(Duration::from_millis(300))
        .sweep_threshold(Duration::from_secs(60))
        .recovery_delay(Duration::ZERO)
        .define_task("t", |_: i64, _: WorkerContext| async {});
    let started = Started::new(options).await;
    until_no_jobs(&db).await;
    started.stop().await;
    strangers.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker._rs_workers").await, 0);
}

/// Its connections have no name there, which says nothing about the worker.
#[tokio::test]
async fn the_missing_connections_of_a_worker_behind_a_pooler_are_not_reported() {
    for mode in ["session", "transaction"] {
        let db = Db::installed().await;
        let (_pooler, url) = db.pgbouncer(&[("pool_mode", mode)]);
        let (started, mut has_started) = mpsc::unbounded_channel();
        let gate = Arc::new(Notify::new());
        let waits = gate.clone();
        let options = worker(&url).heartbeat_interval(Duration::from_secs(5));
        let options = options.define_task("slow", move |_: Value, _: WorkerContext| {
            let (started, waits) = (started.clone(), waits.clone());
            async move {
                started.send(()).unwrap();
                waits.notified().await;
            }
        });
        let running = Started::new(options).await;
        db.add_job("'slow'").await;
        has_started.recv().await.unwrap();
        for utils in [utils(&url), WorkerUtils::new(db.pool.clone(), "graphile_worker")] {
            let workers = utils.list_workers(Duration::from_secs(300)).await.unwrap();
            assert_eq!((workers[0].state, workers[0].is_connected), (WorkerState::Alive, None), "{mode}");
            let why = utils.why(1).await.unwrap();
            let reason = why.reasons[0].to_string();
            assert!(reason.contains("has been running it for") && !reason.contains("connection"), "{mode}: {reason}");
            assert_eq!(why.fix, None, "{mode}");
        }
        gate.notify_one();
        until_no_jobs(&db).await;
        running.stop().await;
    }
}

#[tokio::test]
async fn a_worker_survives_a_restart_of_the_pooler() {
    let db = Db::installed().await;
    let (mut pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    let started = Started::new(worker(&url).define_task("t", |_: i64, _: WorkerContext| async {})).await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 500) n").await;
    pooler.stop();
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 500) n").await;
    pooler.start().unwrap();
    until_no_jobs(&db).await;
    started.stop().await;
}

/// It takes a lock and a setting of a session.
#[tokio::test]
async fn indexes_are_built_beside_running_workers_only_on_a_direct_connection() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    db.run(
        "drop index graphile_worker._rs_jobs_unqueued;
         delete from graphile_worker._rs_additions where id = 19",
    )
    .await;
    let is_built = "select to_regclass('graphile_worker._rs_jobs_unqueued') is not null";
    let (log, _guard) = Log::start();
    let task = |_: i64, _: WorkerContext| async {};
    worker(&url).define_task("t", task).init().await.unwrap();
    utils(&url).migrate().await.unwrap();
    assert_eq!(log.lines("cannot build the indexes through a pooler").lines().count(), 2, "{}", log.text());
    assert_eq!(db.value(is_built).await, false);
    worker(&url).direct_database_url(db.url()).define_task("t", task).init().await.unwrap();
    assert_eq!(db.value(is_built).await, true);
    assert_nothing_left(&url, 3).await;
}

#[tokio::test]
async fn a_pool_that_a_pooler_rejects_is_explained() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    let pool = PgPool::connect_lazy(&url).unwrap();
    let options = WorkerOptions::default().pg_pool(pool).define_task("t", |_: i64, _: WorkerContext| async {});
    let error = options.init().await.expect_err("the pool cannot connect");
    assert!(matches!(error, Error::PoolerRefuses { .. }), "{error:?}");
    assert!(error.to_string().contains("extra_float_digits(None)"), "{error}");
    let pool = PgPoolOptions::new().connect_lazy_with(through(&url));
    let options = WorkerOptions::default().pg_pool(pool).define_task("t", |_: i64, _: WorkerContext| async {});
    options.init().await.unwrap().run_once().await.unwrap();
}

/// Without `lock_timeout`, which a pooler drops unless it is set in each transaction, the worker would wait in silence.
#[tokio::test]
async fn an_open_transaction_does_not_stop_a_worker_in_transaction_mode() {
    let db = Db::installed().await;
    let (_pooler, url) = db.pgbouncer(&TRANSACTION_MODE);
    let started = Started::new(worker(&url).define_task("t", |_: i64, _: WorkerContext| async {})).await;
    db.run("select graphile_worker.add_job('t', '0', 'q', now() + interval '1 day')").await;

    // A row: the worker does the rest.
    let mut other = db.connect().await;
    sqlx::raw_sql("begin; select from graphile_worker._private_job_queues for update")
        .execute(&mut other)
        .await
        .unwrap();
    db.run("select graphile_worker.add_job('t', '1', 'q'), graphile_worker.add_job('t', '2')").await;
    let left = "select json_agg(coalesce(queue_name, '') order by id) from graphile_worker.jobs where run_at <= now()";
    until("only the job of the locked queue is left", async || (db.value(left).await == json!(["q"])).then_some(()))
        .await;
    sqlx::raw_sql("rollback").execute(&mut other).await.unwrap();
    until("it runs, too", async || db.value(left).await.is_null().then_some(())).await;

    // The whole table: the worker gives up again and again, and leaves the server connections to others.
    sqlx::raw_sql("begin; lock table graphile_worker._private_jobs").execute(&mut other).await.unwrap();
    let waits = "select min(query_start)::text from pg_stat_activity
                 where datname = current_database() and wait_event_type = 'Lock'";
    let since = until("the worker waits for the table", async || match db.value(waits).await {
        Value::Null => None,
        since => Some(since),
    })
    .await;
    until("it gives up", async || (db.value(waits).await != since).then_some(())).await;
    sqlx::raw_sql("select 1").execute(&mut connect(&url).await).await.unwrap();
    sqlx::raw_sql("rollback").execute(&mut other).await.unwrap();
    db.add_job("'t', '3'").await;
    until("the next job runs", async || db.value(left).await.is_null().then_some(())).await;
    started.stop().await;
    assert_nothing_left(&url, 3).await;
}
