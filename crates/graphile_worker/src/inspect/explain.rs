//! Why a job does not run: a few statements read the facts (`Facts`), and `decide`, which is pure, finds the reasons.
//! `reasons` has what each reason says, and the command that helps.

use crate::db::rows::{optional_text, optional_time, time};
use crate::error::Context;
use crate::inspect::reasons::{HEARTBEAT_INTERVAL, LockHolder, WhyReason, WhyWorker, fix};
use crate::inspect::{JobState, JobSummary, WorkerState, summary};
use crate::{Error, WorkerUtils};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::collections::{BTreeSet, HashMap};

/// When a worker that does not publish its threshold releases the jobs of dead workers: recovery's default,
/// in seconds.
const DEFAULT_SWEEP_THRESHOLD: f64 = 5.0 * 60.0;

/// Why a job does not run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Why {
    /// The requested id.
    pub id: i64,
    /// The job, if it exists.
    pub job: Option<JobSummary>,
    /// The reasons, most important first; never empty.
    pub reasons: Vec<WhyReason>,
    /// What to do about the first reason; ends with a command, if one helps.
    pub fix: Option<String>,
}

/// What the decision depends on.
#[derive(Debug, Clone)]
struct Facts {
    now: DateTime<Utc>,
    job: Option<JobSummary>,
    /// It is running, and was asked to stop.
    is_being_cancelled: bool,
    table_lock: Option<WhyReason>,
    row_lock: Option<LockHolder>,
    /// The worker that runs the job before its claim is written, and for how many seconds its transaction is open.
    batch: Option<(String, Option<f64>)>,
    queue_row_lock: Option<LockHolder>,
    queue_locked_at: Option<DateTime<Utc>>,
    queue_locked_by: Option<String>,
    queue_job_id: Option<i64>,
    /// The running jobs that it replaces.
    replaced: Vec<SeenReplaced>,
    is_in_lane: bool,
    limits: Vec<SeenLimit>,
    ahead: i64,
    workers: Vec<SeenWorker>,
    /// Sessions that listen for jobs.
    listeners: i64,
    last_heartbeat_at: Option<DateTime<Utc>>,
}

/// A running job that this job replaces.
#[derive(Debug, Clone, Deserialize)]
struct SeenReplaced {
    job_id: i64,
    worker_id: Option<String>,
    can_stop: bool,
}

/// A limit or a pause that the job is under.
#[derive(Debug, Clone, Default, Deserialize)]
struct SeenLimit {
    name: String,
    concurrency: Option<i64>,
    in_use: i64,
    /// How much the job takes of it.
    cost: i64,
    rate: Option<i64>,
    per_seconds: Option<f64>,
    /// `None` for any number.
    room: Option<i64>,
    /// When the next job may start, if none may now because of the rate.
    next_seconds: Option<f64>,
    /// Since when it is paused.
    paused_seconds: Option<f64>,
    /// When the pause ends.
    resumed_seconds: Option<f64>,
    paused_by: Option<String>,
    /// Seconds until it is no longer closed.
    closed_seconds: Option<f64>,
    /// Seconds since its breaker tripped.
    tripped_seconds: Option<f64>,
    failures: Option<i64>,
}

impl SeenLimit {
    fn pause(&self) -> Option<WhyReason> {
        Some(WhyReason::Paused {
            limit: self.name.clone(),
            seconds: self.paused_seconds?,
            resumed_after: self.resumed_seconds,
            by: self.paused_by.clone(),
        })
    }

    fn closed(&self) -> Option<WhyReason> {
        Some(WhyReason::LimitClosed {
            limit: self.name.clone(),
            resumed_after: self.closed_seconds?,
            tripped_seconds: self.tripped_seconds,
            failures: self.failures.unwrap_or_default(),
        })
    }

    /// Whether the job has to wait for others to end, or for the rate.
    fn reached(&self) -> Option<WhyReason> {
        let is_stopped = self.paused_seconds.is_some() || self.closed_seconds.is_some();
        if is_stopped || self.room.is_none_or(|room| room >= self.cost) {
            return None;
        }
        if let Some(tripped_seconds) = self.tripped_seconds.filter(|_| self.in_use > 0) {
            return Some(WhyReason::BehindProbe { limit: self.name.clone(), tripped_seconds });
        }
        let lacks_slots = self.concurrency.is_some_and(|concurrency| self.in_use + self.cost > concurrency);
        Some(WhyReason::LimitReached {
            limit: self.name.clone(),
            concurrency: self.concurrency.filter(|_| lacks_slots),
            in_use: self.in_use,
            cost: self.cost,
            rate: self.rate,
            per_seconds: self.per_seconds,
            next_after: self.next_seconds,
        })
    }
}

/// A worker that is registered or connected, or holds locks.
#[derive(Debug, Clone, Default, Deserialize)]
struct SeenWorker {
    worker_id: String,
    is_registered: bool,
    is_connected: Option<bool>,
    heartbeat_seconds: Option<f64>,
    interval_seconds: Option<f64>,
    host: Option<String>,
    pid: Option<i32>,
    slots: Option<i64>,
    tasks: Option<Vec<String>>,
    settings: Option<SeenSettings>,
    jobs: i64,
    jobs_of_task: i64,
}

/// The settings that a worker has published. Other releases may publish other settings.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SeenSettings {
    task_limits: HashMap<String, i64>,
    /// `None` if a function decides.
    forbidden_flags: Option<Vec<String>>,
    /// `None` if a function decides. Releases that do not publish it accept all flags.
    #[serde(default = "all_flags")]
    accepted_flags: Option<Vec<String>>,
    /// `None` if jobs may have any flags.
    allowed_flags: Option<Vec<String>>,
    sweep_threshold: Option<f64>,
    poll_interval: Option<f64>,
    listens: Option<bool>,
}

fn all_flags() -> Option<Vec<String>> {
    Some(Vec::new())
}

/// Whether a worker runs jobs with these flags.
#[derive(Debug, PartialEq)]
enum ByFlags {
    Runs,
    /// It is unknown.
    MayRun,
    /// It forbids these flags of the job.
    Forbidden(Vec<String>),
    /// It only accepts these flags, and the job has none of them.
    NotAccepted(Vec<String>),
    /// It has an allowlist that lacks these flags of the job.
    NotAllowed(Vec<String>),
}

