//! What can happen next, and what is a fault?
//!
//! Every action is atomic. Between any two of them any other may happen: that is what the checker tries.

use crate::database::{Cleanup, Database, Exchange, JobId, Outcome, Queue, WorkerId};
use crate::invariants;
use crate::setup::{Bug, Limits, Setup};
use crate::worker::{Age, FIRST, Lane, SentHeartbeat, Worker};
use stateright::{Model, Property};
use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Mutex, PoisonError};

/// The protocol in a small configuration, correct or with a bug planted.
#[derive(Debug)]
pub struct Protocol {
    pub(crate) setup: Setup,
    pub(crate) bug: Option<Bug>,
    /// States from which everything is known to end: see `can_end`.
    ends: Mutex<HashSet<u64>>,
}

/// A moment of that configuration.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    pub(crate) database: Database,
    pub(crate) workers: Vec<Worker>,
    /// A standby that has received nothing since some moment, and may take over.
    pub(crate) standby: Option<Box<Database>>,
    /// How often each kind of event may still happen.
    pub(crate) left: Limits,
}

/// Something that happens. A worker is named by its number, a lane too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// A worker sends an exchange.
    Send(usize, usize),
    /// The database carries the exchange out, in one step.
    Exchange(usize, usize),
    /// A worker takes an answer.
    Receive(usize, usize),
    /// A worker that lost an answer ends the abandoned exchange, then asks which jobs it holds.
    AskWhatIsHeld(usize),
    /// A worker begins a job.
    Begin(usize, u8),
    /// A job ends.
    Finish(usize, u8, Outcome),
    /// A worker releases a job that never began: it waited too long, its task is gone, or the worker stops.
    Release(usize, u8),
    /// A worker releases the jobs that wait behind another of their queue.
    ReleaseBehind(usize, u8),
    /// A worker reports blocked outcomes again.
    RetryBlocked(usize),
    /// A worker's heartbeat arrives in the database.
    Heartbeat(usize),
    /// The answer to the heartbeat arrives. A worker that was declared dead finds out, and continues under a new id.
    HeartbeatAnswered(usize),
    /// A worker moves the lock of a job that runs for hours.
    RefreshLock(usize, u8),
    /// A sweep declares workers dead.
    Sweep,
    /// Fault: the answer is lost.
    LoseAnswer(usize, usize),
    /// Fault: the worker stops waiting, and the server may still carry the exchange out.
    Abandon(usize, usize),
    /// Fault: the server carries an abandoned exchange out.
    ExchangeLate(usize),
    /// Fault: a worker dies.
    Die(usize),
    /// Fault: the standby receives nothing from now on.
    FallBehind,
    /// Fault: the server is lost, and the standby takes over.
    FailOver,
    /// An operator unlocks everything that a worker holds.
    ForceUnlock(usize),
    /// Fault: time passes without a heartbeat.
    Age(usize),
    /// The application adds a job with the key.
    AddKeyed,
    /// The application removes the job with the key.
    RemoveKeyed,
    /// An open transaction of the application asks for a row lock.
    LockRow(u8),
    /// Another transaction locks the row of a queue.
    LockQueueRow(u8),
    /// It gets the row lock that it has waited for.
    GetRowLock,
    /// It ends.
    UnlockRows,
    /// The next step of a transaction that adds a job.
    Add(usize),
    /// The next step of a cleanup of unused names.
    CleanUp,
}

impl Protocol {
    /// The correct protocol.
    pub fn new(setup: Setup) -> Protocol {
        Protocol { setup, bug: None, ends: Mutex::default() }
    }

    /// The protocol with a bug in it.
    pub fn with_bug(setup: Setup, bug: Bug) -> Protocol {
        Protocol { setup, bug: Some(bug), ends: Mutex::default() }
    }

    /// Whether everything ends from here, if no more faults happen, nothing is added, and the application ends its
    /// transaction. Follows one path and remembers the result.
    pub(crate) fn can_end(&self, state: &State) -> bool {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        let known = |hash| self.ends.lock().unwrap_or_else(PoisonError::into_inner).contains(&hash);
        let mut way = Vec::new();
        let mut state = Cow::Borrowed(state);
        loop {
            let hash = hasher.hash_one(&state);
            if known(hash) {
                break;
            }
            if way.contains(&hash) {
                return false;
            }
            way.push(hash);
            let mut actions = Vec::new();
            self.actions(&state, &mut actions);
            actions.retain(|action| helpfulness(&state, *action).is_some());
            actions.sort_by_key(|action| helpfulness(&state, *action));
            match actions.into_iter().find_map(|action| self.next_state(&state, action)) {
                Some(next) => state = Cow::Owned(next),
                None if state.is_over() => break,
                None => return false,
            }
        }
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).extend(way);
        true
    }
}

