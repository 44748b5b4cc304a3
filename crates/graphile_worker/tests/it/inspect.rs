//! What is in the queue, why a job does not run, and whether all is well.

use crate::support::{Db, Started, sql_files, until};
use crate::worker_support::utils;
use graphile_worker::{
    DoctorLevel, DoctorReport, JobFilter, JobState, JobSummary, WhyReason, WorkerContext, WorkerOptions,
    WorkerRecoveryConfig, WorkerState, WorkerUtils,
};
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, Executor};
use std::time::Duration;
use tokio::sync::mpsc;

const STALE_AFTER: Duration = Duration::from_secs(300);

/// One job in each state: 1 ready, 2 scheduled, 3 running in the queue `q`, 4 retrying, 5 failed, 6 ready behind 3.
async fn one_of_each() -> Db {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('a', '{\"to\": \"Ann\"}', job_key => 'first', flags => '{y,x}');
         select graphile_worker.add_job('a', run_at => now() + interval '1 hour');
         select graphile_worker.add_job('b', queue_name => 'q');
         select graphile_worker.add_job('b', run_at => now() + interval '1 minute');
         select graphile_worker.add_job('b', max_attempts => 3);
         select graphile_worker.add_job('b', queue_name => 'q', run_at => now() - interval '1 minute', priority => 1);
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w1', attempts = 1 where id = 3;
         update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'w1';
         update graphile_worker._private_jobs set attempts = 1, last_error = 'Connection refused' where id = 4;
         update graphile_worker._private_jobs set attempts = 3, last_error = 'boom' where id = 5",
    )
    .await;
    db
}

async fn listed(db: &Db, filter: JobFilter) -> Vec<i64> {
    utils(db).list_jobs(&filter).await.unwrap().iter().map(|job| job.id).collect()
}

#[tokio::test]
async fn jobs_are_listed_by_state() {
    let db = one_of_each().await;
    let states: Vec<JobState> =
        utils(&db).list_jobs(&JobFilter::default()).await.unwrap().iter().map(|job| job.state).collect();
    use JobState::*;
    assert_eq!(states, [Ready, Scheduled, Running, Retrying, Failed, Ready]);
    for (state, ids) in
        [(Ready, vec![1, 6]), (Scheduled, vec![2]), (Running, vec![3]), (Retrying, vec![4]), (Failed, vec![5])]
    {
        assert_eq!(listed(&db, JobFilter::default().states([state])).await, ids, "{state}");
    }
    assert_eq!(listed(&db, JobFilter::default().states([Failed, Running])).await, [3, 5]);
}

#[tokio::test]
async fn jobs_are_listed_by_task_queue_key_and_text() {
    let db = one_of_each().await;
    let text = |text: &str| Some(text.to_owned());
    for (filter, ids) in [
        (JobFilter::default().task_identifier(text("a")), vec![1, 2]),
        (JobFilter::default().task_identifier(text("nobody's")), vec![]),
        (JobFilter::default().queue_name(text("q")), vec![3, 6]),
        (JobFilter::default().queue_name(text("nobody's")), vec![]),
        (JobFilter::default().key(text("first")), vec![1]),
        (JobFilter::default().search(text("ann")), vec![1]),
        (JobFilter::default().search(text("FIRST")), vec![1]),
        (JobFilter::default().search(text("refused")), vec![4]),
        (JobFilter::default().search(text("%")), vec![]),
    ] {
        assert_eq!(listed(&db, filter.clone()).await, ids, "{filter:?}");
    }
}

#[tokio::test]
async fn jobs_are_listed_page_by_page_in_either_direction() {
    let db = one_of_each().await;
    let page = |after, newest_first| JobFilter::default().after(after).newest_first(newest_first).limit(2);
    assert_eq!(listed(&db, page(None, false)).await, [1, 2]);
    assert_eq!(listed(&db, page(Some(2), false)).await, [3, 4]);
    assert_eq!(listed(&db, page(Some(6), false)).await, [] as [i64; 0]);
    assert_eq!(listed(&db, page(None, true)).await, [6, 5]);
    assert_eq!(listed(&db, page(Some(5), true)).await, [4, 3]);
}

