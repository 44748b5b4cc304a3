//! Limits: what a worker knows of them, and whose turn it is. Decides without I/O; `maintenance` reads the limits and settles
//! them, `exchange` claims under them. What a limit is: `sql/schema/183-limits.sql`.

use super::next_claim::NextClaim;
use crate::job::Job;
use std::collections::HashSet;
use std::time::Instant;

/// What the database has said about limits.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    /// Whether there are limits, or jobs that were under one.
    pub(crate) any_exist: bool,
    /// Until when no job starts.
    pub(crate) all_paused_until: Option<Instant>,
    /// Limited queues that are paused.
    pub(crate) paused_queues: HashSet<i32>,
    /// Tasks with a limit: their jobs without a queue are in limited queues, or will be in a moment.
    pub(crate) limited_tasks: HashSet<i32>,
    /// Stands for the settings of all limits: another text if any of them has changed.
    pub(crate) settings: String,
}

impl Limits {
    pub(crate) fn all_paused(&self) -> bool {
        self.all_paused_until.is_some_and(|until| until > Instant::now())
    }

    /// Whether anything is different, except for the time at which a pause ends.
    pub(crate) fn differs_from(&self, other: &Limits) -> bool {
        let facts = |limits: &Limits| (limits.any_exist, limits.all_paused());
        facts(self) != facts(other)
            || self.paused_queues != other.paused_queues
            || self.limited_tasks != other.limited_tasks
            || self.settings != other.settings
    }

    pub(crate) fn pauses_any(&self) -> bool {
        self.all_paused() || !self.paused_queues.is_empty()
    }

    /// Whether a job that the worker has claimed must not start.
    pub(crate) fn is_paused(&self, job: &Job) -> bool {
        self.all_paused() || job.limited_queue().is_some_and(|queue| self.paused_queues.contains(&queue))
    }
}

/// Whether the next exchange is about jobs under limits, or about all others.
#[derive(Debug)]
pub(crate) struct LimitedTurn {
    pub(crate) next_claim: NextClaim,
    /// Whether the worker has ever claimed a job under a limit.
    pub(crate) has_limited_jobs: bool,
    was_limited: bool,
}

impl Default for LimitedTurn {
    fn default() -> LimitedTurn {
        LimitedTurn { next_claim: NextClaim::new(), has_limited_jobs: false, was_limited: false }
    }
}

impl LimitedTurn {
    /// Decides whose turn it is, if jobs under limits and others have something to do.
    pub(crate) fn next(&mut self, limited: bool, others: bool) -> bool {
        let is_limited = limited && !(others && self.was_limited);
        self.was_limited = is_limited;
        is_limited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn jobs_under_limits_and_others_take_turns() {
        let mut turn = LimitedTurn::default();
        let turns: Vec<bool> = (0..4).map(|_| turn.next(true, true)).collect();
        assert_eq!(turns, [true, false, true, false]);
        assert!(!turn.next(false, true) && !turn.next(false, false));
        assert!(turn.next(true, false) && turn.next(true, false));
    }

    #[test]
    fn a_pause_keeps_the_jobs_of_its_queues_or_all_jobs_from_starting() {
        let job = |queue| Job { job_queue_id: queue, ..Job::example(1) };
        let limits = Limits { paused_queues: [-2].into(), ..Limits::default() };
        assert!(limits.is_paused(&job(Some(-2))));
        assert!(!limits.is_paused(&job(Some(-1))) && !limits.is_paused(&job(Some(2))) && !limits.is_paused(&job(None)));
        let until = Instant::now() + Duration::from_secs(60);
        assert!(Limits { all_paused_until: Some(until), ..Limits::default() }.is_paused(&job(None)));
        assert!(!Limits { all_paused_until: Some(Instant::now()), ..Limits::default() }.is_paused(&job(None)));
    }
}
