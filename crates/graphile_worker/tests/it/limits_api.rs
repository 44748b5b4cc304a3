//! Limits and pauses, as set, dropped and listed in SQL and in Rust. What they allow to run is tested with the workers.

use crate::support::{Db, Log, Started, until};
use crate::worker_support::{Held, options, until_true, utils};
use graphile_worker::{DoctorLevel, Error, Limit, LimitSummary, RoleRight, WorkerRecoveryConfig, WorkerUtils};
use serde_json::{Value, json};
use sqlx::Executor;
use sqlx::postgres::PgPoolOptions;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);

/// All rows of the tables of limits, without what depends on the time.
async fn limits_and_lanes(db: &Db) -> Value {
    db.value(
        "select json_build_array(
           (select json_agg(t order by id) from graphile_worker._rs_limits t),
           (select json_agg(t order by id) from graphile_worker._rs_lanes t),
           (select count(*) from graphile_worker._rs_lane_calls))",
    )
    .await
}

async fn limit(utils: &WorkerUtils, name: &str) -> LimitSummary {
    let found = utils.limits().await.unwrap().into_iter().find(|limit| limit.name == name);
    found.unwrap_or_else(|| panic!("there is no limit {name}"))
}

fn names(limits: &[LimitSummary]) -> Vec<&str> {
    limits.iter().map(|limit| limit.name.as_str()).collect()
}

fn problem(error: Error) -> String {
    assert!(matches!(error, Error::InvalidLimit { .. }), "{error:?}");
    error.to_string()
}

/// The lane of each job: the queue, the task of a lane without a queue, or null.
async fn lanes_of_jobs(db: &Db) -> Value {
    db.value(
        "select json_agg(coalesce('lane ' || coalesce(lanes.queue_name, '(' || tasks.identifier || ')'), job_queues.queue_name) order by jobs.id)
         from graphile_worker._private_jobs as jobs
         left join graphile_worker._rs_lanes as lanes on lanes.id = jobs.job_queue_id
         left join graphile_worker._private_tasks as tasks on tasks.id = lanes.task_id
         left join graphile_worker._private_job_queues as job_queues on job_queues.id = jobs.job_queue_id",
    )
    .await
}

#[tokio::test]
async fn sql_and_rust_reject_the_same_limits_with_the_same_words() {
    let db = Db::installed().await;
    let long = "x".repeat(140);
    let day = Duration::from_secs(86_400);
    for (limit, settings) in [
        (Limit::named("send_email").concurrency(1), "'send_email', concurrency => 1"),
        (Limit::named("all").concurrency(1), "'all', concurrency => 1"),
        (Limit::named("task:").concurrency(1), "'task:', concurrency => 1"),
        (Limit::named("it's a \\").concurrency(1), "E'it''s a \\\\', concurrency => 1"),
        (Limit::task(&long).concurrency(1), &format!("'task:{long}', concurrency => 1")),
        (Limit::task("mail/*").concurrency(1), "'task:mail/*', concurrency => 1"),
        (Limit::group("*").concurrency(1), "'group:*', concurrency => 1"),
        (Limit::queue("a*b").concurrency(1), "'queue:a*b', concurrency => 1"),
        (Limit::queue("a**").concurrency(1), "'queue:a**', concurrency => 1"),
        (Limit::task("t").concurrency(0), "'task:t', concurrency => 0"),
        (Limit::task("t").rate(0, MINUTE), "'task:t', rate => 0, per => '1 minute'"),
        (Limit::task("t").rate(1, Duration::ZERO), "'task:t', rate => 1, per => '0'"),
        (
            Limit::task("t").rate(1, 400 * day + Duration::from_millis(1500)),
            "'task:t', rate => 1, per => make_interval(secs => 34560001.5)",
        ),
        (Limit::task("t").concurrency(1).burst(2), "'task:t', concurrency => 1, burst => 2"),
        (Limit::task("t").rate(1, MINUTE).burst(0), "'task:t', rate => 1, per => '1 minute', burst => 0"),
        (Limit::task("t").rate(1, day).burst(100_000), "'task:t', rate => 1, per => '1 day', burst => 100000"),
        (Limit::queue("q").weight(0.0), "'queue:q', weight => 0"),
        (Limit::queue("q").weight(-0.5), "'queue:q', weight => -0.5"),
        (Limit::queue("q").weight(f64::NAN), "'queue:q', weight => 'NaN'"),
        (Limit::queue("q").weight(f64::INFINITY), "'queue:q', weight => 'Infinity'"),
        (Limit::queue("q").weight(1_000_001.0), "'queue:q', weight => 1000001"),
        (Limit::task("t").weight(2.0), "'task:t', weight => 2"),
        (Limit::task("t").in_group("g").cost(0), "'task:t', group_name => 'g', cost => 0"),
        (Limit::task("t").concurrency(1).cost(2), "'task:t', concurrency => 1, cost => 2"),
        (Limit::group("g").concurrency(1).in_group("h"), "'group:g', concurrency => 1, group_name => 'h'"),
        (Limit::task("t"), "'task:t'"),
        (Limit::task("t").breaker(0, MINUTE), "'task:t', trip => 0, trip_for => '1 minute'"),
        (Limit::task("t").breaker(5, Duration::ZERO), "'task:t', trip => 5, trip_for => '0'"),
        (Limit::task("t").breaker(5, 400 * day), "'task:t', trip => 5, trip_for => make_interval(secs => 34560000)"),
    ] {
        let before = limits_and_lanes(&db).await;
        let in_sql = db.failure(&format!("select graphile_worker._rs_set_limit({settings})")).await;
        let in_rust = problem(utils(&db).set_limit(&limit).await.expect_err(settings));
        assert_eq!(in_sql, ("GWBLI".to_owned(), in_rust.clone()), "{settings}");
        // No database is needed.
        let options = graphile_worker::WorkerOptions::default().database_url("host=nowhere.invalid").limit(limit);
        assert_eq!(problem(options.init().await.expect_err(settings)), in_rust);
        assert_eq!(limits_and_lanes(&db).await, before, "{settings}");
    }
}