/// In which order to do what brings things to an end; `None` for what does not.
fn helpfulness(state: &State, action: Action) -> Option<u8> {
    Some(match action {
        Action::UnlockRows | Action::GetRowLock => 0,
        Action::Exchange(..) => 1,
        Action::Receive(..) => 2,
        Action::AskWhatIsHeld(_) => 3,
        Action::Heartbeat(_) | Action::HeartbeatAnswered(_) => 4,
        Action::Age(worker) if !state.workers[worker].is_alive => 5,
        Action::Sweep => 6,
        Action::RetryBlocked(_) => 7,
        Action::Begin(..) => 8,
        Action::Finish(_, _, Outcome::Done) => 9,
        Action::CleanUp if state.database.cleanup != Cleanup::Idle => 10,
        Action::Add(_) => 11,
        Action::Send(..) => 12,
        _ => return None,
    })
}

impl State {
    /// Whether every job has ended: nothing is available, locked, or in a worker's memory.
    fn is_over(&self) -> bool {
        let database = &self.database;
        let is_alive = |worker: &&Worker| worker.is_alive;
        database.rows().all(|(_, job)| job.locked_by.is_none() && !job.is_available())
            && database.queues.iter().all(Option::is_none)
            && database.row_locks.is_empty()
            && database.queue_row_locks.is_empty()
            && self.workers.iter().filter(is_alive).all(Worker::is_idle)
    }

    /// The exchange that a lane of a worker would send now.
    fn next_exchange(&self, worker: usize, lane: usize, protocol: &Protocol) -> Option<Exchange> {
        let something_waits = |freed: &[Queue]| self.database.something_waits(freed);
        self.workers[worker].exchange(lane, something_waits, &protocol.setup, protocol.bug)
    }

    /// The rows that exchanges have locked while they wait: with a bug only.
    fn rows_locked_by_exchanges(&self) -> impl Iterator<Item = &JobId> {
        self.workers.iter().flat_map(|worker| &worker.lanes).flat_map(|lane| match lane {
            Lane::Waiting { locked, .. } => locked.as_slice(),
            _ => &[],
        })
    }

