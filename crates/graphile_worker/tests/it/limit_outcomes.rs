//! How the outcomes of jobs change their limits: rate-limited jobs, circuit breakers, and the hooks of limits.

use crate::support::{Db, Started, until};
use crate::worker_support::{options, run_once, until_no_jobs, until_true};
use graphile_worker::{JobRateLimited, TaskError, WorkerContext, WorkerOptions};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);

async fn set_limit(db: &Db, arguments: &str) {
    db.run(&format!("select graphile_worker._rs_set_limit({arguments})")).await;
    while db.value("select graphile_worker._rs_settle_lanes()").await != 0 {}
}

async fn task_exists(db: &Db, task: &str) {
    db.run(&format!("insert into graphile_worker._private_tasks (identifier) values ('{task}')")).await;
}

/// The jobs, without the columns that depend on the time.
async fn jobs(db: &Db) -> Value {
    db.value(
        "select json_agg(json_build_object('id', id, 'attempts', attempts, 'error', last_error,
           'is_free', locked_at is null, 'in', round(extract(epoch from run_at - updated_at))) order by id)
         from graphile_worker._private_jobs",
    )
    .await
}

/// For how many seconds each task, group and queue is closed, rounded.
async fn closed(db: &Db) -> Value {
    db.value(
        "select coalesce(json_object_agg(name, seconds order by name), '{}') from (
           select name, round(extract(epoch from closed_until - now())) as seconds from graphile_worker._rs_limits
           union all
           select 'queue:' || queue_name, round(extract(epoch from closed_until - now())) from graphile_worker._rs_lanes
           where queue_name is not null
         ) as known where seconds is not null",
    )
    .await
}

#[tokio::test]
async fn a_rate_limited_job_runs_again_later_without_an_attempt_and_its_task_starts_nothing_until_then() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 1").await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 3) as n").await;
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    run_once(&db, move |_: Value, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Err::<(), _>(TaskError::rate_limited(MINUTE)) }
    })
    .await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    let free = json!({ "id": 2, "attempts": 0, "error": null, "is_free": true, "in": 0 });
    assert_eq!(
        jobs(&db).await,
        json!([
            { "id": 1, "attempts": 0, "error": "rate limited: runs again after 60s", "is_free": true, "in": 60 },
            free,
            { "id": 3, "attempts": 0, "error": null, "is_free": true, "in": 0 },
        ])
    );
    assert_eq!(closed(&db).await, json!({ "task:t": 60 }));
}

#[tokio::test]
async fn a_job_in_a_limited_queue_closes_that_queue_and_no_other_of_its_pattern() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:tenant:*', concurrency => 1").await;
    db.run("select graphile_worker.add_job('t', to_json(n % 2), 'tenant:' || n % 2) from generate_series(1, 6) as n")
        .await;
    run_once(
        &db,
        |tenant: Value, _| async move { if tenant == 0 { Err(TaskError::rate_limited(MINUTE)) } else { Ok(()) } },
    )
    .await;
    assert_eq!(closed(&db).await, json!({ "queue:tenant:0": 60 }));
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 3, "those of tenant 0");
}

#[tokio::test]
async fn a_rate_limited_job_can_close_the_group_that_it_is_in() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    task_exists(&db, "u").await;
    set_limit(&db, "'group:api', concurrency => 1").await;
    set_limit(&db, "'task:t', group_name => 'api'").await;
    set_limit(&db, "'task:u', group_name => 'api'").await;
    db.run("select graphile_worker.add_job('t'), graphile_worker.add_job('u'), graphile_worker.add_job('v')").await;
    let ran = Arc::new(Mutex::new(Vec::new()));
    let options = ["t", "u", "v"].into_iter().fold(options(&db).concurrency(1), |options, task| {
        let ran = ran.clone();
        options.define_task(task, move |_: Value, _| {
            ran.lock().unwrap().push(task);
            async { Err::<(), _>(TaskError::rate_limited_in("group:api", MINUTE)) }
        })
    });
    options.init().await.unwrap().run_once().await.unwrap();
    ran.lock().unwrap().sort_unstable();
    assert_eq!(*ran.lock().unwrap(), ["t", "v"], "v is under no limit and waits alone");
    assert_eq!(closed(&db).await, json!({ "group:api": 60 }));
    assert_eq!(db.value("select sum(attempts) from graphile_worker._private_jobs").await, 0);
}

