//! WorkerUtils: what the SQL API does, from Rust, in the pool or in a transaction.

use crate::support::{Db, PATIENCE};
use crate::worker_support::utils;
use graphile_worker::{
    Error, IntoTaskHandlerResult, JobKeyMode, JobSpec, RawJobSpec, RescheduleJobOptions, TaskHandler, WorkerContext,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::Connection;

#[derive(Serialize, Deserialize)]
struct SyncUser(i64);

impl TaskHandler for SyncUser {
    const IDENTIFIER: &'static str = "sync";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {}
}

#[tokio::test]
async fn every_field_of_a_spec_arrives() {
    let db = Db::installed().await;
    let spec = JobSpec::builder()
        .queue_name("q")
        .run_at("2030-01-01T00:00:00Z".parse().unwrap())
        .max_attempts(5)
        .job_key("k")
        .job_key_mode(JobKeyMode::PreserveRunAt)
        .priority(-10)
        .flags(vec!["x".to_owned()])
        .build();
    let job = utils(&db).add_job(SyncUser(7), spec.clone()).await.unwrap();
    let many = utils(&db).add_jobs(&[(SyncUser(8), &spec)]).await.unwrap();
    assert_eq!(many[0].id, job.id);
    let row = db.row("select *, revision from graphile_worker.jobs").await;
    assert_eq!(row["queue_name"], "q");
    assert_eq!(row["run_at"], "2030-01-01T00:00:00+00:00");
    assert_eq!(
        (row["max_attempts"].as_i64(), row["priority"].as_i64(), row["revision"].as_i64()),
        (Some(5), Some(-10), Some(1))
    );
    assert_eq!((&row["key"], &row["flags"]), (&json!("k"), &json!({"x": true})));
}

#[tokio::test]
async fn a_job_of_a_transaction_that_rolls_back_never_existed() {
    let db = Db::installed().await;
    let mut transaction = db.pool.begin().await.unwrap();
    let within = utils(&db);
    let within = within.within(&mut transaction);
    within.add_job(SyncUser(1), JobSpec::default()).await.unwrap();
    within.add_jobs(&[(SyncUser(2), &JobSpec::default())]).await.unwrap();
    drop(within);
    transaction.rollback().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);

    let mut connection = db.connect().await;
    let mut transaction = connection.begin().await.unwrap();
    utils(&db).within(&mut transaction).add_raw_job("sync", 3, JobSpec::default()).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 1);
}

#[tokio::test]
async fn jobs_are_administered_from_rust() {
    let db = Db::installed().await;
    let utils = utils(&db);
    let raw = |key: &str| RawJobSpec {
        identifier: "t".to_owned(),
        payload: json!(key),
        spec: JobSpec::builder().job_key(key).build(),
    };
    let ids: Vec<i64> =
        utils.add_raw_jobs(&[raw("a"), raw("b"), raw("c"), raw("d")]).await.unwrap().iter().map(|job| job.id).collect();
    assert_eq!(utils.complete_jobs(&ids[..1]).await.unwrap()[0].id, ids[0]);
    let failed = utils.permanently_fail_jobs(&ids[1..2], "enough").await.unwrap();
    assert_eq!((failed[0].attempts, failed[0].last_error.as_deref()), (25, Some("enough")));
    let options = RescheduleJobOptions::default().priority(3).attempts(0);
    let again = utils.reschedule_jobs(&ids[1..2], options).await.unwrap();
    assert_eq!((again[0].priority, again[0].attempts), (3, 0));
    assert_eq!(utils.remove_job("c").await.unwrap().unwrap().id, ids[2]);
    assert!(utils.remove_job("c").await.unwrap().is_none());
    db.run("update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w'").await;
    utils.force_unlock_workers(&["w"]).await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs where locked_by is not null").await, 0);
}

#[tokio::test]
async fn a_batch_uses_the_strictest_key_mode_and_rejects_unsafe_dedupe() {
    let db = Db::installed().await;
    let spec = |key: &str, mode| {
        JobSpec::builder().job_key(key).run_at("2031-01-01T00:00:00Z".parse().unwrap()).job_key_mode(mode).build()
    };
    db.run("select graphile_worker.add_job('sync', '1', job_key := k, run_at := '2030-01-01Z') from unnest('{a,b}'::text[]) k").await;
    let (replace, preserve) = (spec("a", JobKeyMode::Replace), spec("b", JobKeyMode::PreserveRunAt));
    let jobs = utils(&db).add_jobs(&[(SyncUser(1), &replace), (SyncUser(2), &preserve)]).await.unwrap();
    assert!(jobs.iter().all(|job| job.run_at.to_rfc3339() == "2030-01-01T00:00:00+00:00"));

    let unsafe_spec = spec("c", JobKeyMode::UnsafeDedupe);
    let error = utils(&db).add_jobs(&[(SyncUser(1), &replace), (SyncUser(2), &unsafe_spec)]).await.unwrap_err();
    assert!(matches!(error, Error::UnsafeDedupeInBatch { position: 2, .. }));
    assert!(
        error.to_string().starts_with("job 2 of the batch (task \"sync\") has the key mode unsafe_dedupe"),
        "{error}"
    );
}