#[tokio::test]
async fn bad_limits_that_only_sql_can_express_are_rejected() {
    let db = Db::installed().await;
    for (settings, message) in [
        ("null", "Limit name is NULL, expected task:NAME, queue:NAME, queue:PREFIX* or group:NAME."),
        ("'task:t', -1", "Concurrency must be at least 1, got -1. To start no jobs at all, pause task:t."),
        ("'task:t', rate => 5", "Rate 5 needs a period, for example 1 minute."),
        ("'task:t', trip => 5", "Trip 5 needs a pause: for how long no job starts after it, for example 1 minute."),
        ("'task:t', trip => -1, trip_for => '1 minute'", "Trip must be at least 1 failure, got -1."),
        (
            "'task:t', trip_for => '1 minute'",
            "Pause 00:01:00 needs a trip: the number of failures in a row after which it begins.",
        ),
        ("'task:t', trip => 5, trip_for => '-1 minute'", "Pause after a trip must be longer than 0, got -00:01:00."),
        ("'task:t', per => '1 minute'", "Period 00:01:00 needs a rate: how many jobs may start in it."),
        ("'task:t', rate => 5, per => '-1 minute'", "Period must be longer than 0, got -00:01:00."),
    ] {
        let failure = db.failure(&format!("select graphile_worker._rs_set_limit({settings})")).await;
        assert_eq!(failure, ("GWBLI".to_owned(), message.to_owned()));
    }
    assert_eq!(limits_and_lanes(&db).await, json!([null, null, 0]));
}

#[tokio::test]
async fn limits_that_do_not_fit_the_database_are_rejected_with_advice() {
    let db = Db::installed().await;
    let utils = utils(&db);
    db.add_job("'t'").await;
    utils.set_limit(&Limit::group("small").concurrency(2)).await.unwrap();
    utils.set_limit(&Limit::group("slow").rate(1, MINUTE).burst(2)).await.unwrap();
    utils.set_limit(&Limit::task("t").in_group("small").cost(2)).await.unwrap();
    for (limit, message) in [
        (
            Limit::task("unknown").concurrency(1),
            "There is no task 'unknown'. A task exists once a worker that runs it has started, or a job of it was added. Check the spelling.",
        ),
        (Limit::task("t").in_group("large"), "There is no group 'large'. Set the limit of the group first."),
        (
            Limit::task("t").in_group("small").cost(3),
            "Cost 3 is more than the concurrency 2 of group:small, so no job would start.",
        ),
        (
            Limit::task("t").in_group("slow").cost(4),
            "Cost 4 is more than group:slow ever allows at once, so no job would start. Set its burst to at least 3 first.",
        ),
        (
            Limit::group("small").concurrency(1),
            "A job of task:t has cost 2, which is more than this allows at once. Set a lower cost for task:t first, or a higher concurrency.",
        ),
    ] {
        let before = limits_and_lanes(&db).await;
        assert_eq!(problem(utils.set_limit(&limit).await.expect_err(message)), message);
        assert_eq!(limits_and_lanes(&db).await, before, "{message}");
    }
    let error = utils.drop_limit("group:small").await.expect_err("it is used");
    let used = "Limit group:small is used by task:t. Drop these first, or set them without the group.";
    assert_eq!(problem(error), used);
    utils.set_limit(&Limit::task("t").in_group("slow").cost(3)).await.unwrap();
}

