//! The jobs in flight: claimed and waiting, running, or ended and to be reported. Decides which job runs next: by
//! priority, one at a time per queue, within the slots of a limited queue and each task's limit. Does not touch the database.
//!
//! Runners take jobs from here and return outcomes. The run loop and the second lane take the outcomes and bring new
//! jobs. The two sides meet nowhere else.
//!
//! Invariants, each checked by a test below or by `model/`:
//! - A job is in at most one of `ready`, `behind` (of a queue or a limited queue), `over_limit`, `running`, `report`, `blocked`,
//!   a report under way, and the `ended` and `written` of a batch.
//! - A queue is in `queues` exactly while the worker has, or may have, an unreported job of it.
//! - No report both releases a job of a queue and frees that queue.
//! - The outcome of a job of an open batch goes to the batch, and that of any other job to the report (`batches`).

mod batches;
mod ready;
mod slots;

pub(crate) use batches::{BatchClaim, BatchEnd, BatchRequest, Hold, LANES, LONGEST_BATCH};

use super::claim_size::{ClaimSize, SECOND_LANE_MIN_JOBS};
use super::report::{Answer, Ended, KeptSlots, Lane, Report};
use crate::context::{Cancelled, OpenBatch, Running};
use crate::fast_map::{FastMap, FastSet};
use crate::job::Job;
use crate::recovery::heartbeat::StartLease;
use crate::task::{Task, Tasks};
use crate::worker::limits::{LimitedTurn, Limits};
use crate::worker::next_claim::{ClaimResult, NextClaim};
use crate::worker::settle::{self, Settlement};
use batches::Batches;
use chrono::{DateTime, Utc};
use ready::Ready;
use slots::Slots;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// At most how much work of a limited queue a worker claims ahead of its slots. A job of another queue may have to wait this long
/// for its fair share.
const LONGEST_AHEAD: Duration = Duration::from_millis(5);

/// The worker releases a claimed job that has waited this long, because another worker may have a free slot for it.
const MAX_UNSTARTED_HOLD: Duration = Duration::from_secs(1);

/// The delay before a blocked job is reported again: doubles from the minimum to the maximum. Most such locks last only
/// as long as another worker's claim.
const MIN_BLOCKED_RETRY: Duration = Duration::from_millis(2);
const MAX_BLOCKED_RETRY: Duration = Duration::from_secs(1);

/// How long the second lane pauses after contention with other workers: more simultaneous claims would only find more
/// locked rows (bench/RESULTS.md, "An exchange that waits for no row").
const CONTENTION_BACKOFF: Duration = Duration::from_secs(1);

pub(crate) struct Inflight {
    state: Mutex<State>,
    /// Whether jobs may start.
    start_lease: Arc<StartLease>,
    job_ready: Notify,
    /// Notified when there is something to report, or room for more jobs.
    pub(crate) exchange_due: Notify,
    /// Notified when there is enough to report or claim for the second lane to help.
    pub(crate) second_lane_due: Notify,
    /// Notified when a batch may be due.
    batch_due: Notify,
    /// Whether the end of a cancelled job was recorded, so that the job that replaces it may start.
    cancelled_recorded: AtomicBool,
    /// Whether batches claim the jobs of repeatable tasks, and not exchanges.
    pub(crate) batches_run: Arc<AtomicBool>,
}

struct State {
    tasks: Arc<Tasks>,
    new_tasks: watch::Receiver<Arc<Tasks>>,
    concurrency: usize,
    claim_size: ClaimSize,
    /// Jobs that can start as soon as a slot is free.
    ready: Ready,
    queues: FastMap<i32, Queue>,
    slots: Slots,
    /// Jobs whose task is at its limit.
    over_limit: FastMap<Arc<str>, VecDeque<ClaimedJob>>,
    running: FastMap<i64, Arc<Running>>,
    /// The claims that are cancelled, as the database last said: by job, the time of the claim. A claim may be among them before
    /// it arrives here.
    cancelled: FastMap<i64, DateTime<Utc>>,
    /// New claims of jobs that are running here: a failover has lost their first claim, or an operator has unlocked
    /// them.
    reclaimed: FastMap<i64, ClaimedJob>,
    running_by_task: FastMap<Arc<str>, usize>,
    /// Jobs to be reported.
    report: Vec<Ended>,
    /// Jobs whose last report was not written, because another transaction has locked their rows.
    blocked: Vec<Blocked>,
    /// Until when the second lane pauses.
    contended_until: Instant,
    /// How many replies have arrived.
    replies: u64,
    /// The exchanges under way, at most one per lane.
    first: Option<OpenExchange>,
    second: Option<OpenExchange>,
    next_claim: NextClaim,
    limits: Limits,
    limited_turn: LimitedTurn,
    poll_interval: Duration,
    /// Queues that may have no more jobs in flight.
    idle_queues: Vec<i32>,
    batches: Batches,
    closed: bool,
}

/// An exchange under way: how many replies had arrived when it began, and how many jobs it claims.
struct OpenExchange {
    began: u64,
    wanted: usize,
    limited: bool,
}

/// A job whose report was not written, and when to report it again.
struct Blocked {
    ended: Ended,
    until: Instant,
}

/// A queue that this worker holds.
#[derive(Default)]
struct Queue {
    /// Whether one of its jobs is running or ready. The others wait behind it.
    has_head: bool,
    behind: VecDeque<ClaimedJob>,
    /// How many of its jobs have ended and are not recorded: to be reported, being reported, or blocked.
    unreported: usize,
}

impl Queue {
    fn is_idle(&self) -> bool {
        !self.has_head && self.behind.is_empty()
    }

    /// A report may free a queue if none of its jobs is waiting or running, and if the report contains all its
    /// unreported jobs and keeps none of them in the table. The claim of the same exchange would not see a job that it
    /// unlocks, and would claim later ones first.
    fn may_be_freed_by(&self, report: QueueReport) -> bool {
        self.is_idle() && self.unreported == report.jobs && !report.releases
    }
}

/// The delay before a job is reported again, after this many reports that were not written.
fn blocked_retry_delay(tries: u8) -> Duration {
    MIN_BLOCKED_RETRY.saturating_mul(1 << tries.saturating_sub(1).min(20)).min(MAX_BLOCKED_RETRY)
}

/// The part of a report that concerns one queue.
#[derive(Clone, Copy, Default)]
struct QueueReport {
    jobs: usize,
    releases: bool,
}

fn by_queue(report: &Report) -> FastMap<i32, QueueReport> {
    let mut by_queue: FastMap<i32, QueueReport> = FastMap::default();
    for ended in &report.ended {
        if let Some(queue) = ended.job.serial_queue() {
            let of_queue = by_queue.entry(queue).or_default();
            of_queue.jobs += 1;
            of_queue.releases |= ended.settlement.keeps_row();
        }
    }
    by_queue
}

struct ClaimedJob {
    /// A copy from the job, because it is compared often.
    order: (i16, DateTime<Utc>, i64),
    job: Arc<Job>,
    /// The number of the reply that delivered the job.
    reply: u64,
    since: Instant,
    /// The batch in which its claim is not written yet.
    batch: Option<Arc<OpenBatch>>,
}

impl ClaimedJob {
    fn new(job: impl Into<Arc<Job>>, reply: u64, since: Instant) -> ClaimedJob {
        let job = job.into();
        ClaimedJob { order: (job.priority, job.run_at, job.id), job, reply, since, batch: None }
    }
}

impl PartialEq for ClaimedJob {
    fn eq(&self, other: &ClaimedJob) -> bool {
        self.order == other.order
    }
}

impl Eq for ClaimedJob {}

impl PartialOrd for ClaimedJob {
    fn partial_cmp(&self, other: &ClaimedJob) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ClaimedJob {
    fn cmp(&self, other: &ClaimedJob) -> std::cmp::Ordering {
        self.order.cmp(&other.order)
    }
}

/// A job that is cancelled while this worker holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CancelledClaim {
    pub(crate) job_id: i64,
    pub(crate) locked_at: DateTime<Utc>,
    pub(crate) how: Cancelled,
}

/// A later claim of the same job is not cancelled: the job may run again if somebody wants it to.
fn is_cancelled(cancelled: &FastMap<i64, DateTime<Utc>>, waiting: &ClaimedJob) -> bool {
    let at = cancelled.get(&waiting.job.id);
    at.is_some() && waiting.job.locked_at.as_ref() == at
}