    /// The same state with the workers in another order, if that is the smaller one: which worker is which makes no
    /// difference.
    pub fn representative(&self) -> State {
        let in_order = self.workers.windows(2).all(|pair| pair[0].sort_key() <= pair[1].sort_key());
        if in_order {
            return self.clone();
        }
        let mut order: Vec<usize> = (0..self.workers.len()).collect();
        order.sort_by_key(|at| self.workers[*at].sort_key());
        let renamed = |id: WorkerId| {
            let worker = order.iter().position(|at| *at == id.worker as usize).unwrap_or_default();
            WorkerId { worker: worker as u8, ..id }
        };
        let mut state = self.clone();
        state.workers = order.iter().map(|at| self.workers[*at].clone()).collect();
        state.database.registered = order.iter().map(|at| self.database.registered[*at]).collect();
        state.database.heartbeats = order.iter().map(|at| self.database.heartbeats[*at]).collect();
        for worker in &mut state.workers {
            worker.rename(renamed);
        }
        state.database.rename(renamed);
        if let Some(standby) = &mut state.standby {
            standby.rename(renamed);
        }
        state
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let workers = (0..self.setup.workers).map(|worker| Worker::new(worker, 0, self.setup.lanes)).collect();
        vec![State { database: Database::new(&self.setup), workers, standby: None, left: self.setup.limits }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (at, worker) in state.workers.iter().enumerate() {
            if worker.is_alive {
                self.actions_of_worker(state, at, worker, actions);
            }
            let may_expire = !worker.is_alive && state.database.heartbeats[at] < Age::Expired;
            if may_expire || (worker.is_alive && state.left.lapses > 0) {
                actions.push(Action::Age(at));
            }
        }
        for abandoned in 0..state.database.abandoned.len() {
            actions.push(Action::ExchangeLate(abandoned));
        }
        if !state.database.dead_workers(self.bug).is_empty() {
            actions.push(Action::Sweep);
        }
        match state.standby {
            Some(_) => actions.push(Action::FailOver),
            None if state.left.failovers > 0 => actions.push(Action::FallBehind),
            None => {}
        }
        self.actions_of_application(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.act(&mut next, action).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Protocol>> {
        invariants::properties()
    }
}

impl Protocol {
    fn actions_of_worker(&self, state: &State, at: usize, worker: &Worker, actions: &mut Vec<Action>) {
        let left = &state.left;
        for (lane, under_way) in worker.lanes.iter().enumerate() {
            match under_way {
                Lane::Idle => {
                    if state.next_exchange(at, lane, self).is_some() {
                        actions.push(Action::Send(at, lane));
                    }
                }
                Lane::Sent(_) | Lane::Waiting { .. } => {
                    actions.push(Action::Exchange(at, lane));
                    if left.losses > 0 {
                        actions.push(Action::Abandon(at, lane));
                    }
                }
                Lane::Answered { .. } | Lane::Held(..) => {
                    actions.push(Action::Receive(at, lane));
                    if left.losses > 0 {
                        actions.push(Action::LoseAnswer(at, lane));
                    }
                }
            }
        }
        let is_alone = worker.lanes.iter().all(|lane| *lane == Lane::Idle)
            || (self.bug == Some(Bug::AsksBesideSecondLane) && worker.lanes[FIRST] == Lane::Idle);
        if worker.is_uncertain() && is_alone {
            actions.push(Action::AskWhatIsHeld(at));
        }
        if worker.may_begin(&self.setup, self.bug) {
            actions.extend(worker.ready.iter().map(|job| Action::Begin(at, job.id)));
        }
        for job in &worker.running {
            actions.push(Action::Finish(at, job.id, Outcome::Done));
            if left.failures > 0 {
                actions.push(Action::Finish(at, job.id, Outcome::Failed));
            }
            if left.interrupts > 0 {
                actions.push(Action::Finish(at, job.id, Outcome::Interrupted));
            }
            if left.refreshes > 0 {
                actions.push(Action::RefreshLock(at, job.id));
            }
        }
        if left.releases > 0 {
            actions.extend(worker.ready.iter().map(|job| Action::Release(at, job.id)));
            let mut queues: Vec<Queue> = worker.behind.iter().filter_map(|job| job.queue).collect();
            queues.dedup();
            actions.extend(queues.into_iter().map(|queue| Action::ReleaseBehind(at, queue)));
        }
        if !worker.blocked.is_empty() {
            actions.push(Action::RetryBlocked(at));
        }
        if worker.sent_heartbeat.is_some() {
            actions.push(Action::HeartbeatAnswered(at));
        } else if worker.heartbeat > Age::Fresh {
            actions.push(Action::Heartbeat(at));
        }
        // One worker is left to finish the jobs.
        if left.deaths > 0 && state.workers.iter().filter(|worker| worker.is_alive).count() > 1 {
            actions.push(Action::Die(at));
        }
    }

    fn actions_of_application(&self, state: &State, actions: &mut Vec<Action>) {
        let (left, database) = (&state.left, &state.database);
        if left.unlocks > 0 {
            let holds = |worker: &Worker| !database.held(worker.id).is_empty();
            let holders = state.workers.iter().enumerate().filter(|(_, worker)| holds(worker));
            actions.extend(holders.map(|(at, _)| Action::ForceUnlock(at)));
        }
        if left.adds > 0 && database.can_change_keyed() {
            actions.push(Action::AddKeyed);
        }
        if left.removes > 0 && database.has_keyed() && database.can_change_keyed() {
            actions.push(Action::RemoveKeyed);
        }
        if left.row_locks > 0 && database.wanted_row.is_none() {
            let unlocked = database.rows().map(|(id, _)| id).filter(|id| !database.row_locks.contains(id));
            actions.extend(unlocked.map(Action::LockRow));
            let queues = 0..database.queues.len() as Queue;
            let unlocked = queues.filter(|queue| !database.queue_row_locks.contains(queue));
            actions.extend(unlocked.map(Action::LockQueueRow));
        }
        if database.wanted_row.is_some_and(|row| !state.rows_locked_by_exchanges().any(|locked| *locked == row)) {
            actions.push(Action::GetRowLock);
        }
        if database.wanted_row.is_none() && !(database.row_locks.is_empty() && database.queue_row_locks.is_empty()) {
            actions.push(Action::UnlockRows);
        }
        actions.extend((0..database.adders.len()).map(Action::Add));
        if left.cleanups > 0 || database.cleanup != Cleanup::Idle {
            actions.push(Action::CleanUp);
        }
    }

    /// Does it; false if it cannot happen now.
    fn act(&self, state: &mut State, action: Action) -> bool {
        let State { database, workers, left, standby } = state;
        match action {
            Action::Send(worker, lane) => {
                let Some(exchange) = state.next_exchange(worker, lane, self) else { return false };
                state.workers[worker].send(lane, exchange);
            }
            Action::Exchange(worker, lane) => return self.exchange(state, worker, lane),
            Action::Receive(worker, lane) => workers[worker].receive(lane, self.bug),
            Action::AskWhatIsHeld(worker) => {
                let worker = &mut workers[worker];
                if self.bug != Some(Bug::AbandonedExchangeNotEnded) {
                    database.abandoned.retain(|exchange| exchange.worker != worker.id);
                }
                worker.lanes[FIRST] = Lane::Held(database.held(worker.id), database.held_queues(worker.id));
            }
            Action::Begin(worker, id) => {
                let worker = &mut workers[worker];
                let Some(job) = worker.begin(id) else { return false };
                worker.began_after_death |= !database.is_registered(worker.id);
                if let Some(row) = database.row_mut(id).filter(|row| row.created == job.created) {
                    row.has_begun = true;
                }
                database.begun |= job.payload;
            }
            Action::Finish(worker, id, outcome) => {
                match outcome {
                    Outcome::Failed => left.failures -= 1,
                    Outcome::Interrupted => left.interrupts -= 1,
                    Outcome::Done | Outcome::Released => {}
                }
                workers[worker].finish(id, outcome, self.bug);
            }
            Action::Release(worker, id) => {
                left.releases -= 1;
                workers[worker].release(id);
            }
            Action::ReleaseBehind(worker, queue) => {
                left.releases -= 1;
                workers[worker].release_behind(queue);
            }
            Action::RetryBlocked(worker) => workers[worker].retry_blocked(),
            Action::Heartbeat(worker) => {
                let worker = &mut workers[worker];
                worker.sent_heartbeat =
                    Some(SentHeartbeat { age: Age::Fresh, is_registered: database.record_heartbeat(worker.id) });
            }
            Action::HeartbeatAnswered(worker) => self.heartbeat_answered(database, &mut workers[worker]),
            Action::RefreshLock(worker, id) => {
                left.refreshes -= 1;
                if database.row(id).is_some_and(|row| row.locked_by == Some(workers[worker].id)) {
                    database.refresh_lock(id);
                }
            }
            Action::Sweep => {
                let dead = state.database.dead_workers(self.bug);
                state.database.sweep(&dead, self.bug);
            }
            Action::LoseAnswer(worker, lane) => {
                left.losses -= 1;
                workers[worker].lose(lane);
            }
            Action::Abandon(worker, lane) => {
                left.losses -= 1;
                database.abandoned.extend(workers[worker].lose(lane));
            }
            Action::ExchangeLate(abandoned) => {
                let exchange = database.abandoned.remove(abandoned);
                database.exchange(&exchange, self.bug);
            }
            Action::Die(worker) => {
                left.deaths -= 1;
                Protocol::abandon_all(database, &mut workers[worker]);
                let dead = &mut workers[worker];
                *dead = Worker { is_alive: false, ..Worker::new(dead.id.worker, dead.id.generation, self.setup.lanes) };
            }
            Action::FallBehind => {
                left.failovers -= 1;
                *standby = Some(Box::new(database.replicated()));
            }
            Action::FailOver => return Protocol::fail_over(state),
            Action::ForceUnlock(worker) => {
                left.unlocks -= 1;
                database.force_unlock(workers[worker].id);
            }
            Action::Age(at) => {
                let worker = &mut workers[at];
                left.lapses -= u8::from(worker.is_alive);
                database.heartbeats[at] = database.heartbeats[at].older();
                worker.heartbeat = worker.heartbeat.older();
                worker.sent_heartbeat =
                    worker.sent_heartbeat.map(|heartbeat| SentHeartbeat { age: heartbeat.age.older(), ..heartbeat });
            }
            Action::AddKeyed => {
                left.adds -= 1;
                let queue = self.setup.jobs.iter().find(|job| job.keyed).and_then(|job| job.queue);
                database.add_keyed(queue, self.setup.max_attempts);
            }
            Action::RemoveKeyed => {
                left.removes -= 1;
                database.remove_keyed();
            }
            Action::LockRow(id) => {
                left.row_locks -= 1;
                if state.rows_locked_by_exchanges().any(|locked| *locked == id) {
                    state.database.wanted_row = Some(id);
                } else {
                    state.database.row_locks.push(id);
                    state.database.row_locks.sort_unstable();
                }
            }
            Action::GetRowLock => database.row_locks.extend(database.wanted_row.take()),
            Action::LockQueueRow(queue) => {
                left.row_locks -= 1;
                database.queue_row_locks.push(queue);
            }
            Action::UnlockRows => {
                database.row_locks.clear();
                database.queue_row_locks.clear();
            }
            Action::Add(adder) => return database.adder_step(adder, self.setup.max_attempts, self.bug),
            Action::CleanUp => {
                let begins = database.cleanup == Cleanup::Idle;
                if !database.cleanup_step(self.bug) {
                    return false;
                }
                left.cleanups -= u8::from(begins);
            }
        }
        true
    }

    fn exchange(&self, state: &mut State, worker: usize, lane: usize) -> bool {
        let (exchange, had) = match &state.workers[worker].lanes[lane] {
            Lane::Sent(exchange) => (exchange.clone(), None),
            Lane::Waiting { exchange, locked } => (exchange.clone(), Some(locked.clone())),
            _ => return false,
        };
        if self.bug == Some(Bug::ExchangeWaitsForRows) {
            let ids = exchange.report.iter().map(|ended| ended.job.id);
            let locked: Vec<JobId> = ids.take_while(|id| !state.database.row_locks.contains(id)).collect();
            if locked.len() < exchange.report.len() {
                let goes_on = had.as_ref() != Some(&locked);
                state.workers[worker].lanes[lane] = Lane::Waiting { exchange, locked };
                return goes_on;
            }
        }
        let answer = state.database.exchange(&exchange, self.bug);
        state.workers[worker].lanes[lane] = Lane::Answered { exchange, answer };
        true
    }

    /// The answer to a heartbeat. A worker that was declared dead discards everything and registers under a new id.
    fn heartbeat_answered(&self, database: &mut Database, worker: &mut Worker) {
        let Some(heartbeat) = worker.sent_heartbeat.take() else { return };
        if heartbeat.is_registered {
            // From when it was sent: the database may have written it long before the answer came.
            let from_answer = self.bug == Some(Bug::HeartbeatCountedFromAnswer);
            worker.heartbeat = if from_answer { Age::Fresh } else { heartbeat.age };
            return;
        }
        Protocol::abandon_all(database, worker);
        *worker = Worker {
            began_after_death: worker.began_after_death,
            ..Worker::new(worker.id.worker, worker.id.generation + 1, self.setup.lanes)
        };
        database.register(worker.id);
    }

    /// The standby takes over. Connections break, and a worker asks what it holds when it has a new one; answers that were
    /// on their way may still arrive before.
    fn fail_over(state: &mut State) -> bool {
        let Some(standby) = state.standby.take() else { return false };
        for worker in state.workers.iter_mut().filter(|worker| worker.is_alive) {
            for lane in 0..worker.lanes.len() {
                if !matches!(worker.lanes[lane], Lane::Answered { .. }) {
                    worker.lose(lane);
                }
            }
            worker.uncertain[FIRST] = true;
        }
        let workers = &state.workers;
        let last_claim = |id: JobId| {
            let remembered = workers.iter().flat_map(|worker| invariants::known(worker)).filter(|job| job.id == id);
            remembered.map(|job| job.claim).max().unwrap_or_default()
        };
        state.database.fail_over(*standby, last_claim);
        true
    }

    /// The server may still carry out what the worker does not wait for any more.
    fn abandon_all(database: &mut Database, worker: &mut Worker) {
        for lane in &mut worker.lanes {
            if let Lane::Sent(exchange) | Lane::Waiting { exchange, .. } = std::mem::replace(lane, Lane::Idle) {
                database.abandoned.push(exchange);
            }
        }
    }
}
