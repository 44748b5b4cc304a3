//! What a reason why a job does not run says, and which command helps. `explain` finds the reasons.

use crate::inspect::{WorkerState, is_of_rust_port, short_worker_id};
use crate::text::format_duration;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Earlier jobs are counted up to this number.
pub(super) const MAX_COUNTED_AHEAD: i64 = 10_000;

/// The default heartbeat interval, in seconds.
pub(super) const HEARTBEAT_INTERVAL: f64 = 30.0;

/// A worker's transaction holds row locks only briefly; one that is older, in seconds, is stuck.
const STUCK_AFTER: f64 = 5.0;

/// How to make a worker register.
const TURN_RECOVERY_ON: &str =
    "To turn recovery on, start it without `--no-recovery`, or in Rust with `WorkerOptions::worker_recovery`.";

/// A worker named in a reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct WhyWorker {
    /// Its id.
    pub worker_id: String,
    /// Whether it is alive.
    pub state: WorkerState,
    /// Whether it registers: Node's workers do not, nor do ours with recovery off.
    pub is_registered: bool,
    /// The machine that it runs on, if it has registered.
    pub host: Option<String>,
    /// Its process id on that machine.
    pub pid: Option<i32>,
    /// How many jobs it runs at the same time.
    pub slots: Option<i64>,
    /// Number of jobs it holds, running or claimed ahead.
    pub jobs: i64,
    /// Seconds since its last heartbeat, if registered.
    pub heartbeat_seconds: Option<f64>,
    /// Its heartbeat interval in seconds.
    pub interval_seconds: Option<f64>,
    /// Whether a connection with its name is open; `None` if it connects through a pooler, where connections have no name.
    pub is_connected: Option<bool>,
}

/// Prints the worker, and its machine and process if they are known.
impl fmt::Display for WhyWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {}", short_worker_id(&self.worker_id))?;
        match (&self.host, self.pid) {
            (Some(host), Some(pid)) => write!(f, " (process {pid} on {host})"),
            _ => Ok(()),
        }
    }
}

/// An open transaction that holds a lock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LockHolder {
    /// The process id of its session; `None` for a prepared transaction.
    pub pid: Option<i32>,
    /// The application name of its session.
    pub application_name: Option<String>,
    /// Its role.
    pub role: Option<String>,
    /// Its state, if this role may see it.
    pub state: Option<String>,
    /// How long it has been open, in seconds, if this role may see it.
    pub seconds: Option<f64>,
    /// The name of a prepared transaction.
    pub prepared: Option<String>,
    /// How many other transactions share the lock.
    #[serde(default)]
    pub others: i64,
}

impl LockHolder {
    /// The worker that runs jobs of repeatable tasks in this transaction.
    pub(super) fn deferred_lane_of(&self) -> Option<&str> {
        let name = self.application_name.as_deref()?.strip_prefix("graphile_worker ")?;
        let (worker_id, lane) = name.split_once(' ')?;
        lane.starts_with("deferred ").then_some(worker_id)
    }

    /// Whether this is a worker that reports or claims: it locks rows only briefly.
    pub(super) fn is_brief(&self) -> bool {
        let is_worker = self.application_name.as_deref().is_some_and(|name| name.starts_with("graphile_worker "));
        is_worker && self.seconds.is_none_or(|seconds| seconds < STUCK_AFTER)
    }

    fn fix(&self) -> String {
        match (self.pid, &self.prepared) {
            (Some(pid), _) => format!("End that transaction. In psql: select pg_terminate_backend({pid});"),
            (None, Some(name)) => {
                format!("Commit it or roll it back. In psql: rollback prepared '{}';", name.replace('\'', "''"))
            }
            (None, None) => "End that transaction: see pg_locks.".to_owned(),
        }
    }
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, &self.prepared) {
            (Some(pid), _) => write!(f, "an open transaction (pid {pid}")?,
            (None, Some(name)) => write!(f, "the prepared transaction {name:?} (")?,
            (None, None) => write!(f, "an open transaction (")?,
        }
        if let Some(name) = self.application_name.as_deref().filter(|name| !name.is_empty()) {
            write!(f, ", application {name:?}")?;
        }
        if let Some(role) = &self.role {
            write!(f, ", role {role}")?;
        }
        if let Some(state) = &self.state {
            write!(f, ", {state}")?;
        }
        match self.seconds {
            Some(seconds) => write!(f, ", open for {})", format_duration(seconds))?,
            None => write!(f, ", open for an unknown time)")?,
        }
        match self.others {
            0 => Ok(()),
            1 => write!(f, " and 1 other"),
            others => write!(f, " and {others} others"),
        }
    }
}