/// What a runner does next.
enum NextJob {
    Job(Arc<Running>),
    Wait,
    Leave,
}

/// Who has something to do after the state has changed. They are notified once it is unlocked, and only if they may wait:
/// an atomic write for each job costs more than a comparison.
#[derive(Default)]
struct Due {
    runner: bool,
    exchange: bool,
    second_lane: bool,
    batch: bool,
}

impl Inflight {
    pub(crate) fn new(
        mut new_tasks: watch::Receiver<Arc<Tasks>>,
        concurrency: usize,
        poll_interval: Duration,
        start_lease: Arc<StartLease>,
    ) -> Inflight {
        let tasks = new_tasks.borrow_and_update().clone();
        Inflight {
            state: Mutex::new(State {
                tasks,
                new_tasks,
                concurrency,
                claim_size: ClaimSize::default(),
                ready: Ready::default(),
                queues: FastMap::default(),
                slots: Slots::default(),
                over_limit: FastMap::default(),
                running: FastMap::default(),
                cancelled: FastMap::default(),
                reclaimed: FastMap::default(),
                running_by_task: FastMap::default(),
                report: Vec::new(),
                blocked: Vec::new(),
                contended_until: Instant::now(),
                replies: 0,
                first: None,
                second: None,
                next_claim: NextClaim::new(),
                limits: Limits::default(),
                limited_turn: LimitedTurn::default(),
                poll_interval,
                idle_queues: Vec::new(),
                batches: Batches::new(concurrency),
                closed: false,
            }),
            start_lease,
            job_ready: Notify::new(),
            exchange_due: Notify::new(),
            second_lane_due: Notify::new(),
            batch_due: Notify::new(),
            cancelled_recorded: AtomicBool::new(false),
            batches_run: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No panic in this file leaves the state inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job to run. Returns `None` when the worker is stopping.
    pub(crate) async fn next(&self) -> Option<Arc<Running>> {
        // Under load a job is ready, and the runner need not register for notifications.
        if let NextJob::Job(running) = self.start() {
            return Some(running);
        }
        loop {
            let mut ready = std::pin::pin!(self.job_ready.notified());
            let mut heartbeat_sent = std::pin::pin!(self.start_lease.heartbeat_sent.notified());
            ready.as_mut().enable();
            heartbeat_sent.as_mut().enable();
            match self.start() {
                NextJob::Job(running) => return Some(running),
                NextJob::Leave => return None,
                NextJob::Wait => tokio::select! {
                    () = ready => {}
                    // A heartbeat matters only if a missing one is what keeps jobs from starting.
                    () = heartbeat_sent, if !self.start_lease.may_start() => {}
                },
            }
        }
    }

    fn start(&self) -> NextJob {
        let now = Instant::now();
        let mut due = Due::default();
        let next = self.start_in(&mut self.state(), now, &mut due);
        self.notify(&due);
        next
    }

    fn start_in(&self, state: &mut State, now: Instant, due: &mut Due) -> NextJob {
        if state.closed {
            return NextJob::Leave;
        }
        if !self.start_lease.may_start() {
            return NextJob::Wait;
        }
        let ended = state.report.len();
        let started = state.start(now);
        // Jobs may have been released because their task was removed.
        due.exchange |= state.report.len() > ended;
        due.runner = started.is_some() && !state.ready.is_empty() && state.idle_slots() > 0;
        started.map_or(NextJob::Wait, NextJob::Job)
    }

    /// Records how a job has ended, for the next report.
    pub(crate) fn finished(&self, running: &Running, settlement: Settlement, now: Instant) {
        let mut due = Due::default();
        let mut state = self.state();
        state.finish(running, settlement, now, &mut due);
        due.runner = !state.ready.is_empty();
        drop(state);
        self.notify(&due);
    }

    /// The same as `finished` and then `next`, but locks the state once.
    pub(crate) async fn finished_and_next(
        &self,
        running: &Running,
        settlement: Settlement,
        now: Instant,
    ) -> Option<Arc<Running>> {
        let mut due = Due::default();
        let next = {
            let mut state = self.state();
            state.finish(running, settlement, now, &mut due);
            self.start_in(&mut state, now, &mut due)
        };
        self.notify(&due);
        match next {
            NextJob::Job(running) => Some(running),
            NextJob::Wait => self.next().await,
            NextJob::Leave => None,
        }
    }

    fn notify(&self, due: &Due) {
        let all = [
            (due.exchange, &self.exchange_due),
            (due.batch, &self.batch_due),
            (due.second_lane, &self.second_lane_due),
            (due.runner, &self.job_ready),
        ];
        all.into_iter().filter(|(is_due, _)| *is_due).for_each(|(_, waiting)| waiting.notify_one());
    }

    /// Wakes a runner for each of so many jobs that have become ready.
    fn notify_runners(&self, jobs: usize, idle_slots: usize) {
        for _ in 0..jobs.min(idle_slots) {
            self.job_ready.notify_one();
        }
    }

    /// Begins an exchange, if there is anything to report or a claim is due. Returns the report, and how many jobs to
    /// claim.
    pub(crate) fn begin(&self, lane: Lane, limited: bool) -> Option<(Report, usize)> {
        let mut state = self.state();
        let now = Instant::now();
        let (report, wanted) = match lane {
            Lane::First => {
                state.release_expired(now);
                state.report_blocked_again(now);
                let wanted = state.wanted();
                let is_limited = state.is_limited_turn(wanted, now);
                let report = state.report_of_first_lane(is_limited);
                let next_claim = state.next_claim_of(is_limited);
                if report.is_empty() && !(wanted > 0 && next_claim.is_due(now)) {
                    return None;
                }
                if wanted > 0 {
                    next_claim.begin(now);
                }
                (report, wanted)
            }
            Lane::Second if state.contended_until > now => return None,
            Lane::Second => {
                let wanted = if !limited && state.next_claim.is_backlog() { state.wanted() } else { 0 };
                let report = state.report_of_second_lane();
                if report.ended.len() < SECOND_LANE_MIN_JOBS && wanted < SECOND_LANE_MIN_JOBS {
                    state.restore_report(report);
                    return None;
                }
                (report, wanted)
            }
        };
        *state.under_way(lane) = Some(OpenExchange { began: state.replies, wanted, limited });
        if lane == Lane::First && state.has_backlog() {
            self.second_lane_due.notify_one();
        }
        Some((report, wanted))
    }

    /// Ends an answered exchange, and takes in the claimed jobs. Returns the report without the jobs that were not
    /// written.
    pub(crate) fn receive(&self, lane: Lane, report: Report, answer: Answer) -> Report {
        let count = answer.jobs.len();
        let mut is_batch_due = false;
        let (report, idle_slots) = {
            let mut state = self.state();
            let now = Instant::now();
            if let Some(ended) = state.under_way(lane).take()
                && ended.wanted > 0
            {
                is_batch_due = count >= ended.wanted && self.start_batches(&mut state, &answer.jobs);
                let result = ClaimResult {
                    wanted: ended.wanted,
                    got: count,
                    limited: ended.limited,
                    contended: answer.contended,
                    partial: answer.is_partial,
                };
                let poll_interval = state.poll_interval;
                match lane {
                    Lane::First => {
                        let next_claim = state.next_claim_of(report.is_limited);
                        next_claim.finish(result, now, poll_interval);
                        if let Some(wait) = answer.claim_again_after {
                            next_claim.not_after(now + wait);
                        }
                    }
                    Lane::Second => state.next_claim.finish_second_lane(result, now),
                }
            }
            let bytes = answer.jobs.iter().map(|job| job.payload.get().len()).sum();
            state.claim_size.claimed(count, bytes);
            let report = state.written(report, &answer, now);
            state.take_slots(&answer.slots);
            if !state.cancelled.is_empty()
                && report.ended.iter().any(|ended| state.cancelled.contains_key(&ended.job.id))
            {
                self.cancelled_recorded.store(true, Ordering::Release);
                self.exchange_due.notify_one();
            }
            state.receive(answer.jobs);
            if state.closed {
                state.release_waiting(|_| true);
            }
            (report, state.idle_slots())
        };
        if lane == Lane::Second {
            self.exchange_due.notify_one();
        }
        if is_batch_due {
            self.batch_due.notify_one();
        }
        self.notify_runners(count, idle_slots);
        report
    }

    /// Ends an exchange whose report could not be written.
    pub(crate) fn not_written(&self, lane: Lane, report: Report) {
        let mut state = self.state();
        *state.under_way(lane) = None;
        state.next_claim_of(report.is_limited).wake(Instant::now());
        state.restore_report(report);
        drop(state);
        self.exchange_due.notify_one();
    }

    /// Begins a poll, if a claim is due.
    pub(crate) fn begin_poll(&self) -> bool {
        let mut state = self.state();
        let now = Instant::now();
        let is_due = state.next_claim.is_due(now);
        if is_due {
            state.next_claim.begin(now);
        }
        is_due
    }

    /// Ends a poll. `wait` is the time until the next job is due; `None` if a job is due now, or if the poll failed.
    pub(crate) fn end_poll(&self, wait: Option<Duration>) {
        let mut state = self.state();
        let now = Instant::now();
        match wait {
            Some(wait) => {
                let poll_interval = state.poll_interval;
                state.next_claim.not_after(now + wait.min(poll_interval));
            }
            None => state.next_claim.wake(now),
        }
    }

    /// There may be new jobs: a claim is due.
    pub(crate) fn wake_claim(&self) {
        self.wake_exchange();
        self.wake_batch();
    }

    /// The same for jobs that an exchange claims.
    pub(crate) fn wake_exchange(&self) {
        let (mut state, now) = (self.state(), Instant::now());
        state.next_claim.wake(now);
        state.limited_turn.next_claim.wake(now);
    }

    /// Applies changed limits: jobs that are paused do not start.
    pub(crate) fn set_limits(&self, limits: Limits) {
        let mut state = self.state();
        if limits.pauses_any() {
            state.release_waiting(|waiting| limits.is_paused(&waiting.job));
        }
        if limits.settings != state.limits.settings {
            // They may have been claimed under a higher limit.
            state.release_waiting(|waiting| waiting.job.limited_queue().is_some());
        }
        if limits.differs_from(&state.limits) {
            let now = Instant::now();
            state.next_claim.wake(now);
            state.limited_turn.next_claim.wake(now);
            self.exchange_due.notify_one();
        }
        state.limits = limits;
    }

    /// Whether neither kind of claim is due.
    pub(crate) fn no_claim_is_due(&self) -> bool {
        let (state, now) = (self.state(), Instant::now());
        !(state.next_claim.is_due(now) || state.limits.any_exist && state.limited_turn.next_claim.is_due(now))
    }

    /// A job is due at this time: claim then at the latest.
    pub(crate) fn claim_not_after(&self, at: Instant) {
        self.state().next_claim.not_after(at);
    }

    /// When the next exchange is due, if nothing else happens before.
    pub(crate) fn next_exchange_at(&self) -> Option<Instant> {
        let state = self.state();
        let wants = state.wanted() > 0;
        let claim = wants.then(|| state.next_claim.at());
        let limited = (wants && state.limits.any_exist).then(|| state.limited_turn.next_claim.at());
        let resume = state.limits.all_paused_until.filter(|until| *until > Instant::now());
        let blocked = state.blocked.iter().map(|blocked| blocked.until).min();
        let release = state.waiting().map(|waiting| waiting.since + MAX_UNSTARTED_HOLD).min();
        [claim, limited, resume, blocked, release].into_iter().flatten().min()
    }

    /// How many more jobs of each limited task may be in flight.
    pub(crate) fn limits(&self) -> HashMap<Arc<str>, usize> {
        let mut state = self.state();
        state.take_new_tasks();
        let limited = state.tasks.values().filter_map(|task| Some((task, task.options.max_concurrent?)));
        let in_flight = |task: &Task| {
            let waiting = state.waiting().filter(|waiting| waiting.job.task_identifier == task.identifier).count();
            waiting + state.running_by_task.get(&task.identifier).copied().unwrap_or(0)
        };
        limited.map(|(task, limit)| (task.identifier.clone(), limit.saturating_sub(in_flight(task)))).collect()
    }

    pub(crate) fn has_free_slots(&self) -> bool {
        let state = self.state();
        state.running.len() < state.concurrency
    }

    /// How much work the worker claims ahead of the slots of a limited queue.
    pub(crate) fn ahead(&self) -> Duration {
        self.state().claim_size.ahead().min(LONGEST_AHEAD)
    }

    pub(crate) fn record_round_trip(&self, took: Duration) {
        self.state().claim_size.round_trip(took);
    }

    /// Whether no job is waiting, running or to be reported, no exchange is under way, and no queue is held.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state();
        let under_way = state.first.is_some() || state.second.is_some();
        let is_all_reported = state.report.is_empty() && state.blocked.is_empty() && state.queues.is_empty();
        state.in_flight() == 0 && is_all_reported && !under_way && state.batches.are_ended()
    }

    /// Whether another transaction has locked a row for longer than a claim takes.
    pub(crate) fn is_blocked_for_long(&self) -> bool {
        self.state().blocked.iter().any(|blocked| blocked_retry_delay(blocked.ended.tries) >= MAX_BLOCKED_RETRY)
    }

    /// The ids of the jobs whose rows another transaction has locked.
    pub(crate) fn blocked(&self) -> Vec<i64> {
        self.state().blocked.iter().map(|blocked| blocked.ended.job.id).collect()
    }

    /// The jobs that have run for at least this long, and their queues.
    pub(crate) fn running_for(&self, at_least: Duration) -> (Vec<i64>, Vec<i32>) {
        let state = self.state();
        let long_running = state.running.values().filter(|running| running.started.elapsed() >= at_least);
        let jobs: Vec<&Job> = long_running.map(|running| &*running.job).collect();
        let queues = jobs.iter().filter_map(|job| job.serial_queue()).collect();
        (jobs.iter().map(|job| job.id).collect(), queues)
    }

    /// Reconciles the jobs in flight with the jobs and queues that the worker holds in the database: a lost answer may have
    /// claimed jobs that the worker does not know, and a failover may have lost claims that it knows.
    pub(crate) fn reconcile(&self, held: Vec<Job>, queues: &[i32]) {
        let mut state = self.state();
        for id in queues {
            // If the worker has no job of it, the next report frees it.
            state.hold_again(*id, 0);
        }
        let is_held: HashMap<i64, &Job> = held.iter().map(|job| (job.id, job)).collect();
        // Lost claims must not start: another worker may claim these jobs, or this one again. Releasing a job that the
        // worker does not hold has no effect.
        let is_lost = |job: &Job| !is_held.get(&job.id).is_some_and(|held| held.is_same_claim(job));
        let is_lost_claim = |waiting: &ClaimedJob| waiting.batch.is_none() && is_lost(&waiting.job);
        if state.waiting().any(is_lost_claim) {
            state.release_waiting(is_lost_claim);
        }
        // The database may have the claim before it again.
        state.reclaimed.retain(|_, again| !is_lost(&again.job));
        let waiting: HashSet<i64> = state.waiting().map(|waiting| waiting.job.id).collect();
        let ended: HashMap<i64, Vec<Arc<Job>>> = state.ended().fold(HashMap::new(), |mut ended, one| {
            ended.entry(one.job.id).or_default().push(one.job.clone());
            ended
        });
        let is_known = |job: &Job| {
            let has_ended = ended.get(&job.id).is_some_and(|ended| ended.iter().any(|ended| ended.is_same_claim(job)));
            waiting.contains(&job.id)
                || has_ended
                || state.batches.has_written(job)
                || state.running.get(&job.id).is_some_and(|of| of.job.is_same_claim(job))
        };
        let unknown: Vec<Arc<Job>> = held.into_iter().filter(|job| !is_known(job)).map(Arc::new).collect();
        if unknown.is_empty() {
            return;
        }
        state.receive(unknown);
        drop(state);
        self.job_ready.notify_waiters();
    }

    /// Asks jobs to stop. `cancelled` are all cancelled jobs that this worker holds. Returns those that have not started and
    /// will not: their rows say that they are cancelled.
    pub(crate) fn cancel(&self, cancelled: &[CancelledClaim]) -> Vec<Arc<Job>> {
        let mut state = self.state();
        state.cancelled = cancelled.iter().map(|cancelled| (cancelled.job_id, cancelled.locked_at)).collect();
        for cancelled in cancelled {
            if let Some(running) = state.running.get(&cancelled.job_id) {
                running.cancel(cancelled.how);
            }
        }
        let unstarted = state.waiting().filter(|waiting| is_cancelled(&state.cancelled, waiting));
        let unstarted: Vec<Arc<Job>> = unstarted.map(|waiting| waiting.job.clone()).collect();
        state.release_cancelled();
        drop(state);
        if !unstarted.is_empty() {
            self.exchange_due.notify_one();
        }
        unstarted
    }

    /// Whether the end of a cancelled job was recorded since this was last called.
    pub(crate) fn take_cancelled_recorded(&self) -> bool {
        self.cancelled_recorded.swap(false, Ordering::AcqRel)
    }

    /// Whether any job waits or runs.
    pub(crate) fn has_jobs(&self) -> bool {
        self.state().in_flight() > 0
    }

    /// Starts no more jobs, releases those that have not started, and asks running ones to stop.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.release_waiting(|_| true);
        for running in state.running.values() {
            running.cancellation().cancel();
        }
        state.batches.notify_changed();
        drop(state);
        self.job_ready.notify_waiters();
        self.exchange_due.notify_one();
        self.batch_due.notify_waiters();
    }