#[tokio::test]
async fn errors_convert_into_a_box_and_keep_their_code() {
    let db = Db::installed().await;
    let add = async || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        utils(&db).add_raw_job("", (), JobSpec::default()).await?;
        Ok(())
    };
    let error = add().await.unwrap_err();
    let source = error.source().unwrap().downcast_ref::<sqlx::Error>().unwrap();
    assert_eq!(source.as_database_error().unwrap().code().unwrap(), "GWBID");
}

#[tokio::test]
async fn one_job_from_a_script() {
    let db = Db::installed().await;
    let job =
        graphile_worker::add_job(db.url(), "hello", json!({"name": "Bobby Tables"}), JobSpec::default()).await.unwrap();
    assert_eq!(&*job.task_identifier, "hello");
}

#[tokio::test]
async fn local_time_is_used_only_when_asked_for() {
    let db = Db::installed().await;
    let before = chrono::Utc::now();
    let local = utils(&db).with_use_local_time(true).add_job(SyncUser(1), JobSpec::default()).await.unwrap();
    assert!(local.run_at >= before - chrono::Duration::microseconds(1) && local.run_at <= chrono::Utc::now());
    let database = utils(&db).add_job(SyncUser(1), JobSpec::default()).await.unwrap();
    assert_eq!(database.run_at, database.created_at);
}