/// A reason why a job does not run. [`Display`](fmt::Display) prints a sentence.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum WhyReason {
    /// The job does not exist.
    DoesNotExist,
    /// A worker holds it.
    Running {
        /// The worker.
        worker: WhyWorker,
        /// When the worker locked it.
        since: DateTime<Utc>,
        /// Seconds since then.
        seconds: f64,
        /// Seconds without a heartbeat after which another worker releases it; `None` if no live worker does.
        freed_after: Option<f64>,
    },
    /// It was cancelled while a worker ran it, and has not ended yet.
    BeingCancelled {
        /// The worker.
        worker: WhyWorker,
        /// The reason, if one was given.
        cancel_reason: Option<String>,
        /// Seconds without a heartbeat after which another worker ends it; `None` if no live worker does.
        freed_after: Option<f64>,
    },
    /// It was cancelled.
    Cancelled {
        /// The reason, if one was given.
        cancel_reason: Option<String>,
        /// When it was last changed.
        at: DateTime<Utc>,
    },
    /// A worker runs it, and has locked its row without writing a claim: its task is repeatable.
    RunningInBatch {
        /// The worker.
        worker: WhyWorker,
        /// Seconds since the worker locked it, if they are known.
        seconds: Option<f64>,
    },
    /// It failed permanently.
    AttemptsUsedUp {
        /// Number of attempts.
        attempts: i16,
        /// Maximum number of attempts.
        max_attempts: i16,
        /// Error of the last attempt.
        last_error: Option<String>,
    },
    /// It is not due yet.
    NotDue {
        /// When it is due.
        run_at: DateTime<Utc>,
        /// Seconds until then.
        seconds: f64,
        /// Failed attempts so far.
        attempts: i16,
        /// Error of the last attempt.
        last_error: Option<String>,
    },
    /// It replaces a job that is still running.
    ReplacedIsRunning {
        /// That job.
        job_id: i64,
        /// The worker that runs it.
        worker: WhyWorker,
        /// Whether the worker stops jobs when it is asked to. Node's workers and those of older releases do not.
        can_stop: bool,
        /// Seconds without a heartbeat after which another worker ends it; `None` if no live worker does.
        freed_after: Option<f64>,
    },
    /// The job that it replaces has ended, but no worker has noticed yet.
    ReplacedHasEnded,
    /// A session holds, or waits for, a lock on a table: no worker can claim jobs.
    TableLocked {
        /// The table.
        table: String,
        /// Whether the lock is granted. Otherwise all other sessions wait behind it.
        granted: bool,
        /// The session it waits for.
        waits_for: Option<i32>,
        /// The session.
        holder: LockHolder,
    },
    /// A transaction has locked its row; workers skip it.
    RowLocked {
        /// The transaction.
        holder: LockHolder,
    },
    /// A transaction has locked its queue's row; workers skip the queue.
    QueueRowLocked {
        /// The queue.
        queue_name: String,
        /// The transaction.
        holder: LockHolder,
    },
    /// A worker holds its queue, which runs one job at a time.
    QueueLocked {
        /// The queue.
        queue_name: String,
        /// The worker.
        worker: WhyWorker,
        /// When the worker locked it.
        since: DateTime<Utc>,
        /// Seconds since then.
        seconds: f64,
        /// The running job of the queue.
        job_id: Option<i64>,
        /// Seconds without a heartbeat after which another worker releases it; `None` if no live worker does.
        freed_after: Option<f64>,
    },
    /// Jobs of its queue come before it.
    BehindInQueue {
        /// The queue.
        queue_name: String,
        /// Their number, counted up to 10,000.
        jobs: i64,
    },
    /// Other jobs without a queue come before it.
    BehindOthers {
        /// Their number, counted up to 10,000.
        jobs: i64,
    },
    /// It is paused, by itself or with others.
    Paused {
        /// What is paused, such as `task:send_email`, or `all`.
        limit: String,
        /// Seconds since then.
        seconds: f64,
        /// Seconds until the pause ends; `None` if it has to be resumed.
        resumed_after: Option<f64>,
        /// The role that paused it.
        by: Option<String>,
    },
    /// A limit is closed, so no job under it starts for a while: a job was rate limited, or its breaker has tripped.
    LimitClosed {
        /// Its name, such as `task:send_email`.
        limit: String,
        /// Seconds until jobs may start again.
        resumed_after: f64,
        /// Seconds since its breaker tripped; `None` if a job was rate limited.
        tripped_seconds: Option<f64>,
        /// How many jobs have failed in a row.
        failures: i64,
    },
    /// The breaker of a limit is half-open: one job at a time runs, and another one is running now.
    BehindProbe {
        /// Its name, such as `task:send_email`.
        limit: String,
        /// Seconds since its breaker tripped.
        tripped_seconds: f64,
    },
    /// A limit lets no more jobs start now.
    LimitReached {
        /// Its name, such as `task:send_email`. A queue without a limit of its own is serial.
        limit: String,
        /// How many jobs may run at the same time, if that is why.
        concurrency: Option<i64>,
        /// Number of running jobs; in a group, the sum of their costs.
        in_use: i64,
        /// How much this job takes of it.
        cost: i64,
        /// How many jobs may start in a period.
        rate: Option<i64>,
        /// The period in seconds.
        per_seconds: Option<f64>,
        /// Seconds until the next job may start, if the rate is why.
        next_after: Option<f64>,
    },
    /// It is under a limit, and all visible workers are Node's, which never run such a job.
    OnlyNodesWorkers {
        /// Their number.
        workers: i64,
    },
    /// No worker is visible.
    NoWorkers {
        /// Last heartbeat of a registered worker.
        last_heartbeat_at: Option<DateTime<Utc>>,
    },
    /// All workers that run its task are silent: they were killed, stopped or disconnected.
    WorkersSilent {
        /// These workers.
        workers: Vec<WhyWorker>,
    },
    /// All visible workers publish their tasks, and none runs this one.
    NoWorkerKnowsTask {
        /// The task.
        task_identifier: String,
        /// Number of live workers.
        workers: i64,
    },
    /// One of its flags is forbidden on all workers that run its task.
    Forbidden {
        /// Its forbidden flags.
        flags: Vec<String>,
        /// Number of these workers.
        workers: i64,
    },
    /// The workers that run its task only accept jobs with certain flags, and it has none of them.
    NotAccepted {
        /// Its flags.
        flags: Vec<String>,
        /// The flags that they accept.
        accepted: Vec<String>,
        /// Number of these workers.
        workers: i64,
    },
    /// The workers that run its task have an allowlist that lacks some of its flags.
    NotAllowed {
        /// Its flags that are not in the allowlist.
        flags: Vec<String>,
        /// Number of these workers.
        workers: i64,
    },
    /// A worker that runs its task does not publish which flags it forbids or accepts.
    MayBeForbidden {
        /// Its flags.
        flags: Vec<String>,
    },
    /// All workers that run its task are busy.
    AllSlotsBusy {
        /// Number of their slots.
        slots: i64,
        /// Number of jobs they hold, running or claimed ahead.
        jobs: i64,
        /// These workers.
        workers: Vec<WhyWorker>,
    },
    /// The task is at its limit on all workers with a free slot.
    TaskLimit {
        /// The task.
        task_identifier: String,
        /// The sum of their limits.
        limit: i64,
        /// Number of jobs of the task that they hold.
        jobs: i64,
    },
    /// No visible obstacle.
    ShouldRun {
        /// The task.
        task_identifier: String,
        /// Number of visible workers.
        workers: i64,
        /// Number of workers known to run the task.
        knowing: i64,
        /// Their poll interval in seconds, if none of them listens for notifications.
        polled_every: Option<f64>,
    },
}