    /// Ends the jobs that are still running, after their runners were stopped. Returns them.
    pub(crate) fn interrupt(&self, delay: Duration) -> Vec<Arc<Job>> {
        let mut state = self.state();
        let running: Vec<Arc<Running>> = state.running.values().cloned().collect();
        for interrupted in &running {
            let settlement = Settlement::Interrupt { delay };
            let settlement = if interrupted.is_cancelled() { settlement.cancelled() } else { settlement };
            state.end(interrupted, settlement, interrupted.started.elapsed());
        }
        running.into_iter().map(|running| running.job.clone()).collect()
    }
}

impl State {
    fn waiting(&self) -> impl Iterator<Item = &ClaimedJob> {
        let behind = self.queues.values().flat_map(|queue| &queue.behind);
        self.ready.iter().chain(behind).chain(self.slots.behind()).chain(self.over_limit.values().flatten())
    }

    /// Jobs that have ended and are not in a report under way.
    fn ended(&self) -> impl Iterator<Item = &Ended> {
        self.report.iter().chain(self.blocked.iter().map(|blocked| &blocked.ended)).chain(self.batches.ended())
    }

    fn in_flight(&self) -> usize {
        let behind: usize = self.queues.values().map(|queue| queue.behind.len()).sum();
        let over_limit: usize = self.over_limit.values().map(VecDeque::len).sum();
        self.ready.len() + behind + self.slots.count_behind() + over_limit + self.running.len()
    }

