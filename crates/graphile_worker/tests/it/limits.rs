//! Limits across all workers: how many jobs run at once, how many start in a period, fair shares, and pauses.

use crate::support::{Db, Started, until};
use crate::worker_support::{Held, NEVER, options, run_once, utils};
use chrono::{DateTime, TimeDelta, Utc};
use graphile_worker::{FetchStart, JobSpec, WorkerContext, WorkerOptions};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;

/// How many jobs run at the same time, by the name in their payload.
#[derive(Clone, Default)]
struct Concurrency(Arc<Mutex<HashMap<String, (usize, usize)>>>);

impl Concurrency {
    async fn run(self, name: String) {
        {
            let mut counts = self.0.lock().unwrap();
            let (running, most) = counts.entry(name.clone()).or_default();
            *running += 1;
            *most = (*most).max(*running);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        self.0.lock().unwrap().get_mut(&name).unwrap().0 -= 1;
    }

    fn most(&self, name: &str) -> usize {
        self.0.lock().unwrap().get(name).map_or(0, |(_, most)| *most)
    }
}

/// A worker whose tasks `t` and `u` count how many jobs with the same payload run at once.
fn counting(db: &Db, concurrency: &Concurrency) -> WorkerOptions {
    ["t", "u"].into_iter().fold(options(db).concurrency(8), |options, task| {
        let concurrency = concurrency.clone();
        options.define_task(task, move |name: String, _| concurrency.clone().run(name))
    })
}

async fn set_limit(db: &Db, arguments: &str) {
    db.run(&format!("select graphile_worker._rs_set_limit({arguments})")).await;
    while db.value("select graphile_worker._rs_settle_lanes()").await != 0 {}
}

async fn until_no_job_is_left(db: &Db) {
    until("no job is left", async || {
        (db.value("select count(*) from graphile_worker._private_jobs").await == 0).then_some(())
    })
    .await;
}

async fn task_exists(db: &Db, task: &str) {
    db.run(&format!("insert into graphile_worker._private_tasks (identifier) values ('{task}')")).await;
}

#[tokio::test]
async fn no_more_jobs_of_a_task_run_at_once_than_its_limit_allows_in_all_workers_together() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 3").await;
    db.run("select graphile_worker.add_job('t', '\"t\"') from generate_series(1, 200)").await;
    db.run("select graphile_worker.add_job('u', '\"u\"') from generate_series(1, 200)").await;
    let concurrency = Concurrency::default();
    let workers = [
        Started::new(counting(&db, &concurrency)).await,
        Started::new(counting(&db, &concurrency)).await,
        Started::new(counting(&db, &concurrency)).await,
    ];
    until_no_job_is_left(&db).await;
    for worker in workers {
        worker.stop().await;
    }
    assert_eq!(concurrency.most("t"), 3);
    assert!(concurrency.most("u") > 3, "a task without a limit has none");
}

#[tokio::test]
async fn each_queue_of_a_pattern_has_a_count_of_its_own() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:tenant:*', concurrency => 2").await;
    let specs = "array(select ('t', to_json('tenant:' || n % 4), 'tenant:' || n % 4, null, null, null, null, null)::graphile_worker.job_spec
                       from generate_series(1, 200) as n)";
    db.run(&format!("select graphile_worker.add_jobs({specs})")).await;
    db.run("select graphile_worker.add_job('t', '\"serial\"', 'other') from generate_series(1, 20)").await;
    let concurrency = Concurrency::default();
    let workers = [Started::new(counting(&db, &concurrency)).await, Started::new(counting(&db, &concurrency)).await];
    until_no_job_is_left(&db).await;
    for worker in workers {
        worker.stop().await;
    }
    for tenant in 0..4 {
        assert_eq!(concurrency.most(&format!("tenant:{tenant}")), 2);
    }
    assert_eq!(concurrency.most("serial"), 1, "a named queue without a limit is serial");
}