impl fmt::Display for WhyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WhyReason::DoesNotExist => f.write_str(
                "There is no such job: it is done, was removed, or never existed; or the transaction that adds it is still open.",
            ),
            WhyReason::Running { worker, seconds, freed_after, .. } => running(f, worker, *seconds, *freed_after),
            WhyReason::BeingCancelled { worker, cancel_reason, .. } => {
                write!(f, "It was cancelled while it ran, and has not ended yet in {worker}: it will not be retried")?;
                cancelled(f, cancel_reason)
            }
            WhyReason::Cancelled { cancel_reason, .. } => {
                f.write_str("It was cancelled")?;
                cancelled(f, cancel_reason)
            }
            WhyReason::RunningInBatch { worker, .. } => write!(
                f,
                "It is running in worker {}, or about to: its task is repeatable, and the worker has only locked its row.",
                worker.worker_id
            ),
            WhyReason::AttemptsUsedUp { last_error: Some(error), .. } if error.starts_with("Expired: ") => {
                write!(f, "It did not start in time. {error}")
            }
            WhyReason::AttemptsUsedUp { attempts, max_attempts, last_error } => {
                write!(f, "It failed permanently ({attempts} of {max_attempts} attempts)")?;
                error(f, last_error)
            }
            WhyReason::NotDue { seconds, attempts, last_error, .. } => not_due(f, *seconds, *attempts, last_error),
            WhyReason::ReplacedIsRunning { job_id, worker, can_stop, .. } => {
                write!(f, "It waits until job {job_id}, which it replaces, has ")?;
                match can_stop {
                    true => write!(f, "stopped in {worker}, which was asked to stop it."),
                    false => write!(f, "ended in {worker}, which cannot stop it."),
                }
            }
            WhyReason::ReplacedHasEnded => f.write_str(
                "The job that it replaces has ended, but no worker has noticed yet. Only workers of this release check for that, every second.",
            ),
            WhyReason::TableLocked { table, granted, waits_for, holder } => {
                table_locked(f, table, *granted, *waits_for, holder)
            }
            WhyReason::RowLocked { holder } => {
                write!(f, "Its row is locked by {holder}: workers can neither claim it nor record its outcome.")
            }
            WhyReason::QueueRowLocked { queue_name, holder } => {
                write!(f, "The row of its queue {queue_name:?} is locked by {holder}: workers skip the queue.")
            }
            WhyReason::QueueLocked { queue_name, worker, seconds, job_id, freed_after, .. } => {
                write!(f, "Its queue {queue_name:?} has been held by {worker} for {}", format_duration(*seconds))?;
                match job_id {
                    Some(id) => write!(f, ", which runs job {id}")?,
                    None => write!(f, ", although none of its jobs is running")?,
                }
                held_by(f, worker, *seconds, *freed_after)
            }
            WhyReason::BehindInQueue { queue_name, jobs } => {
                let (jobs, come) = counted(*jobs);
                write!(f, "{jobs} of its queue {queue_name:?} {come} before it.")
            }
            WhyReason::BehindOthers { jobs } => {
                let (jobs, come) = counted(*jobs);
                write!(f, "{jobs} {come} before it, by priority and time.")
            }
            WhyReason::Paused { limit, seconds, resumed_after, by } => {
                paused(f, limit, *seconds, *resumed_after, by.as_deref())
            }
            WhyReason::LimitClosed { limit, resumed_after, tripped_seconds, failures } => {
                closed(f, limit, *resumed_after, *tripped_seconds, *failures)
            }
            WhyReason::BehindProbe { limit, tripped_seconds } => {
                let tripped = format_duration(*tripped_seconds);
                write!(f, "The breaker of {} tripped {tripped} ago and is half-open. ", named(limit))?;
                write!(f, "One job at a time runs until one succeeds, and one is running now.")
            }
            WhyReason::LimitReached { limit, concurrency, in_use, cost, rate, per_seconds, next_after } => {
                match (concurrency, rate) {
                    (Some(concurrency), _) => slots_used(f, limit, *concurrency, *in_use, *cost),
                    _ => rate_used(f, limit, rate.zip(*per_seconds).unwrap_or_default(), *cost, *next_after),
                }
            }
            WhyReason::OnlyNodesWorkers { workers } => write!(
                f,
                "Only Node's workers are visible ({workers}), and they never run a job that is under a limit."
            ),
            WhyReason::NoWorkers { last_heartbeat_at } => no_workers(f, last_heartbeat_at.as_ref()),
            WhyReason::WorkersSilent { workers } => workers_silent(f, workers),
            WhyReason::NoWorkerKnowsTask { task_identifier, workers } => {
                let alive = plural(*workers, "worker");
                write!(f, "No live worker runs the task {task_identifier:?} ({alive} alive).")
            }
            WhyReason::Forbidden { flags, workers } => {
                let workers = plural(*workers, "worker");
                write!(f, "Its flags {flags:?} are forbidden on all workers that run its task ({workers}).")
            }
            WhyReason::NotAccepted { flags, accepted, workers } => {
                let (has, workers) = (flags_text(flags), plural(*workers, "worker"));
                write!(f, "It has {has}, but the workers that run its task ({workers}) only accept {accepted:?}.")
            }
            WhyReason::NotAllowed { flags, workers } => {
                let workers = plural(*workers, "worker");
                write!(f, "Its flags {flags:?} are not in the allowlist of the workers that run its task ({workers}).")
            }
            WhyReason::MayBeForbidden { flags } => may_be_forbidden(f, flags),
            WhyReason::AllSlotsBusy { slots, jobs, workers } => all_slots_busy(f, *slots, *jobs, workers),
            WhyReason::TaskLimit { task_identifier, limit, jobs } => write!(
                f,
                "The task {task_identifier:?} is at its limit on all workers with a free slot: {jobs} of {limit} (`max_concurrent`)."
            ),
            WhyReason::ShouldRun { task_identifier, workers, knowing, polled_every } => {
                should_run(f, task_identifier, *workers, *knowing, *polled_every)
            }
        }
    }
}

