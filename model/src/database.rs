//! What does the database do in one atomic step?
//!
//! An exchange, a sweep, a keyed add, a removal: each is one transaction, so each is one function here. How a worker
//! decides what to report is in `worker.rs`; in which order steps happen is in `actions.rs`.

use crate::setup::{Bug, Setup};
use crate::worker::Age;

/// The id of a job: its place in the table.
pub(crate) type JobId = u8;
/// The id of a queue.
pub(crate) type Queue = u8;
/// Which claim of a job, in place of `locked_at`: each claim of a row has another.
pub(crate) type Claim = u8;
/// Events in a payload, one bit each.
pub(crate) type Events = u8;

/// The id under which a worker locks jobs. A worker that was declared dead continues under another id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkerId {
    pub(crate) worker: u8,
    pub(crate) generation: u8,
}

/// A row of `_private_jobs`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Job {
    pub(crate) queue: Option<Queue>,
    pub(crate) task: u8,
    pub(crate) has_key: bool,
    pub(crate) payload: Events,
    pub(crate) attempts: u8,
    pub(crate) max_attempts: u8,
    /// The place in the run order.
    pub(crate) run_at: u8,
    /// The mark of a removed job: `run_at` is infinity.
    pub(crate) removed: bool,
    pub(crate) locked_by: Option<WorkerId>,
    pub(crate) claim: Claim,
    /// In place of the clock: a later claim has a higher number, even if a failover has lost earlier ones.
    pub(crate) last_claim: Claim,
    /// In place of `created_at`: tells apart two jobs to which the same id was given, before and after a failover.
    pub(crate) created: u8,
    /// Whether `updated_at > locked_at`. Only the bug reads it.
    pub(crate) updated_since_lock: bool,
    /// For the invariants: whether a worker has ever begun it.
    pub(crate) has_begun: bool,
    /// For the invariants: it was retried, recovered, or skipped because of a row lock, so others may come first.
    pub(crate) lost_its_turn: bool,
    /// For the invariants: the refund could not restore the attempts that the job had before its claim, because
    /// replacing it had used them up.
    pub(crate) attempts_unknown: bool,
}

impl Job {
    pub(crate) fn is_available(&self) -> bool {
        self.locked_by.is_none() && self.attempts < self.max_attempts
    }

    fn unlock(&mut self) {
        self.locked_by = None;
        self.updated_since_lock = false;
    }

    fn counts_as_removed(&self, bug: Option<Bug>) -> bool {
        match bug {
            Some(Bug::RemovalRecognisedByUpdatedAt) => {
                !self.has_key && self.attempts >= self.max_attempts && self.updated_since_lock
            }
            _ => self.removed,
        }
    }
}

/// A job as a claim returned it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Claimed {
    pub(crate) id: JobId,
    pub(crate) claim: Claim,
    pub(crate) created: u8,
    /// In place of `revision`, too: a keyed add changes it.
    pub(crate) payload: Events,
    pub(crate) attempts: u8,
    pub(crate) queue: Option<Queue>,
    pub(crate) run_at: u8,
    pub(crate) had_key: bool,
}

/// What became of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// It succeeded: its row is deleted.
    Done,
    /// It failed: the attempt counts.
    Failed,
    /// It began, and the worker had to stop it.
    Interrupted,
    /// It never began.
    Released,
}

/// A job that has ended, to be reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ended {
    pub(crate) job: Claimed,
    pub(crate) outcome: Outcome,
}

/// What a worker sends: outcomes, queues to free, and how many jobs it wants.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Exchange {
    pub(crate) worker: WorkerId,
    pub(crate) report: Vec<Ended>,
    pub(crate) free: Vec<Queue>,
    pub(crate) wants: usize,
}

/// What the database answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Answer {
    pub(crate) claimed: Vec<Claimed>,
    /// Reported jobs whose rows another transaction has locked: nothing was written.
    pub(crate) blocked: Vec<JobId>,
    /// Queues that were to be freed and are not: a job of theirs is blocked, or their row is locked.
    pub(crate) blocked_queues: Vec<Queue>,
}

/// How far a transaction that adds a job has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Adder {
    Begun,
    HasLock,
    /// It knows the id of the task and, unless a bug is planted, has the lock.
    LookedUp {
        task: u8,
        has_lock: bool,
    },
    Committed,
}

