//! Databases of the Rust port, the `graphile_worker` of crates.io up to 0.14: recognised, not confused with Node's, refused while
//! its workers are alive, and cleared of what is only its own.

use crate::support::{Db, Log, Started, until};
use graphile_worker::{
    BatchTaskHandler, Cron, CronJobKeyMode, Error, IntoBatchTaskHandlerResult, IntoTaskHandlerResult, JobDefinition,
    JobSpec, JobStart, LocalQueueConfig, Migration, RawJobSpec, RefetchDelayConfig, TaskError, TaskHandler, Worker,
    WorkerContext, WorkerOptions, WorkerShutdownConfig, WorkerUtils, force_migrate_from_rust_port, migrate,
    migrate_from_rust_port,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::Connection;
use std::time::Duration;
use tokio::sync::mpsc;

/// What the port's migrations 20 to 22 leave beside the contract's tables, under its names.
const LEFT_BY_THE_PORT: &str = "
    create table graphile_worker._private_workers (
      id text primary key, last_heartbeat_at timestamptz not null, started_at timestamptz not null default now(), metadata jsonb
    );
    create index _private_workers_last_heartbeat_at_idx on graphile_worker._private_workers (last_heartbeat_at);
    create table graphile_worker._private_job_retirements (
      id bigint primary key references graphile_worker._private_jobs (id) on delete cascade
    );
    create function graphile_worker.worker_heartbeat(worker_id text, metadata json default null) returns void language sql as $$ select $$;
    create function graphile_worker.worker_deregister(worker_id text) returns void language sql as $$ select $$;
    create function graphile_worker.list_stale_workers(stale_threshold interval) returns table (worker_id text) language sql as $$ select null::text $$;
    create function graphile_worker.list_orphan_locked_workers(stale_threshold interval) returns table (worker_id text) language sql as $$ select null::text $$;
    create function graphile_worker.recover_dead_worker_jobs(worker_ids text[], recovery_delay interval default '0') returns int language sql as $$ select 0 $$;
    create function graphile_worker.delete_stale_workers(worker_ids text[]) returns void language sql as $$ select $$;
    create function graphile_worker._private_return_jobs(worker_id text, job_ids bigint[], queue_ids int[]) returns void language sql as $$ select $$;
    insert into graphile_worker.migrations (id, breaking) values (21, false), (22, false);
";

/// A database that the port has installed, before our first migration.
async fn of_the_port() -> Db {
    let db = Db::installed().await;
    db.run("drop table graphile_worker._rs_additions, graphile_worker._rs_workers, graphile_worker._rs_recoveries")
        .await;
    db.run(LEFT_BY_THE_PORT).await;
    db
}

async fn heartbeat(db: &Db, worker: &str, age: &str) {
    db.run(&format!(
        "insert into graphile_worker._private_workers values ('{worker}', now() - interval '{age}')
         on conflict (id) do update set last_heartbeat_at = excluded.last_heartbeat_at"
    ))
    .await;
}

/// As the port names its workers.
const OF_PORT: &str = "graphile_worker_2452fd7f5fb3931c69";

async fn hold(db: &Db, worker: &str, age: &str) {
    db.run(&format!(
        "update graphile_worker._private_jobs set attempts = 1, locked_at = now() - interval '{age}', locked_by = '{worker}'"
    ))
    .await;
}

async fn ledger(db: &Db) -> Value {
    db.value("select json_agg(id order by id) from graphile_worker.migrations where id > 20").await
}

async fn objects(db: &Db) -> Vec<Value> {
    db.rows(
        "select relname::text as name from pg_class
         where relnamespace = 'graphile_worker'::regnamespace and relname in ('_private_workers', '_private_job_retirements')
         union all
         select proname::text from pg_proc
         where pronamespace = 'graphile_worker'::regnamespace and proname in (
           'worker_heartbeat', 'worker_deregister', 'list_stale_workers', 'list_orphan_locked_workers',
           'recover_dead_worker_jobs', 'delete_stale_workers', '_private_return_jobs'
         )",
    )
    .await
}

#[tokio::test]
async fn a_database_of_the_port_is_reported_and_its_jobs_run() {
    let db = of_the_port().await;
    db.add_job("'a'").await;
    let (log, _guard) = Log::start();
    let migration = migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!((migration.from, migration.level), (Some(20), 20));
    let line = log.line("Rust port").unwrap();
    assert!(line.contains("WARN") && line.contains("graphile-worker migrate --from-rust-port"), "{line}");
    assert!(log.line("a newer release of").is_none(), "it is not Node's: {}", log.text());
    assert_eq!(ledger(&db).await, json!([21, 22]), "only the operator takes things away");
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).define_task("a", |_: Value, _| async {});
    options.listen_os_shutdown_signals(false).init().await.unwrap().run_once().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_worker_does_not_start_beside_live_workers_of_the_port() {
    let db = of_the_port().await;
    heartbeat(&db, "graphile_worker_1", "20 seconds").await;
    heartbeat(&db, "graphile_worker_2", "1 hour").await;
    let error = WorkerOptions::default().pg_pool(db.pool.clone()).init().await.err().unwrap();
    assert!(matches!(&error, Error::RustPortRunning { workers, .. } if workers == &["graphile_worker_1"]), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("graphile_worker_1") && text.contains("Stop them"), "{text}");
    assert!(matches!(migrate_from_rust_port(&db.pool, "graphile_worker").await, Err(Error::RustPortRunning { .. })));
    assert_eq!(objects(&db).await.len(), 9, "nothing was taken away");

    heartbeat(&db, "graphile_worker_1", "6 minutes").await;
    Started::new(WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false))
        .await
        .stop()
        .await;
}