fn running(f: &mut fmt::Formatter<'_>, worker: &WhyWorker, seconds: f64, freed_after: Option<f64>) -> fmt::Result {
    let (name, held_for, jobs) = (capital(worker), format_duration(seconds), worker.jobs);
    if let Some(slots) = worker.slots.filter(|slots| worker.state == WorkerState::Alive && jobs > *slots) {
        return write!(
            f,
            "{name} claimed it {held_for} ago. It holds {jobs} jobs and runs {slots} at a time, so it may not have started this one."
        );
    }
    write!(f, "{name} has been running it for {held_for}")?;
    held_by(f, worker, seconds, freed_after)
}

fn not_due(f: &mut fmt::Formatter<'_>, seconds: f64, attempts: i16, last_error: &Option<String>) -> fmt::Result {
    let due_in = format_duration(seconds);
    match attempts {
        0 => return write!(f, "It is not due yet: it will be due in {due_in}."),
        1 => write!(f, "It failed once and will be retried in {due_in}")?,
        _ => write!(f, "It failed {attempts} times and will be retried in {due_in}")?,
    }
    error(f, last_error)
}

fn table_locked(
    f: &mut fmt::Formatter<'_>,
    table: &str,
    granted: bool,
    waits_for: Option<i32>,
    holder: &LockHolder,
) -> fmt::Result {
    if granted {
        return write!(f, "The table {table} is locked by {holder}: no worker can claim jobs.");
    }
    write!(f, "{} waits to lock the table {table}", capital(holder))?;
    if let Some(pid) = waits_for {
        write!(f, ", behind the session with pid {pid}")?;
    }
    write!(f, ", and all workers wait behind it.")
}

