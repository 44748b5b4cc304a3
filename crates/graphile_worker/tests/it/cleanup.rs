//! Deleting what is no longer needed: no job loses its task or its queue, and no session waits for cleanup for long.

use crate::support::{Db, PATIENCE, Started, rows, until};
use crate::worker_support::{until_a_session_waits_for_a_lock, utils};
use graphile_worker::{CleanupTask, JobSpec, RawJobSpec, WorkerContext, WorkerOptions, WorkerUtils};
use serde_json::{Value, json};
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, PgConnection};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

const NAMES: [CleanupTask; 2] = [CleanupTask::GcTaskIdentifiers, CleanupTask::GcJobQueues];

/// The statements of Node's cleanup.
const NODES_CLEANUP: &str = "
    delete from graphile_worker._private_tasks where id not in (select task_id from graphile_worker._private_jobs);
    delete from graphile_worker._private_job_queues
    where locked_at is null and id not in (
      select job_queue_id from graphile_worker._private_jobs where job_queue_id is not null
    )";

const OUR_CLEANUP: &str = "
    select graphile_worker._rs_delete_unused_names('task');
    select graphile_worker._rs_delete_unused_names('queue')";

/// How many jobs point to a task or queue that does not exist.
const DANGLING: &str = "
    select count(*) from graphile_worker._private_jobs as jobs
    where not exists (select from graphile_worker._private_tasks where id = jobs.task_id)
      or jobs.job_queue_id is not null
        and not exists (select from graphile_worker._private_job_queues where id = jobs.job_queue_id)";

const NAMES_LEFT: &str = "
    select json_build_array(
      (select json_agg(identifier order by identifier) from graphile_worker._private_tasks),
      (select json_agg(queue_name order by queue_name) from graphile_worker._private_job_queues))";

/// Cleanup that must not wait for other sessions.
async fn clean_up(db: &Db, tasks: &[CleanupTask]) -> u64 {
    let utils = utils(db);
    let cleaning = tokio::time::timeout(PATIENCE, utils.cleanup(tasks));
    cleaning.await.expect("cleanup waits for another session").unwrap()
}

/// A database in which the task `rare` and the queue `rare_q` exist, without jobs.
async fn with_unused_names() -> Db {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('rare', queue_name := 'rare_q'); delete from graphile_worker._private_jobs")
        .await;
    db
}

/// A session with an open transaction that has run these statements.
async fn open_transaction(db: &Db, statements: &str) -> PgConnection {
    let mut session = db.connect().await;
    let statements = AssertSqlSafe(format!("begin; {statements}"));
    sqlx::raw_sql(statements).execute(&mut session).await.unwrap();
    session
}

async fn commit(mut session: PgConnection) {
    sqlx::raw_sql("commit").execute(&mut session).await.unwrap();
}

#[tokio::test]
async fn cleanup_deletes_unused_names_and_failed_jobs_and_nothing_else() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('used', queue_name := 'used');
         select graphile_worker.add_job('gone', queue_name := 'gone', job_key := 'k');
         select graphile_worker.remove_job('k');
         select graphile_worker.add_job('failed', job_key := 'f');
         select graphile_worker.permanently_fail_jobs(array(select id from graphile_worker.jobs where key = 'f'))",
    )
    .await;
    assert_eq!(clean_up(&db, &[CleanupTask::DeletePermanentlyFailedJobs]).await, 1);
    assert_eq!(clean_up(&db, &NAMES).await, 3);
    assert_eq!(db.value(NAMES_LEFT).await, json!([["used"], ["used"]]));
}

#[tokio::test]
async fn cleanup_works_if_the_database_defaults_to_another_isolation_level() {
    let db = with_unused_names().await;
    db.run(
        "select graphile_worker.add_job('failed', max_attempts := 1);
         update graphile_worker._private_jobs set attempts = 1;
         do $$ begin
           execute format('alter database %I set default_transaction_isolation = ''serializable''', current_database());
         end $$",
    )
    .await;
    let pool = sqlx::PgPool::connect_with(db.options()).await.unwrap();
    let utils = WorkerUtils::new(pool, "graphile_worker");
    assert_eq!(utils.cleanup(&[CleanupTask::DeletePermanentlyFailedJobs]).await.unwrap(), 1);
    assert_eq!(utils.cleanup(&NAMES).await.unwrap(), 3);
}

