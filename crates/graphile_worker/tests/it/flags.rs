//! Flags: which jobs a worker skips because of forbidden flags, accepted flags and the allowlist.

use crate::support::{Db, Started};
use crate::worker_support::{options, sending};
use graphile_worker::{Error, TaskOptions, WorkerOptions};
use serde_json::{Value, json};
use tokio::sync::mpsc;

#[tokio::test]
async fn jobs_with_forbidden_flags_are_not_claimed() {
    for how in 0..3 {
        let db = Db::installed().await;
        db.run(
            "select graphile_worker.add_job('t', '1', flags := array['slow']);
             select graphile_worker.add_job('t', '2', 'q', flags := array['other', 'slow']);
             select graphile_worker.add_job('t', '3', flags := array['other']);
             select graphile_worker.add_job('t', '4', 'q')",
        )
        .await;
        let options = match how {
            0 => options(&db).forbidden_flags(["slow"]),
            1 => options(&db).forbidden_flags_fn(|| Some(vec!["slow".to_owned()])),
            _ => options(&db).forbidden_flags_async(|| async { Some(vec!["slow".to_owned()]) }),
        };
        options.define_task("t", |_: Value, _| async {}).init().await.unwrap().run_once().await.unwrap();
        let left = db.value("select json_agg(payload order by id) from graphile_worker._private_jobs").await;
        assert_eq!(left, json!([1, 2]));
    }
}