#[tokio::test]
async fn a_job_that_names_a_limit_that_it_is_not_under_closes_its_own() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 1").await;
    db.add_job("'t'").await;
    run_once(&db, |_: Value, _| async { Err::<(), _>(TaskError::rate_limited_in("group:other", MINUTE)) }).await;
    assert_eq!(closed(&db).await, json!({ "task:t": 60 }));
}

#[tokio::test]
async fn a_shorter_break_does_not_shorten_a_longer_one() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 2").await;
    db.run("select graphile_worker.add_job('t', '3600'), graphile_worker.add_job('t', '1')").await;
    let both = Arc::new(tokio::sync::Barrier::new(2));
    run_once(&db, move |seconds: Value, _| {
        let both = both.clone();
        async move {
            both.wait().await;
            let seconds = seconds.as_u64().unwrap();
            // The shorter one is reported last.
            tokio::time::sleep(Duration::from_millis(if seconds == 1 { 200 } else { 0 })).await;
            Err::<(), _>(TaskError::rate_limited(Duration::from_secs(seconds)))
        }
    })
    .await;
    assert!(closed(&db).await["task:t"].as_f64().unwrap() >= 3590.0);
}

#[tokio::test]
async fn jobs_that_another_worker_has_claimed_and_not_started_are_released() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    task_exists(&db, "block").await;
    set_limit(&db, "'task:t', concurrency => 100").await;
    let go_on = Arc::new(tokio::sync::Notify::new());
    let begun = Arc::new(AtomicUsize::new(0));
    let ran = Arc::new(AtomicUsize::new(0));
    let worker = |slots| {
        let (go_on, begun, ran) = (go_on.clone(), begun.clone(), ran.clone());
        options(&db).concurrency(slots).define_task("t", move |n: Value, _| {
            let (go_on, begun, ran) = (go_on.clone(), begun.clone(), ran.clone());
            async move {
                if n == 0 {
                    return Err(TaskError::rate_limited(MINUTE));
                }
                begun.fetch_add(1, Ordering::SeqCst);
                go_on.notified().await;
                ran.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
        })
    };
    // Its only slot is busy, but it may hold more jobs.
    let holder = Started::new(worker(1)).await;
    db.run("select graphile_worker.add_job('t', to_json(n)) from generate_series(1, 10) as n").await;
    until("the first job runs", async || (begun.load(Ordering::SeqCst) == 1).then_some(())).await;
    let other = Started::new(worker(1)).await;
    db.run("select graphile_worker.add_job('t', '0', priority => -1)").await;
    until_true(
        "the task is closed",
        &db,
        "select exists (select from graphile_worker._rs_limits where closed_until > now())",
    )
    .await;
    until_true(
        "only running jobs are claimed",
        &db,
        "select count(*) filter (where locked_at is not null) <= 2 from graphile_worker._private_jobs",
    )
    .await;
    go_on.notify_waiters();
    holder.stop().await;
    go_on.notify_waiters();
    other.stop().await;
    assert!(ran.load(Ordering::SeqCst) <= 2);
}

#[tokio::test]
async fn the_token_of_a_rate_limited_job_is_given_back() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'group:api', rate => 1, per => '1 hour', burst => 3").await;
    set_limit(&db, "'task:t', rate => 1, per => '1 hour', burst => 2, group_name => 'api', cost => 2").await;
    set_limit(&db, "'queue:q', rate => 1, per => '1 hour', burst => 2").await;
    db.run("select graphile_worker.add_job('t'), graphile_worker.add_job('u', queue_name => 'q')").await;
    let limited = |_: Value, _| async { Err::<(), _>(TaskError::rate_limited(Duration::from_millis(1))) };
    let worker = options(&db).define_task("t", limited).define_task("u", limited);
    worker.init().await.unwrap().run_once().await.unwrap();
    let ahead = "select json_agg(json_build_object(name, tat > now() + interval '1 minute') order by name) from (
                   select name, tat from graphile_worker._rs_limits where tat is not null
                   union all select 'queue', tat from graphile_worker._rs_lanes where tat is not null) as t";
    assert_eq!(db.value(ahead).await, json!([{ "group:api": false }, { "queue": false }, { "task:t": false }]));
}