#[tokio::test]
async fn an_operator_who_cleans_up_above_read_committed_gets_an_error() {
    let db = with_unused_names().await;
    let mut session = db.connect().await;
    sqlx::raw_sql("begin isolation level repeatable read").execute(&mut session).await.unwrap();
    let error = rows(&mut session, "select * from graphile_worker._rs_delete_unused_names('task')").await.unwrap_err();
    assert_eq!(
        error.into_database_error().unwrap().message(),
        "Names can only be deleted in a transaction with isolation level read committed, this one has repeatable read."
    );
}

#[tokio::test]
async fn names_of_a_job_in_an_open_transaction_are_kept_and_cleanup_does_not_wait() {
    let adds = [
        "select graphile_worker.add_job('rare', queue_name := 'rare_q')",
        "select graphile_worker.add_jobs(array[('rare', null, 'rare_q', null, null, null, null, null)]::graphile_worker.job_spec[])",
        "select graphile_worker._rs_job_names('{rare}', '{rare_q}', '{}')",
        "select * from graphile_worker._rs_known_names('{rare}', '{rare_q}')",
    ];
    for add in adds {
        let db = with_unused_names().await;
        let adding = open_transaction(&db, add).await;
        assert_eq!(clean_up(&db, &NAMES).await, 0, "{add}");
        db.run(NODES_CLEANUP).await;
        assert_eq!(db.value(NAMES_LEFT).await, json!([["rare"], ["rare_q"]]), "{add}");
        commit(adding).await;
        db.run("delete from graphile_worker._private_jobs").await;
        assert_eq!(clean_up(&db, &NAMES).await, 2, "{add}");
    }
}

#[tokio::test]
async fn a_job_that_is_added_while_names_are_deleted_runs() {
    for cleanup in [OUR_CLEANUP, NODES_CLEANUP] {
        for way in ["add_job", "add_jobs", "cron", "keyed", "large batch", "merged"] {
            let db = with_unused_names().await;
            let cleaning = open_transaction(&db, cleanup).await;
            let adding = tokio::spawn(add_a_rare_job(db.connect().await, utils(&db), way));
            until_a_session_waits_for_a_lock(&db).await;
            commit(cleaning).await;
            adding.await.unwrap();
            assert_eq!(db.value(DANGLING).await, 0, "{way} beside{cleanup}");
            let ran = Arc::new(AtomicUsize::new(0));
            let runs = ran.clone();
            let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
            let task = move |_: Value, _: WorkerContext| {
                runs.fetch_add(1, Ordering::SeqCst);
                async {}
            };
            options.define_task("rare", task).init().await.unwrap().run_once().await.unwrap();
            assert!(ran.load(Ordering::SeqCst) > 0, "{way} beside{cleanup}");
        }
    }
}

/// Adds one or more jobs of the task `rare` in the queue `rare_q`.
async fn add_a_rare_job(mut connection: PgConnection, utils: WorkerUtils, way: &str) {
    let spec = JobSpec::builder().queue_name("rare_q").build();
    let sql = match way {
        "add_job" => "select graphile_worker.add_job('rare', queue_name := 'rare_q')",
        "keyed" => "select graphile_worker.add_job('rare', queue_name := 'rare_q', job_key := 'k')",
        "add_jobs" => {
            "select graphile_worker.add_jobs(array[('rare', null, 'rare_q', null, null, null, null, null)]::graphile_worker.job_spec[])"
        }
        // As the statement for ticks adds it: the function is called by a statement whose snapshot is older.
        "cron" => {
            "with added as (select graphile_worker.add_job('rare', queue_name := 'rare_q')) select count(*) from added"
        }
        "large batch" => {
            let one = RawJobSpec { identifier: "rare".to_owned(), payload: json!(1), spec };
            utils.add_raw_jobs(&vec![one; 250]).await.unwrap();
            return;
        }
        // The first is a statement of its own, the others are merged.
        _ => {
            let add = || utils.add_raw_job("rare", 1, spec.clone());
            let (first, second, third) = tokio::join!(add(), add(), add());
            first.and(second).and(third).unwrap();
            return;
        }
    };
    rows(&mut connection, sql).await.unwrap();
}

