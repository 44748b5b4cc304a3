//! What the worker has in hand: jobs that are claimed and wait, jobs that run, outcomes to be reported. Says what
//! runs next (in order of priority, one at a time of a queue, within each task's limit). Touches no database.
//!
//! Runners take jobs from here and bring outcomes back; the exchange loop takes the outcomes and brings jobs. The
//! two meet nowhere else.

use crate::exchange::{Ended, Lane, Pace, Report, WORTH_A_LANE};
use crate::execute::Outcome;
use crate::job::Job;
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

/// How often it is looked whether rows are still held that keep outcomes from being written.
const ASIDE_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct Hand {
    state: Mutex<State>,
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
    report: Report,
    /// What could not be reported, because somebody else's open transaction holds the jobs' rows.
    aside: Report,
    /// When to look whether they are still held.
    look_aside_at: Instant,
    /// How many replies have come.
    replies: u64,
    /// The exchanges that are under way, one of each lane at most.
    first: Option<UnderWay>,
    second: Option<UnderWay>,
    /// Whether the last claim brought all that was wanted.
    more: bool,
    /// Whether the second lane left something to look for: the first may have been told that there is nothing.
    look: bool,
    /// Queues whose jobs the last report gave back: free only with the next one, because a claim in the same
    /// exchange would not see those jobs and run later ones first.
    free_next: Vec<i32>,
    closed: bool,
}

/// An exchange that is under way: how many replies had come when it began, and how many jobs it is to bring.
struct UnderWay {
    began: u64,
    wanted: usize,
}