    fn under_way(&mut self, lane: Lane) -> &mut Option<OpenExchange> {
        match lane {
            Lane::First => &mut self.first,
            Lane::Second => &mut self.second,
        }
    }

    /// How many jobs to claim, given the jobs in flight and those being claimed.
    fn wanted(&self) -> usize {
        if self.closed || self.limits.all_paused() {
            return 0;
        }
        let claiming = |under_way: &Option<OpenExchange>| under_way.as_ref().map_or(0, |under_way| under_way.wanted);
        let being_claimed = claiming(&self.first) + claiming(&self.second);
        // A batch that waits for a slot must not keep other tasks waiting: it is over in a moment.
        let in_flight = self.in_flight().saturating_sub(self.batches.unstarted());
        self.claim_size.wanted(self.concurrency, in_flight + being_claimed)
    }

    /// How many runners run no job. Only those may wait for one.
    fn idle_slots(&self) -> usize {
        self.concurrency.saturating_sub(self.running.len())
    }

    fn has_many_to_report(&self) -> bool {
        self.first.is_some() && self.second.is_none() && self.report.len() >= SECOND_LANE_MIN_JOBS
    }

    fn has_backlog(&self) -> bool {
        self.has_many_to_report()
            || (self.second.is_none() && self.next_claim.is_backlog() && self.wanted() >= SECOND_LANE_MIN_JOBS)
    }

    /// All jobs to be reported, except those that could conflict with a claim of the second lane, and the queues to
    /// free.
    fn report_of_first_lane(&mut self, is_limited: bool) -> Report {
        let began = self.second.as_ref().map(|second| second.began);
        let ended = match began {
            None if !self.limited_turn.has_limited_jobs => {
                // As many may end until the next report.
                let next = Vec::with_capacity(self.report.len());
                std::mem::replace(&mut self.report, next)
            }
            began => self.take_from_report(|ended| {
                began.is_none_or(|began| ended.reply <= began) && ended.job.limited_queue().is_some() == is_limited
            }),
        };
        let mut report = Report { ended, is_limited, ..Report::default() };
        if is_limited {
            report.kept_slots = self.kept_slots();
        } else {
            report.free_queues = self.free_queues(&report);
        }
        report
    }

    /// Whether the next exchange is about jobs under limits. If both kinds have something to do, they take turns.
    fn is_limited_turn(&mut self, wanted: usize, now: Instant) -> bool {
        if !self.limits.any_exist && !self.limited_turn.has_limited_jobs {
            return false;
        }
        let has_ended =
            |is_limited: bool| self.report.iter().any(|ended| ended.job.limited_queue().is_some() == is_limited);
        let limited =
            has_ended(true) || (wanted > 0 && self.limits.any_exist && self.limited_turn.next_claim.is_due(now));
        let others = has_ended(false) || !self.idle_queues.is_empty() || (wanted > 0 && self.next_claim.is_due(now));
        self.limited_turn.next(limited, others)
    }

    fn next_claim_of(&mut self, is_limited: bool) -> &mut NextClaim {
        if is_limited { &mut self.limited_turn.next_claim } else { &mut self.next_claim }
    }

    /// Completed jobs without a queue. The first lane reports those of a queue, because it keeps their order.
    fn report_of_second_lane(&mut self) -> Report {
        let began = self.first.as_ref().map_or(u64::MAX, |first| first.began);
        let ended = self.take_from_report(|ended| {
            ended.reply <= began && ended.job.job_queue_id.is_none() && !ended.settlement.keeps_row()
        });
        Report { ended, ..Report::default() }
    }

    fn take_from_report(&mut self, wanted: impl Fn(&Ended) -> bool) -> Vec<Ended> {
        let mut taken = Vec::with_capacity(self.report.len());
        taken.extend(self.report.extract_if(.., |ended| wanted(ended)));
        taken
    }

    /// The queues that this report frees. They are no longer held, unless the report is not written.
    fn free_queues(&mut self, report: &Report) -> Vec<i32> {
        if self.idle_queues.is_empty() {
            return Vec::new();
        }
        let by_queue = by_queue(report);
        let (mut free, mut kept) = (Vec::new(), Vec::new());
        for id in std::mem::take(&mut self.idle_queues) {
            match self.queues.get(&id) {
                Some(queue) if queue.may_be_freed_by(by_queue.get(&id).copied().unwrap_or_default()) => {
                    self.queues.remove(&id);
                    free.push(id);
                }
                Some(queue) if queue.is_idle() => kept.push(id),
                _ => {}
            }
        }
        self.idle_queues = kept;
        free
    }

    /// Puts back a report that was not written, in front of the jobs that have ended since.
    fn restore_report(&mut self, mut report: Report) {
        for id in std::mem::take(&mut report.free_queues) {
            let unreported = report.ended.iter().filter(|ended| ended.job.serial_queue() == Some(id)).count();
            self.hold_again(id, unreported);
        }
        report.ended.append(&mut self.report);
        self.report = report.ended;
    }

    /// Holds a queue again, which the report should have freed and did not.
    fn hold_again(&mut self, id: i32, unreported: usize) {
        self.queues.entry(id).or_default().unreported += unreported;
        self.idle_queues.push(id);
    }