#[tokio::test]
async fn behind_an_open_transaction_cleanup_stops_neither_adds_nor_workers() {
    let db = Db::installed().await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let task = move |n: i64, _: WorkerContext| {
        sender.send(n).unwrap();
        async {}
    };
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
    let started = Started::new(options.define_task("t", task)).await;
    // So that cleanup keeps the task.
    db.add_job("'t', '0', run_at := '2100-01-01Z'").await;
    db.add_job("'t', '1'").await;
    assert_eq!(ran.recv().await, Some(1));
    let open = open_transaction(
        &db,
        "select graphile_worker.add_job('other', queue_name := 'other');
         insert into graphile_worker._private_jobs (task_id, attempts, max_attempts) values (0, 1, 1)",
    )
    .await;
    let adder = utils(&db);
    for n in 2..10 {
        let all = [NAMES[0], NAMES[1], CleanupTask::DeletePermanentlyFailedJobs];
        let (_, added) = tokio::join!(clean_up(&db, &all), adder.add_raw_job("t", n, JobSpec::default()));
        added.unwrap();
        let begun = tokio::time::timeout(PATIENCE, ran.recv()).await;
        assert_eq!(begun.expect("the job waits for cleanup"), Some(n));
    }
    commit(open).await;
    started.stop().await;
}

#[tokio::test]
async fn cleanup_skips_failed_jobs_that_another_session_has_locked() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('t', max_attempts := 1, job_key := 'k' || n) from generate_series(1, 3) as n;
         update graphile_worker._private_jobs set attempts = 1",
    )
    .await;
    let open = open_transaction(&db, "select graphile_worker.remove_job('k2')").await;
    assert_eq!(clean_up(&db, &[CleanupTask::DeletePermanentlyFailedJobs]).await, 2);
    commit(open).await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

/// Such a transaction does not see that a name was deleted after it began.
#[tokio::test]
async fn above_read_committed_a_name_that_was_deleted_since_is_a_serialization_failure() {
    for level in ["repeatable read", "serializable"] {
        for add in [
            "select graphile_worker.add_job('rare')",
            "select graphile_worker.add_job('used', queue_name := 'rare_q')",
            "select * from graphile_worker._rs_known_names('{rare}', '{}')",
            "select * from graphile_worker._rs_known_names('{}', '{rare_q}')",
        ] {
            let db = with_unused_names().await;
            db.add_job("'used'").await;
            let mut session = db.connect().await;
            let begin = format!("begin isolation level {level}; select count(*) from graphile_worker._private_tasks");
            sqlx::raw_sql(AssertSqlSafe(begin)).execute(&mut session).await.unwrap();
            assert_eq!(clean_up(&db, &NAMES).await, 2);
            let error = rows(&mut session, add).await.expect_err(add).into_database_error().unwrap();
            assert_eq!(error.code().unwrap(), "40001", "{level}: {add}");
        }
    }
}

#[tokio::test]
async fn above_read_committed_a_queue_that_a_worker_has_locked_since_can_be_used_and_is_not_locked() {
    for level in ["repeatable read", "serializable"] {
        let db = with_unused_names().await;
        let mut session = db.connect().await;
        let begin = format!("begin isolation level {level}; select count(*) from graphile_worker._private_tasks");
        sqlx::raw_sql(AssertSqlSafe(begin)).execute(&mut session).await.unwrap();
        db.run("update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'w'").await;
        rows(&mut session, "select graphile_worker.add_job('rare', queue_name := 'rare_q')").await.unwrap();
        let free =
            "select count(*) from (select from graphile_worker._private_job_queues for update skip locked) as free";
        assert_eq!(db.value(free).await, 1, "Node's worker would skip the queue");
        commit(session).await;
        assert_eq!(db.value(DANGLING).await, 0);
    }
}

#[tokio::test]
async fn names_in_use_survive_a_manual_delete() {
    let db = with_unused_names().await;
    db.run(
        "select graphile_worker.add_job('used', queue_name := 'used');
         select graphile_worker.add_job('used', queue_name := 'locked');
         update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'w' where queue_name = 'locked';
         delete from graphile_worker._private_tasks;
         delete from graphile_worker._private_job_queues",
    )
    .await;
    assert_eq!(db.value(NAMES_LEFT).await, json!([["used"], ["locked", "used"]]));
}

