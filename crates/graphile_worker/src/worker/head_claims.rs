//! When a claim reads only the first few jobs (`claim_head.sql`) instead of everything that may be due. No I/O.
//!
//! Such a claim is quick, which an idle worker needs that is woken for a job. It is in vain if the first jobs are not
//! for this worker, or if jobs with a queue wait. The more often that happens, the less often the worker tries.

/// The maximum number of claims between two tries, as a power of two.
const MAX_SKIPPED: u32 = 6;

#[derive(Debug, Default)]
pub(crate) struct HeadClaims {
    is_backlog: bool,
    /// How many of the next claims read everything.
    to_skip: u32,
    /// How many tries in a row were in vain.
    in_vain: u32,
}

impl HeadClaims {
    /// Whether this claim reads only the first jobs.
    pub(crate) fn begin(&mut self) -> bool {
        if self.is_backlog {
            return false;
        }
        let is_skipped = self.to_skip > 0;
        self.to_skip = self.to_skip.saturating_sub(1);
        !is_skipped
    }

    /// The claim has seen that no more jobs are due.
    pub(crate) fn was_conclusive(&mut self) {
        self.in_vain = 0;
    }

    /// The claim has brought jobs, and more may be due: the next one reads everything.
    pub(crate) fn was_partial(&mut self) {
        self.in_vain = 0;
        self.to_skip = 1;
    }

    /// The claim has brought nothing, although jobs may be due.
    pub(crate) fn was_in_vain(&mut self) {
        self.in_vain = (self.in_vain + 1).min(MAX_SKIPPED);
        self.to_skip = 1 << self.in_vain;
    }

    /// A claim that reads everything has ended.
    pub(crate) fn read_everything(&mut self, is_full: bool) {
        self.is_backlog = is_full;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many claims read everything until the next one that does not.
    fn skipped(claims: &mut HeadClaims) -> usize {
        (0..).take_while(|_| !claims.begin()).count()
    }

    #[test]
    fn tries_in_vain_become_rare() {
        let mut claims = HeadClaims::default();
        let in_vain = |claims: &mut HeadClaims| {
            claims.was_in_vain();
            skipped(claims)
        };
        assert_eq!(skipped(&mut claims), 0);
        assert_eq!([(); 7].map(|()| in_vain(&mut claims)), [2, 4, 8, 16, 32, 64, 64]);
        claims.was_conclusive();
        assert_eq!(skipped(&mut claims), 0);
        assert_eq!(in_vain(&mut claims), 2);
    }

    #[test]
    fn a_partial_claim_is_followed_by_one_that_reads_everything() {
        let mut claims = HeadClaims::default();
        claims.was_partial();
        assert_eq!(skipped(&mut claims), 1);
    }

    #[test]
    fn a_backlog_is_claimed_by_claims_that_read_everything() {
        let mut claims = HeadClaims::default();
        claims.read_everything(true);
        assert!(!claims.begin() && !claims.begin());
        claims.read_everything(false);
        assert!(claims.begin());
    }
}