#[tokio::test]
async fn there_are_at_most_a_thousand_limits() {
    let db = Db::installed().await;
    let utils = utils(&db);
    let thousand = "select graphile_worker._rs_set_limit('queue:' || n, 1) from generate_series(1, 1000) n";
    db.run(thousand).await;
    let before = limits_and_lanes(&db).await;
    for limit in [Limit::queue("1001").concurrency(1), Limit::queue("tenant:*").concurrency(1)] {
        let rejected = problem(utils.set_limit(&limit).await.expect_err("one too many"));
        let name = limit.name();
        assert_eq!(
            rejected,
            format!(
                "There are 1000 limits already, so {name} was not set. Set one limit for a pattern of queues, such as queue:tenant:*, and drop the limits that you no longer need."
            )
        );
    }
    assert_eq!(limits_and_lanes(&db).await, before);
    // Existing ones can be replaced.
    db.run(thousand).await;
    assert!(utils.drop_limit("queue:7").await.unwrap());
    utils.set_limit(&Limit::queue("tenant:*").concurrency(1)).await.unwrap();
    assert_eq!(utils.limits().await.unwrap().len(), 1000);
}

#[tokio::test]
async fn a_limit_is_replaced_with_all_its_settings() {
    let db = Db::installed().await;
    let utils = utils(&db);
    db.add_job("'t'").await;
    utils.set_limit(&Limit::group("g").concurrency(9)).await.unwrap();
    let full = Limit::task("t").concurrency(5).rate(100, MINUTE).burst(10).in_group("group:g").cost(3);
    utils.set_limit(&full).await.unwrap();
    let listed = limit(&utils, "task:t").await;
    assert_eq!((listed.concurrency, listed.rate, listed.per_seconds), (Some(5), Some(100), Some(60.0)));
    assert_eq!((listed.burst, listed.cost, listed.group.as_deref()), (10, 3, Some("group:g")));
    assert_eq!((listed.waiting, listed.in_use, listed.room), (1, 0, Some(5)));
    utils.set_limit(&Limit::task("t").rate(1, Duration::from_millis(500))).await.unwrap();
    let listed = limit(&utils, "task:t").await;
    assert_eq!((listed.concurrency, listed.rate, listed.per_seconds), (None, Some(1), Some(0.5)));
    assert_eq!((listed.burst, listed.cost, listed.group.as_deref()), (1, 1, None));
    assert_eq!(names(&utils.limits().await.unwrap()), ["group:g", "task:t"]);
    assert!(utils.drop_limit("group:g").await.unwrap(), "nothing uses it any more");
    assert!(utils.drop_limit("task:t").await.unwrap());
    assert!(!utils.drop_limit("task:t").await.unwrap());
    assert_eq!(limits_and_lanes(&db).await, json!([null, null, 0]));
}

#[tokio::test]
async fn waiting_jobs_move_under_a_limit_and_back() {
    let db = Db::installed().await;
    let utils = utils(&db);
    for job in ["'t'", "'u'", "'t', queue_name => 'a:1'", "'u', queue_name => 'a:2'", "'u', queue_name => 'b'"] {
        db.add_job(job).await;
    }
    let before = lanes_of_jobs(&db).await;
    assert_eq!(before, json!([null, null, "a:1", "a:2", "b"]));
    utils.set_limit(&Limit::task("t").concurrency(1)).await.unwrap();
    assert_eq!(lanes_of_jobs(&db).await, json!(["lane (t)", null, "lane a:1", "a:2", "b"]));
    utils.set_limit(&Limit::queue("a:*").concurrency(2)).await.unwrap();
    assert_eq!(lanes_of_jobs(&db).await, json!(["lane (t)", null, "lane a:1", "lane a:2", "b"]));
    // New jobs are under them at once, also those of new queues.
    db.add_job("'t'").await;
    db.add_job("'u', queue_name => 'a:3'").await;
    assert_eq!(lanes_of_jobs(&db).await[6], "lane a:3");
    let tasks = limit(&utils, "task:t").await;
    assert_eq!((tasks.waiting, tasks.room, tasks.queues), (3, Some(1), None));
    let queues = limit(&utils, "queue:a:*").await;
    assert_eq!((queues.waiting, queues.room, queues.queues, queues.full_queues), (3, None, Some(3), Some(0)));
    assert!(utils.drop_limit("queue:a:*").await.unwrap());
    assert!(utils.drop_limit("task:t").await.unwrap());
    assert_eq!(lanes_of_jobs(&db).await, json!([null, null, "a:1", "a:2", "b", null, "a:3"]));
    let left = limits_and_lanes(&db).await;
    assert_eq!((&left[0], &left[1]), (&Value::Null, &Value::Null), "Node finds what it expects");
}