#[tokio::test]
async fn tasks_and_queues_of_a_group_share_its_limit() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'group:api', concurrency => 4").await;
    set_limit(&db, "'task:t', group_name => 'api'").await;
    set_limit(&db, "'queue:calls', concurrency => 10, group_name => 'api', cost => 2").await;
    db.run("select graphile_worker.add_job('t', '\"api\"') from generate_series(1, 100)").await;
    db.run("select graphile_worker.add_job('u', '\"calls\"', 'calls') from generate_series(1, 100)").await;
    let concurrency = Concurrency::default();
    let workers = [Started::new(counting(&db, &concurrency)).await, Started::new(counting(&db, &concurrency)).await];
    until_no_job_is_left(&db).await;
    for worker in workers {
        worker.stop().await;
    }
    assert!(concurrency.most("calls") <= 2, "each of them counts twice");
    assert!(concurrency.most("api") <= 4);
}

#[tokio::test]
async fn a_serial_queue_stays_serial_and_in_order_if_a_task_in_it_gets_a_limit() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job(case n % 2 when 0 then 't' else 'u' end, to_json(n), 'q') from generate_series(1, 40) as n")
        .await;
    set_limit(&db, "'task:t', concurrency => 5").await;
    db.run("select graphile_worker.add_job(case n % 2 when 0 then 't' else 'u' end, to_json(n), 'q') from generate_series(41, 80) as n")
        .await;
    let seen: Arc<Mutex<Vec<i64>>> = Arc::default();
    let options = ["t", "u"].into_iter().fold(options(&db), |options, task| {
        let seen = seen.clone();
        options.define_task(task, move |n: i64, _| {
            let seen = seen.clone();
            async move {
                seen.lock().unwrap().push(n);
            }
        })
    });
    options.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(*seen.lock().unwrap(), (1..=80).collect::<Vec<i64>>());
}

#[tokio::test]
async fn no_more_jobs_start_in_a_period_than_the_rate_and_the_burst_allow() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', rate => 20, per => '1 second', burst => 3").await;
    db.run("select graphile_worker.add_job('t', '0') from generate_series(1, 40)").await;
    let claims: Arc<Mutex<Vec<DateTime<Utc>>>> = Arc::default();
    let worker = || {
        let claims = claims.clone();
        options(&db).define_task("t", move |_: i64, ctx: WorkerContext| {
            let claims = claims.clone();
            async move {
                claims.lock().unwrap().push(ctx.job().locked_at.unwrap());
            }
        })
    };
    let workers = [Started::new(worker()).await, Started::new(worker()).await];
    until_no_job_is_left(&db).await;
    for worker in workers {
        worker.stop().await;
    }
    let mut claims = claims.lock().unwrap().clone();
    claims.sort();
    assert_eq!(claims.len(), 40);
    for (first, start) in claims.iter().enumerate() {
        let in_period = claims[first..].iter().take_while(|claim| **claim < *start + TimeDelta::seconds(1)).count();
        assert!(in_period <= 20 + 3, "{in_period} in the second from {start}");
    }
}

#[tokio::test]
async fn jobs_that_were_added_before_the_limit_was_set_are_under_it() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', '\"t\"') from generate_series(1, 50)").await;
    db.run("select graphile_worker.add_job('t', '\"q\"', 'q') from generate_series(1, 50)").await;
    set_limit(&db, "'task:t', concurrency => 2").await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs where job_queue_id < 0").await, 100);
    let concurrency = Concurrency::default();
    counting(&db, &concurrency).init().await.unwrap().run_once().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
    assert_eq!(concurrency.most("q"), 1);
    assert!(concurrency.most("t") <= 2);
}

/// What Node's worker asks for, in our words.
const NODE_FINDS: &str = "select count(*) from graphile_worker._private_jobs as jobs
    where is_available and run_at <= now()
      and (job_queue_id is null or job_queue_id in (select id from graphile_worker._private_job_queues where is_available))";

