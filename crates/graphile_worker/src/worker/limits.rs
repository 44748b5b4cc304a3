//! Limits: what a worker knows of them, and whose turn it is. Decides without I/O; `maintenance` reads the limits and settles
//! them, `exchange` claims under them. What a limit is: `sql/schema/183-limits.sql`.

use super::next_claim::NextClaim;
use crate::context::Shared;
use crate::hooks::{LimitCause, LimitEventContext, LimitPaused, LimitResumed, LimitTripped};
use crate::job::Job;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use std::collections::{HashMap, HashSet};
use std::time::Instant;

/// What the database has said about limits.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    /// Whether there are limits, or jobs that were under one.
    pub(crate) any_exist: bool,
    /// Until when no job starts.
    pub(crate) all_paused_until: Option<Instant>,
    /// Whether any limit has a breaker, which failures may trip.
    pub(crate) have_breakers: bool,
    /// Limited queues that are paused or closed.
    pub(crate) paused_queues: HashSet<i32>,
    /// Tasks that are paused or closed.
    pub(crate) paused_tasks: HashSet<String>,
    /// Tasks with a limit: their jobs without a queue are in limited queues, or will be in a moment.
    pub(crate) limited_tasks: HashSet<i32>,
    /// A checksum of the settings of all limits.
    pub(crate) settings: String,
    /// Which limits start no jobs, or one at a time, and why. Read only if hooks need it.
    pub(crate) states: LimitStates,
    /// When the first of these states ends.
    pub(crate) next_change: Option<Instant>,
}

/// The limits that are paused, tripped or rate limited. A limit can be paused and also tripped or rate limited.
pub(crate) type LimitStates = HashMap<(String, StateKind), LimitState>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StateKind {
    Paused,
    RateLimited,
    Tripped,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LimitState {
    pub(crate) until: Option<DateTime<Utc>>,
    pub(crate) by: Option<String>,
    pub(crate) failures: i32,
}

/// A change of a limit's state, for hooks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StateChange {
    /// The state begins, or is extended.
    Begins(String, StateKind, LimitState),
    Ends(String, StateKind),
}

impl Shared {
    /// The hook context of a limit.
    pub(super) fn limit_event(
        &self,
        limit: String,
        cause: LimitCause,
        until: Option<DateTime<Utc>>,
    ) -> LimitEventContext {
        LimitEventContext { worker_id: self.worker_id.clone(), limit, cause, until }
    }

    /// Calls the hook of a change.
    pub(super) async fn emit_limit_change(&self, change: StateChange) {
        let cause = |kind, state: Option<&LimitState>| match kind {
            StateKind::Paused => LimitCause::Paused { by: state.and_then(|state| state.by.clone()) },
            StateKind::RateLimited => LimitCause::RateLimited,
            StateKind::Tripped => LimitCause::Tripped { failures: state.map_or(0, |state| state.failures) },
        };
        match change {
            StateChange::Begins(limit, kind, state) => {
                let event = || self.limit_event(limit, cause(kind, Some(&state)), state.until);
                match kind {
                    StateKind::Tripped => self.hooks.emit(LimitTripped, event).await,
                    StateKind::Paused | StateKind::RateLimited => self.hooks.emit(LimitPaused, event).await,
                }
            }
            StateChange::Ends(limit, kind) => {
                self.hooks.emit(LimitResumed, || self.limit_event(limit, cause(kind, None), None)).await;
            }
        }
    }
}

/// The changes between two reads, sorted by the names of the limits.
pub(crate) fn changes(before: &LimitStates, after: &LimitStates) -> Vec<StateChange> {
    // A breaker that becomes half-open keeps its `until`, so that is no change.
    let is_new =
        |key: &(String, StateKind), state: &LimitState| before.get(key).is_none_or(|known| known.until != state.until);
    let begun = after.iter().filter(|(key, state)| is_new(key, state));
    let ended = before.keys().filter(|key| !after.contains_key(key));
    let mut changes: Vec<StateChange> = ended
        .map(|(name, kind)| StateChange::Ends(name.clone(), *kind))
        .chain(begun.map(|((name, kind), state)| StateChange::Begins(name.clone(), *kind, state.clone())))
        .collect();
    changes.sort_by(|one, other| one.name().cmp(other.name()));
    changes
}

impl StateChange {
    fn name(&self) -> &str {
        match self {
            StateChange::Begins(name, ..) | StateChange::Ends(name, _) => name,
        }
    }
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
            || self.paused_tasks != other.paused_tasks
            || self.limited_tasks != other.limited_tasks
            || self.settings != other.settings
    }

    pub(crate) fn pauses_any(&self) -> bool {
        self.all_paused() || !self.paused_queues.is_empty() || !self.paused_tasks.is_empty()
    }

    /// Whether a job that the worker has claimed must not start.
    pub(crate) fn is_paused(&self, job: &Job) -> bool {
        let is_paused =
            |queue| self.paused_queues.contains(&queue) || self.paused_tasks.contains(&*job.task_identifier);
        self.all_paused() || job.limited_queue().is_some_and(is_paused)
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
        LimitedTurn { next_claim: NextClaim::under_limits(), has_limited_jobs: false, was_limited: false }
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
    fn a_change_is_found_if_a_state_begins_lasts_longer_or_ends() {
        let until = |seconds| DateTime::from_timestamp(seconds, 0);
        let states = |known: &[(&str, StateKind, i64)]| -> LimitStates {
            let state = |seconds| LimitState { until: until(seconds), by: None, failures: 3 };
            known.iter().map(|(name, kind, seconds)| (((*name).to_owned(), *kind), state(*seconds))).collect()
        };
        let tripped = states(&[("task:a", StateKind::Tripped, 10), ("task:b", StateKind::Paused, 10)]);
        assert_eq!(changes(&tripped, &tripped), []);
        let later = states(&[("task:a", StateKind::Tripped, 20), ("task:a", StateKind::Paused, 10)]);
        let found = changes(&tripped, &later);
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[2], StateChange::Ends("task:b".to_owned(), StateKind::Paused));
        assert!(found[..2].iter().all(|change| matches!(change, StateChange::Begins(name, ..) if name == "task:a")));
    }

    #[test]
    fn a_pause_keeps_the_jobs_of_its_queues_or_all_jobs_from_starting() {
        let job = |queue| Job { job_queue_id: queue, ..Job::example(1) };
        let limits = Limits { paused_queues: [-2].into(), ..Limits::default() };
        assert!(limits.is_paused(&job(Some(-2))));
        assert!(!limits.is_paused(&job(Some(-1))) && !limits.is_paused(&job(Some(2))) && !limits.is_paused(&job(None)));
        let task = job(None).task_identifier;
        let limits = Limits { paused_tasks: [task.to_string()].into(), ..Limits::default() };
        assert!(limits.is_paused(&job(Some(-1))) && !limits.is_paused(&job(Some(1))));
        let until = Instant::now() + Duration::from_secs(60);
        assert!(Limits { all_paused_until: Some(until), ..Limits::default() }.is_paused(&job(None)));
        assert!(!Limits { all_paused_until: Some(Instant::now()), ..Limits::default() }.is_paused(&job(None)));
    }
}