#[tokio::test]
async fn jobs_are_moved_in_chunks() {
    let db = Db::installed().await;
    let utils = utils(&db);
    db.run("select graphile_worker.add_job('t') from generate_series(1, 25)").await;
    db.run("select graphile_worker._rs_set_limit('task:t', 1)").await;
    for (moved, left) in [(10, 15), (10, 5), (5, 0), (0, 0)] {
        assert_eq!(db.value("select graphile_worker._rs_settle_lanes(10)").await, moved);
        let outside = "select count(*) from graphile_worker._private_jobs where job_queue_id is null";
        assert_eq!(db.value(outside).await, left);
    }
    let mut progress = Vec::new();
    utils.change_limit(graphile_worker::LimitChange::Drop("task:t"), |moved| progress.push(moved)).await.unwrap();
    assert!(progress.last() >= Some(&25), "{progress:?}");
}

#[tokio::test]
async fn a_queue_with_a_running_job_keeps_its_order_when_it_gets_a_limit() {
    let db = Db::installed().await;
    let utils = utils(&db);
    db.add_job("'t', queue_name => 'q'").await;
    db.add_job("'t', queue_name => 'q'").await;
    db.run(
        "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w', attempts = 1 where id = 1;
         update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'w'",
    )
    .await;
    utils.set_limit(&Limit::queue("q").concurrency(5)).await.unwrap();
    let queue = utils.list_queues(10).await.unwrap().remove(0);
    assert_eq!((queue.queue_name.as_str(), queue.waiting, queue.running), ("q", 1, 1));
    assert_eq!((queue.limit.as_deref(), queue.concurrency), (Some("queue:q"), 5));
    assert_eq!((queue.locked_by.as_deref(), queue.running_job_id), (Some("w"), Some(1)), "it is still the old queue");
    let jobs = utils.list_jobs(&graphile_worker::JobFilter::default().queue_name("q".to_owned())).await.unwrap();
    assert_eq!(jobs.iter().map(|job| job.queue_name.as_deref()).collect::<Vec<_>>(), [Some("q"); 2]);
    let running = utils.find_job(1).await.unwrap().unwrap();
    assert_eq!((running.job.queue_name.as_deref(), running.is_in_lane), (Some("q"), false));
    let waiting = utils.find_job(2).await.unwrap().unwrap();
    assert_eq!((waiting.job.queue_name.as_deref(), waiting.is_in_lane), (Some("q"), true));
    assert_eq!(waiting.limits, ["queue:q"]);
    let lane = db.value("select id from graphile_worker._rs_lanes").await.as_i64().unwrap() as i32;
    assert_eq!(utils.queue_name(lane).await.unwrap().as_deref(), Some("q"));
    // When the running job has ended, only the lane is left.
    db.run("delete from graphile_worker._private_jobs where id = 1; update graphile_worker._private_job_queues set locked_at = null, locked_by = null").await;
    assert_eq!(db.value("select graphile_worker._rs_settle_lanes()").await, 1);
    assert_eq!(db.value("select count(*) from graphile_worker._private_job_queues").await, 0);
    assert_eq!(utils.list_queues(10).await.unwrap()[0].running_job_id, None);
}

#[tokio::test]
async fn use_is_counted_as_claims_count_it() {
    let db = Db::installed().await;
    let utils = utils(&db);
    for job in ["'t'", "'t'", "'u', queue_name => 'a:1'", "'u', queue_name => 'a:1'", "'u', queue_name => 'a:2'"] {
        db.add_job(job).await;
    }
    utils.set_limit(&Limit::group("g").concurrency(9)).await.unwrap();
    utils.set_limit(&Limit::task("t").concurrency(3).in_group("g").cost(2)).await.unwrap();
    utils.set_limit(&Limit::queue("a:*").in_group("g")).await.unwrap();
    db.run("update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w' where id in (1, 3)").await;
    let task = limit(&utils, "task:t").await;
    assert_eq!((task.in_use, task.room, task.waiting), (1, Some(2), 1));
    let queues = limit(&utils, "queue:a:*").await;
    assert_eq!(
        (queues.in_use, queues.full_queues, queues.waiting),
        (1, Some(1), 2),
        "without a concurrency, they are serial"
    );
    let group = limit(&utils, "group:g").await;
    assert_eq!((group.in_use, group.room, group.waiting), (3, Some(6), 3));
}

#[tokio::test]
async fn a_limit_without_tokens_says_when_the_next_job_starts() {
    let db = Db::installed().await;
    let utils = utils(&db);
    db.add_job("'t'").await;
    utils.set_limit(&Limit::task("t").rate(1, MINUTE)).await.unwrap();
    assert_eq!(limit(&utils, "task:t").await.next_at, None);
    db.run("update graphile_worker._rs_limits set tat = now() + interval '100 seconds'").await;
    let listed = limit(&utils, "task:t").await;
    assert_eq!(listed.room, Some(0));
    let next_in = (listed.next_at.unwrap() - chrono::Utc::now()).num_seconds();
    assert!((30..=41).contains(&next_in), "the burst of one comes off: {next_in}");
    let why = utils.why(1).await.unwrap();
    assert!(why.reasons[0].to_string().starts_with("No worker is visible"), "{why:?}");
    let reached = why.reasons[1].to_string();
    assert!(reached.starts_with("The limit task:t lets 1 job start in 1m. The next one may start in "), "{reached}");
}