#[tokio::test]
async fn nodes_worker_finds_no_job_under_a_limit_and_every_job_once_the_limits_are_dropped() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', '1')").await;
    db.run("select graphile_worker.add_job('t', '2', 'serial')").await;
    db.run("select graphile_worker.add_job('u', '3', 'tenant:1')").await;
    set_limit(&db, "'task:t', concurrency => 2").await;
    set_limit(&db, "'queue:tenant:*', concurrency => 2").await;
    db.run("select graphile_worker.add_job('t', '4'), graphile_worker.add_job('u', '5', 'tenant:2')").await;
    let utils = utils(&db);
    utils.add_raw_job("t", json!(6), JobSpec::default()).await.unwrap();
    utils.add_raw_job("t", json!(7), JobSpec::builder().job_key("k").build()).await.unwrap();
    assert_eq!(db.value(NODE_FINDS).await, 0);
    assert_eq!(db.value("select graphile_worker._rs_drop_limit('task:t')").await, true);
    assert_eq!(db.value("select graphile_worker._rs_drop_limit('queue:tenant:*')").await, true);
    assert_eq!(db.value("select graphile_worker._rs_drop_limit('task:t')").await, false);
    while db.value("select graphile_worker._rs_settle_lanes()").await != 0 {}
    assert_eq!(db.value(NODE_FINDS).await, 7);
    for table in ["_rs_limits", "_rs_lanes", "_rs_lane_calls"] {
        assert_eq!(db.value(&format!("select count(*) from graphile_worker.{table}")).await, 0, "{table}");
    }
    let queues = "select json_agg(queue_name order by queue_name) from graphile_worker._private_job_queues";
    assert_eq!(db.value(queues).await, json!(["serial", "tenant:1", "tenant:2"]));
    run_once(&db, |_: Value, _| async {}).await;
}

#[tokio::test]
async fn a_paused_task_starts_no_job_until_it_is_resumed() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    let held = Held::default();
    let task = held.clone();
    let options = options(&db).define_task("t", move |_: Value, _| task.clone().run());
    let worker = Started::new(options.define_task("u", |_: Value, _| async {})).await;
    db.run("select graphile_worker._rs_pause('task:t')").await;
    db.run("select graphile_worker.add_job('t')").await;
    db.run("select graphile_worker.add_job('u')").await;
    until("the other task has run", async || {
        (db.value("select count(*) from graphile_worker._private_jobs").await == 1).then_some(())
    })
    .await;
    assert_eq!(held.runs(), 0);
    assert_eq!(db.value("select graphile_worker._rs_resume('task:t')").await, true);
    held.begun.notified().await;
    held.go_on.notify_one();
    until_no_job_is_left(&db).await;
    worker.stop().await;
    assert_eq!(db.value("select graphile_worker._rs_resume('task:t')").await, false);
}

#[tokio::test]
async fn a_pause_of_everything_ends_by_itself() {
    let db = Db::installed().await;
    db.run("select graphile_worker._rs_pause(until => now() + interval '2 seconds')").await;
    let until_time = db.value("select paused_until from graphile_worker._rs_limits").await;
    let until_time: DateTime<Utc> = until_time.as_str().unwrap().parse().unwrap();
    let claimed: Arc<Mutex<Option<DateTime<Utc>>>> = Arc::default();
    let seen = claimed.clone();
    let options = options(&db).define_task("t", move |_: Value, ctx: WorkerContext| {
        *seen.lock().unwrap() = ctx.job().locked_at;
        async {}
    });
    let worker = Started::new(options).await;
    db.run("select graphile_worker.add_job('t')").await;
    until_no_job_is_left(&db).await;
    worker.stop().await;
    assert!(claimed.lock().unwrap().unwrap() >= until_time);
}

#[tokio::test]
async fn a_raised_limit_takes_effect_at_once() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    let held = Held::default();
    let task = held.clone();
    let worker = Started::new(options(&db).define_task("t", move |_: Value, _| task.clone().run())).await;
    set_limit(&db, "'task:t', concurrency => 1").await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 3)").await;
    held.begun.notified().await;
    assert_eq!(held.runs(), 1);
    set_limit(&db, "'task:t', concurrency => 3").await;
    until("all run", async || (held.runs() == 3).then_some(())).await;
    for _ in 0..3 {
        held.go_on.notify_one();
        tokio::task::yield_now().await;
    }
    until("all end", async || {
        held.go_on.notify_waiters();
        (db.value("select count(*) from graphile_worker._private_jobs").await == 0).then_some(())
    })
    .await;
    worker.stop().await;
}

