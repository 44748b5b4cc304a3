//! What must hold in every state?
//!
//! Each property has a constant for its name, and a predicate below. "Live" is a worker process that has not died and
//! has not been declared dead: one that was declared dead may still run what it began before it finds out.

use crate::actions::{Protocol, State};
use crate::database::{Claimed, Outcome, Queue};
use crate::setup::Limits;
use crate::worker::{Lane, Worker};
use stateright::Property;

/// A claimed job is in one of ready, behind, running, to_report, blocked or under way, and in one only.
pub const IN_ONE_PLACE: &str = "a claimed job is in one place of its worker's memory";
/// Ready, behind and running jobs are locked in the database by this claim.
pub const MEMORY_IS_LOCKED: &str = "a job that has not ended in a live worker's memory is locked by this claim";
/// Every row that a live worker has locked is in its memory or under way, or the worker is uncertain and will ask.
pub const LOCKED_IS_KNOWN: &str = "a row locked by a live worker is known to it, or it will ask";
/// The holder of a job of a queue holds the queue.
pub const QUEUE_LOCKED_WITH_JOB: &str = "while a job of a queue is locked, its holder has locked the queue";
/// A live worker that has locked a queue knows that it must free it, or will ask.
pub const LOCKED_QUEUE_IS_KNOWN: &str = "a queue locked by a live worker is known to it, or it will ask";
/// No report unlocks (releases, retries) a job of a queue that it frees.
pub const NO_RELEASE_WITH_FREE: &str = "no report unlocks a job of a queue that it frees";
/// Every event of a keyed add has begun, can still run, or was removed.
pub const NO_EVENT_LOST: &str = "every event of a keyed add has begun, can still run, or was removed";
/// A job that never began has the attempts that it had before its claim.
pub const RELEASE_REFUNDS: &str = "a job that never began regains what its claim took";
/// While an abandoned exchange may still commit, its worker is uncertain.
pub const ABANDONED_ONLY_WHILE_UNCERTAIN: &str = "an abandoned exchange can commit only while its worker is uncertain";
/// A removed job never becomes available again.
pub const REMOVED_STAYS_REMOVED: &str = "a removed job never becomes available again";
/// The task of every job exists.
pub const NAMES_EXIST: &str = "the task of every job exists";
/// At most one job of a queue runs at a time.
pub const ONE_OF_A_QUEUE: &str = "at most one job of a queue runs on live workers";
/// Jobs of a queue begin in order.
pub const IN_ORDER: &str = "jobs of a queue begin in order";
/// No job runs twice at once on one worker, whatever happened to its claims.
pub const NOT_BESIDE_ITSELF: &str = "no job runs beside itself on one worker";
/// No job runs on two live workers.
pub const ONE_WORKER: &str = "no job runs on two live workers";
/// A worker that was declared dead begins nothing.
pub const DEAD_BEGIN_NOTHING: &str = "a worker that was declared dead begins no job";
/// Every job can end.
pub const EVERY_JOB_CAN_END: &str = "every job can end";

pub(crate) fn properties() -> Vec<Property<Protocol>> {
    vec![
        Property::always(IN_ONE_PLACE, |_, state| live(state).all(is_each_job_in_one_place)),
        Property::always(MEMORY_IS_LOCKED, memory_is_locked),
        Property::always(LOCKED_IS_KNOWN, |_, state| locked_is_known(state)),
        Property::always(QUEUE_LOCKED_WITH_JOB, |_, state| queue_is_locked_with_job(state)),
        Property::always(LOCKED_QUEUE_IS_KNOWN, |_, state| locked_queue_is_known(state)),
        Property::always(NO_RELEASE_WITH_FREE, |_, state| no_release_with_free(state)),
        Property::always(NO_EVENT_LOST, |_, state| no_event_is_lost(state)),
        Property::always(RELEASE_REFUNDS, |_, state| release_refunds(state)),
        Property::always(ABANDONED_ONLY_WHILE_UNCERTAIN, |_, state| abandoned_only_while_uncertain(state)),
        Property::always(REMOVED_STAYS_REMOVED, |_, state| removed_stays_removed(state)),
        Property::always(NAMES_EXIST, |_, state| names_exist(state)),
        Property::always(ONE_OF_A_QUEUE, one_of_a_queue_runs),
        Property::always(IN_ORDER, begins_in_order),
        Property::always(NOT_BESIDE_ITSELF, |_, state| no_job_runs_beside_itself(state)),
        Property::always(ONE_WORKER, runs_on_one_worker),
        Property::always(DEAD_BEGIN_NOTHING, |_, state| dead_begin_nothing(state)),
        Property::always(EVERY_JOB_CAN_END, |protocol, state| protocol.can_end(state)),
    ]
}

