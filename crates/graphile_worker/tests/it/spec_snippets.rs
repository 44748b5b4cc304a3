//! The Rust of the specification, as it is written there, with only the task types and a function around it.

use crate::support::Db;
use chrono::Utc;
use graphile_worker::{
    Cron, CrontabFill, FailureReason, HookRegistry, INFRASTRUCTURE_RESILIENT_FLAG, IntoTaskHandlerResult, JobKeyMode,
    JobRecovery, JobRecoveryResult, JobSpec, JobSpecBuilder, RescheduleJobOptions, SweepStaleWorkersOptions,
    TaskHandler, WorkerContext, WorkerOptions, WorkerRecoveryConfig, WorkerUtils,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

macro_rules! task {
    ($type:ident, $identifier:literal, { $($field:ident: $kind:ty),* }) => {
        #[derive(Serialize, Deserialize)]
        struct $type {
            $($field: $kind),*
        }

        impl TaskHandler for $type {
            const IDENTIFIER: &'static str = $identifier;

            async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {}
        }
    };
}

task!(SendEmail, "send_email", { to: String, subject: String, body: String });
task!(SyncUser, "sync_user", { user_id: i64 });
task!(UpdateAccount, "update_account", { id: i64 });
task!(SendDailyReport, "send_daily_report", {});

fn email() -> SendEmail {
    SendEmail { to: String::new(), subject: String::new(), body: String::new() }
}

#[tokio::test]
async fn scheduling() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let db = Db::empty().await;
    let worker = WorkerOptions::default()
        .define_jobs([SendEmail::definition(), SyncUser::definition(), UpdateAccount::definition()])
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .init()
        .await?;
    let utils = worker.create_utils();
    utils
        .add_job(
            SendEmail {
                to: "user@example.com".to_string(),
                subject: "Welcome".to_string(),
                body: "Thanks for signing up.".to_string(),
            },
            JobSpec::default(),
        )
        .await?;
    utils
        .add_raw_job(
            "send_email",
            serde_json::json!({
                "to": "user@example.com",
                "subject": "Welcome"
            }),
            JobSpec::default(),
        )
        .await?;

    let spec = JobSpecBuilder::new()
        .queue_name("user:123")
        .run_at(Utc::now() + chrono::Duration::minutes(5))
        .max_attempts(5)
        .job_key("welcome-email:123")
        .job_key_mode(JobKeyMode::Replace)
        .priority(-10)
        .flags(vec!["email".to_string()])
        .build();
    utils.add_job(email(), spec).await?;

    let spec = JobSpecBuilder::new().run_at(Utc::now() + chrono::Duration::hours(1)).build();
    utils.add_job(email(), spec).await?;

    let urgent = JobSpecBuilder::new().priority(-10).build();
    let normal = JobSpec::default();
    utils.add_jobs::<SendEmail>(&[(email(), &urgent), (email(), &normal)]).await?;

    let spec = JobSpecBuilder::new().job_key("sync-user:123").job_key_mode(JobKeyMode::Replace).build();
    utils.add_job(SyncUser { user_id: 123 }, spec).await?;

    let spec = JobSpecBuilder::new().queue_name("account:123").build();
    utils.add_job(UpdateAccount { id: 123 }, spec).await?;

    let spec = JobSpec::default();
    utils.add_jobs::<SendEmail>(&[(email(), &spec), (email(), &spec)]).await?;
    utils.reschedule_jobs(&[1], RescheduleJobOptions::default().attempts(0)).await?;

    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 10);
    worker.run_once().await?;
    // Two are of the future, and one has not all the fields of its task.
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 3);
    Ok(())
}

#[tokio::test]
async fn cron() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let db = Db::empty().await;
    let worker = WorkerOptions::default()
        .define_job::<SendDailyReport>()
        .with_cron(Cron::daily_at::<SendDailyReport>(8, 0)?.fill(CrontabFill::hours(1)))
        .pg_pool(db.pool.clone())
        .init()
        .await?;
    worker.run_once().await?;

    let worker = WorkerOptions::default()
        .define_job::<SendDailyReport>()
        .with_cron("0 8 * * * send_daily_report")?
        .pg_pool(db.pool.clone())
        .init()
        .await?;
    worker.run_once().await?;
    Ok(())
}

#[tokio::test]
async fn recovery() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let db = Db::empty().await;
    let pg_pool = db.pool.clone();
    let recovery = WorkerRecoveryConfig::default()
        .enabled(true)
        .heartbeat_interval(Duration::from_secs(30))
        .sweep_interval(Duration::from_secs(60))
        .sweep_threshold(Duration::from_secs(300))
        .recovery_delay(Duration::from_secs(30));
    let worker = WorkerOptions::default()
        .worker_recovery(recovery)
        .define_job::<SendEmail>()
        .pg_pool(pg_pool.clone())
        .init()
        .await?;
    worker.run_once().await?;

    let worker = WorkerOptions::default()
        .heartbeat_interval(Duration::from_secs(30))
        .sweep_interval(Duration::from_secs(60))
        .sweep_threshold(Duration::from_secs(300))
        .recovery_delay(Duration::from_secs(30))
        .define_job::<SendEmail>()
        .pg_pool(pg_pool)
        .init()
        .await?;
    worker.run_once().await?;

    let utils = worker.create_utils();
    let workers = utils.list_active_workers(Duration::from_secs(60)).await?;
    for worker in workers {
        println!(
            "worker={} stale={} started_at={} last_heartbeat_at={}",
            worker.worker_id, worker.is_stale, worker.started_at, worker.last_heartbeat_at
        );
    }

    let database = db.pool.clone();
    let utils = WorkerUtils::new(database, "graphile_worker".to_string());
    let result = utils
        .sweep_stale_workers(SweepStaleWorkersOptions {
            sweep_threshold: Some(Duration::from_secs(60)),
            recovery_delay: Some(Duration::from_secs(30)),
            dry_run: false,
        })
        .await?;
    println!("recovered {} jobs from {:?}", result.recovered_count, result.worker_ids);

    let config = WorkerRecoveryConfig::default()
        .sweep_threshold(Duration::from_secs(60))
        .resilient_sweep_threshold_multiplier(3);
    let result = utils
        .sweep_stale_workers_with_config(
            &config,
            SweepStaleWorkersOptions {
                recovery_delay: Some(Duration::from_secs(30)),
                dry_run: false,
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(result.recovered_count, 0);

    let job = utils
        .add_job(
            UpdateAccount { id: 1 },
            JobSpec::builder().flags(vec![INFRASTRUCTURE_RESILIENT_FLAG.to_string()]).build(),
        )
        .await?;
    assert!(job.flags.is_some());
    let recovery = WorkerRecoveryConfig::default().resilient_job_flags(vec!["custom_resilient".to_string()]);
    assert!(recovery.enabled);

    let mut hooks = HookRegistry::new();
    hooks.on(JobRecovery, |ctx| async move {
        if ctx.reason == FailureReason::WorkerCrashed { JobRecoveryResult::Default } else { JobRecoveryResult::Skip }
    });
    let utils = WorkerUtils::new(db.pool.clone(), "graphile_worker".to_string()).with_hooks(Arc::new(hooks));
    let result = utils.sweep_stale_workers(SweepStaleWorkersOptions::default()).await?;
    assert_eq!(result.worker_ids.len(), 0);
    Ok(())
}