/// How far a cleanup has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Cleanup {
    Idle,
    /// With a bug only: it has seen whether the name is unused, but has no lock.
    Looked {
        unused: bool,
    },
    HasLock {
        unused: Option<bool>,
    },
}

/// Everything that the database knows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Database {
    pub(crate) jobs: Vec<Option<Job>>,
    pub(crate) queues: Vec<Option<WorkerId>>,
    /// `_rs_workers`: under which id each worker is registered, if it is.
    pub(crate) registered: Vec<Option<u8>>,
    /// How old the last heartbeat in that row is.
    pub(crate) heartbeats: Vec<Age>,
    /// The rows that an open transaction of the application has locked, and the one that it waits for.
    pub(crate) row_locks: Vec<JobId>,
    pub(crate) wanted_row: Option<JobId>,
    /// The rows of queues that another transaction has locked.
    pub(crate) queue_row_locks: Vec<Queue>,
    /// Exchanges that their worker has given up on, but that the server may still carry out.
    pub(crate) abandoned: Vec<Exchange>,
    /// The one task name that cleanup may delete: its id, and the last id that was used.
    pub(crate) task: Option<u8>,
    pub(crate) last_task: u8,
    pub(crate) adders: Vec<Adder>,
    pub(crate) cleanup: Cleanup,
    /// How many jobs were ever added. A failover does not turn it back, as it stands for the time.
    pub(crate) last_created: u8,
    /// For the invariants: events that were added, that were removed, and that were in a job that began.
    pub(crate) added: Events,
    pub(crate) removed: Events,
    pub(crate) begun: Events,
}

/// The task of jobs that no cleanup touches.
const OTHER_TASK: u8 = 0;

