//! How many jobs to claim, from measured averages: how long jobs and round trips take, and how large payloads are. No
//! I/O. `next_claim` decides when to claim.

use std::time::Duration;

/// With 1,000 jobs per claim instead of 500, a job costs 14 µs instead of 16 (bench/RESULTS.md). A larger claim would
/// only keep jobs from other workers.
const LARGEST_CLAIM: usize = 1000;

/// The approximate maximum size of prefetched payloads, not counting the jobs that fill the slots.
const PREFETCH_BYTES: f64 = 32.0 * 1024.0 * 1024.0;

/// The approximate maximum size of the payloads of one claim. `PREFETCH_BYTES` is not enough, because it relies on the average
/// of past payloads, and a thousand large ones may follow many small ones. If PostgreSQL stores payloads compressed, a claim
/// may have twice as many: the first ones are not measured (`exchange.sql`).
pub(crate) const CLAIM_BYTES: i32 = 8 * 1024 * 1024;

/// The minimum number of jobs in an exchange of the second lane.
pub(crate) const SECOND_LANE_MIN_JOBS: usize = LARGEST_CLAIM / 4;

/// The averages, and the number of jobs to claim that follows from them: for fast jobs, enough that no slot waits for
/// the database; for slow jobs, exactly the free slots.
#[derive(Debug, Default)]
pub(crate) struct ClaimSize {
    job: Option<f64>,
    round_trip: Option<f64>,
    /// The average size of a payload, in bytes.
    size: Option<f64>,
}

impl ClaimSize {
    pub(crate) fn job(&mut self, took: Duration) {
        average(&mut self.job, took.as_secs_f64(), 0.1);
    }

    pub(crate) fn round_trip(&mut self, took: Duration) {
        average(&mut self.round_trip, took.as_secs_f64(), 0.3);
    }

    /// Records a claim of this many jobs with this many bytes of payloads.
    pub(crate) fn claimed(&mut self, jobs: usize, bytes: usize) {
        if jobs > 0 {
            average(&mut self.size, bytes as f64 / jobs as f64, 0.5);
        }
    }

    /// How many more jobs to claim if `in_flight` are claimed already.
    pub(crate) fn wanted(&self, concurrency: usize, in_flight: usize) -> usize {
        self.wanted_for(self.ahead(), concurrency, in_flight)
    }

    /// How long the claimed jobs should keep the slots busy: twice as long as an exchange takes, because one batch runs
    /// while the worker claims the next.
    pub(crate) fn ahead(&self) -> Duration {
        Duration::from_secs_f64(2.0 * self.round_trip.unwrap_or_default())
    }

    /// The largest claim.
    pub(crate) fn largest(&self, concurrency: usize) -> usize {
        LARGEST_CLAIM.max(concurrency)
    }

    /// How many more jobs to claim if `in_flight` are claimed already, so that the slots are busy for this time.
    pub(crate) fn wanted_for(&self, time: Duration, concurrency: usize, in_flight: usize) -> usize {
        let ahead = self.job.map_or(0.0, |job| concurrency as f64 * time.as_secs_f64() / job.max(1e-6));
        let ahead = ahead.min(PREFETCH_BYTES / self.size.unwrap_or_default().max(1.0));
        let target = concurrency + (ahead as usize).min(3 * LARGEST_CLAIM);
        // The database would measure more payloads than fit.
        let that_fit = 1 + (f64::from(CLAIM_BYTES) / self.size.unwrap_or_default().max(1.0)) as usize;
        target.saturating_sub(in_flight).min(self.largest(concurrency)).min(that_fit)
    }
}

/// A moving average; one outlier does not move it far.
fn average(value: &mut Option<f64>, sample: f64, weight: f64) {
    *value = Some(value.map_or(sample, |value| value + weight * (sample - value)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim_size(job: Duration, round_trip: Duration) -> ClaimSize {
        let mut claim_size = ClaimSize::default();
        claim_size.job(job);
        claim_size.round_trip(round_trip);
        claim_size
    }

    #[test]
    fn slow_jobs_are_claimed_slot_by_slot() {
        let claim_size = claim_size(Duration::from_secs(1), Duration::from_millis(2));
        assert_eq!(claim_size.wanted(10, 0), 10);
        assert_eq!(claim_size.wanted(10, 7), 3);
        assert_eq!(claim_size.wanted(10, 10), 0);
    }

    #[test]
    fn fast_jobs_are_claimed_ahead_up_to_a_limit() {
        let claim_size = claim_size(Duration::from_micros(5), Duration::from_millis(5));
        assert_eq!(claim_size.wanted(2, 0), LARGEST_CLAIM);
        assert_eq!(claim_size.wanted(2, 2 + 3 * LARGEST_CLAIM), 0);
    }

    #[test]
    fn large_payloads_are_not_claimed_far_ahead() {
        let mut claim_size = claim_size(Duration::from_micros(5), Duration::from_millis(5));
        claim_size.claimed(4, 4 * 1024 * 1024);
        assert_eq!(claim_size.wanted(4, 4 + 30), 2);
        assert_eq!(claim_size.wanted(4, 0), 9, "that fit into one claim");
        claim_size.claimed(4, 4 * 1024 * 1024 * 1024);
        assert_eq!(claim_size.wanted(4, 4), 0);
    }

    #[test]
    fn without_measurements_only_the_slots_are_filled() {
        assert_eq!(ClaimSize::default().wanted(4, 1), 3);
    }
}
