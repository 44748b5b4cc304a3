//! The jobs that can start as soon as a slot is free, in the order in which they start.
//!
//! Claims bring jobs in their order, so most jobs wait in a list. Only those that belong in front of others go through a heap,
//! which moves each job several times.

use super::ClaimedJob;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

#[derive(Default)]
pub(super) struct Ready {
    /// Each one belongs behind the one before.
    in_order: VecDeque<ClaimedJob>,
    others: BinaryHeap<Reverse<ClaimedJob>>,
}

impl Ready {
    pub(super) fn push(&mut self, job: ClaimedJob) {
        match self.in_order.back() {
            Some(last) if job < *last => self.others.push(Reverse(job)),
            _ => self.in_order.push_back(job),
        }
    }

    pub(super) fn pop(&mut self) -> Option<ClaimedJob> {
        match (self.in_order.front(), self.others.peek()) {
            (Some(first), Some(Reverse(other))) if first <= other => self.in_order.pop_front(),
            (_, Some(_)) => self.others.pop().map(|Reverse(other)| other),
            (_, None) => self.in_order.pop_front(),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ClaimedJob> {
        self.in_order.iter().chain(self.others.iter().map(|Reverse(other)| other))
    }

    pub(super) fn len(&self) -> usize {
        self.in_order.len() + self.others.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All jobs, in any order.
    pub(super) fn take(&mut self) -> impl Iterator<Item = ClaimedJob> + use<> {
        let Ready { in_order, others } = std::mem::take(self);
        in_order.into_iter().chain(others.into_iter().map(|Reverse(other)| other))
    }
}

impl FromIterator<ClaimedJob> for Ready {
    fn from_iter<I: IntoIterator<Item = ClaimedJob>>(jobs: I) -> Ready {
        let mut jobs: Vec<ClaimedJob> = jobs.into_iter().collect();
        jobs.sort();
        Ready { in_order: jobs.into(), others: BinaryHeap::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use std::time::Instant;

    fn job(id: i64) -> ClaimedJob {
        ClaimedJob::new(Job::example(id), 0, Instant::now())
    }

    fn ids(mut ready: Ready) -> Vec<i64> {
        std::iter::from_fn(|| ready.pop()).map(|waiting| waiting.job.id).collect()
    }

    #[test]
    fn jobs_start_in_their_order_however_they_arrive() {
        let mut ready = Ready::default();
        for id in [5, 6, 7, 1, 3, 8, 2, 7, 4] {
            ready.push(job(id));
        }
        assert_eq!(ready.pop().map(|first| first.job.id), Some(1));
        ready.push(job(0));
        assert_eq!((ready.len(), ready.iter().count()), (9, 9));
        assert_eq!(ids(ready), [0, 2, 3, 4, 5, 6, 7, 7, 8]);
    }

    #[test]
    fn jobs_that_were_taken_and_put_back_are_in_order() {
        let mut ready = Ready::default();
        for id in [3, 1, 2] {
            ready.push(job(id));
        }
        let kept: Ready = ready.take().filter(|waiting| waiting.job.id != 2).collect();
        assert!(ready.is_empty() && kept.others.is_empty());
        assert_eq!(ids(kept), [1, 3]);
    }
}
