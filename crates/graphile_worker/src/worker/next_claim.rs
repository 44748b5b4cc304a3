//! When to claim next. No I/O. At once after a full claim or a wake-up; soon if other workers had locked the due jobs,
//! or if their payloads were too large for one claim; otherwise when the next job is due, or after the poll interval.
//!
//! `claim_size` decides how many jobs to claim.

use std::time::{Duration, Instant};

/// The first pause after a claim that other workers got in the way of. It doubles up to the poll interval.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Under limits, it starts lower, and this many pauses in a row are short: other claims lock a limit for a few milliseconds, and
/// with many workers some of them would hardly ever find it free.
const FIRST_LIMITED_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_SHORT_PAUSE: Duration = Duration::from_millis(8);
const SHORT_PAUSES: u32 = 100;

/// Stands for no planned claim.
const NEVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The result of a claim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClaimResult {
    pub(crate) wanted: usize,
    pub(crate) got: usize,
    /// Whether task limits applied. They may have hidden jobs of other tasks.
    pub(crate) limited: bool,
    /// Whether due jobs were left because others had locked them, or because their payloads were too large for one
    /// claim.
    pub(crate) contended: bool,
    /// Whether the claim has not looked at all due jobs.
    pub(crate) partial: bool,
}

impl ClaimResult {
    fn is_full(self) -> bool {
        self.got >= self.wanted
    }
}

#[derive(Debug)]
pub(crate) struct NextClaim {
    at: Instant,
    pause: Duration,
    first_pause: Duration,
    /// How many pauses are still short.
    short_pauses: u32,
    /// After how many short pauses they begin to grow.
    most_short_pauses: u32,
    backlog: bool,
}

impl NextClaim {
    /// The first claim is due at once.
    pub(crate) fn new() -> NextClaim {
        NextClaim::with_pauses(FIRST_PAUSE, 0)
    }

    /// The same for claims under limits.
    pub(crate) fn under_limits() -> NextClaim {
        NextClaim::with_pauses(FIRST_LIMITED_PAUSE, SHORT_PAUSES)
    }

    fn with_pauses(first_pause: Duration, most_short_pauses: u32) -> NextClaim {
        NextClaim {
            at: Instant::now(),
            pause: first_pause,
            first_pause,
            short_pauses: most_short_pauses,
            most_short_pauses,
            backlog: false,
        }
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.at <= now
    }

    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// Whether the last claim was full, so that more jobs are probably waiting.
    pub(crate) fn is_backlog(&self) -> bool {
        self.backlog
    }

    /// There may be new jobs: claim now.
    pub(crate) fn wake(&mut self, now: Instant) {
        self.at = now;
    }

    /// A job is due at this time: claim then at the latest.
    pub(crate) fn not_after(&mut self, at: Instant) {
        self.at = self.at.min(at);
    }