#[tokio::test]
async fn a_newcomer_waits_for_one_job_of_a_busy_tenant_and_not_for_all() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:tenant:*', concurrency => 1").await;
    db.run("select graphile_worker.add_job('t', '\"busy\"', 'tenant:busy') from generate_series(1, 40)").await;
    let order: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = order.clone();
    let utils = utils(&db);
    let options = options(&db).concurrency(1).define_task("t", move |name: String, _| {
        let (seen, utils) = (seen.clone(), utils.clone());
        async move {
            let runs = {
                let mut seen = seen.lock().unwrap();
                seen.push(name);
                seen.len()
            };
            if runs == 5 {
                let spec = JobSpec::builder().queue_name("tenant:new").build();
                utils.add_raw_job("t", json!("new"), spec).await.unwrap();
            }
            // Of jobs that take less, a worker claims several at a time.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    options.init().await.unwrap().run_once().await.unwrap();
    let order = order.lock().unwrap();
    assert_eq!(order.len(), 41);
    let position = order.iter().position(|name| name == "new").unwrap();
    assert!(position <= 7, "the newcomer's job was number {position}");
}

#[tokio::test]
async fn the_slots_of_a_dead_worker_come_back_with_its_jobs() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 1").await;
    db.run("select graphile_worker.add_job('t', '\"t\"') from generate_series(1, 2)").await;
    db.run(
        "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-live-dead', attempts = 1 where id = 1;
         insert into graphile_worker._rs_workers (worker_id, last_heartbeat_at) values ('rs-live-dead', now() - interval '1 day')",
    )
    .await;
    let concurrency = Concurrency::default();
    let worker = Started::new(counting(&db, &concurrency)).await;
    db.run("select graphile_worker.add_job('u', '\"u\"')").await;
    until("the other task has run", async || (concurrency.most("u") == 1).then_some(())).await;
    assert_eq!(concurrency.most("t"), 0, "the dead worker has the only slot");
    db.run("select graphile_worker._rs_sweep_stale_workers(recovery_delay => '0 seconds')").await;
    until_no_job_is_left(&db).await;
    worker.stop().await;
    assert_eq!(concurrency.most("t"), 1);
}

#[tokio::test]
async fn failed_jobs_give_their_slots_back_and_are_retried_under_the_limit() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:q', concurrency => 2").await;
    db.run("select graphile_worker.add_job('t', queue_name => 'q', max_attempts => 1) from generate_series(1, 20)")
        .await;
    run_once(&db, |_: Value, _| async { Err::<(), _>("it fails") }).await;
    let failed = "select count(*) from graphile_worker._private_jobs where attempts = 1 and locked_at is null and last_error = 'it fails'";
    assert_eq!(db.value(failed).await, 20);
    db.run("select graphile_worker.reschedule_jobs(array(select id from graphile_worker._private_jobs), run_at => now(), attempts => 0)").await;
    run_once(&db, |_: Value, _| async {}).await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

#[tokio::test]
async fn a_future_job_under_a_limit_starts_when_it_is_due() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:q', concurrency => 2").await;
    let worker = Started::new(options(&db).poll_interval(NEVER).define_task("t", |_: Value, _| async {})).await;
    db.run("select graphile_worker.add_job('t', queue_name => 'q', run_at => now() + interval '1 second')").await;
    until_no_job_is_left(&db).await;
    worker.stop().await;
}

#[tokio::test]
async fn adds_and_claims_at_the_same_time_leave_no_job_behind() {
    let db = Db::installed().await;
    set_limit(&db, "'queue:k:*', concurrency => 2").await;
    let concurrency = Concurrency::default();
    let workers = [Started::new(counting(&db, &concurrency)).await, Started::new(counting(&db, &concurrency)).await];
    let utils = utils(&db);
    let adders: Vec<_> = (0..8)
        .map(|adder| {
            let utils = utils.clone();
            tokio::spawn(async move {
                for n in 0..50 {
                    let queue = format!("k:{}", (adder + n) % 5);
                    let spec = JobSpec::builder().queue_name(queue.clone()).build();
                    utils.add_raw_job("t", json!(queue), spec).await.unwrap();
                }
            })
        })
        .collect();
    for adder in adders {
        adder.await.unwrap();
    }
    until_no_job_is_left(&db).await;
    for worker in workers {
        worker.stop().await;
    }
    for queue in 0..5 {
        assert!(concurrency.most(&format!("k:{queue}")) <= 2);
    }
}

