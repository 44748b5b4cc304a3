//! Which small configurations are checked, and which bugs can be planted?
//!
//! Each configuration exercises one theme. Bounds keep it finite: how many jobs, and how often each kind of event happens.

use crate::database::Queue;

/// A small configuration: workers, jobs, and how much may happen.
#[derive(Debug, Clone)]
pub struct Setup {
    pub(crate) workers: u8,
    pub(crate) lanes: u8,
    /// How many jobs a worker runs at a time.
    pub(crate) slots: usize,
    /// How many jobs a worker holds: running, ready and behind.
    pub(crate) capacity: usize,
    pub(crate) max_attempts: u8,
    pub(crate) jobs: Vec<NewJob>,
    /// Transactions that add a job of the one task name that cleanup may delete.
    pub(crate) adders: u8,
    pub(crate) limits: Limits,
}

/// A job that is in the table from the start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewJob {
    pub(crate) queue: Option<Queue>,
    pub(crate) keyed: bool,
}

/// How often something may still happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Limits {
    /// Keyed adds.
    pub(crate) adds: u8,
    /// Removals by key.
    pub(crate) removes: u8,
    /// Row locks that the application takes.
    pub(crate) row_locks: u8,
    /// Releases of jobs that never began.
    pub(crate) releases: u8,
    pub(crate) failures: u8,
    /// Jobs that began and were interrupted.
    pub(crate) interrupts: u8,
    /// Lost answers and abandoned exchanges.
    pub(crate) losses: u8,
    /// Workers that die.
    pub(crate) deaths: u8,
    /// How often the heartbeat of a worker that is alive becomes older: twice until it expires.
    pub(crate) lapses: u8,
    /// Locks that are kept fresh.
    pub(crate) refreshes: u8,
    pub(crate) cleanups: u8,
    /// Standbys that fall behind and take over.
    pub(crate) failovers: u8,
    /// How often an operator unlocks what a worker holds.
    pub(crate) unlocks: u8,
}

const PLAIN: NewJob = NewJob { queue: None, keyed: false };
const KEYED: NewJob = NewJob { queue: None, keyed: true };
const QUEUED: NewJob = NewJob { queue: Some(0), keyed: false };
const KEYED_AND_QUEUED: NewJob = NewJob { queue: Some(0), keyed: true };

impl Setup {
    fn new(workers: u8, lanes: u8, jobs: &[NewJob], limits: Limits) -> Setup {
        let jobs = jobs.to_vec();
        Setup { workers, lanes, slots: 1, capacity: 2, max_attempts: 2, jobs, adders: 0, limits }
    }

    /// The same configuration with every limit raised by one. Too large for CI.
    pub fn larger(mut self) -> Setup {
        let Limits {
            adds,
            removes,
            row_locks,
            releases,
            failures,
            interrupts,
            losses,
            deaths,
            lapses,
            refreshes,
            cleanups,
            failovers,
            unlocks,
        } = &mut self.limits;
        let faults = [releases, failures, interrupts, losses, deaths, lapses, failovers];
        let others = [adds, removes, row_locks, refreshes, cleanups, unlocks];
        for limit in faults.into_iter().chain(others).filter(|limit| **limit > 0) {
            *limit += 1;
        }
        self
    }

    /// One worker with one lane loses answers and abandons exchanges.
    pub fn lost_answers() -> Setup {
        let limits = Limits { losses: 3, releases: 2, failures: 1, ..Limits::default() };
        Setup::new(1, 1, &[PLAIN, PLAIN], limits)
    }

    /// Two workers lose answers and release a job.
    pub fn two_workers_lose_answers() -> Setup {
        let limits = Limits { losses: 2, releases: 1, ..Limits::default() };
        Setup::new(2, 1, &[PLAIN], limits)
    }

    /// Two lanes lose answers, with jobs of a queue and one without.
    pub fn two_lanes() -> Setup {
        let limits = Limits { losses: 2, releases: 1, ..Limits::default() };
        Setup { capacity: 3, ..Setup::new(1, 2, &[QUEUED, QUEUED, PLAIN, PLAIN], limits) }
    }

    /// Two workers share a queue, release and retry its jobs, and lose an answer.
    pub fn queue() -> Setup {
        let limits = Limits { releases: 2, failures: 1, losses: 2, ..Limits::default() };
        Setup::new(2, 1, &[QUEUED, QUEUED, QUEUED], limits)
    }

    /// The application replaces and removes a keyed job that is claimed, released, interrupted or retried.
    pub fn keys() -> Setup {
        let limits = Limits { adds: 2, removes: 1, releases: 1, interrupts: 1, losses: 1, ..Limits::default() };
        Setup::new(1, 1, &[KEYED], limits)
    }