fn paused(
    f: &mut fmt::Formatter<'_>,
    limit: &str,
    seconds: f64,
    resumed_after: Option<f64>,
    by: Option<&str>,
) -> fmt::Result {
    let (kind, name) = limit.split_once(':').unwrap_or((limit, ""));
    let are_many = name.is_empty() || kind == "queue" && name.ends_with('*');
    match (kind, are_many) {
        (_, true) if name.is_empty() => write!(f, "All jobs are paused")?,
        (_, true) => write!(f, "The queues {name:?} are paused")?,
        (_, false) => write!(f, "The {kind} {name:?} is paused")?,
    }
    match resumed_after {
        Some(after) => write!(f, " for {} more", format_duration(after))?,
        None if are_many => write!(f, " until they are resumed")?,
        None => write!(f, " until it is resumed")?,
    }
    let (by, it) = (by.unwrap_or("unknown"), if are_many { "them" } else { "it" });
    write!(f, "; role {by} paused {it} {} ago.", format_duration(seconds))
}

fn closed(
    f: &mut fmt::Formatter<'_>,
    limit: &str,
    resumed_after: f64,
    tripped_seconds: Option<f64>,
    failures: i64,
) -> fmt::Result {
    let (limit, after) = (named(limit), format_duration(resumed_after));
    match tripped_seconds.map(format_duration) {
        None => {
            write!(
                f,
                "{} starts no jobs for another {after}, because one of its jobs was rate limited.",
                capital(&limit)
            )
        }
        Some(tripped) => {
            let failed = if failures == 1 { "1 job".to_owned() } else { format!("{failures} jobs") };
            write!(f, "The breaker of {limit} tripped {tripped} ago: {failed} failed in a row. ")?;
            write!(f, "No job starts for another {after}.")
        }
    }
}

/// The limit in words, such as `the task "t"`.
fn named(limit: &str) -> String {
    match limit.split_once(':') {
        Some((kind, name)) => format!("the {kind} {name:?}"),
        None => limit.to_owned(),
    }
}

fn slots_used(f: &mut fmt::Formatter<'_>, limit: &str, concurrency: i64, in_use: i64, cost: i64) -> fmt::Result {
    write!(f, "The limit {limit} is reached: {in_use} of {concurrency} are in use")?;
    if cost > 1 {
        write!(f, ", and the job needs {cost}")?;
    }
    write!(f, ". The next slot is free when one of its running jobs ends.")
}