impl ByFlags {
    fn of(worker: &SeenWorker, flags: &[String]) -> ByFlags {
        let all_but = |is_fine: &dyn Fn(&String) -> bool| -> Vec<String> {
            flags.iter().filter(|flag| !is_fine(flag)).cloned().collect()
        };
        let Some(settings) = &worker.settings else {
            return if flags.is_empty() { ByFlags::Runs } else { ByFlags::MayRun };
        };
        if let Some(forbidden) = &settings.forbidden_flags
            && flags.iter().any(|flag| forbidden.contains(flag))
        {
            return ByFlags::Forbidden(all_but(&|flag| !forbidden.contains(flag)));
        }
        if let Some(accepted) = &settings.accepted_flags
            && !accepted.is_empty()
            && !flags.iter().any(|flag| accepted.contains(flag))
        {
            return ByFlags::NotAccepted(accepted.clone());
        }
        if let Some(allowed) = &settings.allowed_flags
            && flags.iter().any(|flag| !allowed.contains(flag))
        {
            return ByFlags::NotAllowed(all_but(&|flag| allowed.contains(flag)));
        }
        let runs_all_flags =
            settings.accepted_flags.is_some() && (flags.is_empty() || settings.forbidden_flags.is_some());
        if runs_all_flags { ByFlags::Runs } else { ByFlags::MayRun }
    }

    fn rejects(&self) -> bool {
        !matches!(self, ByFlags::Runs | ByFlags::MayRun)
    }
}

/// One reason per kind of rejection.
fn rejections(by_flags: &[ByFlags], job: &JobSummary) -> Vec<WhyReason> {
    let gathered = |of: fn(&ByFlags) -> Option<&Vec<String>>| {
        let kind: Vec<_> = by_flags.iter().filter_map(of).collect();
        let flags: BTreeSet<String> = kind.iter().copied().flatten().cloned().collect();
        (!kind.is_empty()).then(|| (flags.into_iter().collect::<Vec<_>>(), kind.len() as i64))
    };
    let forbidden = gathered(|by| if let ByFlags::Forbidden(flags) = by { Some(flags) } else { None });
    let not_accepted = gathered(|by| if let ByFlags::NotAccepted(flags) = by { Some(flags) } else { None });
    let not_allowed = gathered(|by| if let ByFlags::NotAllowed(flags) = by { Some(flags) } else { None });
    let mut reasons = Vec::new();
    reasons.extend(forbidden.map(|(flags, workers)| WhyReason::Forbidden { flags, workers }));
    reasons.extend(not_accepted.map(|(accepted, workers)| WhyReason::NotAccepted {
        flags: job.flags.clone(),
        accepted,
        workers,
    }));
    reasons.extend(not_allowed.map(|(flags, workers)| WhyReason::NotAllowed { flags, workers }));
    reasons
}

impl SeenWorker {
    fn state(&self) -> WorkerState {
        let Some(silent_for) = self.heartbeat_seconds else {
            // Only a registered worker has such an id: its row was deleted.
            return match self.worker_id.starts_with("rs-live-") {
                true => WorkerState::Dead,
                false if self.is_connected == Some(true) => WorkerState::Alive,
                false => WorkerState::Unknown,
            };
        };
        let interval = self.interval_seconds.unwrap_or(HEARTBEAT_INTERVAL);
        if silent_for > self.sweep_threshold() {
            WorkerState::Stale
        } else if silent_for > (interval * 1.25).max(interval + 1.0) {
            WorkerState::Silent
        } else {
            WorkerState::Alive
        }
    }

    fn sweep_threshold(&self) -> f64 {
        self.settings.as_ref().and_then(|settings| settings.sweep_threshold).unwrap_or(DEFAULT_SWEEP_THRESHOLD)
    }

    fn is_alive(&self) -> bool {
        self.is_registered && self.state() == WorkerState::Alive
    }

    /// Whether it is one of ours, by its id. An unknown one is Node's, or one of the Rust port.
    fn may_run_limited_jobs(&self) -> bool {
        self.worker_id.starts_with("rs-") && !matches!(self.state(), WorkerState::Dead | WorkerState::Stale)
    }

    fn runs(&self, task: &str) -> Option<bool> {
        self.tasks.as_ref().map(|tasks| tasks.iter().any(|known| known == task))
    }

    fn limit(&self, task: &str) -> Option<i64> {
        self.settings.as_ref()?.task_limits.get(task).copied()
    }

    fn has_free_slot(&self) -> bool {
        self.slots.is_none_or(|slots| self.jobs < slots)
    }

    fn described(&self) -> WhyWorker {
        WhyWorker {
            worker_id: self.worker_id.clone(),
            state: self.state(),
            is_registered: self.is_registered,
            host: self.host.clone(),
            pid: self.pid,
            slots: self.slots,
            jobs: self.jobs,
            heartbeat_seconds: self.heartbeat_seconds,
            interval_seconds: self.interval_seconds,
            is_connected: self.is_connected,
        }
    }
}

impl Facts {
    fn alive(&self) -> impl Iterator<Item = &SeenWorker> {
        self.workers.iter().filter(|worker| worker.is_alive())
    }

    /// Number of unregistered workers, which may run any task. An unregistered worker of ours is connected
    /// and listens, and counts once.
    fn others(&self) -> i64 {
        let is_other = |worker: &&SeenWorker| {
            !worker.is_registered && matches!(worker.state(), WorkerState::Alive | WorkerState::Unknown)
        };
        let registered =
            self.workers.iter().filter(|worker| worker.is_registered && worker.is_connected == Some(true)).count();
        let listeners = self.listeners - registered.max(self.alive().count()) as i64;
        (self.workers.iter().filter(is_other).count() as i64).max(listeners)
    }

    fn all_report_tasks(&self) -> bool {
        self.others() <= 0 && self.alive().all(|worker| worker.tasks.is_some())
    }

    /// The tasks that the live workers run, if all of them publish their tasks.
    fn tasks(&self) -> Option<Vec<String>> {
        let tasks: BTreeSet<String> = self.alive().filter_map(|worker| worker.tasks.clone()).flatten().collect();
        (self.all_report_tasks() && !tasks.is_empty()).then(|| tasks.into_iter().collect())
    }