#[tokio::test]
async fn pauses_end_at_a_time_or_when_they_are_resumed() {
    let db = Db::installed().await;
    let utils = utils(&db);
    db.add_job("'t', queue_name => 'q'").await;
    utils.set_limit(&Limit::group("g").concurrency(1)).await.unwrap();
    utils.set_limit(&Limit::queue("limited").concurrency(3)).await.unwrap();
    let until = chrono::Utc::now() + chrono::TimeDelta::hours(2);
    for name in ["all", "task:t", "queue:q", "queue:tenant:*", "group:g", "queue:limited"] {
        utils.pause_until(name, until).await.unwrap();
        let paused = limit(&utils, name).await;
        assert_eq!((paused.is_paused, paused.paused_by.is_some(), paused.paused_at.is_some()), (true, true, true));
        assert!((paused.paused_until.unwrap() - until).num_milliseconds().abs() < 2, "{paused:?}");
        utils.pause(name).await.unwrap();
        assert_eq!(
            (limit(&utils, name).await.paused_until, limit(&utils, name).await.paused_at),
            (None, paused.paused_at)
        );
    }
    let why = utils.why(1).await.unwrap();
    let said: Vec<String> = why.reasons.iter().map(|reason| reason.to_string()).collect();
    assert!(said.iter().any(|reason| reason.starts_with("All jobs are paused until they are resumed")), "{said:?}");
    for name in ["all", "task:t", "queue:q", "queue:tenant:*", "group:g", "queue:limited"] {
        assert!(utils.resume(name).await.unwrap(), "{name}");
        assert!(!utils.resume(name).await.unwrap(), "{name}");
    }
    assert_eq!(names(&utils.limits().await.unwrap()), ["group:g", "queue:limited"], "pauses leave nothing behind");
    assert_eq!(lanes_of_jobs(&db).await, json!(["q"]));
    // A pause whose time has come is over, and leaves nothing behind, either.
    utils.pause("task:t").await.unwrap();
    db.run("update graphile_worker._rs_limits set paused_until = now() where name = 'task:t'").await;
    assert!(!limit(&utils, "task:t").await.is_paused);
    db.run("select graphile_worker._rs_settle_lanes() from generate_series(1, 5)").await;
    assert_eq!(names(&utils.limits().await.unwrap()), ["group:g", "queue:limited"]);
    assert_eq!(lanes_of_jobs(&db).await, json!(["q"]));
}

#[tokio::test]
async fn bad_pauses_are_rejected_and_change_nothing() {
    let db = Db::installed().await;
    let utils = utils(&db);
    let before = limits_and_lanes(&db).await;
    for (name, message) in [
        ("send_email", "Limit name is 'send_email', expected task:NAME, queue:NAME, queue:PREFIX*, group:NAME or all."),
        (
            "task:t",
            "There is no task 't'. A task exists once a worker that runs it has started, or a job of it was added. Check the spelling.",
        ),
        ("group:g", "There is no group 'g'."),
        ("queue:a*b", "Limit name is 'queue:a*b', but a pattern may only have a * at its end."),
    ] {
        assert_eq!(problem(utils.pause(name).await.expect_err(name)), message);
    }
    let past = "2001-02-03T04:05:06Z".parse().unwrap();
    let message = problem(utils.pause_until("all", past).await.expect_err("it is over"));
    assert!(message.starts_with("A pause must end in the future, got 2001-02-03 04:05:06"), "{message}");
    assert_eq!(limits_and_lanes(&db).await, before);
}