#[tokio::test]
async fn a_token_is_not_given_back_if_other_jobs_have_started_since() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', rate => 1, per => '1 hour', burst => 5").await;
    db.run("select graphile_worker.add_job('t', '\"first\"')").await;
    let (begun, go_on) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (is_begun, goes_on) = (begun.clone(), go_on.clone());
    let worker = Started::new(options(&db).define_task("t", move |name: Value, _| {
        let (begun, go_on) = (is_begun.clone(), goes_on.clone());
        async move {
            if name == "first" {
                begun.notify_one();
                go_on.notified().await;
                return Err(TaskError::rate_limited(MINUTE));
            }
            Ok(())
        }
    }))
    .await;
    begun.notified().await;
    db.run("select graphile_worker.add_job('t', '\"second\"')").await;
    until_true("the second job is done", &db, "select count(*) = 1 from graphile_worker._private_jobs").await;
    let tat = "select tat from graphile_worker._rs_limits";
    let before = db.value(tat).await;
    go_on.notify_one();
    until_true("it is closed", &db, "select closed_until > now() from graphile_worker._rs_limits").await;
    worker.stop().await;
    assert_eq!(db.value(tat).await, before);
}

#[tokio::test]
async fn a_rate_limited_job_is_announced_to_its_hook_and_counts_neither_as_success_nor_as_failure() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let announced = Arc::new(Mutex::new(Vec::new()));
    let mut options =
        options(&db).define_task("t", |_: Value, _| async { Err::<(), _>(TaskError::rate_limited(MINUTE)) });
    let seen = announced.clone();
    options = options.on(JobRateLimited, move |ctx| {
        seen.lock().unwrap().push((ctx.job.id, ctx.error.clone(), ctx.will_retry));
        async {}
    });
    for (name, seen) in [("success", announced.clone()), ("error", announced.clone())] {
        let hook = move |_: graphile_worker::JobEventContext| {
            seen.lock().unwrap().push((-1, Some(name.to_owned()), false));
            async {}
        };
        options = match name {
            "success" => options.on(graphile_worker::JobSuccess, hook),
            _ => options.on(graphile_worker::JobError, hook),
        };
    }
    options.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(*announced.lock().unwrap(), [(1, None, false)]);
}

#[tokio::test]
async fn jobs_under_a_limit_that_complete_themselves_free_their_slots() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 1, trip => 2, trip_for => '1 hour'").await;
    db.run("select graphile_worker.add_job('t', to_json(n), max_attempts => 1) from generate_series(0, 5) as n").await;
    // Fails, completes itself, fails, …: never twice in a row.
    let worker = Started::new(options(&db).define_task("t", |n: Value, ctx: WorkerContext| async move {
        if n.as_u64().unwrap().is_multiple_of(2) {
            return Err(TaskError::new("it fails"));
        }
        let transaction = ctx.pg_pool().begin().await?;
        ctx.complete_in(transaction).await?;
        Ok(())
    }))
    .await;
    until_true(
        "all have run",
        &db,
        "select count(*) = 3 and bool_and(attempts = 1 and locked_at is null) from graphile_worker._private_jobs",
    )
    .await;
    worker.stop().await;
    assert_eq!(db.value("select tripped_at from graphile_worker._rs_limits").await, Value::Null);
}

/// A worker whose jobs `t` fail or succeed as the test says, and are counted.
#[derive(Clone, Default)]
struct Partner {
    is_up: Arc<AtomicBool>,
    runs: Arc<AtomicUsize>,
    running: Arc<AtomicUsize>,
    most_at_once: Arc<AtomicUsize>,
}

impl Partner {
    fn options(&self, db: &Db) -> WorkerOptions {
        let partner = self.clone();
        options(db).define_task("t", move |_: Value, _| partner.clone().call())
    }

