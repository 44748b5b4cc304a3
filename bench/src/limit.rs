//! The limit: plain SQL on our schema, over one or more connections, without any task logic. The worker cannot be
//! faster than this.

use crate::Failure;
use crate::protocol::{self, Task, ready, unix_seconds};
use crate::server::as_the_worker_connects;
use serde_json::{Value, json};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection, Row};
use tokio::task::JoinSet;

/// The size of the worker's largest claim.
const BATCH: i32 = 1000;

/// Bytes of COPY data per message.
const COPY_CHUNK: usize = 1 << 20;

pub(crate) async fn run(task: &Task, connections: usize) -> Result<(), Failure> {
    let figures = match task.command.as_str() {
        "drain" | "fleet" => drain(task, connections).await?,
        "bulk_add" => bulk_add(task).await?,
        _ => return Err(task.unknown_command()),
    };
    protocol::finish(&figures)
}

async fn drain(task: &Task, connections: usize) -> Result<Value, Failure> {
    let options: PgConnectOptions = task.url.parse()?;
    let options = as_the_worker_connects(options);
    let mut open = Vec::new();
    for _ in 0..connections {
        open.push(PgConnection::connect_with(&options).await?);
    }
    ready().await?;
    let mut draining = JoinSet::new();
    for (number, connection) in open.into_iter().enumerate() {
        draining.spawn(drain_on(connection, format!("limit {number}")));
    }
    let mut jobs = 0;
    while let Some(drained) = draining.join_next().await {
        jobs += drained??;
    }
    Ok(json!({ "jobs": jobs, "last": unix_seconds() }))
}

/// Deletes the previous batch and claims the next one, until no job is left.
async fn drain_on(mut connection: PgConnection, worker: String) -> Result<usize, Failure> {
    let tasks: Vec<i32> =
        sqlx::query_scalar("select id from graphile_worker._private_tasks").fetch_all(&mut connection).await?;
    let mut jobs = 0;
    let mut done: Vec<i64> = Vec::new();
    loop {
        if !done.is_empty() {
            sqlx::query(include_str!("../sql/limit_done.sql")).bind(&done).execute(&mut connection).await?;
        }
        let claim = sqlx::query(include_str!("../sql/limit_claim.sql")).bind(&worker).bind(&tasks).bind(BATCH);
        let rows = claim.fetch_all(&mut connection).await?;
        if rows.is_empty() {
            return Ok(jobs);
        }
        done = rows.iter().map(|row| row.try_get("id")).collect::<Result<_, _>>()?;
        jobs += done.len();
    }
}

async fn bulk_add(task: &Task) -> Result<Value, Failure> {
    let mut connection = PgConnection::connect(&task.url).await?;
    let task_id: i32 = sqlx::query_scalar("select id from graphile_worker._private_tasks where identifier = 'trivial'")
        .fetch_one(&mut connection)
        .await?;
    let rows: String = (1..=task.number).map(|id| format!("{task_id}\t{{\"id\":{id}}}\n")).collect();
    ready().await?;
    let mut copy = connection.copy_in_raw("copy graphile_worker._private_jobs (task_id, payload) from stdin").await?;
    for chunk in rows.as_bytes().chunks(COPY_CHUNK) {
        copy.send(chunk).await?;
    }
    let jobs = copy.finish().await?;
    Ok(json!({ "jobs": jobs, "last": unix_seconds() }))
}
