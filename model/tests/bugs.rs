//! Each planted bug breaks the property that names it: the model would have found the bug.

#![allow(clippy::unwrap_used)]

use graphile_worker_model::{Bug, Protocol, Setup, invariants::*};
use stateright::{Checker, HasDiscoveries, Model};

/// Finds a short way to break the property, and prints it.
#[track_caller]
fn check(bug: Bug, setup: Setup, property: &'static str) {
    let checker = Protocol::with_bug(setup, bug).checker().finish_when(HasDiscoveries::AnyOf([property].into()));
    let checker = checker.spawn_bfs().join();
    let Some(path) = checker.discovery(property) else {
        panic!("{bug:?}: {} states, and none breaks \"{property}\"", checker.unique_state_count());
    };
    let actions: Vec<String> = path.into_actions().iter().map(|action| format!("{action:?}")).collect();
    println!("{bug:?} breaks \"{property}\" in {} steps: {}", actions.len(), actions.join(", "));
}

macro_rules! bugs {
    ($($test:ident: $bug:ident in $theme:ident breaks $property:ident;)*) => {
        $(
            #[test]
            fn $test() {
                check(Bug::$bug, Setup::$theme(), $property);
            }
        )*
    };
}

bugs! {
    release_refunds_only_same_key: ReleaseRefundsOnlySameKey in keys breaks NO_EVENT_LOST;
    release_refunds_one_attempt: ReleaseRefundsOneAttempt in keys breaks RELEASE_REFUNDS;
    release_ignores_removal: ReleaseIgnoresRemoval in keys breaks REMOVED_STAYS_REMOVED;
    interrupt_ignores_removal: InterruptIgnoresRemoval in keys breaks REMOVED_STAYS_REMOVED;
    recovery_does_not_refund_replaced: RecoveryDoesNotRefundReplaced in recovery_of_keyed_jobs breaks NO_EVENT_LOST;
    removal_recognised_by_updated_at: RemovalRecognisedByUpdatedAt in recovery_of_keyed_jobs breaks REMOVED_STAYS_REMOVED;
    sweep_forgets_orphans: SweepForgetsOrphans in recovery_of_queues breaks EVERY_JOB_CAN_END;
    frees_queue_while_it_releases: FreesQueueWithRelease in queue breaks NO_RELEASE_WITH_FREE;
    frees_queue_with_release: FreesQueueWithRelease in queue breaks IN_ORDER;
    frees_queue_with_other_jobs: FreesQueueWithOtherJobs in queue breaks ONE_OF_A_QUEUE;
    frees_queue_despite_blocked: FreesQueueDespiteBlocked in row_locks_of_a_queue breaks QUEUE_LOCKED_WITH_JOB;
    blocked_queue_forgotten: BlockedQueueForgotten in row_locks_of_a_queue breaks LOCKED_QUEUE_IS_KNOWN;
    abandoned_exchange_not_ended: AbandonedExchangeNotEnded in lost_answers breaks ABANDONED_ONLY_WHILE_UNCERTAIN;
    abandoned_exchange_claims_jobs_that_never_run: AbandonedExchangeNotEnded in lost_answers breaks LOCKED_IS_KNOWN;
    held_known_by_id: HeldKnownById in lost_answers breaks EVERY_JOB_CAN_END;
    asks_beside_second_lane: AsksBesideSecondLane in two_lanes breaks IN_ONE_PLACE;
    second_lane_before_next_report: SecondLaneBeforeNextReport in two_lanes breaks QUEUE_LOCKED_WITH_JOB;
    second_lane_while_uncertain: SecondLaneWhileUncertain in two_lanes breaks QUEUE_LOCKED_WITH_JOB;
    second_lane_reports_queued: SecondLaneReportsQueued in two_lanes breaks QUEUE_LOCKED_WITH_JOB;
    fence_by_worker_only: FenceByWorkerOnly in two_lanes breaks MEMORY_IS_LOCKED;
    fence_by_worker_only_runs_a_job_twice: FenceByWorkerOnly in two_workers_lose_answers breaks ONE_WORKER;
    fence_by_worker_only_releases_a_new_claim: FenceByWorkerOnly in failover_with_faults breaks MEMORY_IS_LOCKED;
    asks_for_jobs_only: AsksForJobsOnly in failover breaks LOCKED_QUEUE_IS_KNOWN;
    keeps_lost_claims: KeepsLostClaims in failover breaks MEMORY_IS_LOCKED;
    keeps_lost_new_claims: KeepsLostNewClaims in unlocks breaks LOCKED_IS_KNOWN;
    claimed_again_begins: ClaimedAgainBegins in failover breaks NOT_BESIDE_ITSELF;
    claimed_again_begins_after_an_unlock: ClaimedAgainBegins in unlocks breaks NOT_BESIDE_ITSELF;
    waits_under_two_claims: WaitsUnderTwoClaims in unlocks breaks NOT_BESIDE_ITSELF;
    claimed_again_and_changed: ClaimedAgainAndChanged in failover_of_keyed_jobs breaks NO_EVENT_LOST;
    begins_with_old_heartbeat: BeginsWithOldHeartbeat in deaths breaks DEAD_BEGIN_NOTHING;
    heartbeat_counted_from_answer: HeartbeatCountedFromAnswer in deaths breaks DEAD_BEGIN_NOTHING;
    exchange_waits_for_rows: ExchangeWaitsForRows in row_locks breaks EVERY_JOB_CAN_END;
    adder_looks_up_before_lock: AdderLooksUpBeforeLock in names breaks NAMES_EXIST;
    cleanup_looks_before_lock: CleanupLooksBeforeLock in names breaks NAMES_EXIST;
}