/// The jobs of a queue that wait behind the one that is ready or running.
#[derive(Default)]
struct Queue {
    behind: VecDeque<Waiting>,
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
    pub(crate) fn new(mut new_tasks: watch::Receiver<Arc<Tasks>>, concurrency: usize) -> Hand {
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
                report: Report::default(),
                aside: Report::default(),
                look_aside_at: Instant::now(),
                replies: 0,
                first: None,
                second: None,
                more: false,
                look: false,
                free_next: Vec::new(),
                closed: false,
            }),
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
            ready.as_mut().enable();
            match self.start() {
                Next::Job(running) => return Some(running),
                Next::Leave => return None,
                Next::Wait => ready.await,
            }
        }
    }

    fn start(&self) -> Next {
        let mut state = self.state();
        if state.closed {
            return Next::Leave;
        }
        let ended = state.report.ended.len();
        let started = state.start();
        if state.report.ended.len() > ended {
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

    /// Begins an exchange, if there is anything to report, or to `look` for: the report, and how many jobs to claim.
    pub(crate) fn begin(&self, lane: Lane, look: bool) -> Option<(Report, usize)> {
        let mut state = self.state();
        let (report, wanted) = match lane {
            Lane::First => {
                state.give_back_what_waited_too_long();
                let (report, wanted) = (state.report_of_first_lane(), state.wanted());
                if report.is_empty() && !((look || state.look) && wanted > 0) {
                    return None;
                }
                state.look &= wanted == 0;
                (report, wanted)
            }
            Lane::Second => {
                let wanted = if look && state.more { state.wanted() } else { 0 };
                let report = state.report_of_second_lane();
                if report.ended.len() < WORTH_A_LANE && wanted < WORTH_A_LANE {
                    state.report.put_back(report);
                    return None;
                }
                (report, wanted)
            }
        };
        *state.under_way(lane) = Some(UnderWay { began: state.replies, wanted });
        if lane == Lane::First && state.is_much_to_do() {
            self.second_lane_due.notify_one();
        }
        Some((report, wanted))
    }

    /// Ends an exchange whose report is written: takes the jobs it has brought.
    pub(crate) fn receive(&self, lane: Lane, jobs: Vec<Job>) {
        let count = jobs.len();
        {
            let mut state = self.state();
            if let Some(ended) = state.under_way(lane).take()
                && ended.wanted > 0
            {
                state.more = count >= ended.wanted;
                state.look |= lane == Lane::Second && state.more;
            }
            state.receive(jobs);
            if state.closed {
                state.give_back_waiting(|_| true);
            }
        }
        if lane == Lane::Second {
            self.exchange_due.notify_one();
        }
        for _ in 0..count {
            self.job_ready.notify_one();
        }
    }

    /// Ends an exchange whose report could not be written.
    pub(crate) fn not_written(&self, lane: Lane, report: Report) {
        let mut state = self.state();
        *state.under_way(lane) = None;
        state.look |= lane == Lane::Second;
        state.report.put_back(report);
        drop(state);
        self.exchange_due.notify_one();
    }

    /// Ends the first lane's exchange, whose report could not be written because the rows of some jobs are `held`.
    pub(crate) fn set_aside(&self, report: Report, held: &HashSet<i64>) {
        let mut state = self.state();
        state.first = None;
        // Those that were to be free with the next report still are, not with this one.
        let mut later: Vec<i32> =
            state.report.free_queues.extract_if(.., |queue| report.concerns_queue(*queue)).collect();
        state.free_next.append(&mut later);
        state.report.put_back(report);
        state.put_aside(held);
        drop(state);
        self.exchange_due.notify_one();
    }

    /// The jobs that were set aside, when it is time to look whether they still have to be.
    pub(crate) fn what_was_set_aside(&self) -> Option<Vec<i64>> {
        let state = self.state();
        let is_time = !state.aside.is_empty() && state.look_aside_at <= Instant::now();
        is_time.then(|| state.aside.ids().collect())
    }

    /// Of what was set aside, only what is `held` still stays there.
    pub(crate) fn take_back(&self, held: &HashSet<i64>) {
        let mut state = self.state();
        let mut aside = std::mem::take(&mut state.aside);
        state.free_next.append(&mut aside.free_queues);
        state.report.put_back(aside);
        state.put_aside(held);
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

    /// Whether nothing waits, runs, is to be reported, or is under way.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state();
        let under_way = state.first.is_some() || state.second.is_some();
        let is_all_reported = state.report.is_empty() && state.aside.is_empty() && state.free_next.is_empty();
        state.in_hand() == 0 && is_all_reported && !under_way
    }

    /// Jobs that have run for so long, and their queues.
    pub(crate) fn running_for(&self, long: Duration) -> (Vec<i64>, Vec<i32>) {
        let state = self.state();
        let long_running = state.running.values().filter(|running| running.started.elapsed() >= long);
        let jobs: Vec<&Job> = long_running.map(|running| &*running.job).collect();
        let queues = jobs.iter().filter_map(|job| job.job_queue_id).collect();
        (jobs.iter().map(|job| job.id).collect(), queues)
    }

    /// Whether there are jobs that wait for a slot, or for somebody else's transaction.
    pub(crate) fn has_something_waiting(&self) -> bool {
        let state = self.state();
        state.in_hand() > state.running.len() || !state.aside.is_empty()
    }

    /// Takes those of the jobs that were claimed without our knowledge: that neither wait, nor run, nor have ended.
    pub(crate) fn receive_unknown(&self, mut jobs: Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        {
            let state = self.state();
            let waiting = state.waiting().map(|waiting| waiting.job.id);
            let known = waiting.chain(state.running.keys().copied());
            let known: HashSet<i64> = known.chain(state.report.ids()).chain(state.aside.ids()).collect();
            jobs.retain(|job| !known.contains(&job.id));
        }
        self.state().receive(jobs);
        self.job_ready.notify_waiters();
    }

    /// Starts nothing any more, gives back what has not begun, and asks what runs to stop.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.give_back_waiting(|_| true);
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
        self.first.is_some() && self.second.is_none() && self.report.ended.len() >= WORTH_A_LANE
    }

    fn is_much_to_do(&self) -> bool {
        self.is_much_to_report() || (self.second.is_none() && self.more && self.wanted() >= WORTH_A_LANE)
    }

    /// Everything, except what the second lane's claim may stumble over.
    fn report_of_first_lane(&mut self) -> Report {
        let report = match &self.second {
            None => std::mem::take(&mut self.report),
            Some(second) => {
                let began = second.began;
                let mut report = self.report.take(|ended| ended.reply <= began);
                if !self.report.ended.iter().any(|ended| ended.job.job_queue_id.is_some()) {
                    report.free_queues = std::mem::take(&mut self.report.free_queues);
                }
                report
            }
        };
        // With jobs of a queue still to be given back, its turn has not come.
        if !self.report.ended.iter().any(|ended| ended.job.job_queue_id.is_some()) {
            let free_next = std::mem::take(&mut self.free_next);
            self.report.free_queues.extend(free_next);
        }
        report
    }

    /// Jobs that are done and have no queue: those of a queue are the first lane's, which keeps their order.
    fn report_of_second_lane(&mut self) -> Report {
        let began = self.first.as_ref().map_or(u64::MAX, |first| first.began);
        self.report.take(|ended| {
            ended.reply <= began
                && ended.job.job_queue_id.is_none()
                && !matches!(ended.settlement, Settlement::GiveBack(_))
        })
    }

    /// Takes the jobs whose rows are `held` out of the report. Their queues stay locked as long, so that no later job of a
    /// queue comes before one that goes back to it.
    fn put_aside(&mut self, held: &HashSet<i64>) {
        self.aside.put_back(self.report.take(|ended| held.contains(&ended.job.id)));
        for queues in [&mut self.report.free_queues, &mut self.free_next] {
            let mut locked = queues.extract_if(.., |queue| self.aside.concerns_queue(*queue)).collect();
            self.aside.free_queues.append(&mut locked);
        }
        self.look_aside_at = Instant::now() + ASIDE_INTERVAL;
    }

    fn receive(&mut self, jobs: Vec<Job>) {
        self.replies += 1;
        let (since, reply) = (Instant::now(), self.replies);
        let mut jobs: Vec<Waiting> = jobs.into_iter().map(|job| Waiting::new(job, reply, since)).collect();
        jobs.sort();
        for waiting in jobs {
            match waiting.job.job_queue_id {
                None => self.ready.push(Reverse(waiting)),
                Some(queue) => match self.queues.get_mut(&queue) {
                    Some(queue) => queue.behind.push_back(waiting),
                    None => {
                        self.queues.insert(queue, Queue::default());
                        self.ready.push(Reverse(waiting));
                    }
                },
            }
        }
    }

    /// The worker may have been given other tasks: jobs that have not begun and whose task is gone go back.
    fn take_new_tasks(&mut self) {
        if self.new_tasks.has_changed().unwrap_or(false) {
            self.tasks = self.new_tasks.borrow_and_update().clone();
            self.give_back_removed();
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
                self.give_back_removed();
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
        self.report.ended.push(Ended { job: job.clone(), reply: running.reply, settlement, result });
        self.pass_queue_on(job);
    }

    /// A job of a queue is out of our hands: its next one is ready, or the queue is free.
    fn pass_queue_on(&mut self, job: &Job) {
        let Some(id) = job.job_queue_id else { return };
        match self.queues.get_mut(&id).and_then(|queue| queue.behind.pop_front()) {
            Some(next) => self.ready.push(Reverse(next)),
            None => {
                self.queues.remove(&id);
                let report = if self.aside.concerns_queue(id) { &mut self.aside } else { &mut self.report };
                report.free_queues.push(id);
            }
        }
    }

    fn give_back_what_waited_too_long(&mut self) {
        let now = Instant::now();
        if self.waiting().any(|waiting| now - waiting.since > LONGEST_WAIT) {
            self.give_back_waiting(|waiting| now - waiting.since > LONGEST_WAIT);
        }
    }

    /// Gives back the jobs that have not begun and whose task is no longer there.
    fn give_back_removed(&mut self) {
        let tasks = self.tasks.clone();
        self.give_back_waiting(|waiting| !tasks.contains_key(&waiting.job.task_identifier));
    }

    /// Gives back the jobs that have not begun and that `unwanted` names; of a queue all or none, to keep their order.
    fn give_back_waiting(&mut self, unwanted: impl Fn(&Waiting) -> bool) {
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
                && let Some(queue) = self.queues.remove(&id)
            {
                back.extend(queue.behind);
                self.free_next.push(id);
            }
            back.push(waiting);
        }
        for waiting in back {
            let settlement = settle::hand_back(&waiting.job);
            self.report.ended.push(Ended { job: waiting.job, reply: waiting.reply, settlement, result: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TaskOptions;

    fn hand() -> Hand {
        let task = Task::function("t", TaskOptions::default(), |_: serde_json::Value, _| async {});
        Hand::new(
            watch::Sender::new(Arc::new(Tasks::from([("t".into(), Arc::new(task))]))).subscribe(),
            4 * WORTH_A_LANE,
        )
    }

    fn receive(hand: &Hand, lane: Lane, ids: std::ops::Range<i64>, queue: Option<i32>) {
        hand.receive(lane, ids.map(|id| Job { job_queue_id: queue, ..Job::example(id) }).collect());
    }

    fn finish_all(hand: &Hand) {
        while let Some(running) = { hand.state().start() } {
            hand.finished(&running, Outcome::Done);
        }
    }

    fn ids(begun: Option<(Report, usize)>) -> Vec<i64> {
        begun.map_or(Vec::new(), |(report, _)| report.ids().collect())
    }

    const MANY: i64 = WORTH_A_LANE as i64;

    #[test]
    fn a_job_is_reported_only_when_what_was_under_way_when_it_came_is_over() {
        let hand = hand();
        assert!(hand.begin(Lane::First, true).is_some());
        receive(&hand, Lane::First, 0..MANY, None);
        finish_all(&hand);
        // The first lane's claim began before these jobs came...
        assert_eq!(ids(hand.begin(Lane::First, true)), (0..MANY).collect::<Vec<_>>());
        receive(&hand, Lane::Second, MANY..2 * MANY, None);
        finish_all(&hand);
        // ...so the second lane keeps its hands off them,
        assert!(hand.begin(Lane::Second, false).is_none());
        receive(&hand, Lane::First, 0..0, None);
        // and when that is over, either may report them.
        assert_eq!(ids(hand.begin(Lane::Second, false)), (MANY..2 * MANY).collect::<Vec<_>>());
        assert!(!hand.is_empty(), "what is under way is in hand");
    }

    #[test]
    fn the_second_lane_leaves_queues_and_what_goes_back_to_the_first() {
        let hand = hand();
        receive(&hand, Lane::First, 0..MANY, Some(7));
        receive(&hand, Lane::First, MANY..2 * MANY, None);
        let failed = { hand.state().start() }.expect("a job");
        finish_all(&hand);
        let error = crate::TaskError::new("oops");
        hand.finished(&failed, Outcome::Failed { error, remaining: None });
        finish_all(&hand);
        let unqueued = ids(hand.begin(Lane::Second, false));
        assert!(unqueued.iter().all(|id| *id >= MANY && *id != failed.job.id), "{unqueued:?}");
        let (report, _) = hand.begin(Lane::First, false).expect("a report");
        assert_eq!(report.free_queues, [7]);
        assert_eq!(report.ended.len() + unqueued.len(), 2 * WORTH_A_LANE);
    }

    #[test]
    fn a_claim_of_the_second_lane_that_came_to_nothing_is_looked_for_by_the_first() {
        let hand = hand();
        receive(&hand, Lane::First, 0..MANY, None);
        finish_all(&hand);
        assert!(hand.begin(Lane::Second, false).is_some());
        receive(&hand, Lane::Second, 0..0, None);
        assert!(hand.begin(Lane::First, false).is_none(), "nothing to report, nothing to look for");
        hand.not_written(Lane::Second, Report::default());
        assert!(hand.begin(Lane::First, false).is_some_and(|(_, wanted)| wanted > 0));
    }

    #[test]
    fn jobs_whose_task_is_removed_go_back_unless_they_have_begun() {
        let task = |name: &str| Task::function(name, TaskOptions::default(), |_: serde_json::Value, _| async {});
        let tasks =
            |names: &[&str]| Arc::new(names.iter().map(|name| ((*name).into(), Arc::new(task(name)))).collect());
        let now = watch::Sender::new(tasks(&["t", "u"]));
        let hand = Hand::new(now.subscribe(), 3);
        let of_u = |id| Job { task_identifier: "u".into(), ..Job::example(id) };
        hand.receive(Lane::First, vec![Job::example(1), Job::example(2), of_u(3)]);
        let begun = { hand.state().start() }.expect("a job");
        now.send_replace(tasks(&["u"]));
        let next = { hand.state().start() }.expect("a job");
        assert_eq!((begun.job.id, next.job.id), (1, 3));
        hand.receive(Lane::First, vec![Job::example(4)]);
        assert!({ hand.state().start() }.is_none(), "it was claimed too early to know");
        hand.finished(&begun, Outcome::Done);
        let (report, _) = hand.begin(Lane::First, false).expect("a report");
        let settled: Vec<_> = report.ended.iter().map(|ended| (ended.job.id, ended.settlement.clone())).collect();
        let back = |id| (id, settle::hand_back(&Job::example(id)));
        assert_eq!(settled, [back(2), back(4), (1, Settlement::Complete)]);
    }

    #[test]
    fn a_report_that_was_not_written_comes_again() {
        let hand = hand();
        receive(&hand, Lane::First, 0..MANY, None);
        finish_all(&hand);
        let (report, _) = hand.begin(Lane::Second, false).expect("a report");
        hand.not_written(Lane::Second, report);
        assert_eq!(ids(hand.begin(Lane::First, false)).len(), WORTH_A_LANE);
    }

    #[test]
    fn what_is_held_waits_and_its_queue_stays_locked() {
        let hand = hand();
        assert!(hand.begin(Lane::First, true).is_some());
        receive(&hand, Lane::First, 1..3, Some(7));
        receive(&hand, Lane::First, 3..4, None);
        finish_all(&hand);
        let held = HashSet::from([1]);
        let (report, _) = hand.begin(Lane::First, false).expect("three jobs to report");
        assert_eq!(report.free_queues, [7]);
        hand.set_aside(report, &held);
        let (report, _) = hand.begin(Lane::First, false).expect("those that nobody holds");
        assert_eq!(report.ids().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(report.free_queues, [] as [i32; 0]);
        hand.receive(Lane::First, Vec::new());
        assert!(hand.begin(Lane::First, false).is_none() && !hand.is_empty());
        hand.take_back(&held);
        assert!(hand.begin(Lane::First, false).is_none(), "it is held still");
        hand.take_back(&HashSet::new());
        assert_eq!(ids(hand.begin(Lane::First, false)), [1]);
        hand.receive(Lane::First, Vec::new());
        let (report, _) = hand.begin(Lane::First, false).expect("the queue, when its job is written");
        assert_eq!(report.free_queues, [7]);
        hand.receive(Lane::First, Vec::new());
        assert!(hand.is_empty());
    }
}