    fn worker(&self, worker_id: Option<&str>) -> WhyWorker {
        let worker_id = worker_id.unwrap_or_default();
        let found = self.workers.iter().find(|worker| worker.worker_id == worker_id).cloned();
        found.unwrap_or_else(|| SeenWorker { worker_id: worker_id.to_owned(), ..SeenWorker::default() }).described()
    }

    /// Seconds without a heartbeat after which a live worker releases the jobs of this one.
    fn freed_after(&self, worker: &WhyWorker) -> Option<f64> {
        let sweepers = self.alive().filter(|other| other.worker_id != worker.worker_id);
        let threshold = sweepers.map(SeenWorker::sweep_threshold).min_by(f64::total_cmp)?;
        Some(threshold.max(2.0 * worker.interval_seconds.unwrap_or(HEARTBEAT_INTERVAL)))
    }
}

impl WorkerUtils {
    /// Explains why a job does not run, and what to do about it.
    ///
    /// ```no_run
    /// # async fn example(utils: graphile_worker::WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// println!("{}", utils.why(42).await?.reasons[0]);
    /// # Ok(()) }
    /// ```
    pub async fn why(&self, id: i64) -> Result<Why, Error> {
        let context = || format!("explain job {id}");
        let statements = self.statements()?;
        let lock = self.fetch_all(statements.why_table_lock.query()).await;
        let table_lock = lock.and_then(|rows| rows.first().map(table_lock).transpose()).context(context)?;
        if let Some((lock, true)) = &table_lock {
            // Reading the table would wait for that session.
            let fix = fix(std::slice::from_ref(lock), id, statements.schema.name());
            return Ok(Why { id, job: None, reasons: vec![lock.clone()], fix });
        }
        let query = statements.why.query().bind(id);
        let mut facts = self.fetch_one(query).await.and_then(|row| read(&row)).context(context)?;
        facts.table_lock = table_lock.map(|(lock, _)| lock);
        if facts.job.as_ref().is_some_and(|job| job.state == JobState::Ready) {
            let query = statements.why_ahead.query().bind(id).bind(facts.tasks());
            let rows = self.fetch_all(query).await;
            let ahead =
                rows.and_then(|rows| rows.first().map(|row| row.try_get("ahead")).transpose()).context(context)?;
            facts.ahead = ahead.unwrap_or(0);
        }
        let reasons = decide(&facts);
        let fix = fix(&reasons, id, statements.schema.name());
        Ok(Why { id, job: facts.job, reasons, fix })
    }
}

/// The lock on a table, and whether it blocks even readers.
fn table_lock(row: &PgRow) -> sqlx::Result<(WhyReason, bool)> {
    let mode: String = row.try_get("mode")?;
    let lock = WhyReason::TableLocked {
        table: row.try_get("relation")?,
        granted: row.try_get("granted")?,
        waits_for: row.try_get("waits_for")?,
        holder: LockHolder {
            pid: row.try_get("pid")?,
            application_name: row.try_get("application_name")?,
            role: row.try_get("role")?,
            state: row.try_get("state")?,
            seconds: row.try_get("seconds")?,
            prepared: row.try_get("gid")?,
            others: 0,
        },
    };
    Ok((lock, mode == "AccessExclusiveLock"))
}

fn read(row: &PgRow) -> sqlx::Result<Facts> {
    let id: Option<i64> = row.try_get("id")?;
    let decode = |error: serde_json::Error| sqlx::Error::Decode(error.into());
    let holders = |column: &str| -> sqlx::Result<Vec<LockHolder>> {
        let json: Option<String> = row.try_get(column)?;
        let holders = json.as_deref().map(serde_json::from_str::<Vec<LockHolder>>).transpose().map_err(decode)?;
        Ok(holders.unwrap_or_default())
    };
    let lock = |column: &str| -> sqlx::Result<Option<LockHolder>> {
        let mut stuck = holders(column)?.into_iter().filter(|holder| !holder.is_brief());
        let first = stuck.next();
        Ok(first.map(|holder| LockHolder { others: stuck.count() as i64, ..holder }))
    };
    let batch = |holders: Vec<LockHolder>| {
        holders.iter().find_map(|holder| Some((holder.deferred_lane_of()?.to_owned(), holder.seconds)))
    };
    let workers: String = row.try_get("workers")?;
    let limits: String = row.try_get("limits")?;
    let replaced: String = row.try_get("replaced")?;
    Ok(Facts {
        now: time(row, "now")?,
        job: if id.is_some() { Some(summary(row)?) } else { None },
        is_being_cancelled: row.try_get("is_being_cancelled")?,
        table_lock: None,
        row_lock: lock("row_lock")?,
        batch: batch(holders("row_lock")?),
        queue_row_lock: lock("queue_row_lock")?,
        queue_locked_at: optional_time(row, "queue_locked_at")?,
        queue_locked_by: optional_text(row, "queue_locked_by")?,
        queue_job_id: row.try_get("queue_job_id")?,
        replaced: serde_json::from_str(&replaced).map_err(decode)?,
        is_in_lane: row.try_get("is_in_lane")?,
        limits: serde_json::from_str(&limits).map_err(decode)?,
        ahead: 0,
        workers: serde_json::from_str(&workers).map_err(decode)?,
        listeners: row.try_get("listeners")?,
        last_heartbeat_at: optional_time(row, "last_heartbeat_at")?,
    })
}

