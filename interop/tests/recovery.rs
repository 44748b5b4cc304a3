//! Recovery beside Node: its workers do not register, and no sweep releases their jobs.

#![allow(missing_docs)]

use graphile_worker::{SweepStaleWorkersOptions, WorkerContext, WorkerOptions, WorkerUtils};
use graphile_worker_interop::{Db, patiently};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn no_sweep_releases_a_job_that_a_node_worker_runs() {
    for package in ["graphile-worker", "graphile-worker-0.17"] {
        let db = Arc::new(Db::ours().await);
        db.run(
            "create table ran (id serial, task text, payload json, state text, queue int);
             create table gate (open boolean);
             select graphile_worker.add_job('until_open', '{}', 'q')",
        )
        .await;
        let nodes = tokio::task::spawn_blocking({
            let db = db.clone();
            move || db.node_works_on_what_is_there(package)
        });
        let count = |state: &str| format!("select count(*) from ran where state = '{state}'");
        let until = async |question: String, answer: i64| {
            patiently(&question, async {
                while db.value(&question).await != json!(answer) {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        };
        until(count("start"), 1).await;
        let holder = "select locked_by from graphile_worker.jobs where task_identifier = 'until_open'";
        let held_by = db.value(holder).await;

        // One of ours dies and is recovered by another, which sweeps all the while.
        db.run(
            "insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at)
             values ('rs-live-dead', now() - interval '1 hour');
             select graphile_worker.add_job('ours');
             update graphile_worker._private_jobs set locked_by = 'rs-live-dead', locked_at = now(), attempts = 1
             where locked_by is null",
        )
        .await;
        let (sender, mut ran) = tokio::sync::mpsc::unbounded_channel();
        let worker = WorkerOptions::default()
            .pg_pool(db.pool.clone())
            .listen_os_shutdown_signals(false)
            .heartbeat_interval(Duration::from_millis(50))
            .sweep_interval(Duration::from_millis(50))
            .sweep_threshold(Duration::from_secs(1))
            .recovery_delay(Duration::ZERO)
            .define_task("until_open", |_: Value, _: WorkerContext| async { Err::<(), _>("it is Node's") })
            .define_task("ours", move |_: Value, _: WorkerContext| {
                sender.send(()).expect("a test");
                async {}
            });
        let worker = Arc::new(worker.init().await.expect("a worker"));
        let ours = tokio::spawn({
            let worker = worker.clone();
            async move { worker.run().await }
        });
        patiently("the dead one's job to be recovered", ran.recv()).await;
        let now = SweepStaleWorkersOptions::default().sweep_threshold(Duration::ZERO);
        let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
        let swept = utils.sweep_stale_workers(now).await.expect("a sweep");
        assert!(!swept.worker_ids.iter().any(|worker| json!(worker) == held_by), "{package}");
        assert_eq!(db.value(holder).await, held_by, "{package}");

        db.run("insert into gate values (true)").await;
        until(count("end"), 1).await;
        nodes.await.expect("Node's worker");
        assert_eq!(db.value("select count(*) from ran where task = 'until_open'").await, json!(2), "{package}");
        assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, json!(0), "{package}");
        worker.request_shutdown();
        ours.await.expect("our worker").expect("our worker");
    }
}
