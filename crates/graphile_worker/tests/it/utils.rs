//! WorkerUtils: what the SQL API does, from Rust, in the pool or in a transaction.

use crate::support::Db;
use graphile_worker::{
    CleanupTask, Error, IntoTaskHandlerResult, JobKeyMode, JobSpec, RawJobSpec, RescheduleJobOptions, TaskHandler,
    WorkerContext, WorkerUtils,
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

fn utils(db: &Db) -> WorkerUtils {
    WorkerUtils::new(db.pool.clone(), "graphile_worker")
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
    let options = RescheduleJobOptions { priority: Some(3), attempts: Some(0), ..Default::default() };
    let again = utils.reschedule_jobs(&ids[1..2], options).await.unwrap();
    assert_eq!((again[0].priority, again[0].attempts), (3, 0));
    assert_eq!(utils.remove_job("c").await.unwrap().unwrap().id, ids[2]);
    assert!(utils.remove_job("c").await.unwrap().is_none());
    db.run("update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w'").await;
    utils.force_unlock_workers(&["w"]).await.unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs where locked_by is not null").await, 0);
}

#[tokio::test]
async fn a_batch_follows_the_strictest_key_mode_and_refuses_the_unsafe_one() {
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

#[tokio::test]
async fn cleaning_up_deletes_what_nobody_needs_and_nothing_else() {
    let db = Db::installed().await;
    db.run(
        "select graphile_worker.add_job('used', queue_name := 'used');
         select graphile_worker.add_job('gone', queue_name := 'gone', job_key := 'k');
         select graphile_worker.remove_job('k');
         select graphile_worker.add_job('failed', job_key := 'f');
         select graphile_worker.permanently_fail_jobs(array(select id from graphile_worker.jobs where key = 'f'))",
    )
    .await;
    let utils = utils(&db);
    assert_eq!(utils.cleanup(&[CleanupTask::DeletePermanentlyFailedJobs]).await.unwrap(), 1);
    assert_eq!(utils.cleanup(&[CleanupTask::GcTaskIdentifiers, CleanupTask::GcJobQueues]).await.unwrap(), 3);
    assert_eq!(db.value("select json_agg(identifier) from graphile_worker._private_tasks").await, json!(["used"]));
    assert_eq!(db.value("select json_agg(queue_name) from graphile_worker._private_job_queues").await, json!(["used"]));
}

#[tokio::test]
async fn cleaning_up_waits_for_a_job_that_is_just_being_added() {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('rare', job_key := 'k'); select graphile_worker.remove_job('k')").await;
    let mut adding = db.connect().await;
    sqlx::raw_sql("begin; select graphile_worker.add_job('rare')").execute(&mut adding).await.unwrap();
    let cleaning = tokio::spawn({
        let utils = utils(&db);
        async move { utils.cleanup(&[CleanupTask::GcTaskIdentifiers]).await }
    });
    let waits = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    while db.value(waits).await == 0 {
        tokio::task::yield_now().await;
    }
    sqlx::raw_sql("commit").execute(&mut adding).await.unwrap();
    assert_eq!(cleaning.await.unwrap().unwrap(), 0);
    assert_eq!(db.value("select task_identifier from graphile_worker.jobs").await, "rare");
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
    let options = RescheduleJobOptions { priority: Some(9), ..Default::default() };
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
