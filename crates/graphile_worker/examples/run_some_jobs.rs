//! A worker on a private PostgreSQL: typed tasks, a named queue, a retry, a scheduled job and a recurring job. Run it with
//! `cargo run -p graphile_worker --example run_some_jobs`.

use graphile_worker::{
    IntoTaskHandlerResult, JobFailed, JobSpec, TaskError, TaskHandler, TaskOptions, WorkerContext, WorkerOptions,
    WorkerRecoveryConfig,
};
use graphile_worker_devdb::Cluster;
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Serialize, Deserialize)]
struct SendEmail {
    to: String,
}

impl TaskHandler for SendEmail {
    const IDENTIFIER: &'static str = "send_email";

    async fn run(self, ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        tracing::info!("sending to {} (attempt {})", self.to, ctx.job().attempts);
        if ctx.job().attempts == 1 {
            return Err(TaskError::retry_after(Duration::from_secs(1), "the mail server is busy"));
        }
        Ok(())
    }
}

#[derive(Serialize, Deserialize)]
struct SyncAccount {
    step: u32,
}

impl TaskHandler for SyncAccount {
    const IDENTIFIER: &'static str = "sync_account";

    async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        tracing::info!("step {}", self.step);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }

    fn options() -> TaskOptions {
        TaskOptions::default().timeout(Duration::from_secs(10))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    tracing_subscriber::fmt().with_env_filter("info,sqlx=warn").with_target(false).compact().init();
    let cluster = Cluster::open(std::env::temp_dir().join("graphile-worker-demo"))?;
    println!("a private PostgreSQL runs as long as this program: psql {}\n", cluster.url("postgres"));
    let pool = sqlx::PgPool::connect_with(cluster.options("postgres")).await?;
    sqlx::raw_sql("drop schema if exists graphile_worker cascade").execute(&pool).await?;

    let worker = WorkerOptions::default()
        .pg_pool(pool)
        .worker_recovery(WorkerRecoveryConfig::default().enabled(true))
        .define_jobs([SendEmail::definition(), SyncAccount::definition()])
        .define_task("goodbye", |name: String, _ctx| async move { tracing::info!("Goodbye, {name}") })
        .define_task("tick", |_payload: serde_json::Value, ctx: WorkerContext| async move {
            tracing::info!("it is {}", ctx.job().run_at.format("%H:%M:%S"));
        })
        .with_cron("*/2 * * * * * tick ?id=every_two_seconds")?
        .on(JobFailed, |ctx| async move { tracing::info!("job {} has no attempts left", ctx.job.id) })
        .shutdown_signal(tokio::time::sleep(Duration::from_secs(4)))
        .init()
        .await?;

    let utils = worker.create_utils();
    utils.add_job(SendEmail { to: "user@example.com".to_owned() }, JobSpec::default()).await?;
    for step in 1..=3 {
        let one_at_a_time = JobSpec::builder().queue_name("account:7").build();
        utils.add_job(SyncAccount { step }, one_at_a_time).await?;
    }
    let later = JobSpec::builder().run_at(chrono::Utc::now() + chrono::Duration::seconds(2)).build();
    utils.add_raw_job("goodbye", "Bobby Tables", later).await?;

    worker.run().await?;
    println!("\nall done: this worker needed nothing but PostgreSQL");
    Ok(())
}