    /// Takes note that a report was recorded, except for rows that other transactions have locked, or that were not where they
    /// were expected: those are reported again.
    fn written(&mut self, mut report: Report, answer: &Answer, now: Instant) -> Report {
        let is_blocked = |ended: &mut Ended| answer.blocked_jobs.contains(&ended.job.id);
        let blocked: Vec<Ended> = match answer.blocked_jobs.is_empty() {
            true => Vec::new(),
            false => report.ended.extract_if(.., is_blocked).collect(),
        };
        if !answer.missed_jobs.is_empty() {
            let missed = report.ended.extract_if(.., |ended| answer.missed_jobs.contains(&ended.job.id));
            self.report.extend(missed.map(|ended| Ended { is_missed: true, ..ended }));
        }
        let freed: FastSet<i32> = report.free_queues.iter().copied().collect();
        for id in report.ended.iter().filter_map(|ended| ended.job.serial_queue()) {
            // A queue that this report freed is no longer held, or was claimed again since.
            if let Some(queue) = self.queues.get_mut(&id).filter(|_| !freed.contains(&id)) {
                queue.unreported -= 1;
            }
        }
        for id in &answer.blocked_queues {
            let unreported = blocked.iter().filter(|ended| ended.job.serial_queue() == Some(*id)).count();
            self.hold_again(*id, unreported);
        }
        if !blocked.is_empty() {
            self.contended_until = now + CONTENTION_BACKOFF;
        }
        self.blocked.extend(blocked.into_iter().map(|mut ended| {
            ended.tries = ended.tries.saturating_add(1);
            Blocked { until: now + blocked_retry_delay(ended.tries), ended }
        }));
        report
    }

    fn report_blocked_again(&mut self, now: Instant) {
        let due = self.blocked.extract_if(.., |blocked| blocked.until <= now);
        self.report.extend(due.map(|blocked| blocked.ended));
    }

    fn receive(&mut self, jobs: Vec<Arc<Job>>) {
        self.replies += 1;
        let (since, reply) = (Instant::now(), self.replies);
        self.release_claimed_again(jobs.iter().map(|job| job.id));
        self.limited_turn.has_limited_jobs |= jobs.first().is_some_and(|job| job.limited_queue().is_some());
        let mut jobs: Vec<ClaimedJob> = jobs.into_iter().map(|job| ClaimedJob::new(job, reply, since)).collect();
        jobs.sort();
        for waiting in jobs {
            if self.running.contains_key(&waiting.job.id) {
                self.reclaimed.insert(waiting.job.id, waiting);
            } else {
                self.take_in(waiting);
            }
        }
        self.release_cancelled();
    }

    /// Releases the jobs that have not started and are cancelled.
    fn release_cancelled(&mut self) {
        if self.cancelled.is_empty() || !self.waiting().any(|waiting| is_cancelled(&self.cancelled, waiting)) {
            return;
        }
        let cancelled = std::mem::take(&mut self.cancelled);
        self.release_waiting(|waiting| is_cancelled(&cancelled, waiting));
        self.cancelled = cancelled;
    }

    /// Jobs that wait here under an older claim, which an operator has unlocked or a failover has lost. To release what the
    /// worker does not hold changes nothing.
    fn release_claimed_again(&mut self, claimed: impl Iterator<Item = i64>) {
        if self.waiting().next().is_none() {
            return;
        }
        let claimed: FastSet<i64> = claimed.collect();
        if self.waiting().any(|waiting| claimed.contains(&waiting.job.id)) {
            self.release_waiting(|waiting| claimed.contains(&waiting.job.id));
        }
    }

    /// The slots of limited queues that the worker keeps from now on.
    fn kept_slots(&mut self) -> Vec<KeptSlots> {
        let kept = self.slots.keep();
        let mut longest: FastMap<i32, Duration> = FastMap::default();
        for running in self.running.values() {
            if let Some(queue) = running.job.limited_queue() {
                let longest = longest.entry(queue).or_default();
                *longest = running.started.elapsed().max(*longest);
            }
        }
        let longest_run = |queue: i32| longest.get(&queue).copied().unwrap_or_default();
        kept.into_iter().map(|(queue, slots)| KeptSlots { queue, slots, longest_run: longest_run(queue) }).collect()
    }

    /// Records the slots of limited queues. If a queue now has fewer slots than it uses, releases its jobs that have not started.
    fn take_slots(&mut self, slots: &[(i32, usize)]) {
        let mut lowered = FastSet::default();
        for (queue, slots) in slots {
            if self.slots.grant(*queue, *slots) {
                lowered.insert(*queue);
            }
        }
        if !lowered.is_empty() {
            self.release_waiting(|waiting| waiting.job.limited_queue().is_some_and(|queue| lowered.contains(&queue)));
        }
    }

    fn take_in(&mut self, waiting: ClaimedJob) {
        if let Some(queue) = waiting.job.limited_queue() {
            if let Some(waiting) = self.slots.take_in(queue, waiting) {
                self.ready.push(waiting);
            }
            return;
        }
        match waiting.job.serial_queue() {
            None => self.ready.push(waiting),
            Some(queue) => {
                let queue = self.queues.entry(queue).or_default();
                if std::mem::replace(&mut queue.has_head, true) {
                    queue.behind.push_back(waiting);
                } else {
                    self.ready.push(waiting);
                }
            }
        }
    }

    /// Applies changed tasks: releases jobs that have not started and whose task was removed.
    fn take_new_tasks(&mut self) {
        if self.new_tasks.has_changed().unwrap_or(false) {
            self.tasks = self.new_tasks.borrow_and_update().clone();
            self.release_removed();
        }
    }

    fn start(&mut self, now: Instant) -> Option<Arc<Running>> {
        self.take_new_tasks();
        loop {
            let waiting = self.ready.pop()?;
            let identifier = &waiting.job.task_identifier;
            let Some(task) = self.tasks.get(identifier) else {
                // The job was claimed just before its task was removed.
                self.ready.push(waiting);
                self.release_removed();
                continue;
            };
            let count = match self.running_by_task.get_mut(identifier) {
                Some(count) => count,
                None => self.running_by_task.entry(identifier.clone()).or_default(),
            };
            if task.options.max_concurrent.is_some_and(|limit| *count >= limit) {
                self.over_limit.entry(identifier.clone()).or_default().push_back(waiting);
                continue;
            }
            *count += 1;
            let ClaimedJob { job, batch, reply, .. } = waiting;
            let running = Arc::new(Running::new(job, task.clone(), batch, reply, now));
            self.running.insert(running.job.id, running.clone());
            self.batches.started(running.batch.as_ref());
            return Some(running);
        }
    }

    fn finish(&mut self, running: &Running, settlement: Settlement, now: Instant, due: &mut Due) {
        let reported = self.report.len();
        let ran = now - running.started;
        if running.batch.is_some() {
            self.batches.ran(ran);
        } else {
            self.claim_size.job(ran);
        }
        self.end(running, settlement, ran);
        // If the first lane has an exchange under way, it looks at the report afterwards.
        due.exchange = self.report.len() > reported && self.first.is_none();
        due.second_lane = self.has_many_to_report();
        due.batch = self.is_batch_due();
    }

    fn end(&mut self, running: &Running, settlement: Settlement, ran: Duration) {
        let job = &running.job;
        self.running.remove(&job.id);
        if let Some(count) = self.running_by_task.get_mut(&job.task_identifier) {
            *count -= 1;
        }
        if let Some(next) = self.over_limit.get_mut(&job.task_identifier).and_then(VecDeque::pop_front) {
            self.ready.push(next);
        }
        let (mut reported, mut reply) = (job.clone(), running.reply);
        let again = self.reclaimed.remove(&job.id);
        let another = match again {
            // The outcome is recorded under the new claim.
            Some(again) if again.job.is_unchanged(job) => {
                (reported, reply) = (again.job, again.reply);
                None
            }
            // A keyed add has put another event into the job before it was claimed again. Or this is another job: after a
            // failover, the server may assign an id a second time.
            again => again,
        };
        let is_claimed_again = reply != running.reply;
        let ended = Ended { job: reported, reply, settlement, ran, tries: 0, is_missed: false };
        if let Some(ended) = self.batches.take_ended(running.batch.as_ref(), ended, is_claimed_again) {
            self.report.push(ended);
        }
        self.advance_queue(job);
        if let Some(another) = another {
            self.take_in(another);
        }
    }

    /// The head of a queue has ended: the next job becomes ready, or the queue becomes idle.
    fn advance_queue(&mut self, job: &Job) {
        if let Some(queue) = job.limited_queue() {
            if let Some(next) = self.slots.leave(queue) {
                self.ready.push(next);
            }
            return;
        }
        let Some(id) = job.serial_queue() else { return };
        let queue = self.queues.entry(id).or_default();
        queue.unreported += 1;
        match queue.behind.pop_front() {
            Some(next) => self.ready.push(next),
            None => {
                queue.has_head = false;
                self.idle_queues.push(id);
            }
        }
    }