    /// A claim begins. A wake-up from now on plans another one.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.at = now + NEVER;
    }

    /// The claim has ended with this result.
    pub(crate) fn finish(&mut self, result: ClaimResult, now: Instant, poll_interval: Duration) {
        self.backlog = result.is_full();
        let wait = if result.is_full() || result.partial || (result.limited && result.got > 0) {
            Duration::ZERO
        } else if result.contended {
            if result.got > 0 {
                self.reset_pause();
            }
            let pause = self.pause;
            self.pause = (pause * 2).min(poll_interval);
            if self.short_pauses > 0 {
                self.short_pauses -= 1;
                self.pause = self.pause.min(LONGEST_SHORT_PAUSE);
            }
            self.not_after(now + pause.min(poll_interval));
            return;
        } else {
            poll_interval
        };
        self.reset_pause();
        self.not_after(now + wait);
    }

    fn reset_pause(&mut self) {
        (self.pause, self.short_pauses) = (self.first_pause, self.most_short_pauses);
    }

    /// A claim of the second lane has ended with this result.
    pub(crate) fn finish_second_lane(&mut self, result: ClaimResult, now: Instant) {
        self.backlog = result.is_full();
        if result.is_full() || result.contended || result.partial {
            self.wake(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: Duration = Duration::from_secs(2);
    const NOTHING: ClaimResult = ClaimResult { wanted: 10, got: 0, limited: false, contended: false, partial: false };

    /// How long the worker waits after a claim with this result.
    fn wait_after(next: &mut NextClaim, result: ClaimResult) -> Duration {
        let now = Instant::now();
        next.begin(now);
        next.finish(result, now, POLL);
        next.at() - now
    }

    #[test]
    fn a_full_claim_is_followed_by_another_at_once() {
        let mut next = NextClaim::new();
        assert_eq!(wait_after(&mut next, ClaimResult { got: 10, ..NOTHING }), Duration::ZERO);
        assert!(next.is_backlog());
        assert_eq!(wait_after(&mut next, ClaimResult { got: 9, ..NOTHING }), POLL);
        assert!(!next.is_backlog());
        assert_eq!(wait_after(&mut next, ClaimResult { got: 1, limited: true, ..NOTHING }), Duration::ZERO);
        assert_eq!(wait_after(&mut next, ClaimResult { partial: true, ..NOTHING }), Duration::ZERO);
        assert!(!next.is_backlog());
    }

    #[test]
    fn under_limits_the_pauses_of_contended_claims_stay_short_for_a_while() {
        let mut next = NextClaim::under_limits();
        let contended = ClaimResult { contended: true, ..NOTHING };
        let pauses: Vec<Duration> = (0..SHORT_PAUSES).map(|_| wait_after(&mut next, contended)).collect();
        assert_eq!(pauses[..4], [2, 4, 8, 8].map(Duration::from_millis));
        assert!(pauses.iter().all(|pause| *pause <= LONGEST_SHORT_PAUSE));
        for _ in 0..20 {
            wait_after(&mut next, contended);
        }
        assert_eq!(wait_after(&mut next, contended), POLL);
        wait_after(&mut next, ClaimResult { got: 1, ..contended });
        assert!(wait_after(&mut next, contended) <= LONGEST_SHORT_PAUSE);
    }

    #[test]
    fn an_empty_claim_is_followed_by_one_per_poll_interval() {
        let mut next = NextClaim::new();
        assert_eq!(wait_after(&mut next, NOTHING), POLL);
        next.not_after(Instant::now() + POLL / 2);
        assert!(next.at() < Instant::now() + POLL);
        assert_eq!(wait_after(&mut next, NOTHING), POLL);
    }

    #[test]
    fn claims_that_find_locked_jobs_back_off() {
        let mut next = NextClaim::new();
        let contended = ClaimResult { contended: true, ..NOTHING };
        let waits: Vec<Duration> = (0..12).map(|_| wait_after(&mut next, contended)).collect();
        assert_eq!(waits[..3], [FIRST_PAUSE, FIRST_PAUSE * 2, FIRST_PAUSE * 4]);
        assert_eq!(waits[11], POLL);
        assert_eq!(wait_after(&mut next, ClaimResult { got: 1, ..contended }), FIRST_PAUSE, "the claim got a job");
        assert_eq!(wait_after(&mut next, NOTHING), POLL);
        assert_eq!(wait_after(&mut next, contended), FIRST_PAUSE);
    }

    #[test]
    fn a_wake_up_during_a_claim_is_not_lost() {
        let mut next = NextClaim::new();
        let now = Instant::now();
        next.begin(now);
        assert!(!next.is_due(now));
        next.wake(now);
        next.finish(NOTHING, now, POLL);
        assert!(next.is_due(now));
    }

    #[test]
    fn a_full_claim_of_the_second_lane_wakes_the_first() {
        let mut next = NextClaim::new();
        let now = Instant::now();
        next.begin(now);
        next.finish(NOTHING, now, POLL);
        next.finish_second_lane(NOTHING, now);
        assert!(!next.is_due(now));
        next.finish_second_lane(ClaimResult { got: 10, ..NOTHING }, now);
        assert!(next.is_due(now) && next.is_backlog());
    }
}