#[tokio::test]
async fn a_worker_sets_its_limits_when_it_starts() {
    let db = Db::installed().await;
    let (log, _guard) = Log::start();
    let utils = utils(&db);
    // In any order, and of a task that does not exist yet.
    let worker = || {
        let api = Limit::group("api").concurrency(20);
        options(&db)
            .define_task("t", |_: Value, _| async {})
            .limit(Limit::task("t").concurrency(9))
            .limit(Limit::queue("tenant:*").in_group("api"))
            .limit(api)
            .limit(Limit::task("t").concurrency(5))
    };
    worker().init().await.unwrap().run_once().await.unwrap();
    assert_eq!(names(&utils.limits().await.unwrap()), ["group:api", "queue:tenant:*", "task:t"]);
    assert_eq!(limit(&utils, "task:t").await.concurrency, Some(5), "the later call replaces the earlier one");
    assert_eq!(log.lines("limit set").lines().count(), 3, "{}", log.text());
    // The second worker changes nothing.
    let before = limits_and_lanes(&db).await;
    worker().init().await.unwrap().run_once().await.unwrap();
    assert_eq!(limits_and_lanes(&db).await[0], before[0]);
    assert_eq!((log.lines("limit set").lines().count(), log.lines("limit replaced")), (3, String::new()));
    // The last one wins, and says so.
    let other = worker().limit(Limit::task("t").rate(7, MINUTE)).init().await.unwrap();
    other.run_once().await.unwrap();
    let line = log.line("limit replaced by the options of this worker").unwrap();
    assert!(line.contains("task:t") && line.contains("concurrency 5") && line.contains("rate 7 per 60 s"), "{line}");
    // A change that is made while it runs is not undone when it runs again.
    utils.set_limit(&Limit::task("t").concurrency(2)).await.unwrap();
    other.run_once().await.unwrap();
    assert_eq!(limit(&utils, "task:t").await.concurrency, Some(2));
    // A worker without the option leaves the limit as it is.
    options(&db).define_task("t", |_: Value, _| async {}).init().await.unwrap().run_once().await.unwrap();
    assert_eq!(utils.limits().await.unwrap().len(), 3);
}

#[tokio::test]
async fn a_worker_whose_limit_cannot_be_set_does_not_start() {
    let db = Db::installed().await;
    let worker = options(&db).limit(Limit::queue("q").in_group("missing")).init().await.unwrap();
    let message = problem(worker.run_once().await.expect_err("no group"));
    assert_eq!(message, "There is no group 'missing'. Set the limit of the group first.");
}

#[tokio::test]
async fn roles_that_run_jobs_set_limits_and_roles_that_read_see_them() {
    let db = Db::installed().await;
    let owner = utils(&db);
    db.add_job("'t'").await;
    let role = format!("limits {}", std::process::id());
    db.run(&format!("create role \"{role}\" login")).await;
    let as_role = async || {
        let pool = PgPoolOptions::new().max_connections(2).connect_with(db.options().username(&role)).await.unwrap();
        WorkerUtils::new(pool, "graphile_worker")
    };
    let denied = |error: Error| {
        let Error::Database { source, .. } = error else { panic!("{error:?}") };
        source.into_database_error().and_then(|error| Some(error.code()?.into_owned())).as_deref() == Some("42501")
    };
    owner.grant(&role, &[RoleRight::Run]).await.unwrap();
    let runner = as_role().await;
    runner.set_limit(&Limit::task("t").concurrency(1)).await.unwrap();
    runner.pause("all").await.unwrap();
    assert_eq!(limit(&owner, "all").await.paused_by, Some(role.clone()));
    assert!(runner.resume("all").await.unwrap());
    assert_eq!(lanes_of_jobs(&db).await, json!(["lane (t)"]));
    owner.revoke(&role).await.unwrap();
    owner.grant(&role, &[RoleRight::Read]).await.unwrap();
    let reader = as_role().await;
    assert_eq!(names(&reader.limits().await.unwrap()), ["task:t"]);
    assert!(reader.why(1).await.is_ok());
    assert!(denied(reader.pause("all").await.expect_err("a reader")));
    assert!(denied(reader.drop_limit("task:t").await.expect_err("a reader")));
    assert_eq!(names(&owner.limits().await.unwrap()), ["task:t"]);
    drop((runner, reader));
    owner.revoke(&role).await.unwrap();
    owner.grant(&role, &[RoleRight::Add]).await.unwrap();
    let adder = as_role().await;
    adder.add_raw_job("t", (), graphile_worker::JobSpec::default()).await.unwrap();
    assert_eq!(lanes_of_jobs(&db).await, json!(["lane (t)", "lane (t)"]), "its jobs are under the limit");
    assert!(denied(adder.set_limit(&Limit::task("t").concurrency(9)).await.expect_err("an adder")));
    drop(adder);
    owner.revoke(&role).await.unwrap();
    db.run(&format!("drop role \"{role}\"")).await;
}