fn decide(facts: &Facts) -> Vec<WhyReason> {
    let Some(job) = &facts.job else {
        return vec![WhyReason::DoesNotExist];
    };
    let since = |time: DateTime<Utc>| (facts.now - time).as_seconds_f64();
    let row_locked = facts.row_lock.clone().map(|holder| WhyReason::RowLocked { holder });
    if let Some(locked_at) = job.locked_at {
        let worker = facts.worker(job.locked_by.as_deref());
        let freed_after = facts.freed_after(&worker);
        let running = match facts.is_being_cancelled {
            true => WhyReason::BeingCancelled { worker, cancel_reason: cancel_reason(job), freed_after },
            false => WhyReason::Running { worker, since: locked_at, seconds: since(locked_at), freed_after },
        };
        return [running].into_iter().chain(row_locked).collect();
    }
    if let Some((worker_id, seconds)) = &facts.batch {
        let running = WhyReason::RunningInBatch { worker: facts.worker(Some(worker_id)), seconds: *seconds };
        return [running].into_iter().chain(row_locked).collect();
    }
    let (attempts, last_error) = (job.attempts, job.last_error.clone());
    if job.state == JobState::Cancelled {
        return vec![WhyReason::Cancelled { cancel_reason: cancel_reason(job), at: job.updated_at }];
    }
    if job.state == JobState::Failed {
        return vec![WhyReason::AttemptsUsedUp { attempts, max_attempts: job.max_attempts, last_error }];
    }
    let mut reasons = Vec::new();
    let pauses = facts.limits.iter().flat_map(|limit| limit.pause().into_iter().chain(limit.closed()));
    if job.state != JobState::Ready {
        reasons.extend(waits_for_replaced(facts, job));
        if reasons.is_empty() || job.run_at > facts.now {
            reasons.push(WhyReason::NotDue { run_at: job.run_at, seconds: -since(job.run_at), attempts, last_error });
        }
        reasons.extend(pauses);
        reasons.extend(no_worker_for_task(facts, job));
        return reasons;
    }
    reasons.extend(facts.table_lock.clone());
    reasons.extend(row_locked);
    reasons.extend(pauses);
    let no_worker = no_worker_for_task(facts, job);
    let has_worker = no_worker.is_none();
    reasons.extend(no_worker);
    reasons.extend(queue_is_held(facts, job));
    reasons.extend(facts.limits.iter().filter_map(SeenLimit::reached));
    if has_worker {
        reasons.extend(no_free_worker(facts, job));
    }
    if facts.ahead > 0 {
        reasons.push(match &job.queue_name {
            Some(queue_name) => WhyReason::BehindInQueue { queue_name: queue_name.clone(), jobs: facts.ahead },
            None => WhyReason::BehindOthers { jobs: facts.ahead },
        });
    }
    let is_decisive = |reason: &WhyReason| {
        !matches!(
            reason,
            WhyReason::MayBeForbidden { .. } | WhyReason::BehindOthers { .. } | WhyReason::BehindInQueue { .. }
        )
    };
    if !reasons.iter().any(is_decisive) {
        reasons.push(should_run(facts, job));
    }
    reasons
}

/// Whether the job waits for the end of a job that it replaces.
fn waits_for_replaced(facts: &Facts, job: &JobSummary) -> Option<WhyReason> {
    if job.replaces.is_empty() {
        return None;
    }
    Some(match facts.replaced.first() {
        Some(replaced) => {
            let worker = facts.worker(replaced.worker_id.as_deref());
            let freed_after = facts.freed_after(&worker);
            WhyReason::ReplacedIsRunning { job_id: replaced.job_id, worker, can_stop: replaced.can_stop, freed_after }
        }
        None => WhyReason::ReplacedHasEnded,
    })
}

fn cancel_reason(job: &JobSummary) -> Option<String> {
    Some(job.last_error.as_deref()?.strip_prefix("Cancelled: ")?.to_owned())
}

fn should_run(facts: &Facts, job: &JobSummary) -> WhyReason {
    let knowing: Vec<_> = facts.alive().filter(|worker| worker.runs(&job.task_identifier) == Some(true)).collect();
    let polls = |worker: &&SeenWorker| {
        let settings = worker.settings.as_ref()?;
        settings.poll_interval.filter(|_| settings.listens == Some(false))
    };
    let polls: Option<Vec<f64>> = knowing.iter().map(polls).collect();
    WhyReason::ShouldRun {
        task_identifier: job.task_identifier.clone(),
        workers: facts.alive().count() as i64 + facts.others().max(0),
        knowing: knowing.len() as i64,
        polled_every: polls.filter(|_| facts.others() <= 0).and_then(|polls| polls.into_iter().min_by(f64::total_cmp)),
    }
}

fn no_worker_for_task(facts: &Facts, job: &JobSummary) -> Option<WhyReason> {
    let task = &job.task_identifier;
    // An unregistered worker may run any task, but Node's never run a job under a limit.
    if facts.is_in_lane && facts.others() > 0 && !facts.workers.iter().any(SeenWorker::may_run_limited_jobs) {
        return Some(WhyReason::OnlyNodesWorkers { workers: facts.others() });
    }
    if facts.others() > 0 || facts.alive().any(|worker| worker.runs(task) != Some(false)) {
        return None;
    }
    let is_silent = |worker: &&SeenWorker| worker.is_registered && worker.state() == WorkerState::Silent;
    let may_run = |worker: &&SeenWorker| worker.runs(task) != Some(false);
    let silent: Vec<_> = facts.workers.iter().filter(is_silent).filter(may_run).map(SeenWorker::described).collect();
    Some(if !silent.is_empty() {
        WhyReason::WorkersSilent { workers: silent }
    } else if facts.alive().next().is_none() {
        WhyReason::NoWorkers { last_heartbeat_at: facts.last_heartbeat_at }
    } else {
        WhyReason::NoWorkerKnowsTask { task_identifier: task.clone(), workers: facts.alive().count() as i64 }
    })
}

fn queue_is_held(facts: &Facts, job: &JobSummary) -> Vec<WhyReason> {
    let Some(queue_name) = &job.queue_name else { return Vec::new() };
    let mut reasons = Vec::new();
    if let Some(holder) = facts.queue_row_lock.clone() {
        reasons.push(WhyReason::QueueRowLocked { queue_name: queue_name.clone(), holder });
    }
    if let Some(since) = facts.queue_locked_at {
        let worker = facts.worker(facts.queue_locked_by.as_deref());
        reasons.push(WhyReason::QueueLocked {
            queue_name: queue_name.clone(),
            since,
            seconds: (facts.now - since).as_seconds_f64(),
            job_id: facts.queue_job_id,
            freed_after: facts.freed_after(&worker),
            worker,
        });
    }
    reasons
}