#[tokio::test]
async fn a_job_is_shown_with_all_its_fields() {
    let db = one_of_each().await;
    db.run("insert into graphile_worker._rs_recoveries (job_id, times) values (3, 2)").await;
    let first = utils(&db).find_job(1).await.unwrap().unwrap();
    let written = serde_json::to_value(&first).unwrap();
    assert_eq!(written["payload"], json!({"to": "Ann"}));
    assert_eq!((&written["id"], &written["state"], &written["key"]), (&json!(1), &json!("ready"), &json!("first")));
    assert_eq!((&written["flags"], &written["recoveries"]), (&json!(["x", "y"]), &json!(0)));
    let running = utils(&db).find_job(3).await.unwrap().unwrap();
    assert_eq!((running.job.queue_name.as_deref(), running.queue_locked_by.as_deref()), (Some("q"), Some("w1")));
    assert_eq!((running.recoveries, running.last_recovered_at.is_some()), (2, true));
    assert!(utils(&db).find_job(99).await.unwrap().is_none());
}

#[tokio::test]
async fn jobs_with_an_infinite_run_at_can_be_listed() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('a', run_at => t::timestamptz) from unnest('{infinity,-infinity}'::text[]) t",
    )
    .await;
    let jobs = utils(&db).list_jobs(&JobFilter::default()).await.unwrap();
    assert_eq!(jobs.iter().map(|job| job.state).collect::<Vec<_>>(), [JobState::Scheduled, JobState::Ready]);
    assert!(utils(&db).stats().await.unwrap().lag_seconds.unwrap() > 1e9);
    assert!(utils(&db).list_queues(10).await.unwrap().is_empty());
    assert!(matches!(utils(&db).why(1).await.unwrap().reasons[0], WhyReason::NotDue { .. }));
    utils(&db).doctor().await.unwrap();
}

#[tokio::test]
async fn jobs_are_counted_by_state_and_task() {
    let db = one_of_each().await;
    let stats = utils(&db).stats().await.unwrap();
    assert_eq!(
        (stats.ready, stats.scheduled, stats.running, stats.retrying, stats.failed, stats.total()),
        (2, 1, 1, 1, 1, 6)
    );
    assert!((60.0..90.0).contains(&stats.lag_seconds.unwrap()), "{stats:?}");
    let tasks: Vec<_> = stats.tasks.iter().map(|task| (&*task.task_identifier, task.ready, task.failed)).collect();
    assert_eq!(tasks, [("a", 1, 0), ("b", 1, 1)]);

    let empty = utils(&Db::installed().await).stats().await.unwrap();
    assert_eq!((empty.total(), empty.lag_seconds, empty.oldest_due_at), (0, None, None));
}