#[tokio::test]
async fn doctor_reports_unused_limits_old_pauses_and_missing_workers() {
    let db = Db::installed().await;
    let utils = utils(&db);
    let found = async |name: &str| {
        let report = utils.doctor().await.unwrap();
        let check = report.checks.into_iter().find(|check| check.name == name);
        check.map(|check| (check.level, check.found))
    };
    assert_eq!(found("limits").await, Some((DoctorLevel::Ok, "none".to_owned())));
    assert_eq!(found("limited_jobs").await, None);
    db.add_job("'t', queue_name => 'q'").await;
    db.run("insert into graphile_worker._private_tasks (identifier) values ('unused')").await;
    utils.set_limit(&Limit::group("g").concurrency(1)).await.unwrap();
    for limit in [Limit::task("t"), Limit::task("unused"), Limit::queue("q"), Limit::queue("tenant:*")] {
        utils.set_limit(&limit.concurrency(1)).await.unwrap();
    }
    let unused = "5; no job and no worker uses group:g, queue:tenant:*, task:unused".to_owned();
    assert_eq!(found("limits").await, Some((DoctorLevel::Advice, unused)));
    let recovery = "no worker with recovery is registered".to_owned();
    assert_eq!(found("limited_jobs").await, Some((DoctorLevel::Advice, recovery)));
    utils.pause("all").await.unwrap();
    assert_eq!(found("pauses").await.unwrap().0, DoctorLevel::Ok, "it is young");
    db.run("update graphile_worker._rs_limits set paused_at = now() - interval '25 hours' where name = 'all'").await;
    assert_eq!(
        found("pauses").await,
        Some((DoctorLevel::Advice, "without an end, for more than a day: all".to_owned()))
    );
}

#[tokio::test]
async fn doctor_tells_nodes_workers_from_ours() {
    let db = Db::installed().await;
    let utils = utils(&db);
    let recovery = WorkerRecoveryConfig::default().enabled(true);
    let worker = options(&db).worker_recovery(recovery).define_task("t", |_: Value, _| async {});
    let started = Started::new(worker.limit(Limit::task("t").concurrency(1))).await;
    let check = async || {
        let report = utils.doctor().await.unwrap();
        report.checks.into_iter().find(|check| check.name == "limited_jobs").map(|check| check.found)
    };
    let fine = Some("workers with recovery that run them: 1".to_owned());
    until("the worker listens", async || {
        let listens =
            "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'";
        (check().await == fine && db.value(listens).await == 1).then_some(())
    })
    .await;
    assert_eq!(check().await, fine, "our own listener is not taken for Node's");
    let mut nodes = db.connect().await;
    nodes.execute("listen \"jobs:insert\"").await.unwrap();
    let found = check().await.unwrap();
    assert!(found.starts_with("1 of Node's workers in the fleet"), "{found}");
    drop(nodes);
    started.stop().await;
}

#[tokio::test]
async fn a_limit_and_a_pause_are_effective_in_a_running_worker() {
    let db = Db::installed().await;
    let utils = utils(&db);
    let held = Held::default();
    let task = held.clone();
    let started = Started::new(options(&db).define_task("t", move |_: Value, _| task.clone().run())).await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    // The running job continues, the next one waits for the pause to end.
    utils.pause("task:t").await.unwrap();
    db.add_job("'t'").await;
    held.go_on.notify_one();
    until("the first job is done", async || {
        (db.value("select count(*) from graphile_worker._private_jobs").await == 1).then_some(())
    })
    .await;
    let why = utils.why(2).await.unwrap();
    assert!(why.reasons[0].to_string().starts_with("The task \"t\" is paused until it is resumed"), "{why:?}");
    utils.resume("task:t").await.unwrap();
    held.begun.notified().await;
    // Under a limit of one, the next job waits for the running one.
    utils.set_limit(&Limit::task("t").concurrency(1)).await.unwrap();
    held.go_on.notify_one();
    until("the second job is done", async || {
        (db.value("select count(*) from graphile_worker._private_jobs").await == 0).then_some(())
    })
    .await;
    db.add_job("'t'").await;
    held.begun.notified().await;
    db.add_job("'t'").await;
    let reached =
        |why: &graphile_worker::Why| why.reasons.iter().any(|reason| reason.to_string().contains("1 of 1 are in use"));
    let why = utils.why(4).await.unwrap();
    assert!(reached(&why), "{why:?}");
    assert_eq!((limit(&utils, "task:t").await.in_use, held.runs()), (1, 3));
    held.go_on.notify_one();
    held.begun.notified().await;
    held.go_on.notify_one();
    started.stop().await;
    assert_eq!(held.runs(), 4);
}

#[tokio::test]
async fn limits_change_in_the_transaction_of_the_caller() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t')").await;
    let names =
        "select coalesce(json_agg(name order by name), '[]') from graphile_worker._rs_limits where not is_dropped";
    let mut transaction = db.pool.begin().await.unwrap();
    utils(&db).within(&mut transaction).set_limit(&Limit::task("t").concurrency(2)).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(db.value(names).await, json!([]));

    let mut transaction = db.pool.begin().await.unwrap();
    let within = utils(&db).within(&mut transaction);
    within.set_limit(&Limit::task("t").concurrency(2)).await.unwrap();
    within.set_limit(&Limit::queue("q*").concurrency(3)).await.unwrap();
    within.pause("queue:q*").await.unwrap();
    assert!(within.resume("queue:q*").await.unwrap() && !within.resume("queue:q*").await.unwrap());
    assert!(!within.drop_limit("queue:other").await.unwrap());
    let wrong = within.set_limit(&Limit::task("t").concurrency(0)).await.unwrap_err();
    assert!(matches!(wrong, graphile_worker::Error::InvalidLimit { .. }), "{wrong:?}");
    transaction.commit().await.unwrap();
    assert_eq!(db.value(names).await, json!(["queue:q*", "task:t"]));
    // The jobs are left to the workers.
    let outside = "select count(*) from graphile_worker._private_jobs where job_queue_id is null";
    assert_eq!(db.value(outside).await, 1);
    while db.value("select graphile_worker._rs_settle_lanes()").await != 0 {}
    assert_eq!(db.value(outside).await, 0);
}