    async fn call(self) -> Result<(), TaskError> {
        self.runs.fetch_add(1, Ordering::SeqCst);
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_at_once.fetch_max(running, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.running.fetch_sub(1, Ordering::SeqCst);
        if self.is_up.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(TaskError::retry_after(Duration::from_millis(1), "the partner is down"))
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    /// Resets the highest number of jobs at once.
    fn watch(&self) {
        self.most_at_once.store(0, Ordering::SeqCst);
    }
}

async fn until_tripped(db: &Db) {
    until_true("the breaker has tripped", db, "select tripped_at is not null from graphile_worker._rs_limits").await;
}

#[tokio::test]
async fn a_tripped_breaker_lets_one_job_at_a_time_through_all_workers_until_one_succeeds() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', trip => 5, trip_for => '300 milliseconds'").await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 100)").await;
    let partner = Partner::default();
    let workers = [
        Started::new(partner.options(&db)).await,
        Started::new(partner.options(&db)).await,
        Started::new(partner.options(&db)).await,
    ];
    until_tripped(&db).await;
    until("what was claimed before has ended", async || {
        (db.value("select count(*) filter (where locked_at is not null) from graphile_worker._private_jobs").await == 0)
            .then_some(())
    })
    .await;
    // Those that were running when it tripped have ended, the others were released.
    assert!((5..100).contains(&partner.runs()), "{} jobs ran", partner.runs());
    partner.watch();
    let before = partner.runs();
    until("some probes have failed", async || (partner.runs() >= before + 3).then_some(())).await;
    assert_eq!(partner.most_at_once.load(Ordering::SeqCst), 1);
    partner.is_up.store(true, Ordering::SeqCst);
    until_no_jobs(&db).await;
    for worker in workers {
        worker.stop().await;
    }
    assert!(partner.most_at_once.load(Ordering::SeqCst) > 1, "the task has no other limit");
    let state = "select json_build_array(failures, tripped_at) from graphile_worker._rs_limits";
    assert_eq!(db.value(state).await, json!([0, null]));
    assert_eq!(db.value("select count(*) from graphile_worker._rs_limit_outcomes").await, 0);
}

#[tokio::test]
async fn each_failed_probe_pauses_the_limit_again() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', trip => 1, trip_for => '1 hour'").await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 10)").await;
    let partner = Partner::default();
    let worker = Started::new(partner.options(&db).concurrency(1)).await;
    until_tripped(&db).await;
    let before = partner.runs();
    let counted_from = db.value("select counted_from from graphile_worker._rs_limits").await;
    // An hour later.
    db.run(
        "update graphile_worker._rs_limits set closed_until = now();
         select graphile_worker._rs_notify_jobs(1)",
    )
    .await;
    until("a probe has failed", async || {
        (db.value("select counted_from from graphile_worker._rs_limits").await != counted_from).then_some(())
    })
    .await;
    worker.stop().await;
    assert_eq!(partner.runs(), before + 1);
    assert!(closed(&db).await["task:t"].as_f64().unwrap() > 3500.0);
}

#[tokio::test]
async fn a_breaker_of_a_pattern_trips_for_each_queue_by_itself() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:tenant:*', concurrency => 1, trip => 3, trip_for => '1 hour'").await;
    db.run(
        "select graphile_worker.add_job('t', to_json(n % 2), 'tenant:' || n % 2, max_attempts => 1)
         from generate_series(1, 20) as n",
    )
    .await;
    let runs: Arc<Mutex<Vec<Value>>> = Arc::default();
    let ran = runs.clone();
    run_once(&db, move |tenant: Value, _| {
        ran.lock().unwrap().push(tenant.clone());
        async move { if tenant == 0 { Err("down") } else { Ok(()) } }
    })
    .await;
    let of = |tenant: u64| runs.lock().unwrap().iter().filter(|ran| **ran == tenant).count();
    assert_eq!((of(0), of(1)), (3, 10));
    assert_eq!(closed(&db).await.as_object().unwrap().keys().collect::<Vec<_>>(), ["queue:tenant:0"]);
}

#[tokio::test]
async fn a_breaker_of_a_group_counts_the_failures_of_all_its_tasks() {
    let db = Db::installed().await;
    set_limit(&db, "'group:api', trip => 4, trip_for => '1 hour'").await;
    for task in ["t", "u"] {
        task_exists(&db, task).await;
        set_limit(&db, &format!("'task:{task}', group_name => 'api'")).await;
    }
    db.run("select graphile_worker.add_job(case n % 2 when 0 then 't' else 'u' end) from generate_series(1, 20) as n")
        .await;
    let runs = Arc::new(AtomicUsize::new(0));
    let options = ["t", "u"].into_iter().fold(options(&db).concurrency(1), |options, task| {
        let runs = runs.clone();
        options.define_task(task, move |_: Value, _| {
            runs.fetch_add(1, Ordering::SeqCst);
            async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                Err::<(), _>("down")
            }
        })
    });
    options.init().await.unwrap().run_once().await.unwrap();
    // The worker has claimed them all, and releases the others as soon as it learns of the trip.
    assert!((4..20).contains(&runs.load(Ordering::SeqCst)), "{runs:?}");
    let state = "select tripped_at is not null from graphile_worker._rs_limits where name = 'group:api'";
    assert_eq!(db.value(state).await, true);
}