fn rate_used(
    f: &mut fmt::Formatter<'_>,
    limit: &str,
    (jobs, seconds): (i64, f64),
    cost: i64,
    next_after: Option<f64>,
) -> fmt::Result {
    // A fraction of a second would be 0s.
    let period = if seconds < 1.0 { format!("{seconds} s") } else { format_duration(seconds) };
    write!(f, "The limit {limit} lets {} start in {period}.", plural(jobs, "job"))?;
    match next_after {
        Some(after) => write!(f, " The next one may start in {}.", format_duration(after)),
        None => write!(f, " The job needs {cost} of them at once."),
    }
}

fn no_workers(f: &mut fmt::Formatter<'_>, last_heartbeat_at: Option<&DateTime<Utc>>) -> fmt::Result {
    write!(f, "No worker is visible: none is registered, holds a job, or listens")?;
    match last_heartbeat_at {
        Some(time) => write!(f, "; the last heartbeat was at {}.", time.format("%F %T UTC")),
        None => write!(f, "."),
    }
}

fn workers_silent(f: &mut fmt::Formatter<'_>, workers: &[WhyWorker]) -> fmt::Result {
    let silent = workers.iter().map(|worker| {
        let seconds = worker.heartbeat_seconds.unwrap_or_default();
        format!("{worker} has sent no heartbeat for {}", format_duration(seconds))
    });
    let silent = silent.collect::<Vec<_>>().join(", ");
    write!(
        f,
        "No live worker runs its task: {silent}. A worker that was killed, stopped or disconnected claims nothing."
    )
}

fn may_be_forbidden(f: &mut fmt::Formatter<'_>, flags: &[String]) -> fmt::Result {
    let has = flags_text(flags);
    match flags {
        [] => write!(f, "It has {has}. Workers may only accept certain flags, and not all workers publish them."),
        _ => write!(f, "It has {has}. Workers may forbid or not accept them, and not all workers publish their flags."),
    }
}

fn all_slots_busy(f: &mut fmt::Formatter<'_>, slots: i64, jobs: i64, workers: &[WhyWorker]) -> fmt::Result {
    let names = workers.iter().take(3).map(WhyWorker::to_string).collect::<Vec<_>>().join(", ");
    let more = if workers.len() > 3 { ", …" } else { "" };
    let (slots, jobs) = (plural(slots, "slot"), plural(jobs, "job"));
    write!(f, "All slots are busy: the workers that run its task have {slots} and hold {jobs} ({names}{more}).")
}

fn should_run(
    f: &mut fmt::Formatter<'_>,
    task: &str,
    workers: i64,
    knowing: i64,
    polled_every: Option<f64>,
) -> fmt::Result {
    match (knowing, polled_every) {
        (1.., Some(seconds)) => {
            let interval = format_duration(seconds);
            write!(f, "Nothing blocks it: the workers that run its task do not listen, but poll every {interval}.")
        }
        (0, _) => write!(
            f,
            "Nothing visible blocks it: it should run now, provided that an unregistered worker (Node's, or ours without recovery) runs the task {task:?} and has a free slot ({} visible).",
            plural(workers, "worker")
        ),
        _ => {
            let run = if knowing == 1 { "runs" } else { "run" };
            let workers = plural(knowing, "worker");
            write!(f, "Nothing blocks it: it should run now ({workers} {run} the task {task:?}).")
        }
    }
}