/// Runs jobs with various flags, with and without queues, and returns the flags of the jobs that did not run.
async fn left_by(options: impl Fn(WorkerOptions) -> WorkerOptions) -> Vec<String> {
    let kinds = ["null", "'{}'", "'{gpu}'", "'{disk}'", "'{gpu,disk}'", "'{gpu,eu}'", "'{eu}'"];
    let db = Db::installed().await;
    for flags in kinds {
        for queue in ["null", "'q'"] {
            db.run(&format!("select graphile_worker.add_job('t', '1', {queue}, flags := {flags}::text[])")).await;
        }
    }
    let t = |options: WorkerOptions| options.define_task("t", |_: Value, _| async {});
    t(options(self::options(&db))).init().await.unwrap().run_once().await.unwrap();
    let left = "select coalesce(string_agg(flag, '+' order by flag), 'none') as flags
        from graphile_worker._private_jobs as jobs
        left join lateral jsonb_object_keys(jobs.flags) as flag on true group by jobs.id";
    let left = db.rows(&format!("select flags, count(*) as jobs from ({left}) as j group by 1 order by 1")).await;
    // There are twice as many jobs without flags: their flags are null or an empty array.
    for row in &left {
        assert_eq!(row["jobs"], if row["flags"] == "none" { 4 } else { 2 }, "a queue makes no difference: {left:?}");
    }
    left.iter().map(|row| row["flags"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn jobs_without_an_accepted_flag_are_not_claimed() {
    let gpu = || vec!["gpu".to_owned()];
    let others = ["disk", "eu", "none"];
    assert_eq!(left_by(|options| options.accepted_flags(["gpu"])).await, others);
    assert_eq!(left_by(|options| options.add_accepted_flag("gpu")).await, others);
    assert_eq!(left_by(|options| options.accepted_flags_fn(move || Some(gpu()))).await, others);
    assert_eq!(left_by(|options| options.accepted_flags_async(move || async move { Some(gpu()) })).await, others);
    // A limited task is claimed in another way.
    let limited = TaskOptions::default().max_concurrent(2);
    assert_eq!(left_by(|options| options.accepted_flags(["gpu"]).task_options("t", limited.clone())).await, others);
    // One of several is enough; a forbidden flag takes precedence.
    assert_eq!(left_by(|options| options.accepted_flags(["gpu", "disk"])).await, ["eu", "none"]);
    assert_eq!(
        left_by(|options| options.add_accepted_flag("gpu").add_accepted_flag("disk").add_forbidden_flag("eu")).await,
        ["eu", "eu+gpu", "none"]
    );
    assert!(left_by(|options| options.accepted_flags(Vec::<String>::new())).await.is_empty());
    assert!(left_by(|options| options.accepted_flags_fn(|| None)).await.is_empty());
}

#[tokio::test]
async fn jobs_with_a_flag_that_is_not_in_the_allowlist_are_not_claimed() {
    assert_eq!(left_by(|options| options.job_flag_allowlist(["gpu", "disk"])).await, ["eu", "eu+gpu"]);
    let limited = TaskOptions::default().max_concurrent(2);
    let both = |options: WorkerOptions| options.job_flag_allowlist(["gpu", "eu"]).accepted_flags(["gpu", "disk"]);
    assert_eq!(left_by(both).await, ["disk", "disk+gpu", "eu", "none"]);
    assert_eq!(
        left_by(|options| both(options).task_options("t", limited.clone())).await,
        ["disk", "disk+gpu", "eu", "none"]
    );
    let none: [&str; 0] = [];
    assert_eq!(left_by(|options| options.job_flag_allowlist(none)).await, ["disk", "disk+gpu", "eu", "eu+gpu", "gpu"]);
    assert_eq!(
        left_by(|options| options.job_flag_allowlist(["gpu", "eu"]).add_forbidden_flag("eu")).await,
        ["disk", "disk+gpu", "eu", "eu+gpu"]
    );
}

#[tokio::test]
async fn flags_that_are_not_an_object_do_not_stop_a_worker() {
    let db = Db::installed().await;
    for flags in ["'[\"gpu\"]'", "'\"gpu\"'", "'7'", "'null'"] {
        db.run(&format!("select graphile_worker.add_job('t'); update graphile_worker._private_jobs set flags = {flags} where flags is null"))
            .await;
    }
    db.run("select graphile_worker.add_job('t', flags := '{gpu}')").await;
    let options = options(&db).job_flag_allowlist(["gpu"]).define_task("t", |_: Value, _| async {});
    options.init().await.unwrap().run_once().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 4);
}

#[tokio::test]
async fn a_running_worker_leaves_jobs_without_an_accepted_flag_to_others() {
    let db = Db::installed().await;
    let (ran, mut runs) = mpsc::unbounded_channel();
    let worker = |name: &'static str, options: WorkerOptions| {
        let ran = ran.clone();
        Started::new(options.define_task("t", move |n: i64, _| {
            let ran = ran.clone();
            async move { ran.send((name, n)).unwrap() }
        }))
    };
    let gpu = worker("gpu", options(&db).accepted_flags(["gpu"])).await;
    let rest = worker("rest", options(&db).forbidden_flags(["gpu"])).await;
    // Enough for both lanes.
    db.run("select graphile_worker.add_job('t', to_json(n), flags := case when n % 2 = 0 then '{gpu}'::text[] end) from generate_series(1, 2000) n")
        .await;
    for _ in 0..2000 {
        let (name, n) = runs.recv().await.unwrap();
        assert_eq!(name, if n % 2 == 0 { "gpu" } else { "rest" }, "job {n}");
    }
    gpu.stop().await;
    rest.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker._private_jobs").await, 0);
}

#[tokio::test]
async fn flag_settings_that_match_no_job_are_rejected() {
    let db = Db::installed().await;
    let rejection = async |options: WorkerOptions| options.init().await.expect_err("an error").to_string();
    assert_eq!(
        rejection(options(&db).accepted_flags(["gpu"]).job_flag_allowlist(["eu"])).await,
        "accepted_flags [\"gpu\"] match no job: none of them is in job_flag_allowlist [\"eu\"]"
    );
    assert_eq!(
        rejection(options(&db).accepted_flags(["gpu"]).forbidden_flags(["gpu", "eu"])).await,
        "accepted_flags [\"gpu\"] match no job: all of them are in forbidden_flags"
    );
    for fine in [
        options(&db).accepted_flags(["gpu", "eu"]).job_flag_allowlist(["eu"]),
        options(&db).accepted_flags(["gpu", "eu"]).forbidden_flags(["eu"]),
        options(&db).job_flag_allowlist(Vec::<String>::new()).forbidden_flags(["eu"]),
    ] {
        fine.init().await.unwrap();
    }
}

#[tokio::test]
async fn a_flags_function_that_hangs_or_panics_does_not_block_the_worker() {
    let db = Db::installed().await;
    let (options, _ran) = sending(&db);
    Started::new(options.forbidden_flags_async(std::future::pending)).await.stop().await;
    let (options, _ran) = sending(&db);
    let started = Started::new(options.forbidden_flags_fn(|| panic!("no idea"))).await;
    assert!(matches!(started.running.await.unwrap().unwrap_err(), Error::ForbiddenFlagsPanicked));
    let (options, _ran) = sending(&db);
    let started = Started::new(options.accepted_flags_fn(|| panic!("no idea"))).await;
    assert!(matches!(started.running.await.unwrap().unwrap_err(), Error::AcceptedFlagsPanicked));
}