#[tokio::test]
async fn only_failures_in_a_row_trip_a_breaker() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:q', trip => 2, trip_for => '1 hour'").await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'q', max_attempts => 1) from generate_series(0, 9) as n")
        .await;
    run_once(
        &db,
        |n: Value, _| async move { if n.as_u64().unwrap().is_multiple_of(2) { Err("down") } else { Ok(()) } },
    )
    .await;
    assert_eq!(
        db.value("select json_agg(last_error) from graphile_worker._private_jobs").await,
        json!(vec!["down"; 5])
    );
    assert_eq!(closed(&db).await, json!({}));
}

#[tokio::test]
async fn snoozed_cancelled_and_rate_limited_jobs_are_no_failures() {
    use graphile_worker::TaskOutcome;
    let db = Db::installed().await;
    set_limit(&db, "'queue:q', trip => 1, trip_for => '1 hour'").await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'q') from generate_series(0, 2) as n").await;
    run_once(&db, |n: Value, ctx: WorkerContext| async move {
        match n.as_u64().unwrap() {
            0 => Ok(TaskOutcome::Snooze(MINUTE)),
            1 => {
                let id = ctx.job().id;
                sqlx::query("select graphile_worker._rs_cancel_jobs(array[$1])")
                    .bind(id)
                    .execute(ctx.pg_pool())
                    .await?;
                Err(TaskError::new("it has failed, and was cancelled before"))
            }
            _ => Err(TaskError::rate_limited(MINUTE)),
        }
    })
    .await;
    let state = "select json_build_array(failures, tripped_at) from graphile_worker._rs_lanes where queue_name = 'q'";
    assert_eq!(db.value(state).await, json!([0, null]));
}

#[tokio::test]
async fn a_breaker_stays_tripped_if_the_worker_that_tripped_it_dies() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 1, trip => 1, trip_for => '1 second'").await;
    db.run("select graphile_worker.add_job('t', max_attempts => 3) from generate_series(1, 2)").await;
    // It reports a failure while another session has locked the limit, waits for nothing, and dies.
    let mut other = db.connect().await;
    sqlx::raw_sql("begin; select from graphile_worker._rs_limits for update").execute(&mut other).await.unwrap();
    db.run(
        "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'dead', attempts = 1 where id = 1;
         select graphile_worker._rs_report_of_lanes('dead', '{}', '{}', '{1}', array[(select locked_at from graphile_worker._private_jobs where id = 1)],
           '{down}', '{0}', '{null}', '{0}', '{null}', '{null}', '{null}', null, '{true}', '{null}', '{null}', '{}', '{}', '{}')",
    )
    .await;
    assert_eq!(db.value("select count(*) from graphile_worker._rs_limit_outcomes").await, 1);
    sqlx::raw_sql("rollback").execute(&mut other).await.unwrap();
    let partner = Partner::default();
    partner.is_up.store(true, Ordering::SeqCst);
    let worker = Started::new(partner.options(&db)).await;
    until_tripped(&db).await;
    assert_eq!(partner.runs(), 0);
    until_no_jobs(&db).await;
    worker.stop().await;
}

#[tokio::test]
async fn another_probe_starts_once_the_job_of_a_dead_worker_is_recovered() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 5, trip => 1, trip_for => '1 hour'").await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 3)").await;
    db.run(
        "update graphile_worker._rs_limits set failures = 1, tripped_at = now() - interval '1 hour',
           counted_from = now() - interval '1 hour', closed_until = now() - interval '1 second';
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-live-dead', attempts = 1 where id = 1;
         insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at) values ('rs-live-dead', now() - interval '1 day')",
    )
    .await;
    let partner = Partner::default();
    partner.is_up.store(true, Ordering::SeqCst);
    let other = Arc::new(AtomicUsize::new(0));
    let counted = other.clone();
    let worker = Started::new(partner.options(&db).define_task("u", move |_: Value, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        async {}
    }))
    .await;
    db.run("select graphile_worker.add_job('u')").await;
    until("the other task has run", async || (other.load(Ordering::SeqCst) == 1).then_some(())).await;
    assert_eq!(partner.runs(), 0, "the dead worker runs the only probe");
    db.run("select graphile_worker._rs_sweep_stale_workers(recovery_delay => '0 seconds')").await;
    until_no_jobs(&db).await;
    worker.stop().await;
}

