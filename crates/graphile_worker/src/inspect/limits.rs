//! Lists the limits and pauses, with their use. Setting them is in the crate's `limits`.

use super::read;
use crate::db::rows::{optional_text, optional_time, text};
use crate::{Error, WorkerUtils};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::Row;
use sqlx::postgres::PgRow;

/// A limit or a pause, and its use at this moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LimitSummary {
    /// Its full name, such as `task:send_email`; `all` for a pause of everything.
    pub name: String,
    /// How many jobs may run at the same time; in a group, the sum of their costs.
    pub concurrency: Option<i32>,
    /// How many jobs may start in a period.
    pub rate: Option<i32>,
    /// The period of the rate in seconds.
    pub per_seconds: Option<f64>,
    /// How many jobs may start at once.
    pub burst: i32,
    /// The share of a queue beside other queues.
    pub weight: f64,
    /// How much a job takes of the limit of the group.
    pub cost: i32,
    /// The full name of its group.
    pub group: Option<String>,
    /// Number of running jobs; in a group, the sum of their costs; of a pattern, in all its queues.
    pub in_use: i64,
    /// How many more jobs may start now. `None` for any number, and for a pattern, each queue of which has its own room.
    pub room: Option<i32>,
    /// Number of waiting jobs, including those that are not due yet.
    pub waiting: i64,
    /// For a queue or a pattern: number of queues with running or waiting jobs.
    pub queues: Option<i64>,
    /// For a queue or a pattern: number of queues with waiting jobs and no room.
    pub full_queues: Option<i64>,
    /// When the next job may start, if none may now because of the rate. For a pattern: in the queue where that is first.
    pub next_at: Option<DateTime<Utc>>,
    /// Whether it is paused.
    pub is_paused: bool,
    /// When it was paused.
    pub paused_at: Option<DateTime<Utc>>,
    /// When the pause ends; `None` if only [`resume`](WorkerUtils::resume) ends it.
    pub paused_until: Option<DateTime<Utc>>,
    /// The role that paused it.
    pub paused_by: Option<String>,
    /// How many failures in a row trip its breaker.
    pub trip: Option<i32>,
    /// For how many seconds no job starts after a trip.
    pub trip_seconds: Option<f64>,
    /// How many jobs have failed in a row, if it has a breaker. For a pattern: the highest number of its queues.
    pub failures: i32,
    /// When its breaker tripped, if it is tripped; for a pattern, that of a queue. From `closed_until` on, the breaker is
    /// half-open: one job at a time runs.
    pub tripped_at: Option<DateTime<Utc>>,
    /// If the limit is closed, because its breaker has tripped or a job was rate limited: when jobs may start again. For a
    /// pattern: the latest time of its queues.
    pub closed_until: Option<DateTime<Utc>>,
    /// For a queue or a pattern: number of queues that are closed, or whose breakers are tripped.
    pub closed_queues: Option<i64>,
}

impl WorkerUtils {
    /// Lists the limits and pauses by name, with their use. Reads the whole table of jobs.
    pub async fn limits(&self) -> Result<Vec<LimitSummary>, Error> {
        read(self.fetch_all(self.statements()?.list_limits.query()).await, limit, || "list limits".to_owned())
    }
}

fn limit(row: &PgRow) -> sqlx::Result<LimitSummary> {
    Ok(LimitSummary {
        name: text(row, "name")?,
        concurrency: row.try_get("concurrency")?,
        rate: row.try_get("rate")?,
        per_seconds: row.try_get("per_seconds")?,
        burst: row.try_get("burst")?,
        weight: row.try_get("weight")?,
        cost: row.try_get("cost")?,
        group: optional_text(row, "group_name")?,
        in_use: row.try_get("in_use")?,
        room: row.try_get("room")?,
        waiting: row.try_get("waiting")?,
        queues: row.try_get("queues")?,
        full_queues: row.try_get("full_queues")?,
        next_at: optional_time(row, "next_at")?,
        is_paused: row.try_get("is_paused")?,
        paused_at: optional_time(row, "paused_at")?,
        paused_until: optional_time(row, "paused_until")?,
        paused_by: optional_text(row, "paused_by")?,
        trip: row.try_get("trip")?,
        trip_seconds: row.try_get("trip_seconds")?,
        failures: row.try_get("failures")?,
        tripped_at: optional_time(row, "tripped_at")?,
        closed_until: optional_time(row, "closed_until")?,
        closed_queues: row.try_get("closed_queues")?,
    })
}
