//! Installs the schema into a private PostgreSQL, adds jobs through the SQL API, and shows them.

use graphile_worker_devdb::Cluster;
use sqlx::{PgPool, Row};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cluster = Cluster::open(std::env::temp_dir().join("graphile-worker-demo"))?;
    let pool = PgPool::connect_with(cluster.options("postgres")).await?;
    sqlx::raw_sql("drop schema if exists graphile_worker cascade").execute(&pool).await?;
    println!("a private PostgreSQL in {}", cluster.folder().display());
    println!("{}", graphile_worker::migrate(&pool, "graphile_worker").await?);

    for statement in [
        "select graphile_worker.add_job('send_email', '{\"to\": \"user@example.com\"}')",
        "select graphile_worker.add_job('remind', run_at := now() + interval '2 days', priority := 5)",
        "select graphile_worker.add_job('sync', queue_name := 'account:7', job_key := 'sync:7')",
        "select graphile_worker.add_job('sync', queue_name := 'account:7', job_key := 'sync:7', max_attempts := 3)",
    ] {
        println!("  {statement}");
        sqlx::query(statement).execute(&pool).await?;
    }
    println!("\n{:>3}  {:<12} {:<10} {:>8}  {:<8} {:>8}", "id", "task", "queue", "priority", "key", "revision");
    let jobs = "select id, task_identifier, queue_name, priority, key, revision from graphile_worker.jobs order by id";
    for job in sqlx::query(jobs).fetch_all(&pool).await? {
        println!(
            "{:>3}  {:<12} {:<10} {:>8}  {:<8} {:>8}",
            job.get::<i64, _>("id"),
            job.get::<String, _>("task_identifier"),
            job.get::<Option<String>, _>("queue_name").unwrap_or_default(),
            job.get::<i16, _>("priority"),
            job.get::<Option<String>, _>("key").unwrap_or_default(),
            job.get::<i32, _>("revision"),
        );
    }
    Ok(())
}