#[tokio::test]
async fn outcomes_of_jobs_that_started_before_the_breaker_tripped_do_not_count() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 10, trip => 1, trip_for => '1 hour'").await;
    db.run(r#"select graphile_worker.add_job('t', '"old failure"', max_attempts => 1)"#).await;
    db.run(r#"select graphile_worker.add_job('t', '"old success"')"#).await;
    let (started, go_on) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Notify::new()));
    let (begun, goes_on) = (started.clone(), go_on.clone());
    let worker = Started::new(options(&db).define_task("t", move |name: String, _| {
        let (begun, go_on) = (begun.clone(), goes_on.clone());
        async move {
            if name.starts_with("old") {
                begun.fetch_add(1, Ordering::SeqCst);
                go_on.notified().await;
            }
            if name.ends_with("failure") { Err("down") } else { Ok(()) }
        }
    }))
    .await;
    until("both run", async || (started.load(Ordering::SeqCst) == 2).then_some(())).await;
    db.run(r#"select graphile_worker.add_job('t', '"failure"', max_attempts => 1)"#).await;
    until_tripped(&db).await;
    let state = "select to_json(limits) from (select failures, tripped_at, counted_from, closed_until from graphile_worker._rs_limits) as limits";
    let before = db.value(state).await;
    go_on.notify_waiters();
    until_true(
        "the old jobs are done",
        &db,
        "select count(*) = 2 and bool_and(locked_at is null) from graphile_worker._private_jobs",
    )
    .await;
    worker.stop().await;
    assert_eq!(db.value(state).await, before, "neither the late success nor the late failure changes anything");
    assert_eq!(db.value("select count(*) from graphile_worker._rs_limit_outcomes").await, 0);
}

#[tokio::test]
async fn resume_resets_a_tripped_breaker_and_ends_a_closure() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:tenant:*', concurrency => 1, trip => 1, trip_for => '1 hour'").await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'tenant:' || n) from generate_series(0, 1) as n").await;
    run_once(&db, |n: Value, _| async move {
        Err::<(), _>(if n == 0 { TaskError::new("down") } else { TaskError::rate_limited(MINUTE) })
    })
    .await;
    let utils = crate::worker_support::utils(&db);
    let listed = utils.limits().await.unwrap();
    assert_eq!(listed[0].closed_queues, Some(2));
    assert!(listed[0].tripped_at.is_some() && listed[0].closed_until.is_some() && listed[0].failures == 1);
    assert!(utils.resume("queue:tenant:0").await.unwrap());
    assert_eq!(closed(&db).await.as_object().unwrap().keys().collect::<Vec<_>>(), ["queue:tenant:1"]);
    assert!(utils.resume("queue:tenant:*").await.unwrap());
    assert!(!utils.resume("queue:tenant:*").await.unwrap());
    assert_eq!(closed(&db).await, json!({}));
    assert_eq!(utils.limits().await.unwrap()[0].tripped_at, None);
}

#[tokio::test]
async fn another_breaker_counts_anew_and_no_breaker_lets_jobs_start() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 1, trip => 1, trip_for => '1 hour'").await;
    db.run("select graphile_worker.add_job('t', max_attempts => 1)").await;
    run_once(&db, |_: Value, _| async { Err::<(), _>("down") }).await;
    set_limit(&db, "'task:t', concurrency => 2, trip => 1, trip_for => '1 hour'").await;
    assert_ne!(closed(&db).await, json!({}), "it is the same breaker");
    set_limit(&db, "'task:t', concurrency => 2").await;
    assert_eq!(closed(&db).await, json!({}));
    db.add_job("'t'").await;
    run_once(&db, |_: Value, _| async {}).await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 1);
}