#[cfg(feature = "tokio-postgres")]
#[tokio::test]
async fn a_transaction_of_tokio_postgres_does_as_well() {
    let db = Db::installed().await;
    let (mut client, connection) = tokio_postgres::connect(db.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let utils = utils(&db);
    let spec = || JobSpec::builder().queue_name("q").job_key("k").priority(3).flags(vec!["f".to_owned()]).build();

    let transaction = client.transaction().await.unwrap();
    let within = utils.within_tokio_postgres(&transaction);
    let job = within.add_job(SyncUser(1), spec()).await.unwrap();
    assert_eq!((&*job.task_identifier, job.payload.get(), job.priority), ("sync", "1", 3));
    within.add_jobs(&[(SyncUser(2), &JobSpec::default())]).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);

    let transaction = client.transaction().await.unwrap();
    let within = utils.within_tokio_postgres(&transaction);
    let first = within.add_job(SyncUser(1), spec()).await.unwrap().id;
    let second = within.add_jobs(&[(SyncUser(2), &JobSpec::default())]).await.unwrap()[0].id;
    let options = RescheduleJobOptions::default().priority(9);
    assert_eq!(within.reschedule_jobs(&[first], options).await.unwrap()[0].priority, 9);
    assert_eq!(within.permanently_fail_jobs(&[second], "no").await.unwrap()[0].attempts, 25);
    assert_eq!(within.remove_job("k").await.unwrap().unwrap().id, first);
    assert_eq!(within.complete_jobs(&[second]).await.unwrap().len(), 1);
    within.force_unlock_workers(&["w"]).await.unwrap();
    within.add_raw_job("sync", 3, JobSpec::default()).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 1);

    let error = utils.within_tokio_postgres(&client).add_raw_job("", (), JobSpec::default()).await.unwrap_err();
    assert!(matches!(error, Error::TokioPostgres { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_add_at_the_same_moment_each_get_their_own_job_or_error() {
    let db = Db::installed().await;
    let utils = utils(&db);
    let adding = (0..200).map(|n| {
        let utils = utils.clone();
        tokio::spawn(async move {
            // Every seventh has a queue that may be new, and two are not legal.
            let spec = match n {
                50 => JobSpec::builder().max_attempts(0).build(),
                120 => JobSpec::builder().queue_name("").build(),
                n if n % 7 == 0 => JobSpec::builder().queue_name(format!("q{}", n % 3)).flags(vec!["x".into()]).build(),
                _ => JobSpec::builder().priority(n).build(),
            };
            (n, utils.add_raw_job("t", json!({ "n": n }), spec).await)
        })
    });
    let mut ids = std::collections::HashSet::new();
    for adding in adding.collect::<Vec<_>>() {
        let (n, result) = adding.await.unwrap();
        match (n, result) {
            (50, Err(error)) => assert!(format!("{error:?}").contains("GWBMA"), "{error:?}"),
            (120, Err(error)) => assert!(format!("{error:?}").contains("GWBQN"), "{error:?}"),
            (_, result) => {
                let job = result.unwrap();
                assert_eq!(job.payload.get(), format!("{{\"n\":{n}}}"));
                assert_eq!(&*job.task_identifier, "t");
                assert_eq!((job.job_queue_id.is_some(), job.flags.is_some()), (n % 7 == 0, n % 7 == 0));
                assert_eq!(job.priority, if n % 7 == 0 { 0 } else { n });
                ids.insert(job.id);
            }
        }
    }
    assert_eq!(ids.len(), 198);
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 198);
}

#[tokio::test]
async fn a_caller_that_gives_up_does_not_affect_other_callers() {
    let db = Db::installed().await;
    let utils = utils(&db);
    let add = || utils.add_raw_job("t", json!({}), JobSpec::default());
    for _ in 0..20 {
        // Polled once, so that it is on its way (or even back, where the database is quick), and dropped.
        let (mut first, mut second) = (Box::pin(add()), Box::pin(add()));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = first.as_mut().poll(&mut context);
        let _ = second.as_mut().poll(&mut context);
        drop((first, second));
        tokio::time::timeout(PATIENCE, add()).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_large_batch_returns_what_is_in_the_table() {
    let db = Db::installed().await;
    let run_at = "2030-01-01T00:00:00.123456789Z".parse().unwrap();
    let spec = |n: i64| match n % 4 {
        0 => JobSpec::default(),
        1 => JobSpec::builder().queue_name(format!("q{}", n % 10)).priority(-3).build(),
        2 => JobSpec::builder().run_at(run_at).max_attempts(7).build(),
        _ => JobSpec::builder().flags(vec!["x".to_owned(), "y".to_owned()]).build(),
    };
    let batch: Vec<RawJobSpec> = (0..12_000)
        .map(|n| RawJobSpec { identifier: format!("t{}", n % 3), payload: json!({ "n": n }), spec: spec(n) })
        .collect();
    let jobs = utils(&db).add_raw_jobs(&batch).await.unwrap();
    assert_eq!(jobs.len(), batch.len());
    assert!(jobs.is_sorted_by_key(|job| job.id));
    let said: Vec<_> = jobs
        .iter()
        .map(|job| {
            json!([
                job.id,
                &*job.task_identifier,
                job.payload.get(),
                job.job_queue_id,
                job.priority,
                job.run_at.timestamp_micros(),
                job.attempts,
                job.max_attempts,
                job.created_at.timestamp_micros(),
                job.flags,
            ])
            .to_string()
        })
        .collect();
    let rows: Vec<serde_json::Value> = sqlx::query_scalar(
        "select json_build_array(jobs.id, identifier, payload::text, job_queue_id, priority, \
           (extract(epoch from run_at) * 1000000)::bigint, attempts, max_attempts, \
           (extract(epoch from created_at) * 1000000)::bigint, flags) \
         from graphile_worker._private_jobs as jobs join graphile_worker._private_tasks as tasks on tasks.id = task_id \
         order by jobs.id",
    )
    .fetch_all(&db.pool)
    .await
    .unwrap();
    let written: Vec<String> = rows.iter().map(ToString::to_string).collect();
    assert!(said == written, "{} / {}", said[1], written[1]);

    let mut wrong = batch;
    wrong[11_000].spec = JobSpec::builder().max_attempts(0).build();
    let error = utils(&db).add_raw_jobs(&wrong).await.unwrap_err();
    assert!(format!("{error:?}").contains("Job 11001 of 12000"), "{error:?}");
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 12_000);
}

#[tokio::test]
async fn a_large_batch_on_a_connection_without_a_transaction_is_still_one_transaction() {
    let db = Db::installed().await;
    let batch: Vec<RawJobSpec> = (0..12_000)
        .map(|n| RawJobSpec { identifier: "t".to_owned(), payload: json!(n), spec: JobSpec::default() })
        .collect();
    let mut connection = db.connect().await;
    utils(&db).within(&mut connection).add_raw_jobs(&batch).await.unwrap();
    let added = db
        .row("select count(*) as jobs, count(distinct xmin::text) as transactions from graphile_worker._private_jobs")
        .await;
    assert_eq!(added, json!({ "jobs": 12_000, "transactions": 1 }));
}
