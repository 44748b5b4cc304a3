//! What the worker has in hand: jobs that are claimed and wait, jobs that run, outcomes to be reported. Decides what
//! runs next (in order of priority, one at a time of a queue, within each task's limit). Touches no database.
//!
//! Runners take jobs from here and bring outcomes back; the exchange loop takes the outcomes and brings jobs. The
//! two meet nowhere else.
//!
//! Invariants, each checked by a test below or by `model/`: a job is in at most one of `ready`, `behind`, `over_limit`,
//! `running`, `report`, `blocked` and a report that is under way. A queue is in `queues` exactly while the worker has, or
//! may have, an unreported job of it. No report both gives back a job of a queue and frees that queue.

use crate::exchange::{Answer, Ended, Lane, Pace, Report, WORTH_A_LANE};
use crate::execute::Outcome;
use crate::job::Job;
use crate::next_claim::{ClaimResult, NextClaim};
use crate::recovery::Pulse;
use crate::settle::{self, Settlement};
use crate::task::{Task, Tasks};
use chrono::{DateTime, Utc};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

/// A job that has waited this long in hand is given back: somebody else may have a slot for it.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// When a job is reported again whose row others had locked: after this, doubling, up to the other. Mostly the lock lasts as
/// long as another worker's claim.
const FIRST_BLOCKED_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_BLOCKED_PAUSE: Duration = Duration::from_secs(1);

/// How long the second lane rests after other workers have got in the way: more claims at once would only meet more rows
/// that are locked (bench/RESULTS.md, "Eight processes").
const CROWDED_FOR: Duration = Duration::from_secs(1);

pub(crate) struct Hand {
    state: Mutex<State>,
    /// Whether jobs may begin.
    pulse: Arc<Pulse>,
    job_ready: Notify,
    /// Notified when there is something to report, or room for more.
    pub(crate) exchange_due: Notify,
    /// Notified when there is so much of it that the second lane is to help.
    pub(crate) second_lane_due: Notify,
}

struct State {
    tasks: Arc<Tasks>,
    new_tasks: watch::Receiver<Arc<Tasks>>,
    concurrency: usize,
    pace: Pace,
    /// What could start now, if there is a slot.
    ready: BinaryHeap<Reverse<Waiting>>,
    queues: HashMap<i32, Queue>,
    /// Jobs whose task runs as often as it may.
    over_limit: HashMap<Arc<str>, VecDeque<Waiting>>,
    running: HashMap<i64, Running>,
    running_of_task: HashMap<Arc<str>, usize>,
    /// Jobs to be reported.
    report: Vec<Ended>,
    /// Jobs that were reported in vain, because another transaction has locked their rows.
    blocked: Vec<Blocked>,
    /// Until when the second lane rests.
    crowded_until: Instant,
    /// How many replies have come.
    replies: u64,
    /// The exchanges that are under way, one of each lane at most.
    first: Option<UnderWay>,
    second: Option<UnderWay>,
    next_claim: NextClaim,
    poll_interval: Duration,
    /// Queues that may have no job in hand any more.
    idle_queues: Vec<i32>,
    closed: bool,
}

/// An exchange that is under way: how many replies had come when it began, and how many jobs it is to bring.
struct UnderWay {
    began: u64,
    wanted: usize,
    limited: bool,
}

/// A job that was reported in vain, and when to report it again.
struct Blocked {
    ended: Ended,
    until: Instant,
}

/// A queue that this worker holds.
#[derive(Default)]
struct Queue {
    /// Whether one of its jobs runs or may run next. The others wait behind it.
    has_head: bool,
    behind: VecDeque<Waiting>,
    /// How many of its jobs are to be reported, being reported, or blocked.
    unreported: usize,
}

impl Queue {
    fn is_idle(&self) -> bool {
        !self.has_head && self.behind.is_empty()
    }

    /// The rule: a report frees a queue if none of its jobs is in hand, the report carries all that are unreported, and it
    /// gives none of them back. The claim in the same exchange would not see a job that goes back, and take later ones first.
    fn may_be_freed_by(&self, report: OfQueue) -> bool {
        self.is_idle() && self.unreported == report.jobs && !report.gives_back
    }
}

/// How long a job waits that was reported in vain so many times.
fn blocked_pause(tries: u8) -> Duration {
    FIRST_BLOCKED_PAUSE.saturating_mul(1 << tries.saturating_sub(1).min(20)).min(LONGEST_BLOCKED_PAUSE)
}

/// What a report says of a queue.
#[derive(Clone, Copy, Default)]
struct OfQueue {
    jobs: usize,
    gives_back: bool,
}

fn of_queues(report: &Report) -> HashMap<i32, OfQueue> {
    let mut of_queues: HashMap<i32, OfQueue> = HashMap::new();
    for ended in &report.ended {
        if let Some(queue) = ended.job.job_queue_id {
            let of_queue = of_queues.entry(queue).or_default();
            of_queue.jobs += 1;
            of_queue.gives_back |= matches!(ended.settlement, Settlement::GiveBack(_));
        }
    }
    of_queues
}

