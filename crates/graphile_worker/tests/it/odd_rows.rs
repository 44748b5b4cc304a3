//! Rows with extreme values, which any role with rights on the table can write: times and numbers at the limits of their
//! types. Such a row affects only its own job.

use crate::support::{Db, Started, until};
use graphile_worker::{
    Error, JobFilter, RescheduleJobOptions, SweepStaleWorkersOptions, TaskError, WorkerContext, WorkerOptions,
    WorkerUtils,
};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What is set in the row of a job.
const ODD: [&str; 22] = [
    "created_at = 'infinity'",
    "created_at = '-infinity'",
    "updated_at = 'infinity'",
    "updated_at = '-infinity'",
    "created_at = '200000-01-01'",
    "updated_at = '4000-01-01 BC'",
    "run_at = '-infinity'",
    "run_at = '4000-01-01 BC', priority = 32767",
    "priority = -32768",
    "flags = '[1, 2]'",
    "flags = '\"x\"'",
    "flags = '{\"a\": 1e400}'",
    "flags = (repeat('[', 1000) || repeat(']', 1000))::jsonb",
    "payload = '1e999999'",
    "payload = ' [1, 2] '",
    "payload = '\"\\ud83e\"'",
    "payload = '\"\\u0000\"'",
    "payload = (repeat('[', 5000) || repeat(']', 5000))::json",
    "attempts = -32768",
    "max_attempts = 32767, attempts = 32766",
    "revision = 2147483647, key = repeat('\u{1F980}', 512)",
    "last_error = repeat('x', 1000000)",
];

/// A job for each, of the task `t`, and an ordinary one. Their ids are 1, 2, 3, …
async fn database() -> Db {
    let db = Db::installed().await;
    for odd in ODD {
        let id = &db.add_job("'t'").await["id"];
        db.run(&format!("update graphile_worker._private_jobs set {odd} where id = {id}")).await;
    }
    db.add_job("'t'").await;
    db
}

fn ids() -> Vec<i64> {
    (1..=ODD.len() as i64 + 1).collect()
}

#[tokio::test]
async fn a_worker_runs_odd_rows_and_the_other_jobs() {
    let db = database().await;
    let ran = Arc::new(Mutex::new(Vec::new()));
    let runs = ran.clone();
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false).concurrency(2);
    let options = options.define_task("t", move |_: Box<RawValue>, ctx: WorkerContext| {
        runs.lock().unwrap().push(ctx.job().id);
        async {}
    });
    options.init().await.unwrap().run_once().await.unwrap();
    let mut ran = std::mem::take(&mut *ran.lock().unwrap());
    ran.sort();
    assert_eq!(ran, ids());
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_payload_that_the_handler_cannot_take_fails_its_own_job_only() {
    let db = database().await;
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false).concurrency(2);
    let worker = options.define_task("t", |_: Value, _: WorkerContext| async {}).init().await.unwrap();
    worker.run_once().await.unwrap();
    let failed =
        "select json_agg(json_build_array(payload::text, last_error is not null, locked_at is null) order by id)
        from graphile_worker._private_jobs where length(payload::text) < 1000";
    let surrogate = "\"\\ud83e\"";
    assert_eq!(db.value(failed).await, json!([["1e999999", true, true], [surrogate, true, true]]));
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 3, "the third is nested too deep");
}

#[tokio::test]
async fn the_utilities_read_odd_rows() {
    let db = database().await;
    db.run("update graphile_worker._private_jobs set run_at = 'infinity' where id = 1").await;
    db.run("update graphile_worker._private_jobs set locked_at = 'infinity', locked_by = 'w' where id = 2").await;
    let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
    let jobs = utils.list_jobs(&JobFilter::default()).await.unwrap();
    let mut listed: Vec<i64> = jobs.iter().map(|job| job.id).collect();
    listed.sort();
    assert_eq!(listed, ids());
    let first = jobs.iter().find(|job| job.id == 1).unwrap();
    let last_day: chrono::DateTime<chrono::Utc> = "9999-12-31T00:00:00Z".parse().unwrap();
    assert_eq!((first.created_at, first.run_at), (last_day, last_day));
    for id in ids() {
        let found = utils.find_job(id).await.unwrap().unwrap();
        assert_eq!(found.job.id, id);
        serde_json::to_string(&found).unwrap();
        serde_json::to_string(&utils.why(id).await.unwrap()).unwrap();
    }
    assert_eq!(utils.stats().await.unwrap().total(), ODD.len() as i64 + 1);
    utils.doctor().await.unwrap();
    assert_eq!(utils.list_workers(Duration::from_secs(1)).await.unwrap().len(), 1);
}

#[tokio::test]
async fn the_utilities_change_odd_rows_through_either_driver() {
    let db = database().await;
    let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
    let options = RescheduleJobOptions::default().priority(1);
    let rescheduled = utils.reschedule_jobs(&ids(), options.clone()).await.unwrap();
    assert_eq!(rescheduled.len(), ids().len());
    let flags = rescheduled.iter().find_map(|job| job.flags.as_ref()?.get("a")).expect("the large number");
    assert_eq!(flags.as_str().map(str::len), Some(401), "its digits");

    #[cfg(feature = "tokio-postgres")]
    {
        let (client, connection) = tokio_postgres::connect(db.url(), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let within = utils.within_tokio_postgres(&client);
        let again = within.reschedule_jobs(&ids(), options).await.unwrap();
        let json = |jobs: &[graphile_worker::Job]| -> Vec<_> {
            jobs.iter().map(|job| (job.id, job.run_at, job.created_at, job.flags.clone())).collect()
        };
        assert_eq!(json(&again), json(&rescheduled));
    }
    assert_eq!(utils.permanently_fail_jobs(&ids(), "enough").await.unwrap().len(), ids().len());
    assert_eq!(utils.complete_jobs(&ids()).await.unwrap().len(), ids().len());
}

#[tokio::test]
async fn a_sweep_releases_odd_rows_and_the_other_jobs_of_their_worker() {
    let db = database().await;
    db.run(
        "update graphile_worker._private_jobs set locked_by = 'rs-live-dead', locked_at = now();
         update graphile_worker._private_jobs set locked_at = 'infinity' where id = 1;
         insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at) values ('rs-live-dead', '-infinity')",
    )
    .await;
    let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
    assert_eq!(utils.list_workers(Duration::from_secs(1)).await.unwrap().len(), 1);
    let swept = utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
    assert_eq!(swept.recovered_count, ids().len() as u64);
}