/// Jobs of task `t` that end at once if their payload is 0, and otherwise when `open` has permits.
#[derive(Clone)]
struct Gate {
    running: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    open: Arc<Semaphore>,
}

impl Gate {
    fn new() -> Gate {
        Gate { running: Arc::default(), most: Arc::default(), open: Arc::new(Semaphore::new(0)) }
    }

    fn worker(&self, db: &Db) -> WorkerOptions {
        let gate = self.clone();
        options(db).define_task("t", move |n: i64, _| gate.clone().run(n))
    }

    async fn run(self, n: i64) {
        self.most.fetch_max(self.running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        match n {
            0 => tokio::task::yield_now().await,
            _ => self.open.acquire().await.unwrap().forget(),
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    async fn until_running(&self, jobs: usize) {
        until("the jobs run", async || (self.running.load(Ordering::SeqCst) == jobs).then_some(())).await;
    }
}

#[tokio::test]
async fn short_jobs_of_a_full_limit_follow_each_other_without_a_claim_for_each() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 2").await;
    db.run("select graphile_worker.add_job('t', '0') from generate_series(1, 1000)").await;
    let (gate, claims) = (Gate::new(), Arc::new(AtomicUsize::new(0)));
    let counted = claims.clone();
    let worker = gate.worker(&db).concurrency(8).on(FetchStart, move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        async {}
    });
    worker.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
    assert_eq!(gate.most(), 2);
    let claims = claims.load(Ordering::Relaxed);
    assert!(claims < 450, "{claims} claims for 1000 jobs: one for every two would be 500");
    assert_eq!(db.value("select count(*) from graphile_worker._rs_slots").await, 0);
}

#[tokio::test]
async fn jobs_claimed_ahead_leave_the_other_slots_to_other_workers() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 3").await;
    let (gate, another) = (Gate::new(), Gate::new());
    let first = Started::new(gate.worker(&db).concurrency(2)).await;
    // The worker learns that the jobs are short.
    db.run("select graphile_worker.add_job('t', '0') from generate_series(1, 2000)").await;
    until_no_job_is_left(&db).await;
    db.run("select graphile_worker.add_job('t', '1') from generate_series(1, 100)").await;
    gate.until_running(2).await;
    let claimed = "select count(*) from graphile_worker._private_jobs where locked_at is not null";
    assert!(db.value(claimed).await.as_i64().unwrap() > 2, "it has claimed more jobs than it runs");
    let second = Started::new(another.worker(&db).concurrency(2)).await;
    another.until_running(1).await;
    let limits = utils(&db).limits().await.unwrap();
    assert_eq!((limits[0].in_use, limits[0].room, limits[0].waiting), (3, Some(0), 97));
    gate.open.add_permits(100);
    another.open.add_permits(100);
    until_no_job_is_left(&db).await;
    first.stop().await;
    second.stop().await;
    assert!(gate.most() == 2 && another.most() <= 2);
}

#[tokio::test]
async fn a_lowered_limit_keeps_jobs_from_starting_that_were_claimed_ahead() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 4").await;
    let gate = Gate::new();
    let worker = Started::new(gate.worker(&db).concurrency(8)).await;
    db.run("select graphile_worker.add_job('t', '0') from generate_series(1, 2000)").await;
    until_no_job_is_left(&db).await;
    db.run("select graphile_worker.add_job('t', '1') from generate_series(1, 20)").await;
    gate.until_running(4).await;
    set_limit(&db, "'task:t', concurrency => 1").await;
    let kept = "select coalesce(sum(slots), 0) from graphile_worker._rs_slots";
    let released = "select count(*) from graphile_worker._private_jobs where locked_at is not null";
    // The jobs that it had claimed ahead are released, because those that run use up the limit.
    until("only the running jobs are claimed", async || (db.value(released).await == 4).then_some(())).await;
    for running in (1..4).rev() {
        gate.open.add_permits(1);
        gate.until_running(running).await;
    }
    gate.most.store(0, Ordering::SeqCst);
    gate.open.add_permits(100);
    until_no_job_is_left(&db).await;
    worker.stop().await;
    assert_eq!((gate.most(), db.value(kept).await), (1, json!(0)));
}