/// Describes the worker that holds a lock, and ends the sentence.
fn held_by(f: &mut fmt::Formatter<'_>, worker: &WhyWorker, seconds: f64, freed_after: Option<f64>) -> fmt::Result {
    let silent_for = worker.heartbeat_seconds.map(format_duration).unwrap_or_default();
    match worker.state {
        WorkerState::Silent | WorkerState::Stale => {
            let interval = worker.interval_seconds.unwrap_or(HEARTBEAT_INTERVAL);
            write!(f, ", but has sent no heartbeat for {silent_for} (expected every {})", format_duration(interval))?;
            write!(f, ": it was killed, stopped or disconnected. ")?;
            match freed_after {
                Some(after) => write!(f, "Another worker releases its jobs after {}.", format_duration(after)),
                None => write!(f, "No live worker can release its jobs."),
            }
        }
        WorkerState::Dead => write!(f, ", and was declared dead: the next sweep releases it."),
        WorkerState::Unknown if seconds > 4.0 * 3600.0 => {
            write!(f, ". The lock is stale after 4 hours: the next worker that clears stale locks releases it.")
        }
        WorkerState::Unknown if is_of_rust_port(&worker.worker_id) => write!(
            f,
            ". It is a worker of the Rust port, the graphile_worker of crates.io, and does not register here, so it may be dead. Its lock expires 4 hours after it was taken."
        ),
        WorkerState::Unknown => {
            write!(f, ". {}", unregistered(&worker.worker_id))?;
            write!(f, " No connection has its name: it is dead, or connects through a pooler.")
        }
        WorkerState::Alive if !worker.is_registered => write!(f, ". {}", unregistered(&worker.worker_id)),
        WorkerState::Alive if worker.is_connected == Some(false) && worker.heartbeat_seconds.is_some() => {
            write!(
                f,
                ". Its last heartbeat was {silent_for} ago, but no connection has its name: it may have been killed."
            )
        }
        WorkerState::Alive => write!(f, "."),
    }
}

/// Why so little is known of a worker that does not register, and how to know more.
fn unregistered(worker_id: &str) -> String {
    let does_not = "does not register, so its host, process and slots are not known";
    match worker_id.starts_with("rs-worker-") {
        true => format!("Its recovery is off and it {does_not}. {TURN_RECOVERY_ON}"),
        false => format!("It {does_not}: Node's workers do not register, nor do ours with recovery off."),
    }
}