#[tokio::test]
async fn objects_of_the_port_are_removed_and_the_jobs_of_its_dead_workers_are_unlocked() {
    let db = of_the_port().await;
    for spec in ["'a'", "'a', queue_name := 'q'", "'a', job_key := 'k'", "'a'", "'a'"] {
        db.add_job(spec).await;
    }
    heartbeat(&db, "graphile_worker_dead", "1 hour").await;
    // Held by a worker that had heartbeats, by two that had none, the second one replaced by its key; and by Node's.
    db.run(
        "update graphile_worker._private_jobs set attempts = 1, locked_at = now() - interval '1 hour', locked_by = case id
           when 1 then 'graphile_worker_dead' when 2 then 'graphile_worker_quiet' when 3 then 'graphile_worker_quiet' when 4 then 'worker-1'
         end where id < 5",
    )
    .await;
    db.run("update graphile_worker._private_jobs set key = null, attempts = max_attempts where id = 3").await;
    db.run("insert into graphile_worker._private_job_retirements values (3)").await;
    db.run("update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'graphile_worker_quiet'")
        .await;

    let migration = migrate_from_rust_port(&db.pool, "graphile_worker").await.unwrap();
    assert!(migration.changed);
    assert_eq!(migration.released_jobs, 3);
    assert_eq!(
        migration.to_string(),
        "schema \"graphile_worker\" updated at level 20, objects of the Rust port removed, 3 jobs of its workers released"
    );
    assert_eq!((objects(&db).await, ledger(&db).await), (vec![], Value::Null));
    assert_eq!(
        db.rows("select id, attempts, locked_by from graphile_worker._private_jobs order by id").await,
        [
            json!({"id": 1, "attempts": 0, "locked_by": null}),
            json!({"id": 2, "attempts": 0, "locked_by": null}),
            json!({"id": 3, "attempts": 25, "locked_by": null}),
            json!({"id": 4, "attempts": 1, "locked_by": "worker-1"}),
            json!({"id": 5, "attempts": 0, "locked_by": null}),
        ]
    );
    assert_eq!(
        db.value("select count(*) from graphile_worker._private_job_queues where locked_by is not null").await,
        0
    );

    // Once is enough, and where the port never was there is nothing to do.
    let again = migrate_from_rust_port(&db.pool, "graphile_worker").await.unwrap();
    assert!(matches!(again, Migration { changed: false, released_jobs: 0, .. }), "{again:?}");
    let (log, _guard) = Log::start();
    migrate(&db.pool, "graphile_worker").await.unwrap();
    assert!(log.line("Rust port").is_none(), "{}", log.text());
}

#[tokio::test]
async fn a_database_of_an_older_port_is_cleared_as_well() {
    let db = of_the_port().await;
    // Before its migration 22.
    db.run("drop table graphile_worker._private_job_retirements; delete from graphile_worker.migrations where id = 22")
        .await;
    db.add_job("'a'").await;
    hold(&db, "graphile_worker_1", "1 hour").await;
    assert_eq!(migrate_from_rust_port(&db.pool, "graphile_worker").await.unwrap().released_jobs, 1);
    assert_eq!((objects(&db).await, ledger(&db).await), (vec![], Value::Null));
}