#[tokio::test]
async fn workers_are_notified_once_when_tasks_are_deleted() {
    let db = Db::installed().await;
    let mut listener = PgListener::connect_with(&db.pool).await.unwrap();
    listener.listen_all(["worker:tasks", "end of test"]).await.unwrap();
    let unused = "select graphile_worker.add_job('t' || n, queue_name := 'q') from generate_series(1, 3) as n;
                  delete from graphile_worker._private_jobs";
    for cleanup in [OUR_CLEANUP, NODES_CLEANUP] {
        db.run(unused).await;
        db.run(cleanup).await;
        db.run(cleanup).await;
        db.run("notify \"end of test\"").await;
        let notification = listener.recv().await.unwrap();
        assert_eq!((notification.channel(), notification.payload()), ("worker:tasks", "graphile_worker"));
        assert_eq!(listener.recv().await.unwrap().channel(), "end of test", "one notification for three tasks");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_job_loses_its_names_while_sessions_add_and_clean_up_at_once() {
    let db = Arc::new(Db::installed().await);
    let stop = Arc::new(AtomicBool::new(false));
    let session = |statement: &'static str| {
        let (db, stop) = (db.clone(), stop.clone());
        tokio::spawn(async move {
            let mut connection = db.connect().await;
            let mut times = 0;
            loop {
                times += 1;
                let statement = statement.replace("$1", &times.to_string());
                if let Err(error) = sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await {
                    let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default();
                    assert_eq!(code, "40001", "{error}");
                    sqlx::raw_sql("rollback").execute(&mut connection).await.unwrap();
                }
                if stop.load(Ordering::SeqCst) {
                    return times;
                }
            }
        })
    };
    let sessions = [
        "select graphile_worker.add_job('t' || $1 % 7, queue_name := 'q' || $1 % 7)",
        "select graphile_worker.add_job('t' || $1 % 5, queue_name := 'q' || $1 % 5, job_key := 'k' || $1 % 3)",
        "select graphile_worker.add_jobs(array(select ('t' || n, null, 'q' || n, null, null, null, null, null)::graphile_worker.job_spec from generate_series($1 % 9, 9) as n))",
        "begin isolation level repeatable read; select graphile_worker.add_job('t' || $1 % 6, queue_name := 'q' || $1 % 6); commit",
        // Without jobs, the names are unused again.
        "delete from graphile_worker._private_jobs where id in (select id from graphile_worker._private_jobs for update skip locked)",
        NODES_CLEANUP,
    ]
    .map(session);
    let merging = {
        let (utils, stop) = (utils(&db), stop.clone());
        tokio::spawn(async move {
            let mut times = 0;
            loop {
                times += 1;
                let add = |n: i64| {
                    let queue = JobSpec::builder().queue_name(format!("q{}", n % 8)).build();
                    let (utils, task) = (utils.clone(), format!("t{}", n % 8));
                    async move { utils.add_raw_job(&task, n, queue).await.unwrap() }
                };
                tokio::join!(add(times), add(times + 1), add(times + 2));
                if stop.load(Ordering::SeqCst) {
                    return times;
                }
            }
        })
    };
    let deleted = Arc::new(AtomicU64::new(0));
    let cleaning = tokio::spawn({
        let (utils, stop, deleted) = (utils(&db), stop.clone(), deleted.clone());
        async move {
            while !stop.load(Ordering::SeqCst) {
                deleted.fetch_add(utils.cleanup(&NAMES).await.unwrap(), Ordering::SeqCst);
            }
        }
    });
    // Three seconds of load, or until cleanup has deleted names on a slow machine.
    let begun = Instant::now();
    let enough = || begun.elapsed() > Duration::from_secs(3) && deleted.load(Ordering::SeqCst) > 0;
    while !enough() {
        assert!(begun.elapsed() < PATIENCE, "cleanup deletes no names");
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(db.value(DANGLING).await, 0);
    }
    stop.store(true, Ordering::SeqCst);
    for session in sessions.into_iter().chain([merging]) {
        assert!(session.await.unwrap() > 0);
    }
    cleaning.await.unwrap();
    assert_eq!(db.value(DANGLING).await, 0);
}

#[tokio::test]
async fn a_busy_worker_runs_jobs_of_a_task_whose_name_was_deleted_and_added_again() {
    let db = Db::installed().await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let busy = |_: Value, _: WorkerContext| tokio::time::sleep(Duration::from_millis(10));
    let rare = move |n: i64, _: WorkerContext| {
        let _ = sender.send(n);
        async {}
    };
    db.run("select graphile_worker.add_job('busy') from generate_series(1, 20000)").await;
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false).concurrency(2);
    let options = options.shutdown_grace_period(Duration::ZERO).define_task("busy", busy).define_task("rare", rare);
    let started = Started::new(options).await;
    for n in 1..=3 {
        db.add_job(&format!("'rare', '{n}', priority := -10")).await;
        assert_eq!(ran.recv().await, Some(n));
        until("the name is deleted", async || (clean_up(&db, &NAMES).await > 0).then_some(())).await;
    }
    assert_ne!(db.value("select count(*) from graphile_worker.jobs").await, 0, "it was busy all the time");
    started.worker.request_shutdown();
    started.worker.request_shutdown();
    let _ = started.running.await;
}