#[tokio::test]
async fn a_caller_that_sets_a_limit_waits_for_the_session_that_moves_jobs() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t') from generate_series(1, 3)").await;
    let mut busy = db.pool.begin().await.unwrap();
    sqlx::query("select graphile_worker._rs_settle_lanes()").execute(&mut *busy).await.unwrap();
    assert_eq!(db.value("select graphile_worker._rs_settle_lanes()").await, json!(null));
    let utils = utils(&db);
    let setting = tokio::spawn(async move { utils.set_limit(&Limit::task("t").concurrency(1)).await });
    until_true("the limit is set", &db, "select exists (select from graphile_worker._rs_limits)").await;
    assert!(!setting.is_finished());
    busy.commit().await.unwrap();
    setting.await.unwrap().unwrap();
    let outside = "select count(*) from graphile_worker._private_jobs where job_queue_id is null";
    assert_eq!(db.value(outside).await, 0, "all jobs are under the limit when it returns");
}

#[tokio::test]
async fn lanes_that_have_had_no_jobs_for_long_are_deleted() {
    let db = Db::installed().await;
    let day = std::time::Duration::from_secs(86_400);
    utils(&db).set_limit(&Limit::queue("t:*").concurrency(1)).await.unwrap();
    utils(&db).set_limit(&Limit::queue("rated").rate(1, day)).await.unwrap();
    for queue in ["t:done", "t:waiting", "t:failed", "t:running", "t:adding", "rated"] {
        db.run(&format!("select graphile_worker.add_job('t', queue_name := '{queue}')")).await;
    }
    let lanes = "select json_agg(queue_name order by queue_name) from graphile_worker._rs_lanes";
    let of = |queue: &str| format!("(select id from graphile_worker._rs_lanes where queue_name = '{queue}')");
    // A worker runs the jobs of these two, and leaves the others alone.
    db.run("update graphile_worker._private_jobs set run_at = now() + interval '1 day' where id in (2, 3, 4, 5)").await;
    crate::worker_support::run_once(&db, |_, _| async {}).await;
    assert_eq!(
        db.value("select json_agg(id order by id) from graphile_worker._private_jobs").await,
        json!([2, 3, 4, 5])
    );
    db.run(&format!(
        "update graphile_worker._private_jobs set attempts = max_attempts where job_queue_id = {};
         update graphile_worker._private_jobs set locked_at = now(), locked_by = 'rs-a', attempts = 1 where job_queue_id = {};
         delete from graphile_worker._private_jobs where job_queue_id = {};
         delete from graphile_worker._rs_lane_calls",
        of("t:failed"), of("t:running"), of("t:adding")
    ))
    .await;
    // Not before the time has passed.
    assert_eq!(db.value("select graphile_worker._rs_settle_lanes()").await, 0);
    let mut adding = db.pool.begin().await.unwrap();
    let add = "select graphile_worker.add_job('t', queue_name := 't:adding')";
    sqlx::query(add).execute(&mut *adding).await.unwrap();
    let settle = "select graphile_worker._rs_settle_lanes(idle := interval '-1 second')";
    db.run(&format!("do $$ begin while ({settle}) <> 0 loop commit; end loop; end $$")).await;
    assert_eq!(db.value(lanes).await, json!(["rated", "t:adding", "t:failed", "t:running", "t:waiting"]));
    adding.commit().await.unwrap();

    // The next job of the queue has a lane again, and all of them run.
    db.run("select graphile_worker.add_job('t', queue_name := 't:done')").await;
    db.run("update graphile_worker._private_jobs set run_at = now(), locked_at = null, locked_by = null, attempts = 0")
        .await;
    db.run("insert into graphile_worker._rs_lane_calls (lane_id) select id from graphile_worker._rs_lanes").await;
    crate::worker_support::run_once(&db, |_, _| async {}).await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
    db.run("update graphile_worker._rs_lanes set tat = now(), idle_since = now() where queue_name = 'rated'").await;
    db.run(&format!("do $$ begin while ({settle}) <> 0 loop commit; end loop; end $$")).await;
    assert_eq!(db.value("select count(*) from graphile_worker._rs_lanes").await, 0);
    assert_eq!(db.value("select count(*) from graphile_worker._rs_lane_calls").await, 0);
}