/// Why no worker that runs the task takes this job.
fn no_free_worker(facts: &Facts, job: &JobSummary) -> Vec<WhyReason> {
    let candidates: Vec<_> = facts.alive().filter(|worker| worker.runs(&job.task_identifier) != Some(false)).collect();
    let by_flags: Vec<_> = candidates.iter().map(|worker| ByFlags::of(worker, &job.flags)).collect();
    let all_registered = facts.others() <= 0;
    if all_registered && !candidates.is_empty() && by_flags.iter().all(ByFlags::rejects) {
        return rejections(&by_flags, job);
    }
    let has_or_meets_flags = !job.flags.is_empty() || by_flags.iter().any(|by| *by != ByFlags::Runs);
    if has_or_meets_flags && !by_flags.contains(&ByFlags::Runs) {
        return vec![WhyReason::MayBeForbidden { flags: job.flags.clone() }];
    }
    let allowed =
        candidates.into_iter().zip(by_flags).filter(|(_, by)| !by.rejects()).map(|(worker, _)| worker).collect();
    no_free_slot(all_registered, allowed, &job.task_identifier).into_iter().collect()
}

/// Whether all workers that run such jobs are busy, or at the task's limit.
fn no_free_slot(all_registered: bool, allowed: Vec<&SeenWorker>, task: &str) -> Option<WhyReason> {
    if !all_registered {
        return None;
    }
    let (free, busy): (Vec<_>, Vec<_>) = allowed.into_iter().partition(|worker| worker.has_free_slot());
    if free.is_empty() && !busy.is_empty() {
        return Some(WhyReason::AllSlotsBusy {
            slots: busy.iter().filter_map(|worker| worker.slots).sum(),
            jobs: busy.iter().map(|worker| worker.jobs).sum(),
            workers: busy.iter().map(|worker| worker.described()).collect(),
        });
    }
    let at_limit = |worker: &&SeenWorker| worker.limit(task).filter(|limit| worker.jobs_of_task >= *limit);
    let limits: Option<Vec<i64>> = free.iter().map(at_limit).collect();
    limits.filter(|limits| !limits.is_empty()).map(|limits| WhyReason::TaskLimit {
        task_identifier: task.to_owned(),
        limit: limits.iter().sum(),
        jobs: free.iter().map(|worker| worker.jobs_of_task).sum(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::reasons::MAX_COUNTED_AHEAD;
    use chrono::TimeDelta;

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_000_000, 0).expect("a time")
    }

    /// Settings of a worker that runs jobs with any flags.
    fn runs_all_flags() -> SeenSettings {
        let (forbidden_flags, accepted_flags) = (Some(Vec::new()), all_flags());
        SeenSettings { forbidden_flags, accepted_flags, ..SeenSettings::default() }
    }

    /// A registered worker whose last heartbeat was this many seconds ago.
    fn registered(worker_id: &str, heartbeat_seconds: f64) -> SeenWorker {
        SeenWorker {
            worker_id: worker_id.to_owned(),
            is_registered: true,
            is_connected: Some(true),
            heartbeat_seconds: Some(heartbeat_seconds),
            interval_seconds: Some(30.0),
            host: Some("box".to_owned()),
            pid: Some(77),
            slots: Some(2),
            tasks: Some(vec!["t".to_owned()]),
            settings: Some(runs_all_flags()),
            ..SeenWorker::default()
        }
    }

    fn session() -> LockHolder {
        LockHolder {
            pid: Some(123),
            application_name: Some("psql".to_owned()),
            role: Some("ann".to_owned()),
            state: Some("idle in transaction".to_owned()),
            seconds: Some(61.0),
            prepared: None,
            others: 0,
        }
    }

    /// A due job, and one worker that runs its task.
    fn facts() -> Facts {
        Facts {
            now: now(),
            job: Some(JobSummary {
                id: 7,
                task_identifier: "t".to_owned(),
                queue_name: None,
                state: JobState::Ready,
                priority: 0,
                run_at: now(),
                attempts: 0,
                max_attempts: 25,
                last_error: None,
                created_at: now(),
                updated_at: now(),
                key: None,
                locked_at: None,
                locked_by: None,
                revision: 0,
                flags: Vec::new(),
                replaces: Vec::new(),
            }),
            is_being_cancelled: false,
            table_lock: None,
            row_lock: None,
            batch: None,
            queue_row_lock: None,
            queue_locked_at: None,
            queue_locked_by: None,
            queue_job_id: None,
            replaced: Vec::new(),
            is_in_lane: false,
            limits: Vec::new(),
            ahead: 0,
            workers: vec![registered("w", 3.0)],
            listeners: 1,
            last_heartbeat_at: None,
        }
    }

    fn changed(change: impl FnOnce(&mut Facts, &mut JobSummary)) -> Vec<WhyReason> {
        let mut facts = facts();
        let mut job = facts.job.take().expect("a job");
        change(&mut facts, &mut job);
        facts.job = Some(job);
        decide(&facts)
    }

    fn explained(change: impl FnOnce(&mut Facts, &mut JobSummary)) -> Vec<String> {
        changed(change).iter().map(WhyReason::to_string).collect()
    }

    fn fixed(change: impl FnOnce(&mut Facts, &mut JobSummary)) -> String {
        fix(&changed(change), 7, "graphile_worker").unwrap_or_default()
    }

    #[test]
    fn a_missing_job() {
        let facts = Facts { job: None, ..facts() };
        assert_eq!(decide(&facts), [WhyReason::DoesNotExist]);
    }

    #[test]
    fn a_job_that_nothing_blocks() {
        assert_eq!(explained(|_, _| ()), ["Nothing blocks it: it should run now (1 worker runs the task \"t\")."]);
        let unregistered = explained(|facts, _| {
            facts.workers = vec![SeenWorker {
                worker_id: "worker-1".to_owned(),
                is_connected: Some(true),
                ..SeenWorker::default()
            }];
        });
        assert!(unregistered[0].contains("has a free slot (1 worker visible)"), "{unregistered:?}");
        let polling = explained(|facts, _| {
            let settings = SeenSettings { poll_interval: Some(2.0), listens: Some(false), ..runs_all_flags() };
            facts.workers[0].settings = Some(settings);
            facts.listeners = 0;
        });
        assert!(polling[0].contains("poll every 2s"), "{polling:?}");
    }

    fn held(worker: SeenWorker) -> (Vec<String>, String) {
        let change = |facts: &mut Facts, job: &mut JobSummary| {
            job.locked_at = Some(now() - TimeDelta::minutes(5));
            job.locked_by = Some(worker.worker_id.clone());
            job.state = JobState::Running;
            facts.workers = vec![worker.clone(), registered("sweeper", 1.0)];
        };
        (explained(change), fixed(change))
    }

    #[test]
    fn a_job_running_on_a_live_worker() {
        let (said, fix) = held(registered("w", 3.0));
        assert_eq!((&*said[0], &*fix), ("Worker w (process 77 on box) has been running it for 5m.", ""));
        let (said, _) = held(SeenWorker { jobs: 30, ..registered("w", 3.0) });
        assert!(said[0].contains("claimed it 5m ago. It holds 30 jobs and runs 2 at a time"), "{said:?}");
        let (said, fix) = held(SeenWorker { is_connected: Some(false), ..registered("w", 3.0) });
        assert!(said[0].contains("no connection has its name: it may have been killed"), "{said:?}");
        assert!(fix.ends_with("graphile-worker sweep --threshold 60s"), "{fix}");
    }

    #[test]
    fn a_job_running_on_a_lost_worker() {
        let (said, fix) = held(registered("w", 40.0));
        assert_eq!(
            said[0],
            "Worker w (process 77 on box) has been running it for 5m, but has sent no heartbeat for 40s (expected every 30s): it was killed, stopped or disconnected. Another worker releases its jobs after 5m."
        );
        assert_eq!(
            fix,
            "If it is stopped, run on box: kill -CONT 77. If it is dead, release its jobs now: graphile-worker sweep --threshold 60s"
        );
        let (said, fix) =
            held(SeenWorker { worker_id: "rs-live-1".to_owned(), is_connected: Some(true), ..SeenWorker::default() });
        assert!(said[0].contains("declared dead") && fix.ends_with("graphile-worker sweep"), "{said:?} {fix}");
        let (said, fix) = held(SeenWorker { worker_id: "worker-1".to_owned(), ..SeenWorker::default() });
        assert!(said[0].contains("does not register") && fix.ends_with("unlock worker-1"), "{said:?} {fix}");
        assert!(said[0].contains("it is dead, or connects through a pooler"), "{said:?}");
    }

    #[test]
    fn a_job_that_runs_with_a_worker_that_does_not_register() {
        let with = |worker_id: &str| {
            held(SeenWorker { worker_id: worker_id.to_owned(), is_connected: Some(true), ..SeenWorker::default() })
        };
        let (said, fix) = with("rs-worker-00112233445566778899aabb");
        assert_eq!(
            (&*said[0], &*fix),
            (
                "Worker 00112233 has been running it for 5m. Its recovery is off and it does not register, so its host, process and slots are not known. To turn recovery on, start it without `--no-recovery`, or in Rust with `WorkerOptions::worker_recovery`.",
                ""
            )
        );
        let (said, _) = with("worker-00112233445566778899aabb");
        assert!(said[0].ends_with("Node's workers do not register, nor do ours with recovery off."), "{said:?}");
    }

    #[test]
    fn an_old_lock_of_an_unknown_worker() {
        let said = explained(|_, job| {
            job.locked_at = Some(now() - TimeDelta::hours(5));
            job.locked_by = Some("n".to_owned());
            job.state = JobState::Running;
        });
        assert!(said[0].contains("4 hours"), "{said:?}");
    }

    #[test]
    fn a_permanently_failed_job() {
        let change = |_: &mut Facts, job: &mut JobSummary| {
            job.state = JobState::Failed;
            (job.attempts, job.max_attempts, job.last_error) = (3, 3, Some("boom".to_owned()));
        };
        assert_eq!(explained(change), ["It failed permanently (3 of 3 attempts). The last error: boom"]);
        assert_eq!(fixed(change), "To retry it with all attempts: graphile-worker run-now 7");
    }

    #[test]
    fn a_future_job_without_a_worker() {
        let said = explained(|facts, job| {
            (facts.listeners, facts.last_heartbeat_at) = (0, Some(now()));
            facts.workers.clear();
            job.state = JobState::Scheduled;
            job.run_at = now() + TimeDelta::minutes(90);
        });
        assert_eq!(
            said,
            [
                "It is not due yet: it will be due in 1h 30m.",
                "No worker is visible: none is registered, holds a job, or listens; the last heartbeat was at 1970-01-12 13:46:40 UTC."
            ]
        );
    }

    #[test]
    fn a_job_that_waits_for_its_next_attempt() {
        let said = explained(|_, job| {
            job.state = JobState::Retrying;
            job.run_at = now() + TimeDelta::seconds(20);
            (job.attempts, job.last_error) = (2, Some("boom".to_owned()));
        });
        assert_eq!(said, ["It failed 2 times and will be retried in 20s. The last error: boom"]);
    }

    #[test]
    fn a_job_whose_row_queue_or_table_is_locked_by_a_session() {
        let row = |facts: &mut Facts, _: &mut JobSummary| facts.row_lock = Some(session());
        assert_eq!(
            explained(row),
            [
                "Its row is locked by an open transaction (pid 123, application \"psql\", role ann, idle in transaction, open for 1m 1s): workers can neither claim it nor record its outcome."
            ]
        );
        assert!(fixed(row).ends_with("select pg_terminate_backend(123);"));
        let queue = |facts: &mut Facts, job: &mut JobSummary| {
            job.queue_name = Some("q".to_owned());
            let prepared = Some("it's".to_owned());
            facts.queue_row_lock = Some(LockHolder { pid: None, prepared, ..session() });
        };
        assert!(explained(queue)[0].starts_with("The row of its queue \"q\" is locked by the prepared transaction"));
        assert!(fixed(queue).ends_with("rollback prepared 'it''s';"), "{}", fixed(queue));
        let table = |facts: &mut Facts, _: &mut JobSummary| {
            let table = "_private_jobs".to_owned();
            let lock = WhyReason::TableLocked { table, granted: false, waits_for: Some(5), holder: session() };
            facts.table_lock = Some(lock);
        };
        assert!(explained(table)[0].contains("behind the session with pid 5"), "{:?}", explained(table));
        assert!(fixed(table).ends_with("select pg_terminate_backend(5);"));
    }

    #[test]
    fn a_job_of_a_repeatable_task_that_runs() {
        let lane = LockHolder { application_name: Some("graphile_worker w deferred 1".to_owned()), ..session() };
        assert_eq!(lane.deferred_lane_of(), Some("w"));
        assert_eq!(session().deferred_lane_of(), None);
        let said = explained(|facts, _| facts.batch = Some(("w".to_owned(), Some(0.01))));
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("It is running in worker w, or about to"), "{said:?}");
    }

    #[test]
    fn a_reporting_worker_is_not_a_stuck_session() {
        let worker = Some("graphile_worker rs-live-1".to_owned());
        assert!(LockHolder { application_name: worker.clone(), seconds: Some(0.1), ..session() }.is_brief());
        assert!(!LockHolder { application_name: worker, seconds: Some(60.0), ..session() }.is_brief());
        assert!(!LockHolder { seconds: Some(0.1), ..session() }.is_brief());
    }

    #[test]
    fn a_job_behind_others_in_a_locked_queue() {
        let said = explained(|facts, job| {
            job.queue_name = Some("q".to_owned());
            facts.queue_locked_at = Some(now() - TimeDelta::seconds(9));
            facts.queue_locked_by = Some("w".to_owned());
            (facts.queue_job_id, facts.ahead) = (Some(3), MAX_COUNTED_AHEAD);
        });
        assert_eq!(
            said,
            [
                "Its queue \"q\" has been held by worker w (process 77 on box) for 9s, which runs job 3.",
                "At least 10000 jobs of its queue \"q\" come before it."
            ]
        );
    }

    #[test]
    fn a_job_that_waits_for_a_slot() {
        let change = |facts: &mut Facts, _: &mut JobSummary| {
            facts.workers[0].jobs = 2;
            facts.ahead = 1;
        };
        assert_eq!(
            explained(change),
            [
                "All slots are busy: the workers that run its task have 2 slots and hold 2 jobs (worker w (process 77 on box)).",
                "One job comes before it, by priority and time."
            ]
        );
        assert!(fixed(change).ends_with("graphile-worker --jobs 2"), "{}", fixed(change));
        // Another worker has a free slot, or one does not publish its slots.
        for other in [registered("v", 1.0), SeenWorker { slots: None, jobs: 9, ..registered("v", 1.0) }] {
            let said = explained(|facts, _| {
                facts.workers[0].jobs = 2;
                facts.workers.push(other);
            });
            assert!(said[0].starts_with("Nothing blocks it"), "{said:?}");
        }
    }

    #[test]
    fn a_job_whose_task_is_at_its_limit() {
        let said = explained(|facts, _| {
            let settings = facts.workers[0].settings.as_mut().expect("settings");
            settings.task_limits.insert("t".to_owned(), 1);
            (facts.workers[0].jobs, facts.workers[0].jobs_of_task) = (1, 1);
        });
        assert!(said[0].contains("1 of 1 (`max_concurrent`)"), "{said:?}");
    }

    fn limited(limit: SeenLimit) -> (Vec<String>, String) {
        let change = |facts: &mut Facts, _: &mut JobSummary| {
            facts.is_in_lane = true;
            facts.limits = vec![limit.clone()];
        };
        (explained(change), fixed(change))
    }

    #[test]
    fn a_job_whose_limit_is_reached() {
        let slots = SeenLimit {
            name: "task:t".to_owned(),
            concurrency: Some(5),
            in_use: 5,
            cost: 1,
            room: Some(0),
            ..SeenLimit::default()
        };
        let (said, fix) = limited(slots.clone());
        assert_eq!(
            said,
            [
                "The limit task:t is reached: 5 of 5 are in use. The next slot is free when one of its running jobs ends."
            ]
        );
        assert_eq!(fix, "To see limits and their use: graphile-worker limit list");
        let (said, _) =
            limited(SeenLimit { name: "group:g".to_owned(), in_use: 4, cost: 2, room: Some(1), ..slots.clone() });
        assert!(said[0].contains("4 of 5 are in use, and the job needs 2"), "{said:?}");
        let rate = SeenLimit { concurrency: None, rate: Some(100), per_seconds: Some(60.0), ..slots.clone() };
        let (said, _) = limited(SeenLimit { next_seconds: Some(3.2), ..rate.clone() });
        assert_eq!(said, ["The limit task:t lets 100 jobs start in 1m. The next one may start in 3s."]);
        let (said, _) = limited(SeenLimit { cost: 3, room: Some(2), ..rate });
        assert!(said[0].ends_with("The job needs 3 of them at once."), "{said:?}");
        let (said, _) = limited(SeenLimit { room: Some(1), ..slots });
        assert!(said[0].starts_with("Nothing blocks it"), "{said:?}");
    }

    #[test]
    fn a_job_that_is_paused() {
        let paused = |name: &str| SeenLimit {
            name: name.to_owned(),
            cost: 1,
            room: Some(0),
            paused_seconds: Some(300.0),
            paused_by: Some("ann".to_owned()),
            ..SeenLimit::default()
        };
        for (name, what) in [
            ("all", "All jobs are paused"),
            ("task:t", "The task \"t\" is paused"),
            ("queue:q", "The queue \"q\" is paused"),
            ("queue:q*", "The queues \"q*\" are paused"),
            ("group:g", "The group \"g\" is paused"),
        ] {
            let (said, _) = limited(paused(name));
            assert_eq!(
                said,
                [format!("{what} until they are resumed; role ann paused them 5m ago.").replace(
                    "they are resumed; role ann paused them",
                    if name == "all" || name.ends_with('*') {
                        "they are resumed; role ann paused them"
                    } else {
                        "it is resumed; role ann paused it"
                    },
                )]
            );
        }
        let (said, fix) = limited(SeenLimit { resumed_seconds: Some(7_200.0), ..paused("queue:tenant:*") });
        assert_eq!(said, ["The queues \"tenant:*\" are paused for 2h more; role ann paused them 5m ago."]);
        assert_eq!(fix, "To resume: graphile-worker resume 'queue:tenant:*'");
        let later = explained(|facts, job| {
            facts.limits = vec![paused("all")];
            job.state = JobState::Scheduled;
            job.run_at = now() + TimeDelta::minutes(90);
        });
        assert!(later[0].starts_with("It is not due yet") && later[1].starts_with("All jobs are paused"), "{later:?}");
    }

    #[test]
    fn a_job_whose_limit_is_closed() {
        let closed = SeenLimit {
            name: "task:t".to_owned(),
            cost: 1,
            room: Some(0),
            closed_seconds: Some(30.0),
            ..SeenLimit::default()
        };
        let (said, fix) = limited(closed.clone());
        assert_eq!(said, ["The task \"t\" starts no jobs for another 30s, because one of its jobs was rate limited."]);
        assert_eq!(fix, "To start jobs now: graphile-worker resume task:t");
        let tripped = SeenLimit { tripped_seconds: Some(120.0), failures: Some(5), ..closed };
        let (said, _) = limited(tripped.clone());
        assert_eq!(
            said,
            ["The breaker of the task \"t\" tripped 2m ago: 5 jobs failed in a row. No job starts for another 30s."]
        );
        let (said, fix) = limited(SeenLimit { closed_seconds: None, in_use: 1, ..tripped });
        assert_eq!(
            said,
            [
                "The breaker of the task \"t\" tripped 2m ago and is half-open. One job at a time runs until one succeeds, and one is running now."
            ]
        );
        assert_eq!(fix, "To start jobs now: graphile-worker resume task:t");
    }

    #[test]
    fn a_job_under_a_limit_beside_nodes_workers_only() {
        let said = |is_in_lane, worker_id: &str| {
            explained(|facts, _| {
                facts.is_in_lane = is_in_lane;
                let worker_id = worker_id.to_owned();
                facts.workers = vec![SeenWorker { worker_id, is_connected: Some(true), ..SeenWorker::default() }];
            })
        };
        let node = said(true, "worker-1");
        assert!(node[0].starts_with("Only Node's workers are visible (1)"), "{node:?}");
        assert!(said(false, "worker-1")[0].starts_with("Nothing visible blocks it"));
        assert!(said(true, "rs-worker-1")[0].starts_with("Nothing visible blocks it"));
    }

    #[test]
    fn a_job_whose_workers_are_silent() {
        let silent = |facts: &mut Facts, _: &mut JobSummary| {
            facts.workers = vec![registered("w", 40.0)];
        };
        assert!(explained(silent)[0].contains("worker w (process 77 on box) has sent no heartbeat for 40s"));
        assert!(fixed(silent).ends_with("graphile-worker"), "{}", fixed(silent));
        // A live worker that does not run the task does not help.
        let said = explained(|facts, job| {
            silent(facts, job);
            facts.workers.push(SeenWorker { tasks: Some(Vec::new()), ..registered("v", 1.0) });
        });
        assert!(said[0].starts_with("No live worker runs its task"), "{said:?}");
    }

    #[test]
    fn a_job_with_forbidden_flags() {
        let forbid = |worker: &mut SeenWorker, flags: Option<Vec<String>>| {
            worker.settings = Some(SeenSettings { forbidden_flags: flags, ..runs_all_flags() });
        };
        let eu = || vec!["eu".to_owned()];
        let said = |flags: Option<Vec<String>>| {
            explained(|facts, job| {
                forbid(&mut facts.workers[0], flags);
                job.flags = eu();
            })
        };
        assert!(said(Some(eu()))[0].contains("are forbidden on all workers"), "{:?}", said(Some(eu())));
        assert!(said(Some(Vec::new()))[0].starts_with("Nothing blocks it"));
        let unknown = said(None);
        assert!(unknown[0].starts_with("It has the flags") && unknown[1].starts_with("Nothing blocks"), "{unknown:?}");
    }

    #[test]
    fn a_job_whose_flags_workers_do_not_accept() {
        let flags = |flags: &[&str]| flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>();
        let with = |of_job: &[&str], settings: &str| {
            let change = |facts: &mut Facts, job: &mut JobSummary| {
                facts.workers[0].settings = Some(serde_json::from_str(settings).expect("settings"));
                job.flags = flags(of_job);
            };
            (explained(change), fixed(change))
        };
        let gpu = r#"{"forbidden_flags": [], "accepted_flags": ["gpu"]}"#;
        let (said, fix) = with(&[], gpu);
        assert_eq!(said, ["It has no flags, but the workers that run its task (1 worker) only accept [\"gpu\"]."]);
        assert!(fix.starts_with("Start a worker that accepts all jobs"), "{fix}");
        assert!(with(&["eu"], gpu).0[0].starts_with("It has the flags [\"eu\"], but the workers"));
        assert!(with(&["eu", "gpu"], gpu).0[0].starts_with("Nothing blocks it"));
        let (said, fix) = with(&["eu", "gpu"], r#"{"forbidden_flags": [], "allowed_flags": ["gpu"]}"#);
        assert!(said[0].starts_with("Its flags [\"eu\"] are not in the allowlist"), "{said:?}");
        assert!(fix.starts_with("Start a worker without a flag allowlist"), "{fix}");
        // Workers of older releases do not publish it and accept all flags; a worker with a function may
        // accept anything.
        assert!(with(&[], r#"{"forbidden_flags": []}"#).0[0].starts_with("Nothing blocks it"));
        let function = r#"{"forbidden_flags": [], "accepted_flags": null}"#;
        assert!(with(&[], function).0[0].starts_with("It has no flags. Workers may only accept certain flags"));
        assert!(with(&["eu"], function).0[0].starts_with("It has the flags [\"eu\"]. Workers may forbid"));
    }

    #[test]
    fn a_task_that_no_worker_runs_if_all_publish_their_tasks() {
        let unknown = ["No live worker runs the task \"t\" (2 workers alive)."];
        let other_tasks = |worker: SeenWorker| SeenWorker { tasks: Some(vec!["u".to_owned()]), ..worker };
        let two = |facts: &mut Facts| {
            facts.workers = vec![other_tasks(registered("v", 1.0)), other_tasks(registered("w", 1.0))];
            facts.listeners = 2;
        };
        assert_eq!(explained(|facts, _| two(facts)), unknown);
        // A worker that does not publish its tasks may run it.
        for doubt in [
            |facts: &mut Facts| facts.workers[0].tasks = None,
            |facts: &mut Facts| {
                facts.workers.push(SeenWorker {
                    worker_id: "node".to_owned(),
                    is_connected: Some(true),
                    ..SeenWorker::default()
                });
            },
            |facts: &mut Facts| facts.listeners = 3,
        ] {
            assert_ne!(
                explained(|facts, _| {
                    two(facts);
                    doubt(facts);
                }),
                unknown
            );
        }
    }
}