    fn release_expired(&mut self, now: Instant) {
        if self.waiting().any(|waiting| now - waiting.since >= MAX_UNSTARTED_HOLD) {
            self.release_waiting(|waiting| now - waiting.since >= MAX_UNSTARTED_HOLD);
        }
    }

    /// Releases the jobs that have not started and whose task was removed.
    fn release_removed(&mut self) {
        let tasks = self.tasks.clone();
        self.release_waiting(|waiting| !tasks.contains_key(&waiting.job.task_identifier));
    }

    /// Releases the waiting jobs that `is_unwanted` selects. To keep their order, releases all waiting jobs of a queue
    /// or none.
    fn release_waiting(&mut self, is_unwanted: impl Fn(&ClaimedJob) -> bool) {
        let mut released: Vec<ClaimedJob> = Vec::new();
        for queue in self.queues.values_mut() {
            if queue.behind.iter().any(&is_unwanted) {
                released.extend(std::mem::take(&mut queue.behind));
            }
        }
        released.extend(self.slots.take_behind(&is_unwanted));
        let over_limit = std::mem::take(&mut self.over_limit).into_values().flatten();
        let waiting = self.ready.take().chain(over_limit);
        let (unwanted, kept): (Vec<ClaimedJob>, Vec<ClaimedJob>) = waiting.partition(is_unwanted);
        self.ready = kept.into_iter().collect();
        for waiting in unwanted {
            if let Some(queue) = waiting.job.limited_queue() {
                released.extend(self.slots.release(queue));
            }
            if let Some(id) = waiting.job.serial_queue()
                && let Some(queue) = self.queues.get_mut(&id)
            {
                queue.has_head = false;
                released.extend(std::mem::take(&mut queue.behind));
                self.idle_queues.push(id);
            }
            released.push(waiting);
        }
        for waiting in released {
            if let Some(batch) = &waiting.batch {
                // The end of the batch frees its row.
                self.batches.dropped(batch);
                continue;
            }
            if let Some(queue) = waiting.job.serial_queue().and_then(|id| self.queues.get_mut(&id)) {
                queue.unreported += 1;
            }
            let settlement = settle::release(&waiting.job);
            let (reply, ran) = (waiting.reply, Duration::ZERO);
            self.report.push(Ended { job: waiting.job, reply, settlement, ran, tries: 0, is_missed: false });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TaskOptions;
    use crate::worker::execute::Outcome;

    fn tasks(names: &[&str]) -> Arc<Tasks> {
        let task = |name: &str| Task::function(name, TaskOptions::default(), |_: serde_json::Value, _| async {});
        Arc::new(names.iter().map(|name| ((*name).into(), Arc::new(task(name)))).collect())
    }

    fn inflight_with(tasks: &watch::Sender<Arc<Tasks>>) -> Inflight {
        Inflight::new(tasks.subscribe(), 4 * SECOND_LANE_MIN_JOBS, Duration::from_secs(2), Arc::default())
    }

    fn inflight() -> Inflight {
        inflight_with(&watch::Sender::new(tasks(&["t"])))
    }

    fn claimed(jobs: Vec<Job>) -> Answer {
        Answer { jobs: jobs.into_iter().map(Arc::new).collect(), ..Answer::default() }
    }

    fn jobs_of_queue(queue: Option<i32>, ids: std::ops::Range<i64>) -> Vec<Job> {
        ids.map(|id| Job { job_queue_id: queue, ..Job::example(id) }).collect()
    }

    fn of_queue(queue: Option<i32>, ids: std::ops::Range<i64>) -> Answer {
        claimed(jobs_of_queue(queue, ids))
    }

    fn blocked(jobs: &[i64], queues: &[i32]) -> Answer {
        let (blocked_jobs, blocked_queues) = (jobs.iter().copied().collect(), queues.to_vec());
        Answer { blocked_jobs, blocked_queues, ..Answer::default() }
    }

    /// An exchange of this lane, with everything that it can report.
    fn exchange(inflight: &Inflight, lane: Lane, answer: Answer) -> Report {
        let (report, _) = inflight.begin(lane, false).expect("an exchange");
        inflight.receive(lane, report, answer)
    }

    fn claim(inflight: &Inflight, queue: Option<i32>, ids: std::ops::Range<i64>) {
        inflight.wake_claim();
        exchange(inflight, Lane::First, of_queue(queue, ids));
    }

    fn start(inflight: &Inflight) -> Option<Arc<Running>> {
        inflight.state().start(Instant::now())
    }

    fn finish(inflight: &Inflight, running: &Running, outcome: Outcome) {
        let settlement = settle::settlement(&running.job, outcome, &running.task.options);
        inflight.finished(running, settlement, Instant::now());
    }

    fn finish_all(inflight: &Inflight) {
        while let Some(running) = start(inflight) {
            finish(inflight, &running, Outcome::Done);
        }
    }

    fn ids(begun: Option<(Report, usize)>) -> Vec<i64> {
        begun.map_or(Vec::new(), |(report, _)| report.ids().collect())
    }

    fn released(report: &Report) -> Vec<i64> {
        let released = report.ended.iter().filter(|ended| ended.settlement.keeps_row());
        released.map(|ended| ended.job.id).collect()
    }

    /// As if all waiting jobs had waited too long.
    fn wait_too_long(inflight: &Inflight) {
        inflight.state().release_waiting(|_| true);
    }

    const MANY: i64 = SECOND_LANE_MIN_JOBS as i64;

    #[test]
    fn a_job_is_reported_only_after_the_exchanges_under_way_when_it_arrived() {
        let inflight = inflight();
        claim(&inflight, None, 0..MANY);
        finish_all(&inflight);
        // The first lane's claim began before the next jobs arrived...
        let (report, _) = inflight.begin(Lane::First, false).expect("a report");
        assert_eq!(report.ids().collect::<Vec<_>>(), (0..MANY).collect::<Vec<_>>());
        inflight.receive(Lane::Second, Report::default(), of_queue(None, MANY..2 * MANY));
        finish_all(&inflight);
        // ...so the second lane does not report them,
        assert!(inflight.begin(Lane::Second, false).is_none());
        inflight.receive(Lane::First, report, Answer::default());
        // and once that claim has ended, either lane may.
        assert_eq!(ids(inflight.begin(Lane::Second, false)), (MANY..2 * MANY).collect::<Vec<_>>());
        assert!(!inflight.is_empty(), "a report under way is in flight");
    }

    #[test]
    fn the_second_lane_leaves_queues_and_failed_jobs_to_the_first() {
        let inflight = inflight();
        claim(&inflight, Some(7), 0..MANY);
        claim(&inflight, None, MANY..2 * MANY);
        let failed = start(&inflight).expect("a job");
        finish_all(&inflight);
        let error = crate::TaskError::new("oops");
        finish(&inflight, &failed, Outcome::Failed { error, remaining: None });
        finish_all(&inflight);
        let unqueued = ids(inflight.begin(Lane::Second, false));
        assert!(unqueued.iter().all(|id| *id >= MANY && *id != failed.job.id), "{unqueued:?}");
        let (report, _) = inflight.begin(Lane::First, false).expect("a report");
        assert_eq!(report.ended.len() + unqueued.len(), 2 * SECOND_LANE_MIN_JOBS);
    }

    #[test]
    fn the_second_lane_pauses_after_contention_with_other_workers() {
        let inflight = inflight();
        claim(&inflight, None, 0..MANY + 1);
        finish_all(&inflight);
        exchange(&inflight, Lane::First, blocked(&[0], &[]));
        claim(&inflight, None, 1000..1000 + MANY);
        finish_all(&inflight);
        assert!(inflight.begin(Lane::Second, false).is_none());
        inflight.state().contended_until = Instant::now();
        assert!(inflight.begin(Lane::Second, false).is_some());
    }

    #[test]
    fn the_first_lane_repeats_a_failed_claim_of_the_second() {
        let inflight = inflight();
        claim(&inflight, None, 0..MANY);
        finish_all(&inflight);
        exchange(&inflight, Lane::Second, Answer::default());
        assert!(inflight.begin(Lane::First, false).is_none(), "nothing to report, and no claim is due");
        inflight.not_written(Lane::Second, Report::default());
        assert!(inflight.begin(Lane::First, false).is_some_and(|(_, wanted)| wanted > 0));
    }

    #[test]
    fn a_cancelled_job_does_not_start_even_if_its_claim_arrives_later() {
        let inflight = inflight();
        let locked_at = Job::example(1).created_at;
        let claim = |ids: std::ops::Range<i64>| {
            inflight.wake_claim();
            let jobs = ids.map(|id| Job { locked_at: Some(locked_at), ..Job::example(id) });
            let jobs = jobs.map(Arc::new).collect();
            exchange(&inflight, Lane::First, Answer { jobs, ..Answer::default() });
        };
        claim(1..3);
        let running = start(&inflight).expect("a job");
        let cancelled = [1, 2, 3, 4].map(|job_id| {
            let locked_at = locked_at - chrono::TimeDelta::seconds(i64::from(job_id == 4));
            CancelledClaim { job_id, locked_at, how: Cancelled::Asked }
        });
        let unstarted: Vec<i64> = inflight.cancel(&cancelled).iter().map(|job| job.id).collect();
        assert_eq!(unstarted, [2]);
        assert!(running.cancellation().is_cancelled() && running.is_cancelled());
        claim(3..5);
        assert_eq!(start(&inflight).expect("a job").job.id, 4, "its earlier claim was cancelled");
        assert!(start(&inflight).is_none());
    }

    #[test]
    fn jobs_whose_task_is_removed_are_released_unless_they_have_started() {
        let now = watch::Sender::new(tasks(&["t", "u"]));
        let inflight = inflight_with(&now);
        let of_u = |id| Job { task_identifier: "u".into(), ..Job::example(id) };
        exchange(&inflight, Lane::First, claimed(vec![Job::example(1), Job::example(2), of_u(3)]));
        let started = start(&inflight).expect("a job");
        now.send_replace(tasks(&["u"]));
        let next = start(&inflight).expect("a job");
        assert_eq!((started.job.id, next.job.id), (1, 3));
        inflight.receive(Lane::First, Report::default(), claimed(vec![Job::example(4)]));
        assert!(start(&inflight).is_none(), "the job was claimed before its task was removed");
        finish(&inflight, &started, Outcome::Done);
        let (report, _) = inflight.begin(Lane::First, false).expect("a report");
        let settled: Vec<_> = report.ended.iter().map(|ended| (ended.job.id, ended.settlement.clone())).collect();
        let released = |id| (id, settle::release(&Job::example(id)));
        assert_eq!(settled, [released(2), released(4), (1, Settlement::Complete)]);
    }

    #[test]
    fn a_report_that_was_not_written_is_repeated_and_holds_its_queues() {
        let inflight = inflight();
        claim(&inflight, Some(7), 1..3);
        finish_all(&inflight);
        for _ in 0..2 {
            let (report, _) = inflight.begin(Lane::First, false).expect("a report");
            assert_eq!((report.ids().collect::<Vec<_>>(), &report.free_queues[..]), (vec![1, 2], &[7][..]));
            inflight.not_written(Lane::First, report);
            assert!(!inflight.is_empty());
        }
        exchange(&inflight, Lane::First, Answer::default());
        assert!(inflight.is_empty());
    }

    #[test]
    fn a_queue_may_be_freed_only_if_no_job_of_it_is_left_and_none_is_released() {
        let queue = |has_head, unreported| Queue { has_head, unreported, ..Queue::default() };
        let report = |jobs, releases| QueueReport { jobs, releases };
        assert!(queue(false, 0).may_be_freed_by(report(0, false)));
        assert!(queue(false, 2).may_be_freed_by(report(2, false)));
        assert!(!queue(false, 2).may_be_freed_by(report(1, false)), "one is blocked, or waits for a later report");
        assert!(!queue(false, 2).may_be_freed_by(report(2, true)), "one is released");
        assert!(!queue(true, 0).may_be_freed_by(report(0, false)), "one runs");
        let mut behind = queue(false, 0);
        behind.behind.push_back(ClaimedJob::new(Job::example(1), 0, Instant::now()));
        assert!(!behind.may_be_freed_by(report(0, false)));
    }

    #[test]
    fn a_queue_is_freed_after_the_report_that_releases_its_jobs_and_not_by_it() {
        let inflight = inflight();
        claim(&inflight, Some(7), 1..4);
        let head = start(&inflight).expect("the first job of the queue");
        // The jobs behind the head have waited too long, and the head ends before their release is reported.
        wait_too_long(&inflight);
        finish(&inflight, &head, Outcome::Done);
        let report = exchange(&inflight, Lane::First, Answer::default());
        assert_eq!((released(&report), &report.free_queues[..]), (vec![2, 3], &[][..]));
        let report = exchange(&inflight, Lane::First, Answer::default());
        assert_eq!((report.ended.len(), &report.free_queues[..]), (0, &[7][..]));
        assert!(inflight.is_empty());
    }

    #[test]
    fn a_queue_is_not_freed_while_a_slow_second_lane_delays_the_report_of_its_jobs() {
        let inflight = inflight();
        claim(&inflight, None, 100..100 + MANY);
        finish_all(&inflight);
        // The second lane's exchange is under way when the jobs of the queue arrive.
        let (second_report, _) = inflight.begin(Lane::Second, false).expect("a report of the second lane");
        claim(&inflight, Some(7), 1..4);
        let head = start(&inflight).expect("the first job of the queue");
        wait_too_long(&inflight);
        assert!(inflight.begin(Lane::First, false).is_none(), "they wait for the second lane's answer");
        finish(&inflight, &head, Outcome::Done);
        inflight.receive(Lane::Second, second_report, Answer::default());
        let report = exchange(&inflight, Lane::First, Answer::default());
        assert_eq!((released(&report), &report.free_queues[..]), (vec![2, 3], &[][..]));
        assert_eq!(exchange(&inflight, Lane::First, Answer::default()).free_queues, [7]);
    }

    #[test]
    fn a_queue_whose_task_is_removed_is_freed_after_its_jobs_are_released() {
        let now = watch::Sender::new(tasks(&["t", "u"]));
        let inflight = inflight_with(&now);
        let job = |id, task: &str| Job { task_identifier: task.into(), job_queue_id: Some(7), ..Job::example(id) };
        let jobs = vec![job(1, "u"), job(2, "t"), job(3, "u")];
        exchange(&inflight, Lane::First, claimed(jobs));
        let head = start(&inflight).expect("the first job of the queue");
        now.send_replace(tasks(&["u"]));
        assert!(start(&inflight).is_none());
        finish(&inflight, &head, Outcome::Done);
        let report = exchange(&inflight, Lane::First, Answer::default());
        assert_eq!((released(&report), &report.free_queues[..]), (vec![2, 3], &[][..]));
        assert_eq!(exchange(&inflight, Lane::First, Answer::default()).free_queues, [7]);
    }

    #[test]
    fn a_queue_stays_locked_while_one_of_its_jobs_is_blocked() {
        let inflight = inflight();
        claim(&inflight, Some(7), 1..3);
        claim(&inflight, None, 3..4);
        finish_all(&inflight);
        let recorded = exchange(&inflight, Lane::First, blocked(&[1], &[7]));
        assert_eq!(recorded.ids().collect::<Vec<_>>(), [2, 3]);
        assert!(inflight.begin(Lane::First, false).is_none() && !inflight.is_empty());
        assert_eq!(inflight.blocked(), [1]);
        inflight.state().blocked[0].until = Instant::now();
        let (report, _) = inflight.begin(Lane::First, false).expect("it is reported again");
        assert_eq!((report.ids().collect::<Vec<_>>(), &report.free_queues[..]), (vec![1], &[7][..]));
        inflight.receive(Lane::First, report, Answer::default());
        assert!(inflight.is_empty());
    }

    #[test]
    fn a_job_that_is_not_at_its_place_is_reported_again_at_once_by_its_id() {
        let inflight = inflight();
        claim(&inflight, None, 1..3);
        finish_all(&inflight);
        let answer = Answer { missed_jobs: [1].into(), ..Answer::default() };
        let recorded = exchange(&inflight, Lane::First, answer);
        assert_eq!(recorded.ids().collect::<Vec<_>>(), [2]);
        assert!(!inflight.is_empty() && !inflight.is_blocked_for_long());
        let (report, _) = inflight.begin(Lane::First, false).expect("it is reported again");
        assert!(report.ids().eq([1]) && report.ended[0].is_missed);
        inflight.receive(Lane::First, report, Answer::default());
        assert!(inflight.is_empty());
    }

    #[test]
    fn reports_of_blocked_jobs_back_off() {
        let inflight = inflight();
        claim(&inflight, None, 1..2);
        finish_all(&inflight);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            let now = Instant::now();
            exchange(&inflight, Lane::First, blocked(&[1], &[]));
            let mut state = inflight.state();
            pauses.push(state.blocked[0].until - now);
            state.blocked[0].until = Instant::now();
        }
        assert!(pauses[0] < pauses[3] && pauses[11] >= MAX_BLOCKED_RETRY && inflight.is_blocked_for_long());
        exchange(&inflight, Lane::First, Answer::default());
        assert!(inflight.is_empty() && !inflight.is_blocked_for_long());
    }

    #[test]
    fn an_ended_job_that_was_claimed_again_is_recognised_by_the_time_of_its_claim() {
        let inflight = inflight();
        let at = |seconds| Job { locked_at: DateTime::from_timestamp(seconds, 0), ..Job::example(1) };
        inflight.wake_claim();
        exchange(&inflight, Lane::First, claimed(vec![at(1)]));
        finish_all(&inflight);
        inflight.reconcile(vec![at(1), at(3601)], &[]);
        assert!(start(&inflight).is_none(), "it is to be reported, and its lock was kept fresh");
        inflight.reconcile(vec![at(5)], &[]);
        assert_eq!(start(&inflight).map(|running| running.job.locked_at), Some(at(5).locked_at));
    }

    /// This happens after a failover to a standby that had not received the claim.
    #[test]
    fn a_running_job_that_is_claimed_again_is_reported_once_under_its_new_claim() {
        for queue in [None, Some(7)] {
            let inflight = inflight();
            let at = |seconds| {
                let locked_at = DateTime::from_timestamp(seconds, 0);
                claimed(vec![Job { job_queue_id: queue, locked_at, ..Job::example(1) }])
            };
            inflight.wake_claim();
            exchange(&inflight, Lane::First, at(1));
            let running = start(&inflight).expect("a job");
            inflight.reconcile(Vec::new(), &[]);
            inflight.wake_claim();
            exchange(&inflight, Lane::First, at(5));
            assert!(start(&inflight).is_none(), "it runs already");
            finish(&inflight, &running, Outcome::Done);
            let report = exchange(&inflight, Lane::First, Answer::default());
            assert_eq!(report.ended.len(), 1);
            assert_eq!(report.ended[0].job.locked_at, DateTime::from_timestamp(5, 0));
            assert!(inflight.is_empty());
        }
    }

    #[test]
    fn another_job_with_the_id_of_a_running_one_waits_for_its_end() {
        let inflight = inflight();
        let created_at = |seconds| {
            let at = DateTime::from_timestamp(seconds, 0);
            claimed(vec![Job { created_at: at.expect("a time"), locked_at: at, ..Job::example(1) }])
        };
        inflight.wake_claim();
        exchange(&inflight, Lane::First, created_at(1));
        let running = start(&inflight).expect("a job");
        inflight.wake_claim();
        exchange(&inflight, Lane::First, created_at(5));
        assert!(start(&inflight).is_none());
        finish(&inflight, &running, Outcome::Done);
        assert_eq!(start(&inflight).expect("the other job").job.locked_at, DateTime::from_timestamp(5, 0));
    }

    /// Job 1, claimed at that second.
    fn job_of(seconds: i64) -> Job {
        Job { locked_at: DateTime::from_timestamp(seconds, 0), ..Job::example(1) }
    }

    fn claimed_at(seconds: i64) -> Answer {
        claimed(vec![job_of(seconds)])
    }

    #[test]
    fn a_job_that_was_changed_before_it_was_claimed_again_runs_again() {
        let inflight = inflight();
        inflight.wake_claim();
        exchange(&inflight, Lane::First, claimed_at(1));
        let running = start(&inflight).expect("a job");
        // It was unlocked, and a keyed add has put another event into it.
        let again = Job { revision: 1, ..job_of(5) };
        inflight.wake_claim();
        exchange(&inflight, Lane::First, claimed(vec![again]));
        finish(&inflight, &running, Outcome::Done);
        assert_eq!(start(&inflight).expect("the event").job.locked_at, DateTime::from_timestamp(5, 0));
        let report = exchange(&inflight, Lane::First, Answer::default());
        assert_eq!(report.ended[0].job.locked_at, DateTime::from_timestamp(1, 0), "which the fence rejects");
    }

    #[test]
    fn a_job_that_waits_and_is_claimed_again_starts_once() {
        let inflight = inflight();
        inflight.wake_claim();
        exchange(&inflight, Lane::First, claimed_at(1));
        // An operator has unlocked it.
        inflight.wake_claim();
        exchange(&inflight, Lane::First, claimed_at(5));
        let running = start(&inflight).expect("a job");
        assert_eq!(running.job.locked_at, DateTime::from_timestamp(5, 0));
        assert!(start(&inflight).is_none(), "it runs already");
        let report = exchange(&inflight, Lane::First, Answer::default());
        assert_eq!((released(&report), report.ended[0].job.locked_at), (vec![1], DateTime::from_timestamp(1, 0)));
        finish(&inflight, &running, Outcome::Done);
        exchange(&inflight, Lane::First, Answer::default());
        assert!(inflight.is_empty());
    }

    #[test]
    fn a_new_claim_that_a_failover_has_lost_is_forgotten() {
        let inflight = inflight();
        inflight.wake_claim();
        exchange(&inflight, Lane::First, claimed_at(1));
        let running = start(&inflight).expect("a job");
        // An operator has unlocked it, and a failover has lost that and the new claim.
        inflight.wake_claim();
        exchange(&inflight, Lane::First, claimed_at(5));
        inflight.reconcile(vec![job_of(1)], &[]);
        finish(&inflight, &running, Outcome::Done);
        let report = exchange(&inflight, Lane::First, Answer::default());
        assert_eq!(report.ended[0].job.locked_at, DateTime::from_timestamp(1, 0));
        assert!(inflight.is_empty());
    }

    #[test]
    fn a_queue_that_a_failover_has_locked_again_is_freed() {
        let inflight = inflight();
        claim(&inflight, Some(7), 1..2);
        // One queue of which it has a job, and one that it has freed before.
        inflight.reconcile(jobs_of_queue(Some(7), 1..2), &[7, 8]);
        let (report, _) = inflight.begin(Lane::First, false).expect("a report");
        assert_eq!((report.ended.len(), &report.free_queues[..]), (0, &[8][..]));
        inflight.receive(Lane::First, report, Answer::default());
        finish_all(&inflight);
        assert_eq!(exchange(&inflight, Lane::First, Answer::default()).free_queues, [7]);
        assert!(inflight.is_empty());
    }

    #[test]
    fn waiting_jobs_that_the_worker_no_longer_holds_do_not_start() {
        let inflight = inflight();
        claim(&inflight, None, 1..4);
        inflight.reconcile(vec![Job::example(2)], &[]);
        assert_eq!(start(&inflight).map(|running| running.job.id), Some(2));
        assert!(start(&inflight).is_none());
    }

    #[test]
    fn a_queue_that_is_claimed_again_while_it_is_freed_is_held_again() {
        let inflight = inflight();
        claim(&inflight, Some(7), 1..2);
        finish_all(&inflight);
        let (report, _) = inflight.begin(Lane::First, false).expect("a report");
        assert_eq!(report.free_queues, [7]);
        // The second lane's claim runs right after the first lane's exchange, but its answer arrives first.
        inflight.receive(Lane::Second, Report::default(), of_queue(Some(7), 2..3));
        inflight.receive(Lane::First, report, Answer::default());
        finish_all(&inflight);
        let report = exchange(&inflight, Lane::First, Answer::default());
        assert_eq!((report.ids().collect::<Vec<_>>(), &report.free_queues[..]), (vec![2], &[7][..]));
        assert!(inflight.is_empty());
    }
}