#[tokio::test]
async fn queues_show_their_locks_and_waiting_jobs() {
    let db = one_of_each().await;
    db.run(
        "select graphile_worker.add_job('a', queue_name => 'free');
         select graphile_worker.add_job('a', queue_name => 'free', run_at => now() + interval '1 hour');
         insert into graphile_worker._private_job_queues (queue_name) values ('empty')",
    )
    .await;
    let queues = utils(&db).list_queues(10).await.unwrap();
    let told: Vec<_> = queues
        .iter()
        .map(|queue| (&*queue.queue_name, queue.waiting, queue.ready, queue.locked_by.as_deref(), queue.running_job_id))
        .collect();
    assert_eq!(told, [("q", 1, 1, Some("w1"), Some(3)), ("free", 2, 1, None, None), ("empty", 0, 0, None, None)]);
    assert!(queues[0].locked_at.is_some() && queues[0].oldest_due_at.is_some() && queues[2].oldest_due_at.is_none());
    assert_eq!(utils(&db).list_queues(1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn workers_are_known_by_registration_lock_or_connection() {
    let db = one_of_each().await;
    db.run(
        "insert into graphile_worker._rs_workers (worker_id, version, last_heartbeat_at) values
           ('rs-live-1', '0.1.0', now()), ('rs-live-2', '0.1.0', now() - interval '6 minutes'),
           ('rs-live-4', '0.1.0', now() - interval '40 seconds');
         update graphile_worker._rs_workers set tasks = '{a,b}' where worker_id = 'rs-live-1';
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-live-3', attempts = 1 where id = 1",
    )
    .await;
    let _connected =
        sqlx::PgConnection::connect_with(&db.options().application_name("graphile_worker rs-idle 2")).await.unwrap();
    let workers = utils(&db).list_workers(STALE_AFTER).await.unwrap();
    let mut told: Vec<_> = workers
        .iter()
        .map(|worker| (&*worker.worker_id, worker.state, worker.jobs, worker.queues, worker.is_connected))
        .collect();
    told.sort_by_key(|(id, ..)| *id);
    let tasks = workers.iter().find_map(|worker| worker.tasks.clone());
    assert_eq!(tasks, Some(vec!["a".to_owned(), "b".to_owned()]));
    use WorkerState::*;
    assert_eq!(
        told,
        [
            ("rs-idle", Alive, 0, 0, Some(true)),
            ("rs-live-1", Alive, 0, 0, Some(false)),
            ("rs-live-2", Stale, 0, 0, Some(false)),
            ("rs-live-3", Dead, 1, 0, Some(false)),
            ("rs-live-4", Silent, 0, 0, Some(false)),
            ("w1", Unknown, 1, 1, Some(false)),
        ]
    );
}

async fn reasons(db: &Db, id: i64) -> Vec<Value> {
    let why = utils(db).why(id).await.unwrap();
    assert!(why.reasons.iter().all(|reason| reason.to_string().ends_with(['.', 'd', 'm'])), "{why:?}");
    assert!(why.fix.as_ref().is_none_or(|fix| fix.contains(": ")), "{why:?}");
    let why = serde_json::to_value(why).unwrap();
    assert_eq!(why["id"], id);
    why["reasons"].as_array().unwrap().clone()
}

fn names(reasons: &[Value]) -> Vec<&str> {
    reasons.iter().map(|reason| reason["reason"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn why_distinguishes_the_states() {
    let db = one_of_each().await;
    // The worker that holds job 3 is one that can be seen.
    assert_eq!(names(&reasons(&db, 99).await), ["does_not_exist"]);
    assert_eq!(names(&reasons(&db, 1).await), ["may_be_forbidden", "should_run"]);
    assert_eq!(names(&reasons(&db, 2).await), ["not_due"]);
    let running = reasons(&db, 3).await;
    assert_eq!((names(&running), &running[0]["worker"]["worker_id"]), (vec!["running"], &json!("w1")));
    let retrying = reasons(&db, 4).await;
    assert_eq!((names(&retrying), &retrying[0]["last_error"]), (vec!["not_due"], &json!("Connection refused")));
    let failed = reasons(&db, 5).await;
    assert_eq!((names(&failed), &failed[0]["last_error"]), (vec!["attempts_used_up"], &json!("boom")));
    let queued = reasons(&db, 6).await;
    assert_eq!(names(&queued), ["queue_locked"]);
    assert_eq!((&queued[0]["worker"]["worker_id"], &queued[0]["job_id"]), (&json!("w1"), &json!(3)));
}

#[tokio::test]
async fn why_counts_what_comes_first_in_the_queue_and_outside_of_it() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', queue_name => 'q') from generate_series(1, 3);
         select graphile_worker.add_job('t', run_at => '2020-01-01Z') from generate_series(1, 5);
         insert into graphile_worker._rs_workers (worker_id) values ('rs-live-1')",
    )
    .await;
    let queued = reasons(&db, 3).await;
    assert_eq!((names(&queued), &queued[0]["jobs"]), (vec!["behind_in_queue", "should_run"], &json!(2)));
    let other = reasons(&db, 8).await;
    assert_eq!((names(&other), &other[0]["jobs"]), (vec!["behind_others", "should_run"], &json!(4)));
    let first = reasons(&db, 4).await;
    assert_eq!((names(&first), &first[0]["workers"]), (vec!["should_run"], &json!(1)));
}

#[tokio::test]
async fn why_notices_that_no_worker_runs() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    assert_eq!(names(&reasons(&db, 1).await), ["no_workers"]);
    // A heart that does not beat any more.
    db.run(
        "insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at) values ('rs-live-1', now() - interval '1 day')",
    )
    .await;
    let without_workers = reasons(&db, 1).await;
    assert_eq!(names(&without_workers), ["no_workers"]);
    assert!(without_workers[0]["last_heartbeat_at"].is_string());
    // One of Node's that has nothing to do: it is known by its listening alone.
    let mut node = db.connect().await;
    node.execute("LISTEN \"jobs:insert\"").await.unwrap();
    assert_eq!(names(&reasons(&db, 1).await), ["should_run"]);
}

#[tokio::test]
async fn why_detects_a_worker_that_does_not_register() {
    let db = Db::installed().await;
    let (started, mut has_started) = mpsc::unbounded_channel();
    let options = WorkerOptions::default().pg_pool(db.pool.clone());
    let options = options.define_task("known", move |_: Value, _: WorkerContext| {
        let started = started.clone();
        async move { started.send(()).unwrap() }
    });
    let worker = Started::new(options).await;
    db.add_job("'known'").await;
    has_started.recv().await.unwrap();
    db.run("select graphile_worker.add_job('unknown')").await;
    assert_eq!(names(&reasons(&db, 2).await), ["should_run"]);
    assert_eq!(utils(&db).list_workers(STALE_AFTER).await.unwrap()[0].state, WorkerState::Alive);
    worker.stop().await;
}

#[tokio::test]
async fn why_reports_that_no_worker_has_the_task_if_workers_register_their_tasks() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t');
         insert into graphile_worker._rs_workers (worker_id, tasks) values ('rs-live-1', '{a,b}')",
    )
    .await;
    assert_eq!(names(&reasons(&db, 1).await), ["no_worker_knows_task"]);
    db.run("update graphile_worker._rs_workers set tasks = '{t}'").await;
    let known = reasons(&db, 1).await;
    assert_eq!((names(&known), &known[0]["knowing"]), (vec!["should_run"], &json!(1)));
}

#[tokio::test]
async fn why_knows_which_flags_the_workers_accept() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t'), graphile_worker.add_job('t', flags := '{eu}')").await;
    let options = || {
        let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
        options.heartbeat_interval(Duration::from_secs(5)).define_task("t", |_: Value, _: WorkerContext| async {})
    };
    let registered = async |count: i64| {
        until("the workers have registered", async || {
            let workers = "select count(*) from graphile_worker._rs_workers where settings is not null";
            (db.value(workers).await == count).then_some(())
        })
        .await;
    };
    let gpu = Started::new(options().accepted_flags(["gpu"])).await;
    registered(1).await;
    let without = reasons(&db, 1).await;
    assert_eq!((names(&without), &without[0]["accepted"]), (vec!["not_accepted"], &json!(["gpu"])));
    assert_eq!(reasons(&db, 2).await[0]["flags"], json!(["eu"]));
    // A function decides what this one accepts, so it may run the first job; its allowlist keeps it from the second.
    let closed =
        Started::new(options().job_flag_allowlist(["gpu"]).accepted_flags_fn(|| Some(vec!["gpu".into()]))).await;
    registered(2).await;
    assert_eq!(names(&reasons(&db, 1).await), ["may_be_forbidden", "should_run"]);
    let both = reasons(&db, 2).await;
    assert_eq!(names(&both), ["not_accepted", "not_allowed", "behind_others"]);
    assert_eq!((&both[1]["flags"], &both[1]["workers"]), (&json!(["eu"]), &json!(1)));
    gpu.stop().await;
    closed.stop().await;
}