struct Waiting {
    /// Here too, and not only in the job: it is compared a lot.
    order: (i16, DateTime<Utc>, i64),
    job: Arc<Job>,
    /// Which reply brought it.
    reply: u64,
    since: Instant,
}

impl Waiting {
    fn new(job: Job, reply: u64, since: Instant) -> Waiting {
        Waiting { order: (job.priority, job.run_at, job.id), job: Arc::new(job), reply, since }
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Waiting) -> bool {
        self.order == other.order
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Waiting) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Waiting) -> std::cmp::Ordering {
        self.order.cmp(&other.order)
    }
}

#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) job: Arc<Job>,
    pub(crate) task: Arc<Task>,
    pub(crate) cancellation: CancellationToken,
    reply: u64,
    started: Instant,
}

/// What there is for a runner.
enum Next {
    Job(Running),
    Wait,
    Leave,
}

impl Hand {
    pub(crate) fn new(
        mut new_tasks: watch::Receiver<Arc<Tasks>>,
        concurrency: usize,
        poll_interval: Duration,
        pulse: Arc<Pulse>,
    ) -> Hand {
        let tasks = new_tasks.borrow_and_update().clone();
        Hand {
            state: Mutex::new(State {
                tasks,
                new_tasks,
                concurrency,
                pace: Pace::default(),
                ready: BinaryHeap::new(),
                queues: HashMap::new(),
                over_limit: HashMap::new(),
                running: HashMap::new(),
                running_of_task: HashMap::new(),
                report: Vec::new(),
                blocked: Vec::new(),
                crowded_until: Instant::now(),
                replies: 0,
                first: None,
                second: None,
                next_claim: NextClaim::new(),
                poll_interval,
                idle_queues: Vec::new(),
                closed: false,
            }),
            pulse,
            job_ready: Notify::new(),
            exchange_due: Notify::new(),
            second_lane_due: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here leaves the state half changed when it panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job to run; `None` when the worker is leaving.
    pub(crate) async fn next(&self) -> Option<Running> {
        // Under load there is one: nobody has to be told that this runner waits, and not tell it in vain.
        if let Next::Job(running) = self.start() {
            return Some(running);
        }
        loop {
            let mut ready = std::pin::pin!(self.job_ready.notified());
            let mut beaten = std::pin::pin!(self.pulse.beaten.notified());
            ready.as_mut().enable();
            beaten.as_mut().enable();
            match self.start() {
                Next::Job(running) => return Some(running),
                Next::Leave => return None,
                Next::Wait => tokio::select! {
                    () = ready => {}
                    // A heartbeat matters only if its absence is what keeps jobs from beginning.
                    () = beaten, if !self.pulse.may_begin() => {}
                },
            }
        }
    }

    fn start(&self) -> Next {
        let mut state = self.state();
        if state.closed {
            return Next::Leave;
        }
        if !self.pulse.may_begin() {
            return Next::Wait;
        }
        let ended = state.report.len();
        let started = state.start();
        if state.report.len() > ended {
            // Jobs go back because their task was removed.
            self.exchange_due.notify_one();
        }
        match started {
            Some(running) => {
                if !state.ready.is_empty() {
                    self.job_ready.notify_one();
                }
                Next::Job(running)
            }
            None => Next::Wait,
        }
    }

    /// Takes the outcome of a job, and says what it will be settled as.
    pub(crate) fn finished(&self, running: &Running, outcome: Outcome) -> Settlement {
        let (settlement, more, much) = {
            let mut state = self.state();
            (state.finish(running, outcome), !state.ready.is_empty(), state.is_much_to_report())
        };
        self.exchange_due.notify_one();
        if much {
            self.second_lane_due.notify_one();
        }
        if more {
            self.job_ready.notify_one();
        }
        settlement
    }

    /// Begins an exchange, if there is anything to report or a claim is due: the report, and how many jobs to claim.
    pub(crate) fn begin(&self, lane: Lane, limited: bool) -> Option<(Report, usize)> {
        let mut state = self.state();
        let now = Instant::now();
        let (report, wanted) = match lane {
            Lane::First => {
                state.release_what_waited_too_long(now);
                state.report_blocked_again(now);
                let wanted = state.wanted();
                let report = state.report_of_first_lane();
                if report.is_empty() && !(wanted > 0 && state.next_claim.is_due(now)) {
                    return None;
                }
                if wanted > 0 {
                    state.next_claim.begin(now);
                }
                (report, wanted)
            }
            Lane::Second if state.crowded_until > now => return None,
            Lane::Second => {
                let wanted = if !limited && state.next_claim.is_backlog() { state.wanted() } else { 0 };
                let report = state.report_of_second_lane();
                if report.ended.len() < WORTH_A_LANE && wanted < WORTH_A_LANE {
                    state.put_back(report);
                    return None;
                }
                (report, wanted)
            }
        };
        *state.under_way(lane) = Some(UnderWay { began: state.replies, wanted, limited });
        if lane == Lane::First && state.is_much_to_do() {
            self.second_lane_due.notify_one();
        }
        Some((report, wanted))
    }

    /// Ends an exchange that was answered: takes the jobs it has brought. Returns the report without the jobs that were
    /// not written.
    pub(crate) fn receive(&self, lane: Lane, report: Report, answer: Answer) -> Report {
        let count = answer.jobs.len();
        let report = {
            let mut state = self.state();
            let now = Instant::now();
            if let Some(ended) = state.under_way(lane).take()
                && ended.wanted > 0
            {
                let result = ClaimResult {
                    wanted: ended.wanted,
                    got: count,
                    limited: ended.limited,
                    contended: answer.contended,
                };
                let poll_interval = state.poll_interval;
                match lane {
                    Lane::First => state.next_claim.finish(result, now, poll_interval),
                    Lane::Second => state.next_claim.finish_beside(result, now),
                }
            }
            let bytes = answer.jobs.iter().map(|job| job.payload.get().len()).sum();
            state.pace.claimed(count, bytes);
            let report = state.written(report, &answer, now);
            state.receive(answer.jobs);
            if state.closed {
                state.release_waiting(|_| true);
            }
            report
        };
        if lane == Lane::Second {
            self.exchange_due.notify_one();
        }
        for _ in 0..count {
            self.job_ready.notify_one();
        }
        report
    }

    /// Ends an exchange whose report could not be written.
    pub(crate) fn not_written(&self, lane: Lane, report: Report) {
        let mut state = self.state();
        *state.under_way(lane) = None;
        state.next_claim.wake(Instant::now());
        state.put_back(report);
        drop(state);
        self.exchange_due.notify_one();
    }

    /// There may be new jobs: a claim is due.
    pub(crate) fn wake_claim(&self) {
        self.state().next_claim.wake(Instant::now());
    }

    /// A job will be due at this time.
    pub(crate) fn claim_not_after(&self, at: Instant) {
        self.state().next_claim.not_after(at);
    }

    /// When the next exchange is to begin, if nothing else happens before.
    pub(crate) fn next_exchange_at(&self) -> Option<Instant> {
        let state = self.state();
        let claim = (state.wanted() > 0).then(|| state.next_claim.at());
        let blocked = state.blocked.iter().map(|blocked| blocked.until).min();
        let release = state.waiting().map(|waiting| waiting.since + LONGEST_WAIT).min();
        [claim, blocked, release].into_iter().flatten().min()
    }

    /// How many more jobs each limited task may have in hand.
    pub(crate) fn limits(&self) -> HashMap<Arc<str>, usize> {
        let mut state = self.state();
        state.take_new_tasks();
        let limited = state.tasks.values().filter_map(|task| Some((task, task.options.max_concurrent?)));
        let in_hand = |task: &Task| {
            let waiting = state.waiting().filter(|waiting| waiting.job.task_identifier == task.identifier).count();
            waiting + state.running_of_task.get(&task.identifier).copied().unwrap_or(0)
        };
        limited.map(|(task, limit)| (task.identifier.clone(), limit.saturating_sub(in_hand(task)))).collect()
    }

    pub(crate) fn has_free_slots(&self) -> bool {
        let state = self.state();
        state.running.len() < state.concurrency
    }

    pub(crate) fn measured_round_trip(&self, took: Duration) {
        self.state().pace.round_trip(took);
    }

    /// Whether nothing waits, runs, is to be reported, or is under way, and no queue is held.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state();
        let under_way = state.first.is_some() || state.second.is_some();
        let is_all_reported = state.report.is_empty() && state.blocked.is_empty() && state.queues.is_empty();
        state.in_hand() == 0 && is_all_reported && !under_way
    }

    /// Whether another transaction has kept a row locked for longer than a claim takes.
    pub(crate) fn is_blocked_for_long(&self) -> bool {
        self.state().blocked.iter().any(|blocked| blocked_pause(blocked.ended.tries) >= LONGEST_BLOCKED_PAUSE)
    }

    /// The jobs that were reported in vain, because another transaction has locked their rows.
    pub(crate) fn blocked(&self) -> Vec<i64> {
        self.state().blocked.iter().map(|blocked| blocked.ended.job.id).collect()
    }

    /// Jobs that have run for so long, and their queues.
    pub(crate) fn running_for(&self, long: Duration) -> (Vec<i64>, Vec<i32>) {
        let state = self.state();
        let long_running = state.running.values().filter(|running| running.started.elapsed() >= long);
        let jobs: Vec<&Job> = long_running.map(|running| &*running.job).collect();
        let queues = jobs.iter().filter_map(|job| job.job_queue_id).collect();
        (jobs.iter().map(|job| job.id).collect(), queues)
    }

    /// Takes those of the jobs that the database says this worker holds which it does not know of: that neither wait, nor run,
    /// nor have ended. One that has ended may have been claimed again since.
    pub(crate) fn receive_unknown(&self, mut jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let mut state = self.state();
        let in_hand: HashSet<i64> =
            state.waiting().map(|waiting| waiting.job.id).chain(state.running.keys().copied()).collect();
        let ended: HashMap<i64, Arc<Job>> = state.ended().map(|ended| (ended.job.id, ended.job.clone())).collect();
        jobs.retain(|job| {
            !in_hand.contains(&job.id) && !ended.get(&job.id).is_some_and(|ended| ended.is_same_claim(job))
        });
        state.receive(jobs);
        drop(state);
        self.job_ready.notify_waiters();
    }

    /// Starts nothing any more, releases what has not begun, and asks what runs to stop.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.release_waiting(|_| true);
        for running in state.running.values() {
            running.cancellation.cancel();
        }
        drop(state);
        self.job_ready.notify_waiters();
        self.exchange_due.notify_one();
    }