    /// Keyed jobs that fail for good at once give their key to a new job.
    pub fn keys_of_failed_jobs() -> Setup {
        let limits = Limits { adds: 2, removes: 1, releases: 1, failures: 2, ..Limits::default() };
        Setup { max_attempts: 1, ..Setup::new(1, 1, &[KEYED], limits) }
    }

    /// Two workers and a keyed job in a queue: it is replaced, removed, released and found again.
    pub fn keys_in_a_queue() -> Setup {
        let limits = Limits { adds: 1, removes: 1, releases: 1, losses: 1, ..Limits::default() };
        Setup::new(2, 1, &[KEYED_AND_QUEUED, QUEUED], limits)
    }

    /// Two lanes meet row locks.
    pub fn row_locks_and_two_lanes() -> Setup {
        let limits = Limits { row_locks: 1, losses: 1, releases: 1, ..Limits::default() };
        Setup { capacity: 3, ..Setup::new(1, 2, &[QUEUED, PLAIN, PLAIN], limits) }
    }

    /// The application holds row locks on jobs that are claimed, reported and released.
    pub fn row_locks() -> Setup {
        let limits = Limits { row_locks: 2, releases: 1, losses: 1, ..Limits::default() };
        Setup::new(1, 1, &[QUEUED, QUEUED, PLAIN], limits)
    }

    /// Two workers and a queue while the application holds row locks.
    pub fn row_locks_of_a_queue() -> Setup {
        let limits = Limits { row_locks: 2, releases: 1, ..Limits::default() };
        Setup::new(2, 1, &[QUEUED, QUEUED], limits)
    }

    /// Workers lose touch while the application replaces and removes a keyed job.
    pub fn recovery_of_keyed_jobs() -> Setup {
        let limits = Limits { adds: 1, removes: 1, lapses: 2, refreshes: 1, ..Limits::default() };
        Setup { capacity: 1, ..Setup::new(2, 1, &[KEYED], limits) }
    }

    /// A worker dies, another one loses touch, and exchanges of both are carried out late.
    pub fn deaths() -> Setup {
        let limits = Limits { deaths: 1, lapses: 3, losses: 1, releases: 1, ..Limits::default() };
        Setup { capacity: 1, ..Setup::new(2, 1, &[PLAIN], limits) }
    }

    /// Workers die or lose touch while they hold jobs of a queue, and a row lock stops the sweep.
    pub fn recovery_of_queues() -> Setup {
        let limits = Limits { lapses: 2, row_locks: 1, adds: 1, ..Limits::default() };
        Setup::new(2, 1, &[QUEUED, KEYED_AND_QUEUED], limits)
    }

    /// A worker with two lanes loses an answer and touch.
    pub fn recovery_with_two_lanes() -> Setup {
        let limits = Limits { lapses: 2, losses: 1, ..Limits::default() };
        Setup { capacity: 3, ..Setup::new(1, 2, &[QUEUED, QUEUED, PLAIN], limits) }
    }

    /// A worker loses an answer and touch, and a keyed job is replaced, removed, released and recovered.
    pub fn recovery_after_a_loss() -> Setup {
        let limits = Limits { adds: 1, removes: 1, releases: 1, losses: 1, lapses: 2, ..Limits::default() };
        Setup { capacity: 1, ..Setup::new(1, 1, &[KEYED], limits) }
    }

    /// A failover loses claims, reports and releases of a worker that runs two jobs at a time, two of them of a queue.
    pub fn failover() -> Setup {
        let limits = Limits { failovers: 1, releases: 1, failures: 1, ..Limits::default() };
        Setup { slots: 2, capacity: 3, ..Setup::new(1, 1, &[PLAIN, QUEUED, QUEUED], limits) }
    }

    /// A failover meets failures, releases and a lost answer.
    pub fn failover_with_faults() -> Setup {
        let limits = Limits { failovers: 1, losses: 1, releases: 1, failures: 1, ..Limits::default() };
        Setup { slots: 2, ..Setup::new(1, 1, &[PLAIN, PLAIN], limits) }
    }

    /// Two workers continue after a failover.
    pub fn failover_of_two_workers() -> Setup {
        let limits = Limits { failovers: 1, releases: 1, ..Limits::default() };
        Setup::new(2, 1, &[QUEUED, QUEUED], limits)
    }

    /// A failover while two lanes are busy.
    pub fn failover_of_two_lanes() -> Setup {
        let limits = Limits { failovers: 1, ..Limits::default() };
        Setup { capacity: 3, ..Setup::new(1, 2, &[QUEUED, PLAIN, PLAIN], limits) }
    }

