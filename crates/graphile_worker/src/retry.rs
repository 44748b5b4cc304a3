//! Pauses between attempts to reach the database, with back-off and jitter, so that many workers do not retry at the
//! same moment. No I/O. The back-off of failed jobs is in `worker/settle`.

use std::time::Duration;

/// The pauses between attempts: they double from the first to the longest, each with jitter.
#[derive(Debug, Clone)]
pub(crate) struct RetryPauses {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl RetryPauses {
    pub(crate) const fn new(first: Duration, longest: Duration) -> RetryPauses {
        RetryPauses { first, longest, next: first }
    }

    /// The pause before the next attempt.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        jittered(pause)
    }

    /// Starts again with the first pause, after an attempt that succeeded.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

/// A random pause of 0.5 to 1.5 times this length.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + jitter())
}

/// A random number from 0 to 1. Not worth a dependency: the hasher's random keys are good enough.
pub(crate) fn jitter() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    (RandomState::new().hash_one(0) % 1000) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_again() {
        let (first, longest) = (Duration::from_millis(50), Duration::from_millis(150));
        let mut pauses = RetryPauses::new(first, longest);
        let is_about = |pause: Duration, wanted: Duration| pause >= wanted / 2 && pause <= wanted * 3 / 2;
        for wanted in [first, first * 2, longest, longest] {
            assert!(is_about(pauses.next(), wanted));
        }
        pauses.reset();
        assert!(is_about(pauses.next(), first));
    }
}