#[tokio::test]
async fn why_and_workers_work_on_a_schema_without_registered_tasks() {
    let db = one_of_each().await;
    db.run("insert into graphile_worker._rs_workers (worker_id) values ('rs-live-1')").await;
    db.run("alter table graphile_worker._rs_workers drop column tasks").await;
    assert_eq!(names(&reasons(&db, 1).await), ["may_be_forbidden", "should_run"]);
    assert!(utils(&db).list_workers(STALE_AFTER).await.unwrap().iter().all(|worker| worker.tasks.is_none()));
}

#[tokio::test]
async fn why_reads_the_registered_tasks_of_a_real_worker() {
    let db = Db::installed().await;
    let options =
        WorkerOptions::default().pg_pool(db.pool.clone()).define_task("known", |_: Value, _: WorkerContext| async {});
    let worker = Started::new(options.worker_recovery(WorkerRecoveryConfig::default().enabled(true))).await;
    db.add_job("'unknown'").await;
    // It registers before it claims anything.
    until("the job has its reason", async || (names(&reasons(&db, 1).await) == ["no_worker_knows_task"]).then_some(()))
        .await;
    worker.stop().await;
}

fn check<'c>(report: &'c DoctorReport, name: &str) -> (DoctorLevel, &'c str, &'c str) {
    let check = report.checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("{name}: {report:?}"));
    (check.level, &check.found, check.advice.as_deref().unwrap_or_default())
}

#[tokio::test]
async fn doctor_finds_no_problem_in_a_healthy_schema() {
    let db = Db::installed().await;
    let report = utils(&db).doctor().await.unwrap();
    for name in ["schema", "functions", "role", "lag", "workers", "stale_locks", "failed_jobs", "bloat", "autovacuum"] {
        assert_eq!(check(&report, name).0, DoctorLevel::Ok, "{:?}", check(&report, name));
    }
    assert!(check(&report, "schema").1.starts_with("\"graphile_worker\" at level 20, additions at "));
    assert!(check(&report, "table_sizes").1.contains("jobs "), "{report:?}");
}

