//! What does a worker keep in memory, and what does it do with it?
//!
//! Pure: nothing here reads the database. A worker learns from answers alone.

use crate::database::{Answer, Claimed, Ended, Exchange, JobId, Outcome, Queue, WorkerId};
use crate::setup::{Bug, Setup};

/// A connection over which a worker exchanges jobs, and what is under way there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    Idle,
    /// On its way to the database.
    Sent(Exchange),
    /// With a bug only: it has locked rows and waits for another.
    Waiting {
        exchange: Exchange,
        locked: Vec<JobId>,
    },
    /// Carried out; the answer is on its way back.
    Answered {
        exchange: Exchange,
        answer: Answer,
    },
    /// The database has said which jobs and queues the worker holds; the answer is on its way back.
    Held(Vec<Claimed>, Vec<Queue>),
}

/// The lane that carries everything.
pub(crate) const FIRST: usize = 0;
/// The lane that helps under load.
pub(crate) const SECOND: usize = 1;

/// How old a heartbeat is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Age {
    Fresh,
    /// Older than the limit for claiming and beginning jobs, not yet as old as the threshold.
    Old,
    /// A sweep may declare the worker dead.
    Expired,
}

impl Age {
    pub(crate) fn older(self) -> Age {
        match self {
            Age::Fresh => Age::Old,
            Age::Old | Age::Expired => Age::Expired,
        }
    }
}

/// A heartbeat that has reached the database and whose answer is on its way back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SentHeartbeat {
    /// Since the worker sent it.
    pub(crate) age: Age,
    /// Whether the database still had the worker's row.
    pub(crate) is_registered: bool,
}

/// A worker process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Worker {
    pub(crate) is_alive: bool,
    pub(crate) id: WorkerId,
    /// How long ago it sent the last heartbeat that was answered.
    pub(crate) heartbeat: Age,
    pub(crate) sent_heartbeat: Option<SentHeartbeat>,
    /// Jobs that can begin if there is a slot; of a queue one at most.
    pub(crate) ready: Vec<Claimed>,
    /// Jobs of a queue that wait for the one that is ready or running.
    pub(crate) behind: Vec<Claimed>,
    pub(crate) running: Vec<Claimed>,
    /// New claims of jobs that run here: a failover has lost the claim under which they run, or an operator has unlocked
    /// them.
    pub(crate) claimed_again: Vec<Claimed>,
    pub(crate) to_report: Vec<Ended>,
    /// Outcomes that could not be written, because another transaction has locked the rows.
    pub(crate) blocked: Vec<Ended>,
    /// Queues that it has locked and must free.
    pub(crate) queues: Vec<Queue>,
    pub(crate) lanes: Vec<Lane>,
    /// Of each lane: an exchange got no answer, so the database may know more than the worker.
    pub(crate) uncertain: Vec<bool>,
    /// The second lane must wait: the first finds out what the worker holds.
    pub(crate) alone: bool,
    /// For the invariants: it has begun a job after it was declared dead.
    pub(crate) began_after_death: bool,
}

impl Worker {
    pub(crate) fn new(worker: u8, generation: u8, lanes: u8) -> Worker {
        Worker {
            is_alive: true,
            id: WorkerId { worker, generation },
            heartbeat: Age::Fresh,
            sent_heartbeat: None,
            ready: Vec::new(),
            behind: Vec::new(),
            running: Vec::new(),
            claimed_again: Vec::new(),
            to_report: Vec::new(),
            blocked: Vec::new(),
            queues: Vec::new(),
            lanes: vec![Lane::Idle; lanes as usize],
            uncertain: vec![false; lanes as usize],
            alone: false,
            began_after_death: false,
        }
    }

    /// What tells two workers apart but their numbers.
    pub(crate) fn sort_key(&self) -> impl Ord {
        let stage = |lane: &Lane| match lane {
            Lane::Idle => 0,
            Lane::Sent(exchange) => 1 + exchange.report.len(),
            Lane::Waiting { .. } => 10,
            Lane::Answered { exchange, answer } => 11 + exchange.report.len() + 10 * answer.claimed.len(),
            Lane::Held(held, queues) => 100 + held.len() + 10 * queues.len(),
        };
        let stages: Vec<usize> = self.lanes.iter().map(stage).collect();
        let jobs: Vec<Claimed> = self.jobs().chain(&self.claimed_again).copied().collect();
        let places = [self.ready.len(), self.running.len(), self.to_report.len()];
        (
            self.is_alive,
            self.id.generation,
            self.heartbeat,
            self.sent_heartbeat,
            self.is_uncertain(),
            stages,
            places,
            jobs,
            self.queues.clone(),
        )
    }

