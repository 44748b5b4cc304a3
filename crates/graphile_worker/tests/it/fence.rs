//! A worker whose outcome is refused says so: the job was taken from it while it ran.

use crate::support::{Db, Log, Started, until};
use graphile_worker::{WorkerContext, WorkerOptions};
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::{Notify, mpsc};

const REFUSED: &str = "outcome rejected";

#[tokio::test]
async fn an_outcome_that_matches_no_row_is_a_warning_with_the_job() {
    let (log, _guard) = Log::start();
    let db = Db::installed().await;
    let (started, mut has_started) = mpsc::unbounded_channel();
    let gate = Arc::new(Notify::new());
    let waits = gate.clone();
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false).concurrency(4);
    let task = move |fails: bool, context: WorkerContext| {
        let (started, waits) = (started.clone(), waits.clone());
        async move {
            started.send(context.job().id).unwrap();
            waits.notified().await;
            if fails { Err("boom") } else { Ok(()) }
        }
    };
    let worker = Started::new(options.define_task("flaky", task)).await;
    for payload in ["false", "true", "false", "false"] {
        db.add_job(&format!("'flaky', '{payload}'")).await;
    }
    for _ in 0..4 {
        has_started.recv().await.unwrap();
    }
    // The first is recovered and runs elsewhere, the second is unlocked, the third deleted; the fourth is left alone.
    db.run(
        "update graphile_worker._private_jobs set locked_by = 'another', locked_at = now() where id = 1;
         update graphile_worker._private_jobs set locked_by = null, locked_at = null, run_at = 'infinity' where id = 2;
         delete from graphile_worker._private_jobs where id = 3",
    )
    .await;
    gate.notify_waiters();
    until("the outcomes are reported", async || (log.lines(REFUSED).lines().count() >= 3).then_some(())).await;
    worker.stop().await;
    let warnings = log.lines(REFUSED);
    assert_eq!(warnings.lines().count(), 3, "{warnings}");
    for (id, line) in ["job_id=1", "job_id=2", "job_id=3"].iter().map(|id| (id, log.lines(REFUSED))) {
        assert!(line.lines().any(|line| line.contains(id) && line.contains("WARN")), "{line}");
    }
    assert!(warnings.contains("task_identifier=\"flaky\""), "{warnings}");
    // The end of the handler was logged before, so the warning has the last word on the job.
    let text = log.text();
    let of_first: Vec<_> = text.lines().filter(|line| line.contains("job_id=1")).collect();
    assert!(of_first.iter().any(|line| line.contains("job completed")), "{of_first:?}");
    assert!(of_first.last().is_some_and(|line| line.contains(REFUSED)), "{of_first:?}");
    let left = db.value(
        "select json_agg(json_build_array(id, locked_by, last_error) order by id) from graphile_worker._private_jobs",
    );
    assert_eq!(left.await, serde_json::json!([[1, "another", null], [2, null, null]]), "nothing was written");
}

#[tokio::test]
async fn an_outcome_that_is_written_causes_no_warning() {
    let (log, _guard) = Log::start();
    let db = Db::installed().await;
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false).concurrency(8);
    let options = options.define_task("t", |_: Value, _: WorkerContext| async {});
    db.run("select graphile_worker.add_job('t', queue_name => 'q' || n % 3) from generate_series(1, 60) n").await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 500) n").await;
    options.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
    assert_eq!(log.lines(REFUSED), "");
}

#[tokio::test]
async fn an_event_that_is_added_to_an_unlocked_job_while_the_job_still_runs_runs_after_it() {
    let db = Db::installed().await;
    let (started, mut has_started) = mpsc::unbounded_channel();
    let gate = Arc::new(Notify::new());
    let waits = gate.clone();
    let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false).concurrency(4);
    let task = move |event: i64, _: WorkerContext| {
        let (started, waits) = (started.clone(), waits.clone());
        async move {
            started.send(event).unwrap();
            waits.notified().await;
        }
    };
    let worker = Started::new(options.define_task("t", task)).await;
    db.add_job("'t', '1', job_key := 'k'").await;
    assert_eq!(has_started.recv().await, Some(1));
    // The add finds a job that waits, and puts its event in. Then the worker claims the job that it still runs.
    db.run(&format!(
        "begin;
         select graphile_worker.force_unlock_workers(array['{}']);
         select graphile_worker.add_job('t', '2', job_key := 'k');
         commit",
        worker.worker.worker_id()
    ))
    .await;
    until("the job is claimed again", async || {
        (db.value("select locked_by is not null from graphile_worker._private_jobs").await == true).then_some(())
    })
    .await;
    gate.notify_one();
    assert_eq!(has_started.recv().await, Some(2));
    gate.notify_one();
    until("both have ended", async || {
        (db.value("select count(*) from graphile_worker._private_jobs").await == 0).then_some(())
    })
    .await;
    worker.stop().await;
}

#[tokio::test]
async fn a_queue_that_a_failover_has_locked_again_continues() {
    let db = Db::installed().await;
    let (ran, mut has_run) = mpsc::unbounded_channel();
    let options = WorkerOptions::default().database_url(db.url()).listen_os_shutdown_signals(false);
    let options = options.poll_interval(std::time::Duration::from_millis(100));
    let task = move |n: i64, _: WorkerContext| {
        ran.send(n).unwrap();
        async {}
    };
    let worker = Started::new(options.define_task("t", task)).await;
    db.add_job("'t', '1', queue_name := 'q'").await;
    assert_eq!(has_run.recv().await, Some(1));
    let is_free = "select locked_by is null from graphile_worker._private_job_queues";
    until("the queue is free", async || (db.value(is_free).await == true).then_some(())).await;
    // As on a standby that did not receive the last exchange, and that all clients connect to now.
    db.run(&format!(
        "begin;
         update graphile_worker._private_job_queues set locked_by = '{}', locked_at = now();
         select graphile_worker.add_job('t', '2', queue_name := 'q');
         commit;
         select pg_terminate_backend(pid) from pg_stat_activity
         where datname = current_database() and application_name like 'graphile_worker rs-%'",
        worker.worker.worker_id()
    ))
    .await;
    assert_eq!(has_run.recv().await, Some(2));
    until("the queue is free again", async || (db.value(is_free).await == true).then_some(())).await;
    worker.stop().await;
}