    /// A failover loses keyed jobs, and the ids of lost jobs are given to others.
    pub fn failover_of_keyed_jobs() -> Setup {
        let limits = Limits { failovers: 1, adds: 2, releases: 1, ..Limits::default() };
        Setup { slots: 2, ..Setup::new(1, 1, &[KEYED], limits) }
    }

    /// An operator unlocks the jobs of a worker that is alive, before or after a failover.
    pub fn unlocks() -> Setup {
        let limits = Limits { unlocks: 1, failovers: 1, losses: 1, ..Limits::default() };
        Setup { slots: 2, ..Setup::new(1, 1, &[PLAIN, PLAIN], limits) }
    }

    /// An operator unlocks the jobs and the queue of one of two workers.
    pub fn unlocks_of_a_queue() -> Setup {
        let limits = Limits { unlocks: 1, releases: 1, losses: 1, ..Limits::default() };
        Setup::new(2, 1, &[QUEUED, QUEUED], limits)
    }

    /// An operator unlocks the jobs of a worker with two lanes.
    pub fn unlocks_and_two_lanes() -> Setup {
        let limits = Limits { unlocks: 1, losses: 1, ..Limits::default() };
        Setup { slots: 2, capacity: 3, ..Setup::new(1, 2, &[PLAIN, PLAIN, PLAIN], limits) }
    }

    /// Cleanup deletes an unused task name while transactions add jobs of that name.
    pub fn names() -> Setup {
        let limits = Limits { cleanups: 2, ..Limits::default() };
        Setup { adders: 2, capacity: 1, ..Setup::new(1, 1, &[], limits) }
    }
}

/// A mistake that can be planted to show that the checker finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// Release refunds an attempt only if the job still has its key.
    ReleaseRefundsOnlySameKey,
    /// Release takes one off the attempts, which a replaced job has used up, instead of restoring them.
    ReleaseRefundsOneAttempt,
    /// Release refunds a job that was removed, too.
    ReleaseIgnoresRemoval,
    /// An interrupted job is refunded although it was removed.
    InterruptIgnoresRemoval,
    /// Recovery does not refund a job that has lost its key.
    RecoveryDoesNotRefundReplaced,
    /// A removed job is recognised by `updated_at > locked_at`, and a lock refresh moves `locked_at`.
    RemovalRecognisedByUpdatedAt,
    /// A sweep finds only registered workers, not what an earlier sweep has left locked.
    SweepForgetsOrphans,
    /// A report frees a queue although it releases a job of it.
    FreesQueueWithRelease,
    /// A report frees a queue although the worker has other jobs of it.
    FreesQueueWithOtherJobs,
    /// The database frees a queue although a reported job of it is blocked.
    FreesQueueDespiteBlocked,
    /// The worker forgets a queue that it asked to free and that stays locked because a job of it is blocked.
    BlockedQueueForgotten,
    /// The worker asks for what it holds before it ends the abandoned exchange.
    AbandonedExchangeNotEnded,
    /// A held job counts as known by its id, whatever the claim.
    HeldKnownById,
    /// The worker asks for what it holds while an exchange of the second lane is under way.
    AsksBesideSecondLane,
    /// The second lane exchanges between the answer to what is held and the next report.
    SecondLaneBeforeNextReport,
    /// The second lane exchanges while the first is uncertain.
    SecondLaneWhileUncertain,
    /// The second lane reports jobs of queues.
    SecondLaneReportsQueued,
    /// A worker that asks what it holds asks for jobs only. A failover may give it back a queue that it has freed.
    AsksForJobsOnly,
    /// A worker keeps jobs that wait under a claim that a failover has lost.
    KeepsLostClaims,
    /// A worker keeps a new claim of a running job although a failover has lost it, and the database has the old one again.
    KeepsLostNewClaims,
    /// A worker begins a job that it has claimed again, although the job runs there already.
    ClaimedAgainBegins,
    /// A job waits under two claims: a worker keeps the old one when it claims the job again.
    WaitsUnderTwoClaims,
    /// The outcome of a job is written under its new claim, although a keyed add has changed the job before that claim.
    ClaimedAgainAndChanged,
    /// An outcome is fenced by the worker alone, not by the claim.
    FenceByWorkerOnly,
    /// A worker begins jobs although its heartbeat is old.
    BeginsWithOldHeartbeat,
    /// A worker counts the age of its heartbeat from the answer, not from when it sent it.
    HeartbeatCountedFromAnswer,
    /// An exchange waits for a row while it has locked others.
    ExchangeWaitsForRows,
    /// An adder looks the name up before it takes the lock of the name.
    AdderLooksUpBeforeLock,
    /// Cleanup looks for unused names before it takes the lock of the name.
    CleanupLooksBeforeLock,
}
