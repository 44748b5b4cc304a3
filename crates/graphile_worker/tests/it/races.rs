//! Real sessions at the same moment: nothing is lost, nothing is doubled, nothing deadlocks.

use crate::support::{Db, Started, claim, rows};
use graphile_worker::{CleanupTask, WorkerContext, WorkerOptions, WorkerUtils};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

async fn all_end(tasks: Vec<tokio::task::JoinHandle<()>>) {
    for task in tasks {
        task.await.unwrap();
    }
}

/// Takes jobs and finishes them until `stop` and the table is empty; returns the payloads it ran.
async fn work(db: Arc<Db>, name: String, stop: Arc<AtomicBool>) -> Vec<Value> {
    let mut connection = db.connect().await;
    let mut ran = Vec::new();
    loop {
        let last_look = stop.load(Ordering::SeqCst);
        match claim(&mut connection, &name).await {
            Some(job) => {
                ran.push(job["payload"].clone());
                sqlx::query("delete from graphile_worker._private_jobs where id = $1 and locked_by = $2")
                    .bind(job["id"].as_i64().unwrap())
                    .bind(&name)
                    .execute(&mut connection)
                    .await
                    .unwrap();
            }
            None if last_look => return ran,
            None => tokio::task::yield_now().await,
        }
    }
}

/// Eight sessions add 150 events each to one key while two workers run what is there. `add` is the
/// statement that adds event `$1`, whose payload is a list that merges; it returns the job.
async fn events_that_ran(add: &'static str) -> (Vec<i64>, usize) {
    const SESSIONS: i64 = 8;
    const EVENTS: i64 = 150;
    let db = Arc::new(Db::installed().await);
    let stop = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = ["w1", "w2"].map(|name| tokio::spawn(work(db.clone(), name.to_owned(), stop.clone()))).into();
    let adders: Vec<_> = (0..SESSIONS)
        .map(|session| {
            let db = db.clone();
            tokio::spawn(async move {
                let mut connection = db.connect().await;
                for event in session * EVENTS..(session + 1) * EVENTS {
                    let id: Option<i64> = sqlx::query_scalar(add).bind(event).fetch_one(&mut connection).await.unwrap();
                    assert!(id.is_some(), "an add returned no job");
                }
            })
        })
        .collect();
    all_end(adders).await;
    stop.store(true, Ordering::SeqCst);
    let mut runs = Vec::new();
    for worker in workers {
        runs.extend(worker.await.unwrap());
    }
    let events = runs.iter().flat_map(|payload| payload.as_array().unwrap()).map(|event| event.as_i64().unwrap());
    (events.collect(), (SESSIONS * EVENTS) as usize)
}

