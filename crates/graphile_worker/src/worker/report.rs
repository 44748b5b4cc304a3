//! The data of an exchange: the report of ended jobs, the request for new ones, and the answer. `exchange` makes the
//! round trip.

use super::settle::Settlement;
use crate::context::Shared;
use crate::flags::FlagFilter;
use crate::hooks::{JobComplete, JobEventContext};
use crate::job::Job;
use chrono::{DateTime, Utc};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// A connection over which the worker exchanges jobs. The first lane handles everything; under load, the second one
/// helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    First,
    Second,
}

/// What the database has to record about the jobs that have ended in this worker.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) ended: Vec<Ended>,
    /// Queues without any job in flight.
    pub(crate) free_queues: Vec<i32>,
    /// Whether this is about jobs under limits: all its jobs are, and so are those to claim.
    pub(crate) is_limited: bool,
    /// How many slots of each limited queue the worker keeps.
    pub(crate) kept_slots: Vec<KeptSlots>,
}

/// The slots of a limited queue that the worker keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeptSlots {
    pub(crate) queue: i32,
    pub(crate) slots: usize,
    /// How long its longest-running job has run so far.
    pub(crate) longest_run: Duration,
}

/// A job that has ended in this worker and is not recorded yet.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) job: Arc<Job>,
    /// The number of the reply that delivered the job.
    pub(crate) reply: u64,
    pub(crate) settlement: Settlement,
    /// How long it ran.
    pub(crate) ran: Duration,
    /// How many reports found its row locked.
    pub(crate) tries: u8,
    /// Whether a report has not found its row free at its place.
    pub(crate) is_missed: bool,
}

impl Report {
    pub(crate) fn is_empty(&self) -> bool {
        self.ended.is_empty() && self.free_queues.is_empty()
    }

    /// Whether all its jobs are completed and have no queue.
    pub(crate) fn is_simple(&self) -> bool {
        let is_simple = |ended: &Ended| ended.settlement == Settlement::Complete && ended.job.job_queue_id.is_none();
        self.free_queues.is_empty() && self.ended.iter().all(is_simple)
    }

    #[cfg(test)]
    pub(crate) fn ids(&self) -> impl Iterator<Item = i64> {
        self.ended.iter().map(|ended| ended.job.id)
    }
}

/// Which jobs to claim.
#[derive(Default)]
pub(crate) struct ClaimRequest {
    pub(crate) jobs: usize,
    /// How many slots of one limited queue the worker can use.
    pub(crate) most_slots: usize,
    /// How long the jobs that are claimed ahead may keep the slots busy.
    pub(crate) ahead: Duration,
    pub(crate) flags: FlagFilter,
    /// How many more jobs of each limited task to claim.
    pub(crate) limits: HashMap<Arc<str>, usize>,
    pub(crate) now: Option<DateTime<Utc>>,
    /// The maximum age of the worker's heartbeat in seconds, if recovery is on.
    pub(crate) freshness: Option<f64>,
}

/// The database's answer to an exchange.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) jobs: Vec<Arc<Job>>,
    /// Reported jobs, and queues to free, that were not written because another transaction has locked their rows.
    pub(crate) blocked_jobs: HashSet<i64>,
    pub(crate) blocked_queues: Vec<i32>,
    /// Reported jobs that were not written because this worker no longer holds them.
    pub(crate) rejected_jobs: Vec<i64>,
    /// Reported jobs that were not written because their rows were not free at their places. The next report goes by id.
    pub(crate) missed_jobs: HashSet<i64>,
    /// Whether due jobs were left because others had locked them, or because their payloads were too large for one
    /// claim.
    pub(crate) contended: bool,
    /// Whether the claim has not looked at all due jobs, although it got fewer than it wanted: those with a queue, those
    /// in front of the place where it started, or those behind many that this worker cannot take. The next claim does.
    pub(crate) is_partial: bool,
    /// Whether the claim has seen that no job is left, not even one that is due later.
    pub(crate) nothing_waits: bool,
    /// The time of the claim.
    pub(crate) clock: Option<DateTime<Utc>>,
    pub(crate) took: Duration,
    /// When to claim again at the latest, because a limit then has room.
    pub(crate) claim_again_after: Option<Duration>,
    /// How many jobs of a limited queue may run here at the same time.
    pub(crate) slots: Vec<(i32, usize)>,
}

impl Shared {
    /// The hook context of a job that has ended.
    pub(super) fn job_ended(&self, job: &Arc<Job>, duration: Duration, settlement: &Settlement) -> JobEventContext {
        let will_retry = matches!(settlement, Settlement::Retry { .. });
        JobEventContext { will_retry, ..self.job_event(job, duration, settlement.error().map(str::to_owned)) }
    }

    /// Emits `JobComplete` for the jobs whose outcome is recorded.
    pub(super) async fn emit_completed(&self, report: Report) {
        if !self.hooks.has::<JobComplete>() {
            return;
        }
        for Ended { job, ran, settlement, .. } in report.ended {
            if settlement.has_run() {
                self.hooks.emit(JobComplete, || self.job_ended(&job, ran, &settlement)).await;
            }
        }
    }
}