    /// Gives up on what still runs, whose runners were stopped.
    pub(crate) fn interrupt(&self, delay: Duration) -> Vec<Arc<Job>> {
        let mut state = self.state();
        let running: Vec<Running> = state.running.values().cloned().collect();
        for interrupted in &running {
            state.end(interrupted, settle::interrupted(delay), None);
        }
        running.into_iter().map(|running| running.job).collect()
    }
}

impl State {
    fn waiting(&self) -> impl Iterator<Item = &Waiting> {
        let behind = self.queues.values().flat_map(|queue| &queue.behind);
        self.ready.iter().map(|Reverse(waiting)| waiting).chain(behind).chain(self.over_limit.values().flatten())
    }

    /// Jobs that have ended and are not written yet.
    fn ended(&self) -> impl Iterator<Item = &Ended> {
        self.report.iter().chain(self.blocked.iter().map(|blocked| &blocked.ended))
    }

    fn in_hand(&self) -> usize {
        let behind: usize = self.queues.values().map(|queue| queue.behind.len()).sum();
        let over_limit: usize = self.over_limit.values().map(VecDeque::len).sum();
        self.ready.len() + behind + over_limit + self.running.len()
    }

    fn under_way(&mut self, lane: Lane) -> &mut Option<UnderWay> {
        match lane {
            Lane::First => &mut self.first,
            Lane::Second => &mut self.second,
        }
    }