fn assert_each_once((mut events, expected): (Vec<i64>, usize)) {
    events.sort_unstable();
    assert_eq!(events, (0..expected as i64).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn keyed_adds_lose_no_event_while_workers_claim_and_finish_the_same_key() {
    assert_each_once(
        events_that_ran("select id from graphile_worker.add_job('t', json_build_array($1::bigint), job_key := 'k')")
            .await,
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn keyed_batches_lose_no_event_while_workers_claim_and_finish_the_same_key() {
    assert_each_once(
        events_that_ran(
            "select min(id) from graphile_worker.add_jobs(array[
               ('t', json_build_array($1::bigint), null, null, null, 'k', null, null)
             ]::graphile_worker.job_spec[], true)",
        )
        .await,
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn unsafe_dedupe_always_returns_a_job_while_workers_claim_and_finish_the_same_key() {
    let (events, added) = events_that_ran(
        "select id from graphile_worker.add_job('t', json_build_array($1::bigint), job_key := 'k', job_key_mode := 'unsafe_dedupe')",
    )
    .await;
    assert!(!events.is_empty() && events.len() <= added);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batches_with_the_same_keys_in_different_order_do_not_deadlock() {
    let db = Arc::new(Db::installed().await);
    let adders: Vec<_> = (0..6)
        .map(|session| {
            let db = db.clone();
            tokio::spawn(async move {
                let mut connection = db.connect().await;
                for round in 0..10 {
                    // Half of the keys exist already, half are new in this round; tasks and queues too.
                    sqlx::query(
                        "select count(*) from graphile_worker.add_jobs((
                           select array_agg((
                             'task' || n % 20 + $2, null, 'queue' || n % 20 + $2, null, null, 'key' || n + $2, null, null
                           )::graphile_worker.job_spec order by hashint4(n # $1))
                           from generate_series(1, 40) as n
                         ))",
                    )
                    .bind(session)
                    .bind(round * 20)
                    .execute(&mut connection)
                    .await
                    .unwrap();
                }
            })
        })
        .collect();
    all_end(adders).await;
    let counts = db
        .row("select count(*) as jobs, count(distinct key) as keys, count(distinct task_identifier) as tasks from graphile_worker.jobs")
        .await;
    assert_eq!(counts["jobs"], 220);
    assert_eq!(counts["keys"], 220);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn keyed_batches_do_not_deadlock_while_workers_claim_and_finish_their_jobs() {
    let db = Arc::new(Db::installed().await);
    let stop = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = ["w1", "w2"].map(|name| tokio::spawn(work(db.clone(), name.to_owned(), stop.clone()))).into();
    let adders: Vec<_> = (0..6)
        .map(|session| {
            let db = db.clone();
            tokio::spawn(async move {
                let mut connection = db.connect().await;
                for round in 0..60 {
                    sqlx::query(
                        "select count(*) from graphile_worker.add_jobs((
                           select array_agg(('t', '[]', null, null, null, 'key' || n, null, null)::graphile_worker.job_spec
                             order by hashint4(n # $1))
                           from generate_series(1, 13) as n where hashint4(n # $1) % 2 = 0
                         ))",
                    )
                    .bind(session * 1000 + round)
                    .execute(&mut connection)
                    .await
                    .unwrap();
                }
            })
        })
        .collect();
    all_end(adders).await;
    stop.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.await.unwrap();
    }
}

/// Real workers, which report and claim many jobs in one statement, beside everything that an application may call.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_that_an_application_calls_deadlocks_beside_real_workers() {
    let db = Arc::new(Db::installed().await);
    let mut workers = Vec::new();
    for _ in 0..2 {
        let task = |n: i64, _: WorkerContext| async move {
            tokio::time::sleep(Duration::from_millis((n % 5) as u64)).await;
            if n % 7 == 0 { Err("oops") } else { Ok(()) }
        };
        let options = WorkerOptions::default().pg_pool(db.pool.clone()).listen_os_shutdown_signals(false);
        workers.push(Started::new(options.concurrency(16).define_task("t", task).define_task("u", task)).await);
    }
    let calls = [
        "select graphile_worker.add_job((array['t','u'])[1 + $1 % 2], to_json($1), 'q' || $1 % 9, job_key := 'k' || $1 % 40)",
        "select graphile_worker.add_job('t', to_json($1), job_key := 'k' || $1 % 40)",
        "select count(*) from graphile_worker.add_jobs(array(
           select ('t', to_json($1 + n), case when n % 2 = 0 then 'q' || n end, null, null, 'k' || (n * $1) % 40, null, null)::graphile_worker.job_spec
           from generate_series(1, 20) n))",
        "select count(*) from graphile_worker.add_jobs(array(
           select ('u', to_json($1 + n), null, null, null, 'k' || (n * 7 + $1) % 40, null, null)::graphile_worker.job_spec
           from generate_series(1, 20) n))",
        "select graphile_worker.remove_job('k' || $1 % 40)",
        "select count(*) from graphile_worker.reschedule_jobs(array(
           select id from graphile_worker._private_jobs where id % 13 = $1 % 13 limit 50), run_at := now(), attempts := 0)",
        "select count(*) from graphile_worker.complete_jobs(array(
           select id from graphile_worker._private_jobs where id % 17 = $1 % 17 limit 5))",
        "select count(*) from graphile_worker.permanently_fail_jobs(array(
           select id from graphile_worker._private_jobs where id % 19 = $1 % 19 limit 2))",
    ];
    let sessions = calls.map(|call| {
        let db = db.clone();
        tokio::spawn(async move {
            let mut connection = db.connect().await;
            for n in 0..200 {
                let called = sqlx::query(call).bind(n).execute(&mut connection).await;
                called.unwrap_or_else(|error| panic!("{call}: {error}"));
            }
        })
    });
    let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker");
    while !sessions.iter().all(tokio::task::JoinHandle::is_finished) {
        utils.cleanup(&[CleanupTask::DeletePermanentlyFailedJobs]).await.unwrap();
        utils.cleanup(&[CleanupTask::GcJobQueues, CleanupTask::GcTaskIdentifiers]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    all_end(sessions.into()).await;
    for worker in workers {
        worker.stop().await;
    }
    assert_eq!(db.value("select count(*) from graphile_worker.jobs where locked_by is not null").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn single_adds_and_batches_do_not_deadlock_over_new_names() {
    let db = Arc::new(Db::installed().await);
    let adders: Vec<_> = (0..8)
        .map(|session| {
            let db = db.clone();
            tokio::spawn(async move {
                let mut connection = db.connect().await;
                for round in 0..40 {
                    let add = if session % 2 == 0 {
                        format!("graphile_worker.add_job('t{round}', queue_name := 'q{round}')")
                    } else {
                        format!(
                            "graphile_worker.add_jobs(array[('t{round}', null, 'q{round}', null, null, null, null, null)]
                               ::graphile_worker.job_spec[])"
                        )
                    };
                    rows(&mut connection, &format!("select id from {add}")).await.unwrap();
                }
            })
        })
        .collect();
    all_end(adders).await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 320);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_name_that_eight_sessions_use_first_at_the_same_moment_is_made_once() {
    let db = Arc::new(Db::installed().await);
    let barrier = Arc::new(tokio::sync::Barrier::new(8));
    let adders: Vec<_> = (0..8)
        .map(|_| {
            let (db, barrier) = (db.clone(), barrier.clone());
            tokio::spawn(async move {
                let mut connection = db.connect().await;
                barrier.wait().await;
                rows(&mut connection, "select graphile_worker.add_job('new', queue_name := 'new')").await.unwrap();
            })
        })
        .collect();
    all_end(adders).await;
    let jobs = db.rows("select task_identifier, queue_name, count(*) from graphile_worker.jobs group by 1, 2").await;
    assert_eq!(jobs.len(), 1);
    assert_eq!(jobs[0]["count"], 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn remove_job_and_a_claiming_worker_agree_on_who_came_first() {
    let db = Arc::new(Db::installed().await);
    let mut outcomes = HashMap::new();
    for round in 0..60 {
        db.run("truncate graphile_worker._private_jobs; select graphile_worker.add_job('t', job_key := 'k')").await;
        let barrier = Arc::new(tokio::sync::Barrier::new(2));
        let (mut worker, mut remover) = (db.connect().await, db.connect().await);
        let at_once = barrier.clone();
        let claimed = tokio::spawn(async move {
            at_once.wait().await;
            claim(&mut worker, "w").await
        });
        barrier.wait().await;
        for _ in 0..round % 8 {
            tokio::task::yield_now().await;
        }
        let removed = rows(&mut remover, "select * from graphile_worker.remove_job('k')").await.unwrap();
        let claimed = claimed.await.unwrap();
        let left = db.rows("select * from graphile_worker._private_jobs").await;
        assert_eq!(removed.len(), 1);
        let came_first = if claimed.is_some() {
            // It runs, under no key, for the last time.
            assert_eq!((left.len(), &left[0]["key"], &left[0]["locked_by"]), (1, &Value::Null, &Value::from("w")));
            assert_eq!(left[0]["attempts"], left[0]["max_attempts"]);
            assert_eq!(removed[0], left[0]);
            "worker"
        } else {
            assert!(left.is_empty());
            "remover"
        };
        *outcomes.entry(came_first).or_insert(0) += 1;
    }
    println!("{outcomes:?}");
}

#[tokio::test]
async fn a_removal_that_waited_finds_the_job_that_took_the_key_over() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', '1', job_key := 'k')").await;
    db.claim().await;
    // Replaces the running job in an open transaction; the remover has to wait for it.
    let mut replacer = db.connect().await;
    sqlx::raw_sql("begin; select graphile_worker.add_job('t', '2', job_key := 'k')")
        .execute(&mut replacer)
        .await
        .unwrap();
    let mut remover = db.connect().await;
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut remover).await.unwrap();
    let removal =
        tokio::spawn(async move { rows(&mut remover, "select * from graphile_worker.remove_job('k')").await });
    while db.value(&format!("select cardinality(pg_blocking_pids({pid}))")).await == 0 {
        tokio::task::yield_now().await;
    }
    sqlx::raw_sql("commit").execute(&mut replacer).await.unwrap();
    let removed = removal.await.unwrap().unwrap();
    assert_eq!(removed[0]["payload"], 2);
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs where key is not null").await, 0);
}

#[tokio::test]
async fn in_repeatable_read_a_lost_race_is_an_error_and_never_a_lost_event() {
    let db = Db::installed().await;
    let mut first = db.connect().await;
    sqlx::raw_sql("begin isolation level repeatable read; select 1").execute(&mut first).await.unwrap();
    db.add_job("'t', job_key := 'k'").await;
    let error = rows(&mut first, "select * from graphile_worker.add_job('t', job_key := 'k')").await.unwrap_err();
    assert_eq!(error.into_database_error().unwrap().code().unwrap(), "40001");
}

/// Sessions add each event to four of seven keys, in an order of their own, while workers run what is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batches_over_several_keys_lose_no_event_while_workers_claim_and_finish_them() {
    const SESSIONS: i64 = 6;
    const EVENTS: i64 = 40;
    let db = Arc::new(Db::installed().await);
    let stop = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = ["w1", "w2"].map(|name| tokio::spawn(work(db.clone(), name.to_owned(), stop.clone()))).into();
    let adders: Vec<_> = (0..SESSIONS)
        .map(|session| {
            let db = db.clone();
            tokio::spawn(async move {
                let mut connection = db.connect().await;
                for event in session * EVENTS..(session + 1) * EVENTS {
                    let returned: Vec<String> = sqlx::query_scalar(
                        "select key from graphile_worker.add_jobs(array(
                           select ('t', json_build_array($1 * 10 + n), null, null, null, 'k' || n, null, null)
                             ::graphile_worker.job_spec
                           from generate_series(0, 6) as n where (n + $1) % 7 < 4 order by hashint8(n # $1)))",
                    )
                    .bind(event)
                    .fetch_all(&mut connection)
                    .await
                    .unwrap();
                    assert_eq!(returned.len(), 4);
                }
            })
        })
        .collect();
    all_end(adders).await;
    stop.store(true, Ordering::SeqCst);
    let mut ran = Vec::new();
    for worker in workers {
        for payload in worker.await.unwrap() {
            ran.extend(payload.as_array().unwrap().iter().map(|event| event.as_i64().unwrap()));
        }
    }
    ran.sort_unstable();
    let expected = (0..SESSIONS * EVENTS)
        .flat_map(|event| (0..7).filter(move |n| (n + event) % 7 < 4).map(move |n| event * 10 + n))
        .collect::<Vec<_>>();
    assert_eq!(ran, expected);
}

/// Waits until another session blocks the one with this process id.
async fn is_blocked(db: &Db, pid: i32) {
    while db.value(&format!("select cardinality(pg_blocking_pids({pid}))")).await == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_batch_gives_way_to_a_transaction_that_wants_its_keys_in_another_order() {
    // The key that both want first is new, or exists.
    for exists in [false, true] {
        let db = Db::installed().await;
        if exists {
            db.add_job("'t', '[0]', job_key := 'x'").await;
        }
        // It never looks for a deadlock, so it waits until the batch gives way.
        let mut transaction = db.connect().await;
        sqlx::raw_sql(
            "set deadlock_timeout = '10min'; begin; select graphile_worker.add_job('t', '[1]', job_key := 'z')",
        )
        .execute(&mut transaction)
        .await
        .unwrap();
        let mut connection = db.connect().await;
        let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut connection).await.unwrap();
        let batch = tokio::spawn(async move {
            rows(
                &mut connection,
                "select key, payload from graphile_worker.add_jobs(array[
                   ('t', '[2]', null, null, null, 'x', null, null),
                   ('t', '[2]', null, null, null, 'z', null, null)
                 ]::graphile_worker.job_spec[])",
            )
            .await
        });
        is_blocked(&db, pid).await;
        sqlx::raw_sql("select graphile_worker.add_job('t', '[1]', job_key := 'x'); commit")
            .execute(&mut transaction)
            .await
            .unwrap();
        let jobs = batch.await.unwrap().unwrap();
        assert_eq!(jobs[0]["payload"], if exists { json!([0, 1, 2]) } else { json!([1, 2]) });
        assert_eq!(jobs[1]["payload"], json!([1, 2]));
    }
}

#[tokio::test]
async fn a_batch_obeys_the_lock_timeout_of_its_caller_and_keeps_it() {
    let db = Db::installed().await;
    let mut holder = db.connect().await;
    let mut caller = db.connect().await;
    sqlx::raw_sql("set lock_timeout = '7ms'").execute(&mut caller).await.unwrap();
    let add = "select id from graphile_worker.add_jobs(array[
                 ('t', '1', null, null, null, 'a', null, null), ('t', '1', null, null, null, 'b', null, null)
               ]::graphile_worker.job_spec[])";
    // The key is new to the caller, then it exists.
    for _ in 0..2 {
        sqlx::raw_sql("begin; select graphile_worker.add_job('t', job_key := 'b')").execute(&mut holder).await.unwrap();
        let error = rows(&mut caller, add).await.unwrap_err();
        assert_eq!(error.into_database_error().unwrap().code().unwrap(), "55P03");
        sqlx::raw_sql("commit").execute(&mut holder).await.unwrap();
        assert_eq!(rows(&mut caller, add).await.unwrap().len(), 2);
        let setting = rows(&mut caller, "select current_setting('lock_timeout') as lock_timeout").await;
        assert_eq!(setting.unwrap()[0]["lock_timeout"], "7ms");
    }
}
