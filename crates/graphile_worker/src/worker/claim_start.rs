//! Where a claim of jobs without a queue starts to read: at the head of their order, or where the last claim found the
//! first job. Batches of repeatable tasks start behind the last one. No I/O.
//!
//! Between the head and that job are only index entries of jobs that are gone. PostgreSQL cannot remove them while any
//! transaction may still see those jobs: for a moment after each claim, or for minutes if some transaction stays open.
//! Reading them once is enough. Jobs may appear there again (added with a higher priority, released, retried), so the
//! worker returns to the head often, but spends at most about a tenth of its time on reading what is in front.

use chrono::{DateTime, Utc};
use std::time::{Duration, Instant};

/// The minimum interval between two claims from the head, while there is a backlog.
const MIN_HEAD_INTERVAL: Duration = Duration::from_millis(20);

/// The maximum interval, however long such a claim takes.
const MAX_HEAD_INTERVAL: Duration = Duration::from_secs(2);

/// One part in this many of the time may be spent on what claims from the head take longer than others.
const HEAD_SHARE: u32 = 10;

/// A place in the order of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) priority: i16,
    pub(crate) run_at: DateTime<Utc>,
    pub(crate) id: i64,
}

#[derive(Debug, Default)]
pub(crate) struct ClaimStart {
    first_job: Option<Position>,
    /// Until when claims do not read from the head.
    head_due_at: Option<Instant>,
    /// How long the last claim took that did not start at the head.
    usual: Option<Duration>,
}

impl ClaimStart {
    /// Where the next claim starts; `None` for the head.
    pub(crate) fn next(&self, now: Instant) -> Option<Position> {
        self.first_job.filter(|_| self.head_due_at.is_some_and(|due| now < due))
    }

    /// A claim has ended, which started at `from`, took this long, and found this job first. If it did not find as many
    /// jobs as it wanted, the next one starts at the head.
    pub(crate) fn claimed(
        &mut self,
        from: Option<Position>,
        first_job: Option<Position>,
        is_full: bool,
        took: Duration,
        now: Instant,
    ) {
        if !is_full {
            *self = ClaimStart::default();
            return;
        }
        self.first_job = first_job;
        if from.is_some() {
            self.usual = Some(took);
        } else {
            let longer = took.saturating_sub(self.usual.unwrap_or(took));
            self.head_due_at = Some(now + (longer * HEAD_SHARE).clamp(MIN_HEAD_INTERVAL, MAX_HEAD_INTERVAL));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(id: i64) -> Option<Position> {
        Some(Position { priority: 0, run_at: DateTime::UNIX_EPOCH, id })
    }

    const FAST: Duration = Duration::from_millis(1);

    #[test]
    fn claims_start_where_the_last_one_found_the_first_job_and_return_to_the_head() {
        let mut start = ClaimStart::default();
        let now = Instant::now();
        assert_eq!(start.next(now), None, "the first claim");
        start.claimed(None, position(5), true, FAST, now);
        assert_eq!(start.next(now), position(5));
        start.claimed(position(5), position(9), true, FAST, now);
        assert_eq!(start.next(now), position(9));
        assert_eq!(start.next(now + MIN_HEAD_INTERVAL), None);
    }

    #[test]
    fn a_claim_that_is_not_full_is_followed_by_one_from_the_head() {
        let mut start = ClaimStart::default();
        let now = Instant::now();
        start.claimed(None, position(5), true, FAST, now);
        start.claimed(position(5), position(6), false, FAST, now);
        assert_eq!(start.next(now), None);
    }

    #[test]
    fn the_longer_it_takes_to_read_from_the_head_the_less_often_the_worker_does() {
        let mut start = ClaimStart::default();
        let now = Instant::now();
        start.claimed(None, position(5), true, Duration::from_millis(110), now);
        start.claimed(position(5), position(5), true, Duration::from_millis(10), now);
        assert_eq!(start.next(now + MIN_HEAD_INTERVAL), None, "how long others take was not known");
        start.claimed(None, position(5), true, Duration::from_millis(110), now);
        assert_eq!(start.next(now + Duration::from_millis(999)), position(5));
        assert_eq!(start.next(now + Duration::from_millis(1_000)), None);
        start.claimed(None, position(5), true, Duration::from_secs(60), now);
        assert_eq!(start.next(now + MAX_HEAD_INTERVAL), None);
    }
}