impl Database {
    pub(crate) fn new(setup: &Setup) -> Database {
        let mut database = Database {
            jobs: Vec::new(),
            queues: vec![None; setup.jobs.iter().filter_map(|job| job.queue).max().map_or(0, |last| last as usize + 1)],
            registered: vec![Some(0); setup.workers as usize],
            heartbeats: vec![Age::Fresh; setup.workers as usize],
            row_locks: Vec::new(),
            wanted_row: None,
            queue_row_locks: Vec::new(),
            abandoned: Vec::new(),
            task: None,
            last_task: OTHER_TASK,
            adders: vec![Adder::Begun; setup.adders as usize],
            cleanup: Cleanup::Idle,
            last_created: 0,
            added: 0,
            removed: 0,
            begun: 0,
        };
        for job in &setup.jobs {
            let payload = if job.keyed { database.new_event() } else { 0 };
            database.insert(job.queue, OTHER_TASK, job.keyed, payload, setup.max_attempts);
        }
        database
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = (JobId, &Job)> {
        (0..).zip(&self.jobs).filter_map(|(id, job)| Some((id, job.as_ref()?)))
    }

    pub(crate) fn rename(&mut self, renamed: impl Fn(WorkerId) -> WorkerId) {
        let holders = self.jobs.iter_mut().flatten().filter_map(|job| job.locked_by.as_mut());
        let holders = holders.chain(self.queues.iter_mut().flatten());
        for id in holders.chain(self.abandoned.iter_mut().map(|exchange| &mut exchange.worker)) {
            *id = renamed(*id);
        }
    }

    fn rows_mut(&mut self) -> impl Iterator<Item = (JobId, &mut Job)> {
        (0..).zip(&mut self.jobs).filter_map(|(id, job)| Some((id, job.as_mut()?)))
    }

    pub(crate) fn row(&self, id: JobId) -> Option<&Job> {
        self.jobs.get(id as usize)?.as_ref()
    }

    pub(crate) fn row_mut(&mut self, id: JobId) -> Option<&mut Job> {
        self.jobs.get_mut(id as usize)?.as_mut()
    }

    fn delete(&mut self, id: JobId) {
        self.jobs[id as usize] = None;
    }

    fn insert(&mut self, queue: Option<Queue>, task: u8, has_key: bool, payload: Events, max_attempts: u8) {
        let run_at = self.last_in_order();
        self.last_created += 1;
        let created = self.last_created;
        self.jobs.push(Some(Job {
            queue,
            task,
            has_key,
            payload,
            attempts: 0,
            max_attempts,
            run_at,
            removed: false,
            locked_by: None,
            claim: 0,
            // No claim of a job has the time of a claim of another one.
            last_claim: created << 4,
            created,
            updated_since_lock: false,
            has_begun: false,
            lost_its_turn: false,
            attempts_unknown: false,
        }));
    }

    fn new_event(&mut self) -> Events {
        let event = self.added + 1;
        self.added |= event;
        event
    }

    /// The place in the run order after all others.
    fn last_in_order(&self) -> u8 {
        self.rows().map(|(_, job)| job.run_at + 1).max().unwrap_or(0)
    }

    /// Whether the worker's own row is there: it has not been declared dead.
    pub(crate) fn is_registered(&self, id: WorkerId) -> bool {
        self.registered[id.worker as usize] == Some(id.generation)
    }

    /// The fence: whether the row is still what this worker has claimed.
    pub(crate) fn is_locked_as_claimed(&self, worker: WorkerId, job: &Claimed, bug: Option<Bug>) -> bool {
        self.row(job.id).is_some_and(|row| {
            row.locked_by == Some(worker) && (row.claim == job.claim || bug == Some(Bug::FenceByWorkerOnly))
        })
    }

    /// How old the heartbeat of a worker is that is registered.
    fn heartbeat(&self, id: WorkerId) -> Option<Age> {
        self.is_registered(id).then(|| self.heartbeats[id.worker as usize])
    }

    /// A heartbeat arrives; false if the worker was declared dead.
    pub(crate) fn record_heartbeat(&mut self, id: WorkerId) -> bool {
        let is_registered = self.is_registered(id);
        if is_registered {
            self.heartbeats[id.worker as usize] = Age::Fresh;
        }
        is_registered
    }

    pub(crate) fn register(&mut self, id: WorkerId) {
        self.registered[id.worker as usize] = Some(id.generation);
        self.heartbeats[id.worker as usize] = Age::Fresh;
    }

    /// One exchange: reports outcomes, frees queues, claims jobs.
    ///
    /// The claim sees the jobs as they were before the report, as all parts of one SQL statement do.
    pub(crate) fn exchange(&mut self, exchange: &Exchange, bug: Option<Bug>) -> Answer {
        let available: Vec<JobId> = self.available_in_order();
        let blocked = self.settle(exchange, bug);
        let freed = self.queues_to_free(exchange, &blocked, bug);
        let is_still_locked =
            |queue: &&Queue| self.queues[**queue as usize] == Some(exchange.worker) && !freed.contains(queue);
        let blocked_queues = exchange.free.iter().filter(is_still_locked).copied().collect();
        let may_claim = self.heartbeat(exchange.worker) == Some(Age::Fresh);
        let claimed =
            if may_claim { self.claim(exchange.worker, &available, &freed, exchange.wants) } else { Vec::new() };
        for queue in freed {
            if !claimed.iter().any(|job| job.queue == Some(queue)) {
                self.queues[queue as usize] = None;
            }
        }
        Answer { claimed, blocked, blocked_queues }
    }

    fn available_in_order(&self) -> Vec<JobId> {
        let mut available: Vec<(u8, JobId)> =
            self.rows().filter(|(_, job)| job.is_available()).map(|(id, job)| (job.run_at, id)).collect();
        available.sort_unstable();
        available.into_iter().map(|(_, id)| id).collect()
    }

    /// Writes what became of the jobs; returns those whose rows another transaction has locked.
    fn settle(&mut self, exchange: &Exchange, bug: Option<Bug>) -> Vec<JobId> {
        let mut blocked = Vec::new();
        for ended in &exchange.report {
            let id = ended.job.id;
            if !self.is_locked_as_claimed(exchange.worker, &ended.job, bug) {
                continue;
            }
            if self.row_locks.contains(&id) {
                blocked.push(id);
                continue;
            }
            let last = self.last_in_order();
            let Some(row) = self.row_mut(id) else { continue };
            match ended.outcome {
                Outcome::Done => self.delete(id),
                Outcome::Failed => {
                    row.unlock();
                    row.run_at = last;
                    row.lost_its_turn = true;
                }
                Outcome::Interrupted => {
                    // A key that was gone when the worker found the job is unchanged, too: so the mark counts here.
                    let is_refused = row.counts_as_removed(bug) && bug != Some(Bug::InterruptIgnoresRemoval);
                    if row.has_key == ended.job.had_key && !is_refused {
                        row.attempts -= 1;
                    }
                    row.unlock();
                    row.run_at = last;
                    row.lost_its_turn = true;
                }
                Outcome::Released if row.counts_as_removed(bug) && bug != Some(Bug::ReleaseIgnoresRemoval) => {
                    self.delete(id);
                }
                Outcome::Released => {
                    if row.has_key == ended.job.had_key || bug != Some(Bug::ReleaseRefundsOnlySameKey) {
                        row.attempts_unknown |= row.updated_since_lock && row.has_key == ended.job.had_key;
                        let at_claim = match bug {
                            Some(Bug::ReleaseRefundsOneAttempt) => row.attempts,
                            _ => ended.job.attempts,
                        };
                        row.attempts = at_claim - 1;
                    }
                    row.unlock();
                    row.run_at = ended.job.run_at;
                }
            }
        }
        blocked
    }

    /// The queues of this worker that it asks to free, except those of which a reported job is blocked, and those whose
    /// row another transaction has locked.
    fn queues_to_free(&self, exchange: &Exchange, blocked: &[JobId], bug: Option<Bug>) -> Vec<Queue> {
        let is_blocked = |queue: Queue| {
            bug != Some(Bug::FreesQueueDespiteBlocked)
                && blocked.iter().any(|id| self.row(*id).is_some_and(|job| job.queue == Some(queue)))
        };
        let is_ours = |queue: Queue| {
            self.queues[queue as usize] == Some(exchange.worker) && !self.queue_row_locks.contains(&queue)
        };
        exchange.free.iter().copied().filter(|queue| is_ours(*queue) && !is_blocked(*queue)).collect()
    }

    /// Claims jobs in order: of free queues, and of those that this exchange frees. Skips locked rows.
    fn claim(&mut self, worker: WorkerId, available: &[JobId], freed: &[Queue], wants: usize) -> Vec<Claimed> {
        let won: Vec<bool> = (0..self.queues.len() as Queue).map(|queue| self.may_take(queue, freed)).collect();
        let mut claimed = Vec::new();
        for id in available.iter().copied() {
            if claimed.len() == wants {
                break;
            }
            let is_row_locked = self.row_locks.contains(&id);
            let Some(row) = self.row_mut(id) else { continue };
            if row.queue.is_some_and(|queue| !won[queue as usize]) {
                continue;
            }
            if is_row_locked {
                row.lost_its_turn |= row.queue.is_some();
                continue;
            }
            row.locked_by = Some(worker);
            row.last_claim += 1;
            row.claim = row.last_claim;
            row.attempts += 1;
            row.updated_since_lock = false;
            claimed.push(Claimed {
                id,
                claim: row.claim,
                created: row.created,
                payload: row.payload,
                attempts: row.attempts,
                queue: row.queue,
                run_at: row.run_at,
                had_key: row.has_key,
            });
            if let Some(queue) = row.queue {
                self.queues[queue as usize] = Some(worker);
            }
        }
        claimed
    }

    /// Whether a claim may take jobs of the queue: it is free, or this exchange frees it, and its row is not locked.
    fn may_take(&self, queue: Queue, freed: &[Queue]) -> bool {
        let is_free = self.queues[queue as usize].is_none() || freed.contains(&queue);
        is_free && !self.queue_row_locks.contains(&queue)
    }

    /// Whether a claim that also frees these queues would find something: PostgreSQL would notify the worker.
    pub(crate) fn something_waits(&self, freed: &[Queue]) -> bool {
        self.rows().any(|(_, job)| job.is_available() && job.queue.is_none_or(|queue| self.may_take(queue, freed)))
    }

    /// The jobs that the worker holds, whether it knows of them or not.
    pub(crate) fn held(&self, worker: WorkerId) -> Vec<Claimed> {
        let held = self.rows().filter(|(_, job)| job.locked_by == Some(worker));
        let held = held.map(|(id, job)| Claimed {
            id,
            claim: job.claim,
            created: job.created,
            payload: job.payload,
            attempts: job.attempts,
            queue: job.queue,
            run_at: job.run_at,
            had_key: job.has_key,
        });
        held.collect()
    }

    /// The queues that the worker holds.
    pub(crate) fn held_queues(&self, worker: WorkerId) -> Vec<Queue> {
        (0..).zip(&self.queues).filter(|(_, holder)| **holder == Some(worker)).map(|(queue, _)| queue).collect()
    }

    /// Who is dead: registered without a heartbeat for long, or not registered and holding something.
    pub(crate) fn dead_workers(&self, bug: Option<Bug>) -> Vec<WorkerId> {
        let registered = (0..)
            .zip(&self.registered)
            .filter_map(|(worker, generation)| Some(WorkerId { worker, generation: (*generation)? }));
        let holders = self.rows().filter_map(|(_, job)| job.locked_by).chain(self.queues.iter().copied().flatten());
        let orphans = holders.filter(|holder| !self.is_registered(*holder) && bug != Some(Bug::SweepForgetsOrphans));
        let mut dead: Vec<WorkerId> =
            registered.filter(|id| self.heartbeat(*id) == Some(Age::Expired)).chain(orphans).collect();
        dead.sort_unstable();
        dead.dedup();
        dead
    }

    /// Declares workers dead, in one transaction: unlocks their jobs, frees their queues, deletes their rows. Skips
    /// rows that another transaction has locked; their queues stay locked, and the next sweep finds them.
    pub(crate) fn sweep(&mut self, dead: &[WorkerId], bug: Option<Bug>) {
        let is_dead = |holder: Option<WorkerId>| holder.is_some_and(|holder| dead.contains(&holder));
        let row_locks = self.row_locks.clone();
        let mut last = self.last_in_order();
        for (id, row) in self.rows_mut() {
            if !is_dead(row.locked_by) || row_locks.contains(&id) {
                continue;
            }
            let is_replaced = !row.has_key && row.attempts >= row.max_attempts && row.updated_since_lock;
            let is_refused = is_replaced && bug == Some(Bug::RecoveryDoesNotRefundReplaced);
            if !row.counts_as_removed(bug) && !is_refused {
                row.attempts -= 1;
                row.attempts_unknown |= is_replaced;
                row.run_at = last;
                last += 1;
            }
            row.lost_its_turn = true;
            row.unlock();
        }
        let held: Vec<Queue> =
            self.rows().filter(|(_, row)| is_dead(row.locked_by)).filter_map(|(_, row)| row.queue).collect();
        for (queue, holder) in (0..).zip(&mut self.queues) {
            if is_dead(*holder) && !held.contains(&queue) && !self.queue_row_locks.contains(&queue) {
                *holder = None;
            }
        }
        for worker in dead {
            if self.is_registered(*worker) {
                self.registered[worker.worker as usize] = None;
            }
        }
    }

    /// `force_unlock_workers`: an operator unlocks all jobs and queues of a worker that may be alive.
    pub(crate) fn force_unlock(&mut self, worker: WorkerId) {
        for (_, row) in self.rows_mut().filter(|(_, row)| row.locked_by == Some(worker)) {
            row.unlock();
            row.lost_its_turn = true;
            // It keeps the attempt, although the job may never have begun.
            row.attempts_unknown = true;
        }
        for holder in self.queues.iter_mut().filter(|holder| **holder == Some(worker)) {
            *holder = None;
        }
    }

    /// What a standby has of it. Transactions that are open, or not begun yet, are not there.
    pub(crate) fn replicated(&self) -> Database {
        Database {
            row_locks: Vec::new(),
            wanted_row: None,
            queue_row_locks: Vec::new(),
            abandoned: Vec::new(),
            ..self.clone()
        }
    }

    /// The standby takes over: what was committed since it fell behind is lost. What has really happened stays: which jobs
    /// have begun, and which times were given to claims and jobs. `last_claim` says which was the last claim of a row.
    pub(crate) fn fail_over(&mut self, standby: Database, last_claim: impl Fn(JobId) -> Claim) {
        let before = std::mem::replace(self, standby);
        for (id, row) in self.rows_mut() {
            let was = before.row(id).filter(|was| was.created == row.created);
            // A row that was deleted since has begun, unless the application has removed it.
            row.has_begun |= was.is_none_or(|was| was.has_begun);
            row.last_claim = was.map_or(0, |was| was.last_claim).max(row.last_claim).max(last_claim(id));
        }
        self.last_created = before.last_created;
        // Events that are lost with the server count as removed.
        self.removed |= before.added & !self.added;
        self.added = before.added;
        self.begun = before.begun;
        self.registered = before.registered;
        self.heartbeats = before.heartbeats;
    }

    fn keyed(&self) -> Option<JobId> {
        self.rows().find(|(_, job)| job.has_key).map(|(id, _)| id)
    }

    /// Whether the row that has the key can be changed without waiting.
    pub(crate) fn can_change_keyed(&self) -> bool {
        self.keyed().is_none_or(|id| !self.row_locks.contains(&id))
    }

    pub(crate) fn has_keyed(&self) -> bool {
        self.keyed().is_some()
    }

    /// `add_job` with the key: merges the event into a job that waits, or takes the key from one that does not.
    pub(crate) fn add_keyed(&mut self, queue: Option<Queue>, max_attempts: u8) {
        let event = self.new_event();
        let last = self.last_in_order();
        let keyed = self.keyed();
        if let Some(row) = keyed.and_then(|id| self.row_mut(id)) {
            if row.is_available() {
                row.payload |= event;
                row.attempts = 0;
                row.run_at = last;
                return;
            }
            row.has_key = false;
            row.attempts = row.max_attempts;
            row.updated_since_lock = true;
        }
        self.insert(queue, OTHER_TASK, true, event, max_attempts);
    }

    /// `remove_job`: deletes a job that is not locked, and marks one that is.
    pub(crate) fn remove_keyed(&mut self) {
        let Some(id) = self.keyed() else { return };
        let Some(row) = self.row_mut(id) else { return };
        let payload = row.payload;
        if row.locked_by.is_none() {
            self.delete(id);
        } else {
            row.has_key = false;
            row.attempts = row.max_attempts;
            row.removed = true;
            row.updated_since_lock = true;
        }
        self.removed |= payload;
    }

    /// `keep_locks_fresh`: the lock moves by whole hours, which the fence does not mind.
    pub(crate) fn refresh_lock(&mut self, id: JobId) {
        if let Some(row) = self.row_mut(id) {
            row.updated_since_lock = false;
        }
    }

    /// Whether an adder has the shared lock of the name.
    fn is_name_shared(&self) -> bool {
        let has_lock = |adder: &Adder| matches!(adder, Adder::HasLock | Adder::LookedUp { has_lock: true, .. });
        self.adders.iter().any(has_lock)
    }

    fn is_name_locked(&self) -> bool {
        matches!(self.cleanup, Cleanup::HasLock { .. })
    }

    fn look_up_task(&mut self) -> u8 {
        *self.task.get_or_insert_with(|| {
            self.last_task += 1;
            self.last_task
        })
    }

    /// The next step of a transaction that adds a job, if it need not wait.
    pub(crate) fn adder_step(&mut self, adder: usize, max_attempts: u8, bug: Option<Bug>) -> bool {
        let looks_first = bug == Some(Bug::AdderLooksUpBeforeLock);
        let next = match self.adders[adder] {
            Adder::Begun if looks_first => Adder::LookedUp { task: self.look_up_task(), has_lock: false },
            Adder::Begun if self.is_name_locked() => return false,
            Adder::Begun => Adder::HasLock,
            Adder::HasLock => Adder::LookedUp { task: self.look_up_task(), has_lock: true },
            Adder::LookedUp { has_lock: false, .. } if self.is_name_locked() => return false,
            Adder::LookedUp { task, has_lock: false } => Adder::LookedUp { task, has_lock: true },
            Adder::LookedUp { task, has_lock: true } => {
                self.insert(None, task, false, 0, max_attempts);
                Adder::Committed
            }
            Adder::Committed => return false,
        };
        self.adders[adder] = next;
        true
    }

    fn is_name_unused(&self) -> bool {
        !self.rows().any(|(_, job)| Some(job.task) == self.task)
    }

    /// The next step of a cleanup, if it need not wait.
    pub(crate) fn cleanup_step(&mut self, bug: Option<Bug>) -> bool {
        self.cleanup = match self.cleanup {
            Cleanup::Idle if bug == Some(Bug::CleanupLooksBeforeLock) => {
                Cleanup::Looked { unused: self.is_name_unused() }
            }
            Cleanup::Idle | Cleanup::Looked { .. } if self.is_name_shared() => return false,
            Cleanup::Idle => Cleanup::HasLock { unused: None },
            Cleanup::Looked { unused } => Cleanup::HasLock { unused: Some(unused) },
            Cleanup::HasLock { unused } => {
                if unused.unwrap_or_else(|| self.is_name_unused()) {
                    self.task = None;
                }
                Cleanup::Idle
            }
        };
        true
    }
}
