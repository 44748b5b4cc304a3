//! One of Node's workers and one of ours on the same jobs at the same time.

#![allow(missing_docs)]

use graphile_worker::{TaskOptions, WorkerContext, WorkerOptions};
use graphile_worker_interop::Db;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// The same as Node's tasks do in `node/worker.cjs`.
async fn note(ctx: &WorkerContext, state: &str) {
    sqlx::query("insert into public.ran (task, payload, state, queue) values ($1, $2::json, $3, $4)")
        .bind(&*ctx.job().task_identifier)
        .bind(ctx.payload().get())
        .bind(state)
        .bind(ctx.job().job_queue_id)
        .execute(ctx.pg_pool())
        .await
        .expect("a note");
}

fn our_worker(db: &Db) -> WorkerOptions {
    WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .concurrency(4)
        .listen_os_shutdown_signals(false)
        .define_task("note", |_: Value, ctx| async move { note(&ctx, "done").await })
        .define_task("slow", |_: Value, ctx| async move {
            note(&ctx, "start").await;
            tokio::time::sleep(Duration::from_millis(5)).await;
            note(&ctx, "end").await;
        })
}

#[tokio::test(flavor = "multi_thread")]
async fn each_job_runs_once_and_each_queue_one_at_a_time() {
    for package in ["graphile-worker", "graphile-worker-0.17"] {
        let db = Arc::new(Db::ours().await);
        db.run(
            "create table ran (id serial, task text, payload json, state text, queue int);
             select graphile_worker.add_job('note', to_json(n)) from generate_series(1, 600) n;
             select graphile_worker.add_job('slow', to_json(n), 'queue' || n % 3) from generate_series(1, 60) n",
        )
        .await;
        let worker = Arc::new(our_worker(&db).init().await.expect("a worker"));
        let nodes = tokio::task::spawn_blocking({
            let db = db.clone();
            move || db.node_works_on_what_is_there(package)
        });
        // Until Node has its first job, or has nothing left to do.
        while db.value("select count(*) from ran").await == json!(0) && !nodes.is_finished() {
            tokio::task::yield_now().await;
        }
        let ours = tokio::spawn({
            let worker = worker.clone();
            async move { worker.run().await }
        });
        while db.value("select count(*) from graphile_worker._private_jobs").await != json!(0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        worker.request_shutdown();
        ours.await.expect("our worker").expect("our worker");
        nodes.await.expect("Node's worker");

        let notes = "select json_build_array(count(*), count(distinct payload::text)) from ran where task = 'note'";
        assert_eq!(db.value(notes).await, json!([600, 600]), "{package}");
        for queue in 0..3 {
            let order = format!(
                "select json_agg(state || payload order by id) from ran
                 where queue = (select id from graphile_worker._private_job_queues where queue_name = 'queue{queue}')"
            );
            let first = if queue == 0 { 3 } else { queue };
            let expected: Vec<String> =
                (first..=60).step_by(3).flat_map(|n| [format!("start{n}"), format!("end{n}")]).collect();
            assert_eq!(db.value(&order).await, json!(expected), "{package}, queue {queue}");
        }
        let held = "select count(*) from graphile_worker._private_job_queues where locked_by is not null";
        assert_eq!(db.value(held).await, json!(0));
    }
}

#[tokio::test]
async fn jobs_that_failed_in_one_worker_are_retried_by_the_other() {
    let db = Db::ours().await;
    db.run("select graphile_worker.add_job('fail', queue_name := 'q')").await;
    db.node_works("graphile-worker").await;
    db.run("update graphile_worker._private_jobs set run_at = now()").await;
    let worker = our_worker(&db)
        .define_task("fail", |_: Value, _| async { Err::<(), _>("here too") })
        .init()
        .await
        .expect("a worker");
    worker.run_once().await.expect("our worker");
    let job = "select json_build_array(attempts, last_error, locked_by) from graphile_worker._private_jobs";
    assert_eq!(db.value(job).await, json!([2, "here too", null]));
    db.run("update graphile_worker._private_jobs set run_at = now()").await;
    db.node_works("graphile-worker").await;
    assert_eq!(db.value("select attempts from graphile_worker._private_jobs").await, json!(3));
}

#[tokio::test]
async fn a_job_that_node_adds_wakes_our_worker() {
    let db = Db::ours().await;
    db.run("create table ran (id serial, task text, payload json, state text, queue int)").await;
    let worker = Arc::new(our_worker(&db).poll_interval(Duration::from_secs(3600)).init().await.expect("a worker"));
    let ours = tokio::spawn({
        let worker = worker.clone();
        async move { worker.run().await }
    });
    db.run("select graphile_worker.add_job('note', '0')").await;
    while db.value("select count(*) from ran").await == json!(0) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Adds, replaces, reschedules and fails jobs of the task `note`, some of the future.
    db.node_utils("graphile-worker");
    while db.value("select count(*) from ran").await == json!(1) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    worker.request_shutdown();
    ours.await.expect("our worker").expect("our worker");
}

/// Our worker runs the jobs of a repeatable task before their claims are written. Node's worker sees rows that are free, but
/// locked.
#[tokio::test(flavor = "multi_thread")]
async fn node_leaves_the_jobs_alone_that_run_before_their_claims_are_written() {
    for package in ["graphile-worker", "graphile-worker-0.17"] {
        let db = Arc::new(Db::ours().await);
        db.run(
            "create table ran (id serial, task text, payload json, state text, queue int);
             select graphile_worker.add_job('note', to_json(n)) from generate_series(1, 4) n",
        )
        .await;
        let gate = Arc::new(Semaphore::new(0));
        let worker = WorkerOptions::default()
            .pg_pool(db.pool.clone())
            .concurrency(4)
            .listen_os_shutdown_signals(false)
            .longest_batch(Duration::from_secs(3600))
            .define_task("note", {
                let gate = gate.clone();
                move |_: Value, ctx| {
                    let gate = gate.clone();
                    async move {
                        note(&ctx, "start").await;
                        let _open = gate.acquire().await.expect("the gate");
                        note(&ctx, "end").await;
                    }
                }
            })
            .task_options("note", TaskOptions::default().repeatable(true));
        let worker = Arc::new(worker.init().await.expect("a worker"));
        let ours = tokio::spawn({
            let worker = worker.clone();
            async move { worker.run().await }
        });
        db.until("select count(*) = 4 from ran where state = 'start'").await;
        let claims = "select count(*) from graphile_worker._private_jobs where locked_by is not null or attempts > 0";
        assert_eq!(db.value(claims).await, json!(0), "{package}: no claim is written");
        db.run("select graphile_worker.add_job('slow', '5')").await;

        // Runs what it finds, and ends.
        db.node_works(package).await;
        let states = "select json_agg(state order by id) from ran where payload::text <> '5'";
        assert_eq!(
            db.value(states).await,
            json!(["start", "start", "start", "start"]),
            "{package}: Node ran none of them"
        );
        let nodes = "select json_agg(state order by id) from ran where payload::text = '5'";
        assert_eq!(db.value(nodes).await, json!(["start", "end"]), "{package}: Node ran its own");

        gate.add_permits(4);
        db.until("select count(*) = 0 from graphile_worker._private_jobs").await;
        worker.request_shutdown();
        ours.await.expect("our worker").expect("our worker");
        let states = "select json_object_agg(state, jobs) from (
                 select state, json_build_array(count(*), count(distinct payload::text)) as jobs
                 from ran where payload::text <> '5' group by state
             ) as by_state";
        assert_eq!(db.value(states).await, json!({ "start": [4, 4], "end": [4, 4] }), "{package}");
    }
}