#[tokio::test]
async fn why_names_the_breaker_and_the_break_that_a_job_waits_for() {
    let db = Db::installed().await;
    for task in ["t", "u"] {
        task_exists(&db, task).await;
        set_limit(&db, &format!("'task:{task}', concurrency => 1, trip => 1, trip_for => '1 hour'")).await;
    }
    db.run("select graphile_worker.add_job('t'), graphile_worker.add_job('u')").await;
    let worker = options(&db)
        .define_task("t", |_: Value, _| async { Err::<(), _>("down") })
        .define_task("u", |_: Value, _| async { Err::<(), _>(TaskError::rate_limited(MINUTE)) });
    worker.init().await.unwrap().run_once().await.unwrap();
    db.run("select graphile_worker.reschedule_jobs(array[1, 2], run_at => now())").await;
    let utils = crate::worker_support::utils(&db);
    let tripped = utils.why(1).await.unwrap().reasons[0].to_string();
    assert!(
        tripped.starts_with("The breaker of the task \"t\" tripped") && tripped.contains("1 job failed"),
        "{tripped}"
    );
    let limited = utils.why(2).await.unwrap().reasons[0].to_string();
    assert!(limited.starts_with("The task \"u\" starts no jobs for"), "{limited}");
}

/// The events of limits, as text.
fn announced(options: WorkerOptions) -> (WorkerOptions, Arc<Mutex<Vec<String>>>) {
    use graphile_worker::{LimitEventContext, LimitPaused, LimitReached, LimitResumed, LimitTripped};
    let events: Arc<Mutex<Vec<String>>> = Arc::default();
    let hook = |what: &'static str| {
        let events = events.clone();
        move |ctx: LimitEventContext| {
            events.lock().unwrap().push(format!("{what} {} {:?}", ctx.limit, ctx.cause));
            async {}
        }
    };
    let options = options
        .on(LimitPaused, hook("paused"))
        .on(LimitTripped, hook("tripped"))
        .on(LimitResumed, hook("resumed"))
        .on(LimitReached, hook("reached"));
    (options, events)
}

async fn until_announced(events: &Arc<Mutex<Vec<String>>>, event: &str) {
    until(event, async || events.lock().unwrap().iter().any(|known| known == event).then_some(())).await;
}

#[tokio::test]
async fn hooks_hear_of_pauses_of_tripped_breakers_and_of_their_ends() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 1, trip => 1, trip_for => '1 second'").await;
    set_limit(&db, "'queue:q', concurrency => 1").await;
    let partner = Partner::default();
    let (options, events) =
        announced(partner.options(&db).define_task("u", |_: Value, ctx: WorkerContext| async move {
            // The first time.
            if ctx.job().last_error.is_none() { Err(TaskError::rate_limited(Duration::from_secs(2))) } else { Ok(()) }
        }));
    let worker = Started::new(options).await;
    db.run("select graphile_worker.add_job('t')").await;
    until_announced(&events, "tripped task:t Tripped { failures: 1 }").await;
    partner.is_up.store(true, Ordering::SeqCst);
    until_announced(&events, "resumed task:t Tripped { failures: 0 }").await;
    db.run("select graphile_worker.add_job('u', queue_name => 'q')").await;
    until_announced(&events, "paused queue:q RateLimited").await;
    until_announced(&events, "resumed queue:q RateLimited").await;
    db.run("select graphile_worker._rs_pause('all', now() + interval '1 second')").await;
    let role = db.value("select session_user::text").await;
    until_announced(&events, &format!("paused all Paused {{ by: Some({role}) }}")).await;
    until_announced(&events, "resumed all Paused { by: None }").await;
    worker.stop().await;
}

#[tokio::test]
async fn a_hook_hears_that_due_jobs_wait_for_a_limit() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'group:api', concurrency => 1").await;
    set_limit(&db, "'task:t', group_name => 'api'").await;
    set_limit(&db, "'queue:q', rate => 1, per => '1 hour'").await;
    let held = crate::worker_support::Held::default();
    let running = held.clone();
    let (options, events) = announced(options(&db).define_task("t", move |_: Value, _| running.clone().run()));
    let worker = Started::new(options.define_task("u", |_: Value, _| async {})).await;
    db.run("select graphile_worker.add_job('t'), graphile_worker.add_job('u', queue_name => 'q')").await;
    held.begun.notified().await;
    assert_eq!(*events.lock().unwrap(), Vec::<String>::new());
    // The burst lets a second one start.
    db.run("select graphile_worker.add_job('t'), graphile_worker.add_job('u', queue_name => 'q') from generate_series(1, 2)").await;
    until_announced(&events, "reached group:api Reached").await;
    until_announced(&events, "reached queue:q Reached").await;
    for _ in 0..2 {
        held.go_on.notify_one();
        held.begun.notified().await;
    }
    held.go_on.notify_one();
    worker.stop().await;
}