    pub(crate) fn rename(&mut self, renamed: impl Fn(WorkerId) -> WorkerId) {
        self.id = renamed(self.id);
        for lane in &mut self.lanes {
            if let Lane::Sent(exchange) | Lane::Waiting { exchange, .. } | Lane::Answered { exchange, .. } = lane {
                exchange.worker = renamed(exchange.worker);
            }
        }
    }

    /// Jobs that have not begun.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Claimed> {
        self.ready.iter().chain(&self.behind)
    }

    /// Jobs that have not ended.
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = &Claimed> {
        self.waiting().chain(&self.running)
    }

    /// Jobs that have ended and are not on their way to the database.
    pub(crate) fn ended(&self) -> impl Iterator<Item = &Ended> {
        self.to_report.iter().chain(&self.blocked)
    }

    /// Everything in memory that is not on a lane.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = &Claimed> {
        self.unfinished().chain(self.ended().map(|ended| &ended.job))
    }

    /// The exchanges that are under way.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = &Exchange> {
        self.lanes.iter().filter_map(|lane| match lane {
            Lane::Sent(exchange) | Lane::Waiting { exchange, .. } | Lane::Answered { exchange, .. } => Some(exchange),
            Lane::Idle | Lane::Held(..) => None,
        })
    }

    pub(crate) fn is_uncertain(&self) -> bool {
        self.uncertain.contains(&true)
    }

    /// Whether it has nothing in memory and nothing under way.
    pub(crate) fn is_idle(&self) -> bool {
        let is_empty = self.jobs().next().is_none() && self.queues.is_empty();
        is_empty && !self.is_uncertain() && self.lanes.iter().all(|lane| *lane == Lane::Idle)
    }

    fn wants(&self, setup: &Setup) -> usize {
        let on_their_way: usize = self.under_way().map(|exchange| exchange.wants).sum();
        setup.capacity.saturating_sub(self.unfinished().count() + on_their_way)
    }

    /// The exchange that this lane would send now, if it may send one and there is anything to say.
    pub(crate) fn exchange(
        &self,
        lane: usize,
        something_waits: impl Fn(&[Queue]) -> bool,
        setup: &Setup,
        bug: Option<Bug>,
    ) -> Option<Exchange> {
        let may_send = self.lanes[lane] == Lane::Idle
            && match lane {
                FIRST => !self.is_uncertain(),
                // It helps while the first is busy, and leaves lost answers to it.
                _ => {
                    let may_be_uncertain = bug == Some(Bug::SecondLaneWhileUncertain) && !self.uncertain[SECOND];
                    (self.lanes[FIRST] != Lane::Idle || may_be_uncertain)
                        && !matches!(self.lanes[FIRST], Lane::Held(..))
                        && (!self.is_uncertain() || may_be_uncertain)
                        && (!self.alone || bug == Some(Bug::SecondLaneBeforeNextReport))
                }
            };
        if !may_send {
            return None;
        }
        let report: Vec<Ended> = match lane {
            FIRST => self.to_report.clone(),
            _ => self.to_report.iter().filter(|ended| is_for_second_lane(ended, bug)).copied().collect(),
        };
        let free = if lane == FIRST { self.queues_to_free(&report, bug) } else { Vec::new() };
        let wants = if something_waits(&free) { self.wants(setup) } else { 0 };
        let is_worth_it = !report.is_empty() || !free.is_empty() || wants > 0;
        is_worth_it.then_some(Exchange { worker: self.id, report, free, wants })
    }

    /// A queue is freed only if the worker has no other job of it, and the report gives no job of it back: a claim in the
    /// same exchange would not see that job, and take a later one.
    fn queues_to_free(&self, report: &[Ended], bug: Option<Bug>) -> Vec<Queue> {
        let has_others = |queue: Queue| {
            let blocked = self.blocked.iter().map(|ended| &ended.job);
            let unreported = self.to_report.iter().filter(|ended| !report.contains(ended)).map(|ended| &ended.job);
            self.unfinished().chain(blocked).chain(unreported).any(|job| job.queue == Some(queue))
        };
        let gives_back = |queue: Queue| {
            bug != Some(Bug::FreesQueueWithRelease)
                && report.iter().any(|ended| ended.outcome != Outcome::Done && ended.job.queue == Some(queue))
        };
        let ignores_others = bug == Some(Bug::FreesQueueWithOtherJobs);
        let may_free = |queue: Queue| (ignores_others || !has_others(queue)) && !gives_back(queue);
        self.queues.iter().copied().filter(|queue| may_free(*queue)).collect()
    }

    pub(crate) fn send(&mut self, lane: usize, exchange: Exchange) {
        self.to_report.retain(|ended| !exchange.report.contains(ended));
        self.queues.retain(|queue| !exchange.free.contains(queue));
        self.lanes[lane] = Lane::Sent(exchange);
    }

    /// Takes the answer of a lane.
    pub(crate) fn receive(&mut self, lane: usize, bug: Option<Bug>) {
        match std::mem::replace(&mut self.lanes[lane], Lane::Idle) {
            Lane::Answered { exchange, answer } => self.receive_answer(lane, exchange, answer, bug),
            Lane::Held(held, queues) => self.receive_held(held, queues, bug),
            other => self.lanes[lane] = other,
        }
    }

    fn receive_answer(&mut self, lane: usize, exchange: Exchange, answer: Answer, bug: Option<Bug>) {
        let blocked = |job: &Claimed| answer.blocked.contains(&job.id);
        self.blocked.extend(exchange.report.iter().filter(|ended| blocked(&ended.job)));
        self.blocked.sort_unstable();
        if bug != Some(Bug::BlockedQueueForgotten) {
            for queue in &answer.blocked_queues {
                self.must_free(*queue);
            }
        }
        self.take(answer.claimed, bug);
        if lane == FIRST {
            self.alone = false;
        }
    }

    /// Takes in what the database says that the worker holds: takes the jobs that it does not know, releases those that wait
    /// under a claim that the database does not have any more, and will free the queues of which it has no job.
    fn receive_held(&mut self, held: Vec<Claimed>, queues: Vec<Queue>, bug: Option<Bug>) {
        if bug != Some(Bug::AsksForJobsOnly) {
            for queue in queues {
                self.must_free(queue);
            }
        }
        let is_lost = |job: &Claimed| !held.iter().any(|held| (held.id, held.claim) == (job.id, job.claim));
        if bug != Some(Bug::KeepsLostClaims) {
            self.release_lost(is_lost);
        }
        if bug != Some(Bug::KeepsLostNewClaims) {
            self.claimed_again.retain(|again| !is_lost(again));
        }
        let is_known = |found: &Claimed| {
            self.jobs().any(|job| job.id == found.id && (job.claim == found.claim || bug == Some(Bug::HeldKnownById)))
        };
        let unknown: Vec<Claimed> = held.into_iter().filter(|job| !is_known(job)).collect();
        self.take(unknown, bug);
        self.uncertain.fill(false);
        // What was put back may be written already: the second lane waits until it is reported again.
        self.alone = self.lanes.len() > SECOND && !(self.to_report.is_empty() && self.queues.is_empty());
    }

    /// New jobs: ready, or behind another job of their queue. A job that runs here does not begin a second time.
    fn take(&mut self, mut jobs: Vec<Claimed>, bug: Option<Bug>) {
        jobs.sort_unstable_by_key(|job| (job.run_at, job.id));
        if bug != Some(Bug::WaitsUnderTwoClaims) {
            self.release_lost(|waits| jobs.iter().any(|job| job.id == waits.id));
        }
        for job in jobs {
            if self.running.iter().any(|runs| runs.id == job.id) && bug != Some(Bug::ClaimedAgainBegins) {
                self.claimed_again.retain(|again| again.id != job.id);
                self.claimed_again.push(job);
                self.claimed_again.sort_unstable();
            } else {
                self.take_in(job);
            }
            if let Some(queue) = job.queue {
                self.must_free(queue);
            }
        }
        self.ready.sort_unstable();
    }

    fn take_in(&mut self, job: Claimed) {
        let is_busy = |queue| self.unfinished().any(|other| other.queue == Some(queue));
        match job.queue {
            Some(queue) if is_busy(queue) => self.behind.push(job),
            _ => self.ready.push(job),
        }
    }

    fn must_free(&mut self, queue: Queue) {
        if !self.queues.contains(&queue) {
            self.queues.push(queue);
            self.queues.sort_unstable();
        }
    }

    /// An exchange got no answer: its report has to be written again, and the worker is uncertain.
    pub(crate) fn lose(&mut self, lane: usize) -> Option<Exchange> {
        self.uncertain[lane] = true;
        if lane == FIRST {
            self.alone = false;
        }
        let exchange = match std::mem::replace(&mut self.lanes[lane], Lane::Idle) {
            Lane::Sent(exchange) | Lane::Waiting { exchange, .. } | Lane::Answered { exchange, .. } => exchange,
            Lane::Idle | Lane::Held(..) => return None,
        };
        self.to_report.extend(&exchange.report);
        self.to_report.sort_unstable();
        for queue in &exchange.free {
            self.must_free(*queue);
        }
        Some(exchange)
    }

    /// Whether the heartbeat is young enough, and there is a slot.
    pub(crate) fn may_begin(&self, setup: &Setup, bug: Option<Bug>) -> bool {
        let is_fresh = self.heartbeat == Age::Fresh || bug == Some(Bug::BeginsWithOldHeartbeat);
        is_fresh && self.running.len() < setup.slots
    }

    pub(crate) fn begin(&mut self, id: JobId) -> Option<Claimed> {
        let at = self.ready.iter().position(|job| job.id == id)?;
        let job = self.ready.remove(at);
        self.running.push(job);
        self.running.sort_unstable();
        Some(job)
    }

    pub(crate) fn finish(&mut self, id: JobId, outcome: Outcome, bug: Option<Bug>) {
        let job = self.running.iter().position(|job| job.id == id);
        if let Some(job) = job.map(|at| self.running.remove(at)) {
            let again = self.claimed_again.iter().position(|again| again.id == id);
            let again = again.map(|at| self.claimed_again.remove(at));
            // Its outcome is written under the new claim, unless that is of another job with the same id, or a keyed add
            // has changed the job since.
            let is_changed = |again: &Claimed| again.payload != job.payload && bug != Some(Bug::ClaimedAgainAndChanged);
            let another = again.filter(|again| again.created != job.created || is_changed(again));
            self.end(again.filter(|_| another.is_none()).unwrap_or(job), outcome);
            // The next job of its queue is ready.
            if let Some(next) =
                job.queue.and_then(|queue| self.behind.iter().position(|next| next.queue == Some(queue)))
            {
                let next = self.behind.remove(next);
                self.ready.push(next);
            }
            if let Some(another) = another {
                self.take_in(another);
            }
            self.ready.sort_unstable();
        }
    }

    fn end(&mut self, job: Claimed, outcome: Outcome) {
        self.to_report.push(Ended { job, outcome });
        self.to_report.sort_unstable();
    }

    /// Releases a job that is ready, and those behind it: of a queue all or none, to keep their order.
    pub(crate) fn release(&mut self, id: JobId) {
        let Some(at) = self.ready.iter().position(|job| job.id == id) else { return };
        let job = self.ready.remove(at);
        self.end(job, Outcome::Released);
        if let Some(queue) = job.queue {
            self.release_behind(queue);
        }
    }

    /// Releases the jobs that wait and are lost; of a queue all or none.
    fn release_lost(&mut self, is_lost: impl Fn(&Claimed) -> bool) {
        let lost: Vec<Claimed> = self.ready.iter().copied().filter(&is_lost).collect();
        for job in lost {
            self.release(job.id);
        }
        while let Some(queue) = self.behind.iter().find(|job| is_lost(job)).and_then(|job| job.queue) {
            self.release_behind(queue);
        }
    }

    /// Releases the jobs that wait behind another of the queue.
    pub(crate) fn release_behind(&mut self, queue: Queue) {
        let (released, kept): (Vec<Claimed>, Vec<Claimed>) =
            self.behind.iter().partition(|job| job.queue == Some(queue));
        self.behind = kept;
        for job in released {
            self.end(job, Outcome::Released);
        }
    }

    /// The blocked outcomes are to be reported again.
    pub(crate) fn retry_blocked(&mut self) {
        self.to_report.append(&mut self.blocked);
        self.to_report.sort_unstable();
    }
}

/// Done and without a queue: what needs care is for the first lane.
fn is_for_second_lane(ended: &Ended, bug: Option<Bug>) -> bool {
    let is_allowed = ended.job.queue.is_none() || bug == Some(Bug::SecondLaneReportsQueued);
    ended.outcome == Outcome::Done && is_allowed
}