    /// How many jobs to claim, with what is in hand and on its way.
    fn wanted(&self) -> usize {
        if self.closed {
            return 0;
        }
        let on_its_way = |under_way: &Option<UnderWay>| under_way.as_ref().map_or(0, |under_way| under_way.wanted);
        let coming = on_its_way(&self.first) + on_its_way(&self.second);
        self.pace.wanted(self.concurrency, self.in_hand() + coming)
    }

    fn is_much_to_report(&self) -> bool {
        self.first.is_some() && self.second.is_none() && self.report.len() >= WORTH_A_LANE
    }

    fn is_much_to_do(&self) -> bool {
        self.is_much_to_report()
            || (self.second.is_none() && self.next_claim.is_backlog() && self.wanted() >= WORTH_A_LANE)
    }

    /// Everything, except what the second lane's claim may stumble over, and the queues that it frees.
    fn report_of_first_lane(&mut self) -> Report {
        let began = self.second.as_ref().map(|second| second.began);
        let ended = match began {
            None => std::mem::take(&mut self.report),
            Some(began) => self.take_from_report(|ended| ended.reply <= began),
        };
        let mut report = Report { ended, free_queues: Vec::new() };
        report.free_queues = self.free_queues(&report);
        report
    }

    /// Jobs that are done and have no queue: those of a queue are the first lane's, which keeps their order.
    fn report_of_second_lane(&mut self) -> Report {
        let began = self.first.as_ref().map_or(u64::MAX, |first| first.began);
        let ended = self.take_from_report(|ended| {
            ended.reply <= began
                && ended.job.job_queue_id.is_none()
                && !matches!(ended.settlement, Settlement::GiveBack(_))
        });
        Report { ended, free_queues: Vec::new() }
    }

    fn take_from_report(&mut self, wanted: impl Fn(&Ended) -> bool) -> Vec<Ended> {
        let (taken, kept) = std::mem::take(&mut self.report).into_iter().partition(wanted);
        self.report = kept;
        taken
    }