#[tokio::test]
async fn doctor_reports_problems_of_jobs() {
    let db = one_of_each().await;
    db.run(
        "update graphile_worker._private_jobs set locked_at = now() - interval '5 hours' where id = 3;
         update graphile_worker._private_job_queues set locked_at = now() - interval '5 hours';
         insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at) values ('rs-live-1', now() - interval '1 day')",
    )
    .await;
    let report = utils(&db).doctor().await.unwrap();
    assert_eq!(check(&report, "stale_locks").1, "locked for more than 4 hours: jobs 1, queues 1");
    assert_eq!(check(&report, "failed_jobs").1, "failed permanently: 1 of 6");
    assert_eq!((check(&report, "workers").0, check(&report, "lag").0), (DoctorLevel::Advice, DoctorLevel::Advice));
}

#[tokio::test]
async fn doctor_without_a_schema_advises_what_to_run() {
    let db = Db::empty().await;
    let report = utils(&db).doctor().await.unwrap();
    assert_eq!(report.level, DoctorLevel::Problem);
    assert_eq!(
        check(&report, "schema"),
        (
            DoctorLevel::Problem,
            "nothing is installed in the schema \"graphile_worker\"",
            "Run `graphile-worker migrate`. If it is in another schema, use -s."
        )
    );
}

#[tokio::test]
async fn doctor_reports_functions_that_were_replaced() {
    let db = Db::installed().await;
    db.run(
        "create or replace function graphile_worker.force_unlock_workers(worker_ids text[])
         returns void language sql as 'select'",
    )
    .await;
    let report = utils(&db).doctor().await.unwrap();
    assert_eq!(
        (check(&report, "functions").0, check(&report, "schema").0),
        (DoctorLevel::Advice, DoctorLevel::Problem)
    );
}

#[tokio::test]
async fn doctor_reports_missing_privileges() {
    let db = Db::installed().await;
    let role = format!("visitor_{}", std::process::id());
    db.run(&format!("create role {role} login")).await;
    let report = async || {
        let pool = PgPoolOptions::new().max_connections(1).connect_with(db.options().username(&role)).await.unwrap();
        let report = WorkerUtils::new(pool.clone(), "graphile_worker").doctor().await.unwrap();
        pool.close().await;
        report
    };
    let stranger = report().await;
    assert!(check(&stranger, "role").2.contains("grant visitor_"), "{stranger:?}");
    db.run(&format!("grant usage on schema graphile_worker to {role}; grant select on graphile_worker.migrations, graphile_worker._rs_additions to {role}")).await;
    assert!(check(&report().await, "role").1.contains("select, insert, update, delete _private_jobs"));
    db.run(&format!("grant all on all tables in schema graphile_worker to {role}")).await;
    assert!(check(&report().await, "role").1.ends_with("because of row security"));
    db.run(&format!("alter role {role} bypassrls")).await;
    assert_eq!(check(&report().await, "role").0, DoctorLevel::Ok);
    db.run("revoke execute on all functions in schema graphile_worker from public").await;
    assert!(check(&report().await, "role").1.contains("may not call _rs_"));
    db.run(&format!("drop owned by {role}; drop role {role}")).await;
}

#[tokio::test]
async fn doctor_reports_a_long_transaction() {
    let db = Db::installed().await;
    let options = db.options().application_name("slow report");
    let mut report = sqlx::PgConnection::connect_with(&options).await.unwrap();
    report.execute("begin isolation level repeatable read; select count(*) from pg_class").await.unwrap();
    let report = utils(&db).doctor().await.unwrap();
    let (level, found, _) = check(&report, "long_transactions");
    assert_eq!(level, DoctorLevel::Ok, "it is young");
    assert!(found.contains("application \"slow report\"") && found.contains("idle in transaction"), "{found}");
}

/// The plan of a page, or of a key, for the values given.
async fn plan(db: &Db, values: &str) -> String {
    let files = sql_files();
    let (_, text) = files.iter().find(|(name, _)| name == "list_jobs.sql").unwrap();
    let text = text.replace(":\"schema\"", "graphile_worker");
    let mut connection = db.connect().await;
    let prepare = format!("prepare p(text[], text, text, text, text, bigint, bool, bigint) as {text}");
    connection.execute(AssertSqlSafe(prepare)).await.unwrap();
    let lines: Vec<String> = sqlx::query_scalar(AssertSqlSafe(format!("explain (costs off) execute p({values})")))
        .fetch_all(&mut connection)
        .await
        .unwrap();
    lines.join("\n")
}

