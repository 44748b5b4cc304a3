//! Roles that may add, run or read jobs, with row security on as Node's schema has it; each test logs in as the role.

use crate::support::{Db, Log, Started, rows};
use graphile_worker::{
    DoctorLevel, JobFilter, JobKeyMode, JobSpec, ListenSuccess, RoleRight, TestClock, WorkerContext, WorkerOptions,
    WorkerUtils,
};
use graphile_worker::{WorkerRecoveryConfig, migrate};
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor, PgConnection, PgPool};
use std::time::Duration;
use tokio::sync::mpsc;

/// A role with these rights, which is gone after the test.
struct Role<'d> {
    db: &'d Db,
    name: String,
    pool: PgPool,
}

impl<'d> Role<'d> {
    async fn new(db: &'d Db, what: &str, rights: &[RoleRight]) -> Role<'d> {
        let name = format!("{what} {}", std::process::id());
        db.run(&format!("create role \"{name}\" login")).await;
        owner(db).grant(&name, rights).await.unwrap();
        // Twice is as good as once.
        owner(db).grant(&name, rights).await.unwrap();
        let pool = PgPoolOptions::new().max_connections(5).connect_with(db.options().username(&name)).await.unwrap();
        Role { db, name, pool }
    }

    fn utils(&self) -> WorkerUtils {
        WorkerUtils::new(self.pool.clone(), "graphile_worker")
    }

    async fn connection(&self) -> PgConnection {
        self.db.connect_as(&self.name).await
    }

    /// The SQLSTATE, message and hint with which each of these fails.
    async fn refused(&self, statement: &str) -> String {
        let mut connection = self.connection().await;
        let error = connection.execute(sqlx::AssertSqlSafe(statement)).await.expect_err(statement);
        let error = error.into_database_error().unwrap();
        assert_eq!(error.code().as_deref(), Some("42501"), "{statement}: {error}");
        let hint = error.downcast_ref::<sqlx::postgres::PgDatabaseError>().hint().unwrap_or_default();
        format!("{}: {hint}", error.message())
    }

    async fn end(self) {
        self.pool.close().await;
        owner(self.db).revoke(&self.name).await.unwrap();
        // Nothing depends on it any more.
        self.db.run(&format!("drop role \"{}\"", self.name)).await;
    }
}

fn owner(db: &Db) -> WorkerUtils {
    WorkerUtils::new(db.pool.clone(), "graphile_worker")
}

const CHANGES: [&str; 8] = [
    "select graphile_worker.complete_jobs('{1}')",
    "select graphile_worker.permanently_fail_jobs('{1}')",
    "select graphile_worker.reschedule_jobs('{1}', now())",
    "select graphile_worker.remove_job('k')",
    "select graphile_worker.force_unlock_workers('{w}')",
    "update graphile_worker._private_jobs set payload = '{}'",
    "delete from graphile_worker._private_jobs",
    "insert into graphile_worker._private_tasks (identifier) values ('t')",
];

#[tokio::test]
async fn a_role_that_may_add_adds_and_does_nothing_else() {
    let db = Db::installed().await;
    db.add_job("'t', '{\"secret\": 1}', job_key => 'k'").await;
    db.add_job("'t', '[\"secret\"]', job_key => 'list'").await;
    db.run("update graphile_worker._private_jobs set last_error = 'secret'").await;
    let role = Role::new(&db, "web", &[RoleRight::Add]).await;
    let mut connection = role.connection().await;
    for (call, payload) in [
        ("add_job('t', '{\"a\": 1}', 'q', now(), 3, null, 5, '{flag}')", json!({"a": 1})),
        ("add_job('new')", json!({})),
        // What was there is not for this role to read.
        ("add_job('t', '{\"b\": 1}', job_key => 'k', job_key_mode => 'unsafe_dedupe')", json!({"b": 1})),
        ("add_job('t', '[2]', job_key => 'list')", json!([2])),
        (
            "add_jobs(array[row('t', '[3]', null, null, null, 'list', null, null)]::graphile_worker.job_spec[])",
            json!([3]),
        ),
        (
            "add_jobs(array[row('u', '{\"c\": 1}', 'q', null, null, null, null, null)]::graphile_worker.job_spec[])",
            json!({"c": 1}),
        ),
    ] {
        let added = rows(&mut connection, &format!("select * from graphile_worker.{call}")).await.unwrap();
        assert_eq!((&added[0]["payload"], &added[0]["last_error"]), (&payload, &Value::Null), "{call}");
    }
    let merged = db.value("select payload from graphile_worker._private_jobs where key = 'list'").await;
    assert_eq!(merged, json!(["secret", 2, 3]), "it was added all the same");
    // What is wrong with a job is said as always.
    let error = connection.execute("select graphile_worker.add_job('')").await.expect_err("no name");
    assert_eq!(error.into_database_error().unwrap().code().as_deref(), Some("GWBID"));
    for statement in CHANGES.into_iter().chain([
        "select * from graphile_worker.jobs",
        "select payload from graphile_worker._private_jobs",
        "select * from graphile_worker._rs_workers",
    ]) {
        role.refused(statement).await;
    }
    // The library, too: alone, merged with others, many at once, with keys.
    let before = db.value("select count(*) from graphile_worker._private_jobs").await.as_i64().unwrap();
    let utils = role.utils();
    let one = |n: i64| {
        let utils = utils.clone();
        tokio::spawn(async move { utils.add_raw_job("t", json!({"n": n}), JobSpec::default()).await })
    };
    for added in (0..30).map(one).collect::<Vec<_>>() {
        added.await.unwrap().unwrap();
    }
    let mut keyed = JobSpec::default();
    (keyed.job_key, keyed.job_key_mode) = (Some("mine".to_owned()), Some(JobKeyMode::PreserveRunAt));
    utils.add_raw_job("t", json!({}), keyed).await.unwrap();
    let many = (0..2_000).map(|n| graphile_worker::RawJobSpec {
        identifier: "t".to_owned(),
        payload: json!({ "n": n }),
        spec: JobSpec::default(),
    });
    assert_eq!(utils.add_raw_jobs(&many.collect::<Vec<_>>()).await.unwrap().len(), 2_000);
    let after = db.value("select count(*) from graphile_worker._private_jobs").await.as_i64().unwrap();
    assert_eq!(after, before + 2_031);
    let report = utils.doctor().await.unwrap();
    assert!(report.level < DoctorLevel::Problem, "{report:?}");
    role.end().await;
}

#[tokio::test]
async fn a_role_without_rights_gets_an_error_with_advice() {
    let db = Db::installed().await;
    let role = Role::new(&db, "visitor of roles", &[]).await;
    db.run(&format!("grant usage on schema graphile_worker to \"{}\"", role.name)).await;
    let add_job = "select graphile_worker.add_job('t')";
    for grants in ["", "grant all on all tables in schema graphile_worker to"] {
        if !grants.is_empty() {
            db.run(&format!("{grants} \"{}\"", role.name)).await;
        }
        for statement in [
            add_job,
            "select graphile_worker.add_jobs(array[row('t', '{}', null, null, null, null, null, null)]::graphile_worker.job_spec[])",
        ] {
            let refused = role.refused(statement).await;
            assert!(refused.contains("may not add jobs") && refused.contains("graphile-worker grant"), "{refused}");
        }
    }
    // Policies of the owner's own let it through, as they did before.
    db.run(
        "create policy mine on graphile_worker._private_jobs using (true);
         create policy mine on graphile_worker._private_tasks using (true)",
    )
    .await;
    role.connection().await.execute(add_job).await.unwrap();
    role.end().await;
}

#[tokio::test]
async fn a_role_that_may_read_sees_everything_and_changes_nothing() {
    let db = Db::installed().await;
    db.add_job("'t', '{\"a\": 1}', 'q', job_key => 'k'").await;
    let role = Role::new(&db, "reader", &[RoleRight::Read]).await;
    let utils = role.utils();
    assert_eq!(utils.list_jobs(&JobFilter::default()).await.unwrap().len(), 1);
    assert_eq!(utils.find_job(1).await.unwrap().unwrap().payload.get(), "{\"a\": 1}");
    assert_eq!(utils.stats().await.unwrap().total(), 1);
    assert_eq!(utils.list_queues(9).await.unwrap().len(), 1);
    utils.list_workers(std::time::Duration::from_secs(60)).await.unwrap();
    utils.why(1).await.unwrap();
    utils.job_counters().await.unwrap();
    let report = utils.doctor().await.unwrap();
    let said = report.checks.iter().find(|check| check.name == "role").unwrap();
    assert!(said.found.ends_with("can read everything, but change nothing"), "{said:?}");
    assert!(report.checks.iter().any(|check| check.name == "lag"), "the jobs were checked");
    for statement in CHANGES.into_iter().chain(["select graphile_worker.add_job('t')"]) {
        role.refused(statement).await;
    }
    let view = rows(&mut role.connection().await, "select * from graphile_worker.jobs").await.unwrap();
    assert_eq!(view.len(), 1);
    role.end().await;
}

#[tokio::test]
async fn a_role_that_may_run_is_a_worker() {
    let db = Db::installed().await;
    let role = Role::new(&db, "runner", &[RoleRight::Run]).await;
    db.add_job("'first', queue_name => 'q'").await;
    db.add_job("'fails', max_attempts => 1").await;
    let options = WorkerOptions::default()
        .pg_pool(role.pool.clone())
        .worker_recovery(WorkerRecoveryConfig::default().enabled(true))
        .define_task("first", |_: Value, context: WorkerContext| async move {
            context
                .utils()
                .add_raw_job("second", json!({}), JobSpec::default())
                .await
                .map(drop)
                .map_err(|e| e.to_string())
        })
        .define_task("second", |_: Value, _: WorkerContext| async {})
        .define_task("fails", |_: Value, _: WorkerContext| async { Err::<(), _>("boom") });
    // The schema is up to date: a worker looks, and changes nothing.
    options.init().await.unwrap().run_once().await.unwrap();
    let left = db.rows("select task_identifier, last_error from graphile_worker.jobs").await;
    assert_eq!(left, [json!({"task_identifier": "fails", "last_error": "boom"})]);
    let utils = role.utils();
    utils
        .cleanup(&[
            graphile_worker::CleanupTask::DeletePermanentlyFailedJobs,
            graphile_worker::CleanupTask::GcJobQueues,
        ])
        .await
        .unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
    utils.sweep_stale_workers(Default::default()).await.unwrap();
    assert!(utils.doctor().await.unwrap().level < DoctorLevel::Problem);
    role.end().await;
}

#[tokio::test]
async fn a_role_that_may_run_listens_ticks_and_sweeps() {
    let db = Db::installed().await;
    let role = Role::new(&db, "runner for long", &[RoleRight::Run]).await;
    // A worker that died with a job.
    db.add_job("'orphan'").await;
    db.run(
        "insert into graphile_worker._rs_workers (worker_id, started_at, last_heartbeat_at)
           values ('rs-live-dead', now() - interval '1 day', now() - interval '1 hour');
         update graphile_worker._private_jobs set locked_by = 'rs-live-dead', locked_at = now(), attempts = 1",
    )
    .await;
    let (ran, mut has_run) = mpsc::unbounded_channel();
    let (listens, mut is_listening) = mpsc::unbounded_channel();
    let task = |ran: &mpsc::UnboundedSender<&'static str>, name: &'static str| {
        let ran = ran.clone();
        move |_: Value, _: WorkerContext| {
            ran.send(name).unwrap();
            async {}
        }
    };
    let clock = TestClock::at("2026-03-10T08:00:30Z".parse().unwrap());
    let options = WorkerOptions::default()
        .pg_pool(role.pool.clone())
        .listen_os_shutdown_signals(false)
        // Only a notification can wake it.
        .poll_interval(Duration::from_secs(3600))
        .heartbeat_interval(Duration::from_millis(100))
        .sweep_interval(Duration::from_millis(300))
        .sweep_threshold(Duration::from_secs(60))
        .recovery_delay(Duration::ZERO)
        .cron_clock(&clock)
        .with_cron("* * * * * recurring")
        .unwrap()
        .on(ListenSuccess, move |_| {
            let _ = listens.send(());
            async {}
        })
        .define_task("orphan", task(&ran, "orphan"))
        .define_task("recurring", task(&ran, "recurring"))
        .define_task("added", task(&ran, "added"));
    let (log, _guard) = Log::start();
    let started = Started::new(options).await;
    is_listening.recv().await.unwrap();
    assert_eq!(has_run.recv().await, Some("orphan"), "the sweep has freed it");
    clock.set("2026-03-10T08:01:10Z".parse().unwrap());
    assert_eq!(has_run.recv().await, Some("recurring"));
    db.add_job("'added'").await;
    assert_eq!(has_run.recv().await, Some("added"));
    started.stop().await;
    assert_eq!(
        log.lines("WARN").lines().filter(|line| !line.contains("recovered from a dead worker")).count(),
        0,
        "{}",
        log.text()
    );
    assert_eq!(db.value("select count(*) from graphile_worker._rs_workers").await, 0, "it has signed off");
    role.end().await;
}

#[tokio::test]
async fn functions_that_run_with_other_rights_are_detected_and_restored() {
    let db = Db::installed().await;
    let check = async || {
        let report = owner(&db).doctor().await.unwrap();
        report.checks.into_iter().find(|check| check.name == "function_rights").unwrap()
    };
    assert_eq!(check().await.level, DoctorLevel::Ok);
    db.run(
        "alter function graphile_worker.complete_jobs security definer;
         alter function graphile_worker._rs_add_job_as_owner security invoker",
    )
    .await;
    let found = check().await;
    assert_eq!(found.level, DoctorLevel::Problem);
    assert!(found.found.contains("complete_jobs run as their owner"), "{found:?}");
    assert!(found.found.contains("_rs_add_job_as_owner should run as their owner"), "{found:?}");
    migrate(&db.pool, "graphile_worker").await.unwrap();
    assert_eq!(check().await.level, DoctorLevel::Ok);
    for (change, what) in [
        ("grant execute on function graphile_worker._rs_add_job_as_owner to public", "everyone"),
        ("alter function graphile_worker._rs_next_job_id reset search_path", "search_path"),
    ] {
        db.run(change).await;
        assert!(check().await.found.contains(what));
    }
}

#[tokio::test]
async fn a_role_that_only_adds_jobs_lets_its_own_expire_and_cancels_none() {
    let db = Db::installed().await;
    let other = db.add_job("'t'").await["id"].as_i64().unwrap();
    let role = Role::new(&db, "expires", &[RoleRight::Add]).await;
    let in_an_hour = chrono::Utc::now() + chrono::TimeDelta::hours(1);
    let spec = || JobSpec::builder().expires_at(in_an_hour).build();
    let one = role.utils().add_raw_job("t", json!({}), spec()).await.unwrap().id;
    let job = graphile_worker::RawJobSpec { identifier: "t".to_owned(), payload: json!({}), spec: spec() };
    let many = role.utils().add_raw_jobs(&[job]).await.unwrap()[0].id;
    let expiring = "select json_agg(job_id order by job_id) from graphile_worker._rs_expiries";
    assert_eq!(db.value(expiring).await, json!([one, many]));
    let refused =
        rows(&mut role.connection().await, &format!("select graphile_worker._rs_expire_job({other}, now()) as is_set"))
            .await
            .unwrap();
    assert_eq!(refused, [json!({ "is_set": false })]);
    assert_eq!(db.value(expiring).await, json!([one, many]));
    let cancel = format!("select * from graphile_worker._rs_cancel_jobs('{{{other}}}')");
    role.refused(&cancel).await;
    role.end().await;

    let reader = Role::new(&db, "reads cancellations", &[RoleRight::Read]).await;
    reader.refused(&cancel).await;
    reader
        .connection()
        .await
        .execute("select from graphile_worker._rs_cancellations, graphile_worker._rs_expiries")
        .await
        .unwrap();
    reader.end().await;
}

#[tokio::test]
async fn a_role_that_runs_jobs_cancels_and_expires_them() {
    let db = Db::installed().await;
    let role = Role::new(&db, "runs and cancels", &[RoleRight::Run]).await;
    let (waiting, expired, running) = (
        db.add_job("'t'").await["id"].clone(),
        db.add_job("'t'").await["id"].clone(),
        db.add_job("'t'").await["id"].clone(),
    );
    db.run(&format!(
        "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-worker-1' where id = {running}"
    ))
    .await;
    let mut connection = role.connection().await;
    let sql = format!("select outcome from graphile_worker._rs_cancel_jobs('{{{waiting},{running}}}', force := true)");
    assert_eq!(
        rows(&mut connection, &sql).await.unwrap(),
        [json!({"outcome": "cancelled"}), json!({"outcome": "stopping"})]
    );
    let sql = format!("select graphile_worker._rs_expire_job({expired}, now() - interval '1 minute') as is_set");
    assert_eq!(rows(&mut connection, &sql).await.unwrap(), [json!({ "is_set": true })]);
    let sql = "select id from graphile_worker._rs_expire_due_jobs()";
    assert_eq!(rows(&mut connection, sql).await.unwrap(), [json!({ "id": expired })]);
    drop(connection);
    role.end().await;
}