/// The workers that have neither died nor been declared dead.
fn live(state: &State) -> impl Iterator<Item = &Worker> {
    state.workers.iter().filter(|worker| worker.is_alive && state.database.is_registered(worker.id))
}

/// All jobs that a worker knows of, also those under way; not the answer to what it holds.
pub(crate) fn known(worker: &Worker) -> Vec<&Claimed> {
    let reported = worker.under_way().flat_map(|exchange| &exchange.report).map(|ended| &ended.job);
    let claimed = worker.lanes.iter().flat_map(|lane| match lane {
        Lane::Answered { answer, .. } => answer.claimed.as_slice(),
        _ => &[],
    });
    worker.jobs().chain(&worker.claimed_again).chain(reported).chain(claimed).collect()
}

fn is_each_job_in_one_place(worker: &Worker) -> bool {
    has_no_duplicates(known(worker).into_iter().map(|job| (job.id, job.claim)))
}

/// After a failover, running jobs may have lost their claim; those that wait are released when the worker has asked. An
/// operator who unlocks jobs does not ask their worker.
fn memory_is_locked(protocol: &Protocol, state: &State) -> bool {
    let Limits { failovers, unlocks, .. } = protocol.setup.limits;
    let is_locked = |worker: &Worker, job: &Claimed| state.database.is_locked_as_claimed(worker.id, job, None);
    unlocks > 0
        || live(state).filter(|worker| failovers == 0 || !worker.is_uncertain()).all(|worker| {
            let running = worker.running.iter().filter(|_| failovers == 0);
            worker.waiting().chain(running).all(|job| is_locked(worker, job))
        })
}

fn locked_is_known(state: &State) -> bool {
    live(state).filter(|worker| !worker.is_uncertain()).all(|worker| {
        let known = known(worker);
        state
            .database
            .held(worker.id)
            .iter()
            .all(|held| known.iter().any(|job| (job.id, job.claim) == (held.id, held.claim)))
    })
}

fn queue_is_locked_with_job(state: &State) -> bool {
    state.database.rows().all(|(_, job)| match (job.locked_by, job.queue) {
        (Some(holder), Some(queue)) => state.database.queues[queue as usize] == Some(holder),
        _ => true,
    })
}

fn locked_queue_is_known(state: &State) -> bool {
    let knows = |worker: &Worker, queue: Queue| {
        worker.is_uncertain()
            || worker.queues.contains(&queue)
            || worker.under_way().any(|exchange| exchange.free.contains(&queue))
            || known(worker).iter().any(|job| job.queue == Some(queue))
    };
    live(state).all(|worker| state.database.held_queues(worker.id).into_iter().all(|queue| knows(worker, queue)))
}

fn no_release_with_free(state: &State) -> bool {
    let under_way = state.workers.iter().flat_map(Worker::under_way);
    under_way.chain(&state.database.abandoned).all(|exchange| {
        let mut given_back = exchange.report.iter().filter(|ended| ended.outcome != Outcome::Done);
        !given_back.any(|ended| ended.job.queue.is_some_and(|queue| exchange.free.contains(&queue)))
    })
}

