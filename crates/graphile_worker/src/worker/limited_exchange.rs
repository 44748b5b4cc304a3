//! Limits in the database: the exchange of jobs under limits, reading the limits, and putting waiting jobs under them.
//!
//! Not here: `limits` decides whose turn it is; `maintenance` has the timers; `exchange` retries until the database answers.

use super::claim_size::CLAIM_BYTES;
use super::exchange::{Claimed, Exchange, LATEST_RUN, OPTIONAL_QUERY_TIMEOUT, attempts, seconds, time};
use super::limits::{LimitState, LimitStates, Limits, StateKind};
use super::report::{Answer, ClaimRequest, Report};
use super::settle::{Settlement, Unlock};
use crate::Error;
use crate::db::rows::{optional_time, text};
use crate::error::Context;
use crate::job::Job;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};
use tracing::debug;

impl Exchange {
    /// The exchange of jobs under limits.
    pub(super) async fn exchange_limited(
        &self,
        connection: &mut PgConnection,
        report: &Report,
        request: &ClaimRequest,
    ) -> Result<Answer, Error> {
        let context = || "exchange jobs under limits with the database".to_owned();
        let done = report.ended.iter().filter(|ended| ended.settlement == Settlement::Complete);
        let (done, done_at): (Vec<_>, Vec<_>) = done.map(|ended| (ended.job.id, ended.job.locked_at)).unzip();
        let unlocked = report.ended.iter().filter_map(|ended| Some((&*ended.job, ended.settlement.unlock()?)));
        let unlocked: Vec<(&Job, Unlock<'_>)> = unlocked.collect();
        let (errors, payloads) = self.errors_and_payloads(unlocked.iter().map(|(_, unlock)| unlock));
        let (task_ids, rooms) = self.tasks_and_limits(request);
        let (run_queues, run_ms): (Vec<i32>, Vec<f64>) = mean_run_times(report).into_iter().unzip();
        let query = self
            .statements
            .exchange_limited
            .query()
            .bind(&*self.shared.worker_id)
            .bind(done)
            .bind(done_at)
            .bind(unlocked.iter().map(|(job, _)| job.id).collect::<Vec<_>>())
            .bind(unlocked.iter().map(|(job, _)| job.locked_at).collect::<Vec<_>>())
            .bind(errors)
            .bind(unlocked.iter().map(|(_, unlock)| seconds(unlock.run_at)).collect::<Vec<_>>())
            .bind(unlocked.iter().map(|(_, unlock)| time(unlock.run_at)).collect::<Vec<_>>())
            .bind(unlocked.iter().map(|(_, unlock)| attempts(unlock.attempts)).collect::<Vec<_>>())
            .bind(payloads)
            .bind(unlocked.iter().map(|(job, _)| job.key.as_deref()).collect::<Vec<_>>())
            .bind(unlocked.iter().map(|(_, unlock)| unlock.released.map(i32::from)).collect::<Vec<_>>())
            .bind(run_queues)
            .bind(run_ms)
            .bind(task_ids)
            .bind(rooms)
            .bind(whole(request.jobs))
            .bind(&request.flags.forbidden)
            .bind(&request.flags.accepted)
            .bind(&request.flags.allowed)
            .bind(request.now)
            .bind(request.freshness)
            .bind(CLAIM_BYTES)
            .bind(report.kept_slots.iter().map(|kept| kept.queue).collect::<Vec<_>>())
            .bind(report.kept_slots.iter().map(|kept| whole(kept.slots)).collect::<Vec<_>>())
            .bind(report.kept_slots.iter().map(|kept| kept.longest_run.as_secs_f64() * 1e3).collect::<Vec<_>>())
            .bind(whole(request.most_slots))
            .bind(request.ahead.as_secs_f64() * 1e3);
        let query = bind_outcomes(query, report);
        let Claimed { jobs, about, .. } = self.claim(query, connection).await.context(context)?;
        let answer = || -> sqlx::Result<Answer> {
            let seconds: Option<f64> = about.try_get("seconds")?;
            let lanes: Vec<i32> = about.try_get("lanes_with_slots")?;
            let slots: Vec<i32> = about.try_get("slots")?;
            let slots = slots.into_iter().map(|slots| usize::try_from(slots).unwrap_or_default());
            Ok(Answer {
                jobs,
                blocked_jobs: about.try_get::<Vec<i64>, _>("blocked_jobs")?.into_iter().collect(),
                rejected_jobs: about.try_get("rejected_jobs")?,
                contended: about.try_get("contended")?,
                clock: about.try_get("clock")?,
                slots: lanes.into_iter().zip(slots).collect(),
                claim_again_after: seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.001)).ok()),
                ..Answer::default()
            })
        };
        answer().context(context)
    }

    /// Reads the limits, and their states if hooks need them.
    pub(super) async fn limits(&mut self) -> Option<Limits> {
        let wants_states = self.shared.hooks.follow_limits();
        let connection = self.connection.as_mut()?;
        let query = self.statements.limits.query().persistent(false).bind(wants_states);
        let query = self.session.fetch_one(connection, query);
        let Ok(row) = tokio::time::timeout(OPTIONAL_QUERY_TIMEOUT, query).await else {
            // The answer may arrive when another one is expected.
            self.connection = None;
            return None;
        };
        let read = row.and_then(|row| {
            let is_paused: bool = row.try_get("all_paused")?;
            let seconds: Option<f64> = row.try_get("seconds")?;
            let pause = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
            let after = |seconds: f64| Instant::now().checked_add(Duration::try_from_secs_f64(seconds.max(0.0)).ok()?);
            let limited_tasks: HashSet<i32> = row.try_get::<Vec<i32>, _>("limited_tasks")?.into_iter().collect();
            Ok(Limits {
                any_exist: row.try_get("any_exist")?,
                all_paused_until: is_paused.then(|| Instant::now() + pause.unwrap_or(LATEST_RUN)),
                paused_queues: row.try_get::<Vec<i32>, _>("paused_queues")?.into_iter().collect(),
                have_breakers: row.try_get("have_breakers")?,
                paused_tasks: row.try_get::<Vec<String>, _>("paused_tasks")?.into_iter().collect(),
                limited_tasks,
                settings: row.try_get::<Option<_>, _>("settings")?.unwrap_or_default(),
                states: states(row.try_get("states")?)?,
                next_change: row.try_get::<Option<f64>, _>("next_change")?.and_then(after),
            })
        });
        match read {
            Ok(limits) => {
                self.lanes.set_limited_tasks(limits.limited_tasks.clone());
                Some(limits)
            }
            Err(error) => {
                debug!(label = "worker", %error, "could not read the limits; retrying");
                None
            }
        }
    }

    /// The limits because of which due jobs wait, and when the next one may start, if that is known.
    pub(super) async fn reached_limits(&mut self) -> Option<Vec<(String, Option<DateTime<Utc>>)>> {
        let connection = self.connection.as_mut()?;
        let query = self.session.fetch_all(connection, self.statements.reached_limits.query().persistent(false));
        let Ok(rows) = tokio::time::timeout(OPTIONAL_QUERY_TIMEOUT, query).await else {
            // The answer may arrive when another one is expected.
            self.connection = None;
            return None;
        };
        let reached = |row: &PgRow| Ok((text(row, "name")?, optional_time(row, "next_at")?));
        rows.and_then(|rows| rows.iter().map(reached).collect())
            .inspect_err(|error| debug!(label = "worker", %error, "could not read which limits are reached; retrying"))
            .ok()
    }

    /// Puts waiting jobs where the limits want them.
    pub(super) async fn settle_limits(&mut self) {
        let Some(connection) = self.connection.as_mut() else { return };
        let query = self.session.fetch_one(connection, self.statements.settle_limits.query().persistent(false));
        match tokio::time::timeout(self.answer_timeout, query).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(label = "worker", %error, "could not put jobs under their limits; retrying"),
            Err(_) => self.connection = None,
        }
    }
}