#[tokio::test]
async fn a_page_and_a_key_use_their_indexes() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', job_key => 'k' || n) from generate_series(1, 3000) n").await;
    db.run("analyze graphile_worker._private_jobs").await;
    let forwards = plan(&db, "null, null, null, null, null, 1000, false, 50").await;
    assert!(forwards.contains("Index Scan using jobs_pkey1") && !forwards.contains("Sort"), "{forwards}");
    assert!(forwards.contains("Index Cond: (id > '1000'::bigint)"), "{forwards}");
    let backwards = plan(&db, "null, null, null, null, null, null, true, 50").await;
    assert!(
        backwards.contains("Index Scan Backward using jobs_pkey1") && !backwards.contains("Sort Key"),
        "{backwards}"
    );
    let key = plan(&db, "null, null, null, 'k7', null, null, false, 50").await;
    assert!(key.contains("jobs_key_key1"), "{key}");
}

#[tokio::test]
async fn what_is_read_can_be_written_as_json_with_times_in_utc() {
    let db = one_of_each().await;
    db.run("update graphile_worker._private_jobs set run_at = '2030-01-01T00:00:00+02' where id = 2").await;
    let jobs: Vec<JobSummary> = utils(&db).list_jobs(&JobFilter::default()).await.unwrap();
    let written = serde_json::to_value(&jobs).unwrap();
    assert_eq!(written[1]["run_at"], "2029-12-31T22:00:00Z");
    let fields: Vec<&String> = written[0].as_object().unwrap().keys().collect();
    for field in ["id", "task_identifier", "queue_name", "state", "locked_by", "flags", "max_attempts"] {
        assert!(fields.iter().any(|name| *name == field), "{field}");
    }
}

#[tokio::test]
async fn counters_follow_what_is_added_and_deleted() {
    let db = Db::installed().await;
    let mut connection = db.connect().await;
    connection.execute("select graphile_worker.add_job('t') from generate_series(1, 5)").await.unwrap();
    connection.execute("select graphile_worker.complete_jobs('{1,2}')").await.unwrap();
    // Statistics arrive at the latest when the session that made them ends.
    connection.close().await.unwrap();
    until("five were added and two removed", async || {
        let counters = utils(&db).job_counters().await.unwrap();
        ((counters.added, counters.removed) == (5, 2)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn uninstall_first_reports_what_it_would_drop_and_then_drops_it() {
    let db = one_of_each().await;
    db.run(
        "create table graphile_worker.my_own (); create view public.mine as select id from graphile_worker.jobs;
         create table public.holds (job bigint references graphile_worker._private_jobs on delete cascade)",
    )
    .await;
    let would = utils(&db).uninstall_preview().await.unwrap();
    assert_eq!((would.installed, would.dropped, would.jobs, would.running), (true, false, 6, 1));
    assert_eq!(would.strangers, ["my_own"]);
    assert_eq!(would.dependents, ["foreign key holds_job_fkey of public.holds", "view public.mine"]);
    assert!(would.tables.contains(&"_private_jobs".to_owned()) && would.functions > 10, "{would:?}");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 6, "it was only asked");

    let refused = utils(&db).uninstall().await.unwrap_err().to_string();
    assert!(refused.contains("that are not Graphile Worker's (my_own)"), "{refused}");
    db.run("drop table graphile_worker.my_own").await;
    let did = utils(&db).uninstall().await.unwrap();
    assert!(did.dropped);
    assert_eq!(db.value("select count(*) from pg_namespace where nspname = 'graphile_worker'").await, 0);
    let nothing = utils(&db).uninstall().await.unwrap();
    assert_eq!((nothing.installed, nothing.dropped), (false, false));
}

#[tokio::test]
async fn a_schema_that_is_not_ours_is_not_uninstalled() {
    let db = Db::empty().await;
    db.run(
        "create schema graphile_worker; create table graphile_worker.jobs (id int);
         create table graphile_worker.migrations (id int)",
    )
    .await;
    let left = utils(&db).uninstall().await.unwrap();
    assert_eq!((left.installed, left.dropped), (false, false));
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}