fn no_event_is_lost(state: &State) -> bool {
    let database = &state.database;
    let can_run = database.rows().filter(|(_, job)| job.locked_by.is_some() || job.is_available());
    let can_run = can_run.fold(0, |events, (_, job)| events | job.payload);
    database.added & !(database.begun | database.removed | can_run) == 0
}

/// Exactly; or at least one attempt, if the job was replaced before its worker learned how many it had.
fn release_refunds(state: &State) -> bool {
    let mut never_began = state.database.rows().filter(|(_, job)| !job.has_begun && !job.removed);
    never_began
        .all(|(_, job)| job.locked_by.is_some() || job.attempts == 0 || (job.attempts_unknown && job.is_available()))
}

fn abandoned_only_while_uncertain(state: &State) -> bool {
    let uncertain = |worker: &Worker| worker.is_uncertain();
    live(state)
        .all(|worker| uncertain(worker) || state.database.abandoned.iter().all(|exchange| exchange.worker != worker.id))
}

fn removed_stays_removed(state: &State) -> bool {
    state.database.rows().all(|(_, job)| !(job.removed && job.is_available()))
}

fn names_exist(state: &State) -> bool {
    let exists = |task: u8| task == 0 || state.database.task == Some(task);
    state.database.rows().all(|(_, job)| exists(job.task))
}

/// The jobs that run on live workers. If there are failovers or unlocks, only those that the worker still holds: a job
/// whose claim was lost runs to its end, and another worker may run it, too.
fn running<'a>(protocol: &Protocol, state: &'a State) -> impl Iterator<Item = &'a Claimed> {
    let Limits { failovers, unlocks, .. } = protocol.setup.limits;
    let keeps_claims = failovers + unlocks == 0;
    live(state).flat_map(move |worker| {
        let again = |job: &Claimed| worker.claimed_again.iter().find(|again| again.id == job.id).copied();
        let is_held = |job: &Claimed| state.database.is_locked_as_claimed(worker.id, job, None);
        worker
            .running
            .iter()
            .filter(move |job| keeps_claims || is_held(job) || again(job).is_some_and(|again| is_held(&again)))
    })
}

fn has_no_duplicates<T: Ord>(items: impl Iterator<Item = T>) -> bool {
    let mut items: Vec<T> = items.collect();
    let count = items.len();
    items.sort_unstable();
    items.dedup();
    items.len() == count
}

/// On all workers together; and on each of them, even if claims were lost.
fn one_of_a_queue_runs(protocol: &Protocol, state: &State) -> bool {
    let queues = |worker: &Worker| has_no_duplicates(worker.running.iter().filter_map(|job| job.queue));
    has_no_duplicates(running(protocol, state).filter_map(|job| job.queue)) && state.workers.iter().all(queues)
}

fn no_job_runs_beside_itself(state: &State) -> bool {
    state.workers.iter().all(|worker| has_no_duplicates(worker.running.iter().map(|job| job.id)))
}

/// While a job of a queue runs, no earlier one waits that never began; except those that were retried, recovered, or
/// skipped because a transaction had locked their rows.
fn begins_in_order(protocol: &Protocol, state: &State) -> bool {
    running(protocol, state).all(|runs| {
        let of_queue = state.database.rows().filter(|(_, job)| job.queue.is_some() && job.queue == runs.queue);
        let mut waits = of_queue.filter(|(_, job)| !job.has_begun && !job.lost_its_turn && !job.removed);
        !waits.any(|(id, job)| (job.run_at, id) < (runs.run_at, runs.id))
    })
}

fn runs_on_one_worker(protocol: &Protocol, state: &State) -> bool {
    has_no_duplicates(running(protocol, state).map(|job| job.id))
}

fn dead_begin_nothing(state: &State) -> bool {
    state.workers.iter().all(|worker| !worker.began_after_death)
}
