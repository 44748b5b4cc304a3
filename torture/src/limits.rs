//! The limits of the load, and which of them was in force when. `load::limits` sets and changes them; `check::limits` judges the runs.

use crate::record::{Nanos, now};
use chrono::Utc;
use graphile_worker::Limit;
use std::time::Duration;

/// The task whose jobs are under a limit of concurrency.
pub(crate) const CAPPED: &str = "capped";

/// The task whose jobs are under a rate.
pub(crate) const METERED: &str = "metered";

/// The task of the jobs in limited queues.
pub(crate) const LINED: &str = "lined";

/// A limit of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Limited {
    Capped,
    Metered,
    /// Each queue `pair-*` by itself: two jobs at a time.
    Pairs,
    /// Each queue `row-*`: always serial.
    Rows,
    /// The group of `Pairs` and `Rows`. A job of a row costs two.
    Group,
}

impl Limited {
    pub(crate) const ALL: [Limited; 5] =
        [Limited::Group, Limited::Capped, Limited::Metered, Limited::Pairs, Limited::Rows];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Limited::Capped => "task:capped",
            Limited::Metered => "task:metered",
            Limited::Pairs => "queue:pair-*",
            Limited::Rows => "queue:row-*",
            Limited::Group => "group:shared",
        }
    }

    /// The setting while no change is made.
    pub(crate) fn base(self) -> State {
        match self {
            Limited::Capped => State::of(Some(3), None),
            Limited::Metered => State::of(None, Some(Rate { jobs: 10, per_ms: 1000, burst: 4 })),
            Limited::Pairs => State::of(Some(2), None),
            Limited::Rows => State::of(None, None),
            Limited::Group => State::of(Some(5), None),
        }
    }

    /// The settings that a change may choose. The steps of the rates are whole microseconds, so that PostgreSQL does not round them.
    pub(crate) fn others(self) -> Vec<State> {
        let rate = |jobs, burst| State::of(None, Some(Rate { jobs, per_ms: 1000, burst }));
        match self {
            Limited::Capped => vec![State::of(Some(1), None), State::of(Some(6), None), State::DROPPED],
            Limited::Metered => vec![rate(5, 1), rate(20, 2), State::DROPPED],
            Limited::Pairs => {
                vec![State::of(Some(1), None), State::of(None, None), State::of(Some(4), None), State::DROPPED]
            }
            Limited::Rows => vec![State::DROPPED],
            Limited::Group => vec![State::of(Some(2), None), State::of(Some(9), None)],
        }
    }

    /// The task that it limits, or whose jobs are in its queues.
    pub(crate) fn task(self) -> &'static str {
        match self {
            Limited::Capped => CAPPED,
            Limited::Metered => METERED,
            Limited::Pairs | Limited::Rows | Limited::Group => LINED,
        }
    }

    /// How much a job takes of the group.
    pub(crate) fn cost(self) -> u32 {
        if self == Limited::Rows { 2 } else { 1 }
    }

    pub(crate) fn is_in_group(self) -> bool {
        matches!(self, Limited::Pairs | Limited::Rows)
    }

    /// The limit of a job with this task, in this limited queue.
    pub(crate) fn of_job(task: &str, queue: Option<&str>) -> Option<Limited> {
        match (task, queue) {
            (CAPPED, _) => Some(Limited::Capped),
            (METERED, _) => Some(Limited::Metered),
            (LINED, Some(queue)) if queue.starts_with("pair-") => Some(Limited::Pairs),
            (LINED, Some(queue)) if queue.starts_with("row-") => Some(Limited::Rows),
            _ => None,
        }
    }

    pub(crate) fn limit(self, state: &State) -> Limit {
        let mut limit = Limit::named(self.name());
        if let Some(jobs) = state.concurrency {
            limit = limit.concurrency(jobs);
        }
        if let Some(rate) = state.rate {
            limit = limit.rate(rate.jobs, Duration::from_millis(rate.per_ms)).burst(rate.burst);
        }
        if self.is_in_group() {
            limit = limit.in_group("shared").cost(self.cost());
        }
        limit
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    pub(crate) jobs: u32,
    pub(crate) per_ms: u64,
    pub(crate) burst: u32,
}