fn whole(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// The states of limits, as `limits.sql` returns them.
fn states(json: &str) -> sqlx::Result<LimitStates> {
    #[derive(Deserialize)]
    struct Row {
        name: String,
        state: StateKind,
        until: Option<DateTime<Utc>>,
        by: Option<String>,
        failures: Option<i32>,
    }
    let rows: Vec<Row> = serde_json::from_str(json).map_err(|error| sqlx::Error::Decode(error.into()))?;
    let state = |row: Row| {
        let state = LimitState { until: row.until, by: row.by, failures: row.failures.unwrap_or_default() };
        ((row.name, row.state), state)
    };
    Ok(rows.into_iter().map(state).collect())
}

/// The outcomes that count for the limits of the jobs: see `_rs_note_outcomes`.
fn bind_outcomes<'q>(query: Query<'q, Postgres, PgArguments>, report: &'q Report) -> Query<'q, Postgres, PgArguments> {
    let given_back = || report.ended.iter().map(|ended| &ended.settlement).filter(|ended| ended.unlock().is_some());
    let closed_for = |ended: &Settlement| ended.closed_for().map(|wait| wait.min(LATEST_RUN).as_secs_f64());
    let completed: Vec<&Job> = report
        .ended
        .iter()
        .filter(|ended| ended.settlement == Settlement::CompletedByHandler)
        .map(|ended| &*ended.job)
        .collect();
    query
        .bind(given_back().map(Settlement::has_failed).collect::<Vec<_>>())
        .bind(given_back().map(closed_for).collect::<Vec<_>>())
        .bind(given_back().map(Settlement::closes).collect::<Vec<_>>())
        .bind(completed.iter().map(|job| job.job_queue_id).collect::<Vec<_>>())
        .bind(completed.iter().map(|job| &*job.task_identifier).collect::<Vec<_>>())
        .bind(completed.iter().map(|job| job.locked_at).collect::<Vec<_>>())
}

/// How many milliseconds a job of each limited queue took on average.
fn mean_run_times(report: &Report) -> HashMap<i32, f64> {
    let mut totals: HashMap<i32, (f64, u32)> = HashMap::new();
    for ended in report.ended.iter().filter(|ended| ended.settlement.has_run()) {
        if let Some(queue) = ended.job.limited_queue() {
            let (total, jobs) = totals.entry(queue).or_default();
            *total += ended.ran.as_secs_f64() * 1e3;
            *jobs += 1;
        }
    }
    totals.into_iter().map(|(queue, (total, jobs))| (queue, total / f64::from(jobs))).collect()
}