#[tokio::test]
async fn a_job_that_a_port_without_heartbeats_may_run_stays_locked() {
    let db = of_the_port().await;
    db.add_job("'a'").await;
    hold(&db, OF_PORT, "1 hour").await;
    let refused = async || {
        let error = migrate_from_rust_port(&db.pool, "graphile_worker").await.unwrap_err();
        assert!(matches!(error, Error::RustPortMayRun { .. }), "{error:?}");
        assert_eq!(db.value("select locked_by from graphile_worker.jobs").await, OF_PORT);
        assert_eq!(objects(&db).await.len(), 9, "nothing was taken away");
        error.to_string()
    };

    // It listens as the port's driver does.
    let mut session = db.connect().await;
    sqlx::raw_sql("LISTEN \"jobs:insert\"").execute(&mut session).await.unwrap();
    let pid: i32 = sqlx::query_scalar(
        "select pid from pg_stat_activity where query = 'LISTEN \"jobs:insert\"' and datname = current_database()",
    )
    .fetch_one(&db.pool)
    .await
    .unwrap();
    let text = refused().await;
    assert!(text.contains(&format!("server processes {pid}")), "{text}");
    assert!(text.contains(&format!("{OF_PORT} holds 1 job: 1")) && text.contains("--from-rust-port --force"), "{text}");
    // Beside such a worker ours may run, and says what it saw.
    let (log, _guard) = Log::start();
    migrate(&db.pool, "graphile_worker").await.unwrap();
    let line = log.line("Rust port").unwrap();
    assert!(
        line.contains(&format!(
            "its workers may be alive: sessions that look like theirs are connected (server processes {pid})"
        )),
        "{line}"
    );

    session.close().await.unwrap();
    until("the session is gone", async || {
        let sessions = format!("select count(*) from pg_stat_activity where pid = {pid}");
        (db.value(&sessions).await == 0).then_some(())
    })
    .await;
    hold(&db, OF_PORT, "100 seconds").await;
    let text = refused().await;
    assert!(text.contains("they claimed a job 1m ") && text.contains("less than 5 minutes"), "{text}");

    let migration = force_migrate_from_rust_port(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!((migration.removed_rust_port, migration.released_jobs), (true, 1));
    assert_eq!((objects(&db).await, ledger(&db).await), (vec![], Value::Null));
}

#[tokio::test]
async fn a_port_that_crashed_a_moment_ago_is_removed_by_force() {
    let db = of_the_port().await;
    heartbeat(&db, OF_PORT, "20 seconds").await;
    let error = migrate_from_rust_port(&db.pool, "graphile_worker").await.unwrap_err();
    assert!(error.to_string().contains("if all of them have crashed, add `--force`"), "{error}");
    assert!(force_migrate_from_rust_port(&db.pool, "graphile_worker").await.unwrap().removed_rust_port);
    assert_eq!((objects(&db).await, ledger(&db).await), (vec![], Value::Null));
}

#[tokio::test]
async fn a_worker_logs_a_warning_if_a_port_starts_beside_it() {
    let db = Db::installed().await;
    let (log, _guard) = Log::start();
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
    let often = Duration::from_millis(50);
    let worker =
        Started::new(options.heartbeat_interval(often).sweep_interval(often).sweep_threshold(Duration::from_secs(60)))
            .await;
    db.run(LEFT_BY_THE_PORT).await;
    heartbeat(&db, OF_PORT, "0 seconds").await;
    let line = until("the warning is there", async || log.line("with recovery on")).await;
    assert!(line.contains("WARN") && line.contains(OF_PORT) && line.contains("stop them"), "{line}");
    worker.stop().await;
    assert_eq!(log.text().matches("with recovery on").count(), 1, "once is enough: {}", log.text());
}

#[tokio::test]
async fn an_operator_sees_what_the_port_has_left() {
    let db = of_the_port().await;
    migrate(&db.pool, "graphile_worker").await.unwrap();
    let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
    let check = async || {
        let report = utils.doctor().await.unwrap();
        report
            .checks
            .into_iter()
            .find(|check| check.name == "rust_port")
            .map(|check| (check.level.as_str(), check.found, check.advice.unwrap_or_default()))
    };
    let (level, found, advice) = check().await.unwrap();
    assert_eq!(level, "advice", "{found}");
    assert!(found.contains("of the Rust port") && advice.contains("migrate --from-rust-port"), "{found} {advice}");

    db.add_job("'a'").await;
    hold(&db, OF_PORT, "1 hour").await;
    let (level, found, advice) = check().await.unwrap();
    assert_eq!(level, "problem", "{found}");
    assert!(found.ends_with(&format!("{OF_PORT} holds 1 job: 1")) && advice.contains("releases these jobs"), "{found}");
    let workers = utils.list_workers(Duration::from_secs(300)).await.unwrap();
    assert!(workers.len() == 1 && workers[0].of_rust_port, "{workers:?}");
    let why = utils.why(1).await.unwrap();
    let reason = why.reasons[0].to_string();
    assert!(reason.contains("It is a worker of the Rust port"), "{reason}");
    assert!(why.fix.as_ref().is_some_and(|fix| fix.contains("migrate --from-rust-port")), "{why:?}");

    hold(&db, OF_PORT, "1 minute").await;
    let (_, found, advice) = check().await.unwrap();
    assert!(found.contains("may be alive: they claimed a job 1m") && advice.contains("--force"), "{found}");
    heartbeat(&db, OF_PORT, "0 seconds").await;
    let (_, found, _) = check().await.unwrap();
    assert!(found.ends_with(&format!("its workers send heartbeats: {OF_PORT}")), "{found}");

    force_migrate_from_rust_port(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!(check().await, None);
}

#[tokio::test]
async fn a_task_without_a_payload_takes_null_and_an_empty_object() {
    #[derive(serde::Deserialize, serde::Serialize)]
    struct Nothing;
    #[derive(serde::Deserialize, serde::Serialize)]
    struct Defaults {
        #[serde(default)]
        size: u32,
    }
    let db = Db::installed().await;
    let options = WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .define_task("unit", |(): (), _| async {})
        .define_task("nothing", |Nothing, _| async {})
        .define_task("defaults", |Defaults { size }, _| async move { if size == 0 { Ok(()) } else { Err("not 0") } })
        .define_task("needs", |_: String, _| async {});
    for task in ["unit", "nothing", "defaults", "needs"] {
        db.add_job(&format!("'{task}', 'null'")).await;
        db.add_job(&format!("'{task}', '{{}}'")).await;
    }
    options.init().await.unwrap().run_once().await.unwrap();
    let left = until("two jobs are left", async || {
        let rows = db.rows("select task_identifier, last_error from graphile_worker.jobs order by id").await;
        (rows.len() == 2).then_some(rows)
    })
    .await;
    assert!(left.iter().all(|row| row["task_identifier"] == "needs"), "{left:?}");
    // The error speaks of the payload as it is.
    assert!(left[0]["last_error"].as_str().unwrap().contains("invalid type: null"), "{left:?}");
    assert!(left[1]["last_error"].as_str().unwrap().contains("invalid type: map"), "{left:?}");
}

type Ran = mpsc::UnboundedSender<String>;

#[derive(Serialize, Deserialize)]
struct Parent;

impl TaskHandler for Parent {
    const IDENTIFIER: &'static str = "parent";

    async fn run(self, ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        let spec = JobSpec::default();
        ctx.add_jobs(&[(Child { n: 1 }, &spec), (Child { n: 2 }, &spec)]).await?;
        ctx.add_raw_jobs(&[RawJobSpec { identifier: "child".to_owned(), payload: json!({"n": 3}), spec }]).await?;
        ctx.add_batch_job(vec![Letter { to: "a".to_owned() }, Letter { to: "b".to_owned() }], JobSpec::default())
            .await?;
        Ok::<(), TaskError>(())
    }
}

#[derive(Serialize, Deserialize)]
struct Child {
    n: i32,
}

impl TaskHandler for Child {
    const IDENTIFIER: &'static str = "child";

    async fn run(self, ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        ctx.get_ext::<Ran>().unwrap().send(format!("child {}", self.n)).unwrap();
    }
}

#[derive(Serialize, Deserialize)]
struct Letter {
    to: String,
}

impl BatchTaskHandler for Letter {
    const IDENTIFIER: &'static str = "letters";

    async fn run_batch(items: Vec<Letter>, ctx: WorkerContext) -> impl IntoBatchTaskHandlerResult {
        let all = items.iter().map(|letter| letter.to.as_str()).collect::<Vec<_>>().join("+");
        ctx.get_ext::<Ran>().unwrap().send(format!("letters {all}")).unwrap();
        Ok::<(), String>(())
    }
}

fn jobs() -> [JobDefinition; 3] {
    [Parent::definition(), Child::definition(), Letter::definition()]
}

#[tokio::test]
async fn names_of_the_port_have_the_same_effect() {
    let db = Db::installed().await;
    let (ran, mut runs) = mpsc::unbounded_channel::<String>();
    let (started, mut starts) = mpsc::unbounded_channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    assert_eq!(jobs().map(|job| job.identifier().to_owned()), ["parent", "child", "letters"]);
    let shutdown = WorkerShutdownConfig::default()
        .listen_os_shutdown_signals(false)
        .grace_period(Duration::from_secs(10))
        .interrupted_job_retry_delay(Duration::from_secs(60))
        .shutdown_signal(async move {
            let _ = stopped.await;
        });
    let worker = Worker::options()
        .pg_pool(db.pool.clone())
        .use_notification_delivery(true)
        .worker_shutdown(shutdown)
        .shutdown_interrupted_job_retry_delay(Duration::from_secs(30))
        .add_forbidden_flag("later")
        .add_extension::<Ran>(ran)
        .define_jobs(jobs())
        .on(JobStart, move |ctx| {
            let started = started.clone();
            async move { started.send((*ctx.job.id(), ctx.job.task_identifier().to_owned())).unwrap() }
        })
        .init()
        .await
        .unwrap();
    let utils = worker.create_utils();
    let running = tokio::spawn(async move { worker.run().await });

    let mut transaction = db.pool.begin().await.unwrap();
    let parent = utils.with_executor(&mut transaction).add_job(Parent, JobSpec::default()).await.unwrap();
    transaction.commit().await.unwrap();
    let mut all = Vec::new();
    for _ in 0..4 {
        all.push(runs.recv().await.unwrap());
    }
    all.sort();
    assert_eq!(all, ["child 1", "child 2", "child 3", "letters a+b"]);
    assert_eq!(starts.recv().await.unwrap(), (parent.id, "parent".to_owned()));
    stop.send(()).unwrap();
    running.await.unwrap().unwrap();
}

#[tokio::test]
#[allow(deprecated)]
async fn names_of_the_port_without_a_counterpart_have_no_effect() {
    let db = Db::installed().await;
    db.add_job("'parent'").await;
    let delay = RefetchDelayConfig::builder().duration(Duration::from_secs(1)).threshold(5).build();
    let config = LocalQueueConfig::builder().size(10).ttl(Duration::from_secs(1)).refetch_delay(delay).build();
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
    let worker = options
        .local_queue(config.with_queue_count(2))
        .complete_job_batch_delay(Duration::from_secs(1))
        .fail_job_batch_delay(Duration::from_secs(1))
        .define_job::<Parent>()
        .init()
        .await
        .unwrap();
    worker.run_once().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs where task_identifier = 'parent'").await, 0);
}

#[tokio::test]
async fn a_job_that_the_shutdown_config_interrupts_waits_for_its_delay() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let (began, mut begins) = mpsc::unbounded_channel();
    let shutdown = WorkerShutdownConfig::default()
        .listen_os_shutdown_signals(false)
        .grace_period(Duration::ZERO)
        .interrupted_job_retry_delay(Duration::from_secs(1000));
    assert!(format!("{shutdown:?}").contains("interrupted_job_retry_delay: 1000s"), "{shutdown:?}");
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).worker_shutdown(shutdown);
    let worker = Started::new(options.define_task("t", move |_: Value, _| {
        began.send(()).unwrap();
        std::future::pending::<()>()
    }))
    .await;
    begins.recv().await.unwrap();
    worker.stop().await;
    let waits = "select run_at > now() + interval '900 seconds' and attempts = 0 from graphile_worker._private_jobs";
    assert_eq!(db.value(waits).await, true);
}

#[tokio::test]
async fn items_of_several_tasks_are_in_one_list() {
    let hourly = Cron::hourly_at::<Child>(5).unwrap().job_key("k").job_key_mode(CronJobKeyMode::PreserveRunAt).build();
    let items = [Cron::every_minute::<Parent>().build(), hourly];
    let lines = items.each_ref().map(ToString::to_string);
    assert_eq!(lines[0], "* * * * * parent");
    assert!(lines[1].starts_with("5 * * * * child ?"), "{lines:?}");
    drop(WorkerOptions::default().with_crons(items));
    // The same constructor as for a pool of the port's.
    let db = Db::installed().await;
    assert!(WorkerUtils::new(db.pool.clone(), "graphile_worker".to_owned()).is_migrated().await.unwrap());
}