/// The setting of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    /// False if it was dropped.
    pub(crate) is_set: bool,
    pub(crate) concurrency: Option<u32>,
    pub(crate) rate: Option<Rate>,
    pub(crate) is_paused: bool,
}

impl State {
    pub(crate) const DROPPED: State = State { is_set: false, concurrency: None, rate: None, is_paused: false };

    pub(crate) fn of(concurrency: Option<u32>, rate: Option<Rate>) -> State {
        State { is_set: true, concurrency, rate, is_paused: false }
    }
}

/// A moment on two clocks: that of the records, and that of the database in microseconds since 1970, which the claims of
/// jobs have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) at: Nanos,
    pub(crate) clock: i64,
}

impl Moment {
    pub(crate) fn now() -> Moment {
        Moment { at: now(), clock: Utc::now().timestamp_micros() }
    }
}

/// A change of a limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub(crate) limited: Limited,
    pub(crate) state: State,
    pub(crate) called: Moment,
    /// When the call returned. `None` if its answer was lost: the change may have been made or not.
    pub(crate) acknowledged: Option<Moment>,
}

/// The end of a period, on either clock.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Until {
    Record(Nanos),
    Clock(i64),
}

/// All changes, in the order in which they were made, one after the other.
#[derive(Debug, Default)]
pub(crate) struct History(pub(crate) Vec<Change>);

impl History {
    /// The states of a limit that may have been in force at some time between these two. A change may be in force as soon as
    /// the call begins; the state before it may be in force until the answer arrives.
    pub(crate) fn possible(&self, limited: Limited, from: i64, until: Until) -> Vec<&State> {
        let changes: Vec<&Change> = self.0.iter().filter(|change| change.limited == limited).collect();
        let is_over = |at: usize| {
            let next = changes[at + 1..].iter().filter_map(|change| change.acknowledged).next();
            next.is_some_and(|moment| moment.clock < from)
        };
        let has_begun = |change: &Change| match until {
            Until::Record(at) => change.called.at <= at,
            Until::Clock(clock) => change.called.clock <= clock,
        };
        let possible = changes.iter().enumerate().filter(|(at, change)| has_begun(change) && !is_over(*at));
        possible.map(|(_, change)| &change.state).collect()
    }

    /// The state that was in force for all of this time, if that is certain.
    pub(crate) fn certain(&self, limited: Limited, from: i64, until: i64) -> Option<&State> {
        match self.possible(limited, from, Until::Clock(until))[..] {
            [state] => Some(state),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(called: i64, acknowledged: Option<i64>, jobs: u32) -> Change {
        let moment = |clock: i64| Moment { at: clock.unsigned_abs(), clock };
        Change {
            limited: Limited::Capped,
            state: State::of(Some(jobs), None),
            called: moment(called),
            acknowledged: acknowledged.map(moment),
        }
    }

    #[test]
    fn a_change_counts_from_its_call_and_ends_the_state_before_it_with_its_answer() {
        let history =
            History(vec![change(0, Some(1), 3), change(10, Some(12), 1), change(20, None, 6), change(30, Some(31), 3)]);
        let jobs = |from, until| -> Vec<u32> {
            let possible = history.possible(Limited::Capped, from, Until::Clock(until));
            possible.iter().filter_map(|state| state.concurrency).collect()
        };
        assert_eq!(jobs(5, 9), [3]);
        assert_eq!(jobs(5, 10), [3, 1]);
        assert_eq!(jobs(13, 19), [1]);
        assert_eq!(jobs(25, 26), [1, 6], "the answer was lost");
        assert_eq!(jobs(32, 40), [3]);
        assert!(
            history.certain(Limited::Capped, 13, 19).is_some() && history.certain(Limited::Capped, 25, 26).is_none()
        );
        assert!(history.possible(Limited::Metered, 0, Until::Record(50)).is_empty());
    }
}