/// With both at work on one backlog, each job of a repeatable task still runs once while nothing breaks.
#[tokio::test(flavor = "multi_thread")]
async fn each_repeatable_job_runs_once_beside_node() {
    let db = Arc::new(Db::ours().await);
    db.run(
        "create table ran (id serial, task text, payload json, state text, queue int);
         select graphile_worker.add_job('note', to_json(n)) from generate_series(1, 2000) n",
    )
    .await;
    let options = our_worker(&db).task_options("note", TaskOptions::default().repeatable(true));
    let worker = Arc::new(options.longest_batch(Duration::from_secs(3600)).init().await.expect("a worker"));
    let nodes = tokio::task::spawn_blocking({
        let db = db.clone();
        move || db.node_works_on_what_is_there("graphile-worker")
    });
    while db.value("select count(*) from ran").await == json!(0) && !nodes.is_finished() {
        tokio::task::yield_now().await;
    }
    let ours = tokio::spawn({
        let worker = worker.clone();
        async move { worker.run().await }
    });
    db.until("select count(*) = 0 from graphile_worker._private_jobs").await;
    worker.request_shutdown();
    ours.await.expect("our worker").expect("our worker");
    nodes.await.expect("Node's worker");
    let notes = "select json_build_array(count(*), count(distinct payload::text)) from ran";
    assert_eq!(db.value(notes).await, json!([2000, 2000]));
}

/// Also jobs that Node's own API adds fall under the limit.
#[tokio::test]
async fn node_runs_no_job_under_a_limit_and_all_of_them_once_the_limit_is_dropped() {
    for package in ["graphile-worker", "graphile-worker-0.17"] {
        let db = Db::ours().await;
        db.run(
            "create table ran (id serial, task text, payload json, state text, queue int);
             select graphile_worker.add_job('note', '\"before\"');
             select graphile_worker.add_job('note', '\"in a queue\"', 'q');
             select graphile_worker._rs_set_limit('task:note', concurrency => 1);
             select graphile_worker._rs_settle_lanes()",
        )
        .await;
        db.node_utils(package);
        let free = "select count(*) from graphile_worker._private_jobs where is_available and run_at <= now()";
        assert_ne!(db.value(free).await, json!(0));
        db.node_works(package).await;
        assert_eq!(db.value("select count(*) from ran").await, json!(0), "{package}");

        let waiting = db.value(free).await;
        our_worker(&db).init().await.expect("a worker").run_once().await.expect("our worker");
        assert_eq!(db.value("select count(*) from ran").await, waiting, "{package}");

        db.run("select graphile_worker.add_job('note', '\"after\"', 'q'); select graphile_worker._rs_drop_limit('task:note')").await;
        while db.value("select graphile_worker._rs_settle_lanes()").await != json!(0) {}
        db.run("truncate ran").await;
        db.node_works(package).await;
        assert_eq!(db.value("select json_agg(payload) from ran").await, json!(["after"]), "{package}");
    }
}