#[tokio::test]
async fn a_queue_whose_first_job_is_added_while_its_limit_is_set_is_under_the_limit() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 10").await;
    let mut adding = db.pool.begin().await.unwrap();
    // The limit of the task puts the queue into a lane, which has no limit of its own yet.
    let add = "select graphile_worker.add_job('t', '\"q\"', queue_name => 'tenant:1')";
    sqlx::query(add).execute(&mut *adding).await.unwrap();
    set_limit(&db, "'queue:tenant:*', concurrency => 2").await;
    adding.commit().await.unwrap();
    db.run("select graphile_worker.add_job('t', '\"q\"', queue_name => 'tenant:1') from generate_series(1, 50)").await;
    let concurrency = Concurrency::default();
    let worker = Started::new(counting(&db, &concurrency)).await;
    until_no_job_is_left(&db).await;
    worker.stop().await;
    assert_eq!(concurrency.most("q"), 2);
}

#[tokio::test]
async fn a_queue_whose_first_job_is_added_while_its_limit_is_dropped_and_set_again_is_under_the_limit() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'queue:tenant:*', concurrency => 1").await;
    let mut adding = db.pool.begin().await.unwrap();
    let add = "select graphile_worker.add_job('t', '\"q\"', queue_name => 'tenant:1')";
    sqlx::query(add).execute(&mut *adding).await.unwrap();
    db.run("select graphile_worker._rs_drop_limit('queue:tenant:*')").await;
    let mut setting = db.pool.begin().await.unwrap();
    let set = "select graphile_worker._rs_set_limit('queue:tenant:*', concurrency => 2)";
    sqlx::query(set).execute(&mut *setting).await.unwrap();
    adding.commit().await.unwrap();
    // The limit is not committed, so the lane stays unchecked.
    db.run("select graphile_worker._rs_settle_lanes()").await;
    assert_eq!(db.value("select count(*) from graphile_worker._rs_lanes where is_new").await, 1);
    setting.commit().await.unwrap();
    while db.value("select graphile_worker._rs_settle_lanes()").await != 0 {}
    let right = "select count(*) from graphile_worker._rs_lanes as lanes
        join graphile_worker._rs_limits as limits on limits.id = lanes.limit_id where not lanes.is_new";
    assert_eq!(db.value(right).await, 1);
}

#[tokio::test]
async fn a_function_that_turns_off_scans_of_tables_turns_off_compilation_too() {
    let db = Db::installed().await;
    // A scan that is needed all the same seems expensive then. Adding jobs to new limited queues took 100 ms for each.
    let compiled = "select count(*) from pg_proc
        where pronamespace = 'graphile_worker'::regnamespace
          and 'enable_seqscan=off' = any (proconfig) and not 'jit=off' = any (proconfig)";
    assert_eq!(db.value(compiled).await, 0);
}

#[tokio::test]
async fn a_claim_whose_limit_another_session_has_locked_leaves_the_worker_its_slots() {
    let db = Db::installed().await;
    task_exists(&db, "t").await;
    set_limit(&db, "'task:t', concurrency => 3").await;
    db.run("update graphile_worker._rs_lanes set mean_ms = 0.01").await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 20)").await;
    let claim = "select json_build_array(count(id), max(slots[1])) from graphile_worker._rs_claim_from_lanes(
        'w', '{}', '{}', '{}', (select array_agg(id) from graphile_worker._private_tasks), null, 10, null, null, null, null, null,
        8000000, '{}', '{}', '{}', 2, 5
    )";
    assert_eq!(db.value(claim).await, json!([10, 2]));
    let mut other = db.pool.begin().await.unwrap();
    sqlx::query("select from graphile_worker._rs_limits for update").execute(&mut *other).await.unwrap();
    assert_eq!(db.value(claim).await, json!([0, 2]));
    other.rollback().await.unwrap();
    assert_eq!(db.value(claim).await, json!([10, 2]), "it claims more for the slots that it has");
}