    /// The queues that this report frees. They are not held from now on, unless it cannot be written.
    fn free_queues(&mut self, report: &Report) -> Vec<i32> {
        if self.idle_queues.is_empty() {
            return Vec::new();
        }
        let of_queues = of_queues(report);
        let (mut free, mut kept) = (Vec::new(), Vec::new());
        for id in std::mem::take(&mut self.idle_queues) {
            match self.queues.get(&id) {
                Some(queue) if queue.may_be_freed_by(of_queues.get(&id).copied().unwrap_or_default()) => {
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

    /// Puts a report that was not written before what has come since.
    fn put_back(&mut self, mut report: Report) {
        for id in std::mem::take(&mut report.free_queues) {
            let unreported = report.ended.iter().filter(|ended| ended.job.job_queue_id == Some(id)).count();
            self.hold_again(id, unreported);
        }
        report.ended.append(&mut self.report);
        self.report = report.ended;
    }

    /// A queue that was to be freed is not free.
    fn hold_again(&mut self, id: i32, unreported: usize) {
        self.queues.entry(id).or_default().unreported += unreported;
        self.idle_queues.push(id);
    }

    /// Takes note that a report was written, except for the rows that others have locked: those are reported again later.
    fn written(&mut self, mut report: Report, answer: &Answer, now: Instant) -> Report {
        let is_blocked = |ended: &mut Ended| answer.blocked_jobs.contains(&ended.job.id);
        let blocked: Vec<Ended> = match answer.blocked_jobs.is_empty() {
            true => Vec::new(),
            false => report.ended.extract_if(.., is_blocked).collect(),
        };
        let freed: HashSet<i32> = report.free_queues.iter().copied().collect();
        for id in report.ended.iter().filter_map(|ended| ended.job.job_queue_id) {
            // One that was freed by this report is not held any more, or was claimed again since.
            if let Some(queue) = self.queues.get_mut(&id).filter(|_| !freed.contains(&id)) {
                queue.unreported -= 1;
            }
        }
        for id in &answer.blocked_queues {
            let unreported = blocked.iter().filter(|ended| ended.job.job_queue_id == Some(*id)).count();
            self.hold_again(*id, unreported);
        }
        if !blocked.is_empty() {
            self.crowded_until = now + CROWDED_FOR;
        }
        self.blocked.extend(blocked.into_iter().map(|mut ended| {
            ended.tries = ended.tries.saturating_add(1);
            Blocked { until: now + blocked_pause(ended.tries), ended }
        }));
        report
    }

    fn report_blocked_again(&mut self, now: Instant) {
        let due = self.blocked.extract_if(.., |blocked| blocked.until <= now);
        self.report.extend(due.map(|blocked| blocked.ended));
    }

    fn receive(&mut self, jobs: Vec<Job>) {
        self.replies += 1;
        let (since, reply) = (Instant::now(), self.replies);
        let mut jobs: Vec<Waiting> = jobs.into_iter().map(|job| Waiting::new(job, reply, since)).collect();
        jobs.sort();
        for waiting in jobs {
            match waiting.job.job_queue_id {
                None => self.ready.push(Reverse(waiting)),
                Some(queue) => {
                    let queue = self.queues.entry(queue).or_default();
                    if std::mem::replace(&mut queue.has_head, true) {
                        queue.behind.push_back(waiting);
                    } else {
                        self.ready.push(Reverse(waiting));
                    }
                }
            }
        }
    }

    /// The worker may have been given other tasks: jobs that have not begun and whose task is gone go back.
    fn take_new_tasks(&mut self) {
        if self.new_tasks.has_changed().unwrap_or(false) {
            self.tasks = self.new_tasks.borrow_and_update().clone();
            self.release_removed();
        }
    }

    fn start(&mut self) -> Option<Running> {
        self.take_new_tasks();
        loop {
            let Reverse(waiting) = self.ready.pop()?;
            let identifier = waiting.job.task_identifier.clone();
            let Some(task) = self.tasks.get(&identifier).cloned() else {
                // It was claimed just before its task was removed.
                self.ready.push(Reverse(waiting));
                self.release_removed();
                continue;
            };
            let limit = task.options.max_concurrent;
            let count = self.running_of_task.entry(identifier.clone()).or_default();
            if limit.is_some_and(|limit| *count >= limit) {
                self.over_limit.entry(identifier).or_default().push_back(waiting);
                continue;
            }
            *count += 1;
            let running = Running {
                job: waiting.job,
                task,
                cancellation: CancellationToken::new(),
                reply: waiting.reply,
                started: Instant::now(),
            };
            self.running.insert(running.job.id, running.clone());
            return Some(running);
        }
    }

    fn finish(&mut self, running: &Running, outcome: Outcome) -> Settlement {
        self.pace.job(running.started.elapsed());
        let result = outcome.error().map_or(Ok(()), |error| Err(error.to_owned()));
        let settlement = settle::settlement(&running.job, outcome, &running.task.options);
        self.end(running, settlement.clone(), Some(result));
        settlement
    }

    fn end(&mut self, running: &Running, settlement: Settlement, result: Option<Result<(), String>>) {
        let job = &running.job;
        self.running.remove(&job.id);
        if let Some(count) = self.running_of_task.get_mut(&job.task_identifier) {
            *count -= 1;
        }
        if let Some(next) = self.over_limit.get_mut(&job.task_identifier).and_then(VecDeque::pop_front) {
            self.ready.push(Reverse(next));
        }
        self.report.push(Ended { job: job.clone(), reply: running.reply, settlement, result, tries: 0 });
        self.pass_queue_on(job);
    }

    /// The head of a queue is to be reported: the next job is ready, or the queue is idle.
    fn pass_queue_on(&mut self, job: &Job) {
        let Some(id) = job.job_queue_id else { return };
        let queue = self.queues.entry(id).or_default();
        queue.unreported += 1;
        match queue.behind.pop_front() {
            Some(next) => self.ready.push(Reverse(next)),
            None => {
                queue.has_head = false;
                self.idle_queues.push(id);
            }
        }
    }

    fn release_what_waited_too_long(&mut self, now: Instant) {
        if self.waiting().any(|waiting| now - waiting.since >= LONGEST_WAIT) {
            self.release_waiting(|waiting| now - waiting.since >= LONGEST_WAIT);
        }
    }

    /// Releases the jobs that have not begun and whose task is no longer there.
    fn release_removed(&mut self) {
        let tasks = self.tasks.clone();
        self.release_waiting(|waiting| !tasks.contains_key(&waiting.job.task_identifier));
    }

    /// Releases the jobs that have not begun and that `unwanted` names; of a queue all or none, to keep their order.
    fn release_waiting(&mut self, unwanted: impl Fn(&Waiting) -> bool) {
        let mut back: Vec<Waiting> = Vec::new();
        for queue in self.queues.values_mut() {
            if queue.behind.iter().any(&unwanted) {
                back.extend(std::mem::take(&mut queue.behind));
            }
        }
        let over_limit = std::mem::take(&mut self.over_limit).into_values().flatten();
        let ready = std::mem::take(&mut self.ready).into_iter().map(|Reverse(waiting)| waiting);
        let (unwanted, kept): (Vec<Waiting>, Vec<Waiting>) = ready.chain(over_limit).partition(unwanted);
        self.ready = kept.into_iter().map(Reverse).collect();
        for waiting in unwanted {
            if let Some(id) = waiting.job.job_queue_id
                && let Some(queue) = self.queues.get_mut(&id)
            {
                queue.has_head = false;
                back.extend(std::mem::take(&mut queue.behind));
                self.idle_queues.push(id);
            }
            back.push(waiting);
        }
        for waiting in back {
            if let Some(queue) = waiting.job.job_queue_id.and_then(|id| self.queues.get_mut(&id)) {
                queue.unreported += 1;
            }
            let settlement = settle::release(&waiting.job);
            self.report.push(Ended { job: waiting.job, reply: waiting.reply, settlement, result: None, tries: 0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TaskOptions;

    fn tasks(names: &[&str]) -> Arc<Tasks> {
        let task = |name: &str| Task::function(name, TaskOptions::default(), |_: serde_json::Value, _| async {});
        Arc::new(names.iter().map(|name| ((*name).into(), Arc::new(task(name)))).collect())
    }

    fn hand_with(tasks: &watch::Sender<Arc<Tasks>>) -> Hand {
        Hand::new(tasks.subscribe(), 4 * WORTH_A_LANE, Duration::from_secs(2), Arc::default())
    }

    fn hand() -> Hand {
        hand_with(&watch::Sender::new(tasks(&["t"])))
    }

    fn of_queue(queue: Option<i32>, ids: std::ops::Range<i64>) -> Answer {
        let jobs = ids.map(|id| Job { job_queue_id: queue, ..Job::example(id) }).collect();
        Answer { jobs, ..Answer::default() }
    }

    fn blocked(jobs: &[i64], queues: &[i32]) -> Answer {
        let (blocked_jobs, blocked_queues) = (jobs.iter().copied().collect(), queues.to_vec());
        Answer { blocked_jobs, blocked_queues, ..Answer::default() }
    }

    /// An exchange of this lane, with whatever there is to report.
    fn exchange(hand: &Hand, lane: Lane, answer: Answer) -> Report {
        let (report, _) = hand.begin(lane, false).expect("an exchange");
        hand.receive(lane, report, answer)
    }

    fn claim(hand: &Hand, queue: Option<i32>, ids: std::ops::Range<i64>) {
        hand.wake_claim();
        exchange(hand, Lane::First, of_queue(queue, ids));
    }

    fn start(hand: &Hand) -> Option<Running> {
        hand.state().start()
    }

    fn finish_all(hand: &Hand) {
        while let Some(running) = start(hand) {
            hand.finished(&running, Outcome::Done);
        }
    }

    fn ids(begun: Option<(Report, usize)>) -> Vec<i64> {
        begun.map_or(Vec::new(), |(report, _)| report.ids().collect())
    }

    fn given_back(report: &Report) -> Vec<i64> {
        let back = report.ended.iter().filter(|ended| matches!(ended.settlement, Settlement::GiveBack(_)));
        back.map(|ended| ended.job.id).collect()
    }

    /// As if all that wait had waited too long.
    fn wait_too_long(hand: &Hand) {
        hand.state().release_waiting(|_| true);
    }

    const MANY: i64 = WORTH_A_LANE as i64;

    #[test]
    fn a_job_is_reported_only_when_what_was_under_way_when_it_came_is_over() {
        let hand = hand();
        claim(&hand, None, 0..MANY);
        finish_all(&hand);
        // The first lane's claim began before the next jobs came...
        let (report, _) = hand.begin(Lane::First, false).expect("a report");
        assert_eq!(report.ids().collect::<Vec<_>>(), (0..MANY).collect::<Vec<_>>());
        hand.receive(Lane::Second, Report::default(), of_queue(None, MANY..2 * MANY));
        finish_all(&hand);
        // ...so the second lane leaves them alone,
        assert!(hand.begin(Lane::Second, false).is_none());
        hand.receive(Lane::First, report, Answer::default());
        // and when that is over, either may report them.
        assert_eq!(ids(hand.begin(Lane::Second, false)), (MANY..2 * MANY).collect::<Vec<_>>());
        assert!(!hand.is_empty(), "what is under way is in hand");
    }

    #[test]
    fn the_second_lane_leaves_queues_and_what_goes_back_to_the_first() {
        let hand = hand();
        claim(&hand, Some(7), 0..MANY);
        claim(&hand, None, MANY..2 * MANY);
        let failed = start(&hand).expect("a job");
        finish_all(&hand);
        let error = crate::TaskError::new("oops");
        hand.finished(&failed, Outcome::Failed { error, remaining: None });
        finish_all(&hand);
        let unqueued = ids(hand.begin(Lane::Second, false));
        assert!(unqueued.iter().all(|id| *id >= MANY && *id != failed.job.id), "{unqueued:?}");
        let (report, _) = hand.begin(Lane::First, false).expect("a report");
        assert_eq!(report.ended.len() + unqueued.len(), 2 * WORTH_A_LANE);
    }

    #[test]
    fn the_second_lane_rests_while_other_workers_are_in_the_way() {
        let hand = hand();
        claim(&hand, None, 0..MANY + 1);
        finish_all(&hand);
        exchange(&hand, Lane::First, blocked(&[0], &[]));
        claim(&hand, None, 1000..1000 + MANY);
        finish_all(&hand);
        assert!(hand.begin(Lane::Second, false).is_none());
        hand.state().crowded_until = Instant::now();
        assert!(hand.begin(Lane::Second, false).is_some());
    }

    #[test]
    fn a_claim_of_the_second_lane_that_came_to_nothing_is_made_by_the_first() {
        let hand = hand();
        claim(&hand, None, 0..MANY);
        finish_all(&hand);
        exchange(&hand, Lane::Second, Answer::default());
        assert!(hand.begin(Lane::First, false).is_none(), "nothing to report, and no claim is due");
        hand.not_written(Lane::Second, Report::default());
        assert!(hand.begin(Lane::First, false).is_some_and(|(_, wanted)| wanted > 0));
    }

    #[test]
    fn jobs_whose_task_is_removed_are_released_unless_they_have_begun() {
        let now = watch::Sender::new(tasks(&["t", "u"]));
        let hand = hand_with(&now);
        let of_u = |id| Job { task_identifier: "u".into(), ..Job::example(id) };
        let claimed = |jobs| Answer { jobs, ..Answer::default() };
        exchange(&hand, Lane::First, claimed(vec![Job::example(1), Job::example(2), of_u(3)]));
        let begun = start(&hand).expect("a job");
        now.send_replace(tasks(&["u"]));
        let next = start(&hand).expect("a job");
        assert_eq!((begun.job.id, next.job.id), (1, 3));
        hand.receive(Lane::First, Report::default(), claimed(vec![Job::example(4)]));
        assert!(start(&hand).is_none(), "it was claimed too early to know");
        hand.finished(&begun, Outcome::Done);
        let (report, _) = hand.begin(Lane::First, false).expect("a report");
        let settled: Vec<_> = report.ended.iter().map(|ended| (ended.job.id, ended.settlement.clone())).collect();
        let released = |id| (id, settle::release(&Job::example(id)));
        assert_eq!(settled, [released(2), released(4), (1, Settlement::Complete)]);
    }

    #[test]
    fn a_report_that_was_not_written_comes_again_and_holds_its_queues() {
        let hand = hand();
        claim(&hand, Some(7), 1..3);
        finish_all(&hand);
        for _ in 0..2 {
            let (report, _) = hand.begin(Lane::First, false).expect("a report");
            assert_eq!((report.ids().collect::<Vec<_>>(), &report.free_queues[..]), (vec![1, 2], &[7][..]));
            hand.not_written(Lane::First, report);
            assert!(!hand.is_empty());
        }
        exchange(&hand, Lane::First, Answer::default());
        assert!(hand.is_empty());
    }

    #[test]
    fn a_queue_may_be_freed_only_if_nothing_of_it_is_left_and_nothing_goes_back() {
        let queue = |has_head, unreported| Queue { has_head, unreported, ..Queue::default() };
        let report = |jobs, gives_back| OfQueue { jobs, gives_back };
        assert!(queue(false, 0).may_be_freed_by(report(0, false)));
        assert!(queue(false, 2).may_be_freed_by(report(2, false)));
        assert!(!queue(false, 2).may_be_freed_by(report(1, false)), "one is blocked, or left for a later report");
        assert!(!queue(false, 2).may_be_freed_by(report(2, true)), "one goes back");
        assert!(!queue(true, 0).may_be_freed_by(report(0, false)), "one runs");
        let mut behind = queue(false, 0);
        behind.behind.push_back(Waiting::new(Job::example(1), 0, Instant::now()));
        assert!(!behind.may_be_freed_by(report(0, false)));
    }

    #[test]
    fn a_queue_is_freed_after_the_report_that_releases_its_jobs_not_by_it() {
        let hand = hand();
        claim(&hand, Some(7), 1..4);
        let head = start(&hand).expect("the first job of the queue");
        // The jobs behind it have waited too long, and it ends before that is reported.
        wait_too_long(&hand);
        hand.finished(&head, Outcome::Done);
        let report = exchange(&hand, Lane::First, Answer::default());
        assert_eq!((given_back(&report), &report.free_queues[..]), (vec![2, 3], &[][..]));
        let report = exchange(&hand, Lane::First, Answer::default());
        assert_eq!((report.ended.len(), &report.free_queues[..]), (0, &[7][..]));
        assert!(hand.is_empty());
    }

    #[test]
    fn a_queue_is_not_freed_while_a_slow_second_lane_keeps_its_jobs_from_being_reported() {
        let hand = hand();
        claim(&hand, None, 100..100 + MANY);
        finish_all(&hand);
        // The second lane is on its way while the jobs of the queue come.
        let (beside, _) = hand.begin(Lane::Second, false).expect("a report of the second lane");
        claim(&hand, Some(7), 1..4);
        let head = start(&hand).expect("the first job of the queue");
        wait_too_long(&hand);
        assert!(hand.begin(Lane::First, false).is_none(), "they wait until the second lane is back");
        hand.finished(&head, Outcome::Done);
        hand.receive(Lane::Second, beside, Answer::default());
        let report = exchange(&hand, Lane::First, Answer::default());
        assert_eq!((given_back(&report), &report.free_queues[..]), (vec![2, 3], &[][..]));
        assert_eq!(exchange(&hand, Lane::First, Answer::default()).free_queues, [7]);
    }

    #[test]
    fn a_queue_whose_task_is_removed_is_freed_after_its_jobs_are_released() {
        let now = watch::Sender::new(tasks(&["t", "u"]));
        let hand = hand_with(&now);
        let job = |id, task: &str| Job { task_identifier: task.into(), job_queue_id: Some(7), ..Job::example(id) };
        let jobs = vec![job(1, "u"), job(2, "t"), job(3, "u")];
        exchange(&hand, Lane::First, Answer { jobs, ..Answer::default() });
        let head = start(&hand).expect("the first job of the queue");
        now.send_replace(tasks(&["u"]));
        assert!(start(&hand).is_none());
        hand.finished(&head, Outcome::Done);
        let report = exchange(&hand, Lane::First, Answer::default());
        assert_eq!((given_back(&report), &report.free_queues[..]), (vec![2, 3], &[][..]));
        assert_eq!(exchange(&hand, Lane::First, Answer::default()).free_queues, [7]);
    }

    #[test]
    fn a_queue_stays_locked_while_one_of_its_jobs_is_blocked() {
        let hand = hand();
        claim(&hand, Some(7), 1..3);
        claim(&hand, None, 3..4);
        finish_all(&hand);
        let written = exchange(&hand, Lane::First, blocked(&[1], &[7]));
        assert_eq!(written.ids().collect::<Vec<_>>(), [2, 3]);
        assert!(hand.begin(Lane::First, false).is_none() && !hand.is_empty());
        assert_eq!(hand.blocked(), [1]);
        hand.state().blocked[0].until = Instant::now();
        let (report, _) = hand.begin(Lane::First, false).expect("it is reported again");
        assert_eq!((report.ids().collect::<Vec<_>>(), &report.free_queues[..]), (vec![1], &[7][..]));
        hand.receive(Lane::First, report, Answer::default());
        assert!(hand.is_empty());
    }

    #[test]
    fn blocked_jobs_are_reported_again_ever_more_rarely() {
        let hand = hand();
        claim(&hand, None, 1..2);
        finish_all(&hand);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            let now = Instant::now();
            exchange(&hand, Lane::First, blocked(&[1], &[]));
            let mut state = hand.state();
            pauses.push(state.blocked[0].until - now);
            state.blocked[0].until = Instant::now();
        }
        assert!(pauses[0] < pauses[3] && pauses[11] >= LONGEST_BLOCKED_PAUSE && hand.is_blocked_for_long());
        exchange(&hand, Lane::First, Answer::default());
        assert!(hand.is_empty() && !hand.is_blocked_for_long());
    }

    #[test]
    fn a_job_that_has_ended_and_was_claimed_again_is_known_by_the_time_of_its_claim() {
        let hand = hand();
        let at = |seconds| Job { locked_at: DateTime::from_timestamp(seconds, 0), ..Job::example(1) };
        hand.wake_claim();
        exchange(&hand, Lane::First, Answer { jobs: vec![at(1)], ..Answer::default() });
        finish_all(&hand);
        hand.receive_unknown(vec![at(1), at(3601)]);
        assert!(start(&hand).is_none(), "it is to be reported, and its lock was kept fresh");
        hand.receive_unknown(vec![at(5)]);
        assert_eq!(start(&hand).map(|running| running.job.locked_at), Some(at(5).locked_at));
    }

    #[test]
    fn a_queue_that_is_claimed_again_while_it_is_freed_is_held_again() {
        let hand = hand();
        claim(&hand, Some(7), 1..2);
        finish_all(&hand);
        let (report, _) = hand.begin(Lane::First, false).expect("a report");
        assert_eq!(report.free_queues, [7]);
        // The second lane's claim comes right after the first lane's exchange, and its answer is here sooner.
        hand.receive(Lane::Second, Report::default(), of_queue(Some(7), 2..3));
        hand.receive(Lane::First, report, Answer::default());
        finish_all(&hand);
        let report = exchange(&hand, Lane::First, Answer::default());
        assert_eq!((report.ids().collect::<Vec<_>>(), &report.free_queues[..]), (vec![2], &[7][..]));
        assert!(hand.is_empty());
    }
}