/// Times that chrono, JSON or arithmetic in PostgreSQL cannot deal with.
const ODD_TIMES: [&str; 4] = ["infinity", "-infinity", "4000-01-01 BC", "290000-01-01"];

#[tokio::test]
async fn a_worker_continues_if_the_lock_of_a_running_job_becomes_odd() {
    for time in ODD_TIMES {
        let db = Db::installed().await;
        for _ in 0..3 {
            db.add_job("'t'").await;
        }
        // Some of these times make a lock older than 4 hours. The worker releases such locks once, when it first waits: this
        // one shows when that is over.
        db.add_job("'another'").await;
        db.run("update graphile_worker._private_jobs set locked_at = '2000-01-01', locked_by = 'dead' where id = 4")
            .await;
        let pool = db.pool.clone();
        let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
        let options = options.define_task("t", move |_: Value, ctx: WorkerContext| {
            let pool = pool.clone();
            async move {
                let change = "update graphile_worker._private_jobs set locked_at = $1::text::timestamptz where id = $2";
                let id = ctx.job().id;
                let is_locked = "select locked_at is not null from graphile_worker._private_jobs where id = 4";
                while sqlx::query_scalar(is_locked).fetch_one(&pool).await? {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                if id < 3 {
                    sqlx::query(change).bind(time).bind(id).execute(&pool).await?;
                }
                if id == 2 {
                    return Err(TaskError::new("it fails"));
                }
                Ok::<(), TaskError>(())
            }
        });
        options.init().await.unwrap().run_once().await.unwrap_or_else(|error| panic!("{time}: {error:?}"));
        let left = db.value("select json_agg(id order by id) from graphile_worker.jobs").await;
        assert_eq!(left, json!([1, 2, 4]), "{time}: the worker no longer holds 1 and 2");
    }
}

#[tokio::test]
async fn a_worker_starts_and_sweeps_whatever_times_are_in_the_other_tables() {
    for time in ODD_TIMES {
        let db = Db::installed().await;
        db.run(&format!(
            "select graphile_worker.add_job('t', queue_name := 'q'), graphile_worker.add_job('other', queue_name := 'odd');
             update graphile_worker._private_job_queues set locked_at = '{time}', locked_by = 'w' where queue_name = 'odd';
             update graphile_worker._rs_additions set ts = '{time}' where id = 3;
             insert into graphile_worker._rs_additions (id, ts, wanted_until) values (2, '{time}', 'infinity')
               on conflict (id) do update set ts = excluded.ts;
             update graphile_worker.migrations set ts = '{time}';
             insert into graphile_worker._rs_workers (worker_id, started_at, last_heartbeat_at, swept_at)
             values ('rs-live-odd', '{time}', '{time}', '{time}');
             insert into graphile_worker._rs_recoveries (job_id, times, last_at) values (1, 1, '{time}');
             insert into graphile_worker._rs_crontab_items (identifier, item, since) values ('tick', 'x', '{time}');
             insert into graphile_worker._private_known_crontabs values ('tick', '{time}', '{time}'), ('new', '{time}', null)"
        ))
        .await;
        let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
        let options = options.with_cron("* * * * * t ?id=tick&fill=1h\n* * * * * t ?id=new").unwrap();
        let options = options.heartbeat_interval(Duration::from_millis(50)).sweep_interval(Duration::from_millis(50));
        let started = Started::new(options.define_task("t", |_: Value, _| async {})).await;
        until("the job has run", async || {
            assert!(!started.running.is_finished(), "{time}: the worker ended");
            (db.value("select count(*) from graphile_worker.jobs where id = 1").await == 0).then_some(())
        })
        .await;
        let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
        serde_json::to_string(&utils.list_workers(Duration::from_secs(1)).await.unwrap()).unwrap();
        utils.list_active_workers(Duration::from_secs(1)).await.unwrap();
        serde_json::to_string(&utils.list_queues(10).await.unwrap()).unwrap();
        serde_json::to_string(&utils.why(2).await.unwrap()).unwrap();
        serde_json::to_string(&utils.doctor().await.unwrap()).unwrap();
        assert!(utils.is_migrated().await.unwrap());
        utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await.unwrap();
        assert!(!started.running.is_finished(), "{time}: the worker ended");
        started.stop().await;
        assert!(utils.uninstall_preview().await.unwrap().installed);
    }
}

#[tokio::test]
async fn a_step_that_is_wanted_at_an_odd_time_is_still_noticed() {
    for time in ODD_TIMES {
        let db = Db::installed().await;
        db.run(&format!(
            "insert into graphile_worker._rs_additions (id, breaking, ts, wanted_until) values (999, true, '{time}', 'infinity')"
        ))
        .await;
        let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
        let error = options.define_task("t", |_: Value, _| async {}).init().await.err().unwrap();
        assert!(matches!(error, Error::UpgradeUnderWay { step: 999, .. }), "{time}: {error:?}");
    }
}