fn capital(what: &impl fmt::Display) -> String {
    let text = what.to_string();
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

fn error(f: &mut fmt::Formatter<'_>, last_error: &Option<String>) -> fmt::Result {
    match last_error {
        Some(error) => write!(f, ". The last error: {error}"),
        None => write!(f, "."),
    }
}

fn cancelled(f: &mut fmt::Formatter<'_>, reason: &Option<String>) -> fmt::Result {
    match reason {
        Some(reason) => write!(f, ". The reason: {reason}"),
        None => write!(f, "."),
    }
}

fn flags_text(flags: &[String]) -> String {
    if flags.is_empty() { "no flags".to_owned() } else { format!("the flags {flags:?}") }
}

fn plural(count: i64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

fn counted(jobs: i64) -> (String, &'static str) {
    match jobs {
        1 => ("One job".to_owned(), "comes"),
        MAX_COUNTED_AHEAD.. => (format!("At least {MAX_COUNTED_AHEAD} jobs"), "come"),
        _ => (format!("{jobs} jobs"), "come"),
    }
}

/// How to call the command line for a schema.
#[doc(hidden)]
pub fn program(schema: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match schema {
        "graphile_worker" => "graphile-worker".to_owned(),
        plain if plain.chars().all(is_plain) => format!("graphile-worker -s {plain}"),
        odd => format!("graphile-worker -s '{}'", odd.replace('\'', "'\\''")),
    }
}

/// A name, quoted for a shell if needed.
fn shell_word(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-:./@".contains(c);
    if name.chars().all(is_plain) { name.to_owned() } else { format!("'{}'", name.replace('\'', "'\\''")) }
}

/// What to do about the first reason for which there is advice.
pub(super) fn fix(reasons: &[WhyReason], id: i64, schema: &str) -> Option<String> {
    let program = program(schema);
    reasons.iter().find_map(|reason| match reason {
        WhyReason::DoesNotExist | WhyReason::RunningInBatch { .. } => None,
        WhyReason::Running { worker, .. } | WhyReason::QueueLocked { worker, .. } => release(worker, &program),
        WhyReason::BeingCancelled { .. } => {
            Some(format!("If it ignores the request, end it: {program} cancel --force {id}"))
        }
        WhyReason::ReplacedIsRunning { worker, can_stop: true, .. }
            if matches!(worker.state, WorkerState::Silent | WorkerState::Stale | WorkerState::Dead) =>
        {
            release(worker, &program)
        }
        WhyReason::ReplacedIsRunning { job_id, can_stop: true, .. } => {
            Some(format!("If it ignores the request, end it: {program} cancel --force {job_id}"))
        }
        WhyReason::ReplacedIsRunning { worker, .. } => release(worker, &program),
        WhyReason::ReplacedHasEnded => Some(format!("Start a worker: {program}")),
        WhyReason::AttemptsUsedUp { .. } | WhyReason::Cancelled { .. } => {
            Some(format!("To retry it with all attempts: {program} run-now {id}"))
        }
        WhyReason::NotDue { .. } => Some(format!("To run it now: {program} run-now {id}")),
        WhyReason::TableLocked { waits_for: Some(pid), .. } => {
            Some(format!("End the session it waits for. In psql: select pg_terminate_backend({pid});"))
        }
        WhyReason::TableLocked { holder, .. }
        | WhyReason::RowLocked { holder }
        | WhyReason::QueueRowLocked { holder, .. } => Some(holder.fix()),
        WhyReason::Paused { limit, .. } => Some(format!("To resume: {program} resume {}", shell_word(limit))),
        WhyReason::LimitClosed { limit, .. } | WhyReason::BehindProbe { limit, .. } => {
            Some(format!("To start jobs now: {program} resume {}", shell_word(limit)))
        }
        WhyReason::LimitReached { .. } => Some(format!("To see limits and their use: {program} limit list")),
        WhyReason::OnlyNodesWorkers { .. } => Some(format!("Start a worker: {program}")),
        WhyReason::NoWorkers { .. } => Some(format!("Start a worker: {program}")),
        WhyReason::WorkersSilent { workers } => {
            let process = workers.iter().find_map(|worker| worker.host.as_ref().zip(worker.pid));
            Some(match process {
                Some((host, pid)) => {
                    format!("If it is stopped, run on {host}: kill -CONT {pid}. Otherwise start a worker: {program}")
                }
                None => format!("Start a worker: {program}"),
            })
        }
        WhyReason::NoWorkerKnowsTask { .. } => {
            Some(format!("Start a worker that has this task. To list the tasks of workers: {program} workers --json"))
        }
        WhyReason::Forbidden { .. } | WhyReason::MayBeForbidden { .. } => {
            Some(format!("Start a worker that does not forbid these flags: {program}"))
        }
        WhyReason::NotAccepted { .. } => {
            Some(format!("Start a worker that accepts all jobs, or one of these flags: {program}"))
        }
        WhyReason::NotAllowed { .. } => Some(format!("Start a worker without a flag allowlist: {program}")),
        WhyReason::AllSlotsBusy { slots, .. } => {
            Some(format!("Start another worker to run more jobs at a time: {program} --jobs {}", (*slots).max(1)))
        }
        WhyReason::TaskLimit { .. } => {
            Some(format!("Raise the task's `max_concurrent`, or start another worker: {program}"))
        }
        WhyReason::BehindInQueue { .. } | WhyReason::BehindOthers { .. } => {
            Some(format!("To run it first: {program} reschedule {id} --priority -100"))
        }
        WhyReason::ShouldRun { .. } => Some(format!("If it still waits in a moment: {program} doctor")),
    })
}

/// How to release the locks of a worker that may be dead.
fn release(worker: &WhyWorker, program: &str) -> Option<String> {
    let id = &worker.worker_id;
    match worker.state {
        WorkerState::Silent | WorkerState::Stale => {
            let resume = match (&worker.host, worker.pid) {
                (Some(host), Some(pid)) => format!("If it is stopped, run on {host}: kill -CONT {pid}. "),
                _ => String::new(),
            };
            // A sweep declares a worker dead after at least two of its heartbeat intervals.
            let threshold = (2.0 * worker.interval_seconds.unwrap_or(HEARTBEAT_INTERVAL)).ceil();
            Some(format!("{resume}If it is dead, release its jobs now: {program} sweep --threshold {threshold}s"))
        }
        WorkerState::Dead => Some(format!("Release its jobs now: {program} sweep")),
        WorkerState::Unknown if id.is_empty() => None,
        WorkerState::Unknown if is_of_rust_port(id) => Some(format!(
            "If that worker is dead: {program} unlock {id}. If no worker of the port runs any more: {program} migrate --from-rust-port"
        )),
        WorkerState::Unknown => Some(format!("If that worker is dead: {program} unlock {id}")),
        WorkerState::Alive if worker.is_connected == Some(false) && worker.heartbeat_seconds.is_some() => {
            let threshold = (2.0 * worker.interval_seconds.unwrap_or(HEARTBEAT_INTERVAL)).ceil();
            Some(format!(
                "If it is dead, release its jobs in {threshold} seconds: {program} sweep --threshold {threshold}s"
            ))
        }
        WorkerState::Alive => None,
    }
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn the_command_contains_the_schema() {
        assert_eq!(program("graphile_worker"), "graphile-worker");
        assert_eq!(program("jobs"), "graphile-worker -s jobs");
        assert_eq!(program("it's"), "graphile-worker -s 'it'\\''s'");
    }
}
