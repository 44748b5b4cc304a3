//! The slots of limited queues: how many jobs of each may run here at the same time. The worker claims more short jobs than it
//! has slots, so that a slot does not wait for the database between two jobs. The other jobs wait `behind`.
//!
//! The database counts the slots that it has granted, not the claimed jobs. To lower their number, the worker reports how many it
//! keeps (`keep`), and uses no more from then on.

use super::ClaimedJob;
use crate::fast_map::FastMap;
use chrono::Utc;
use std::collections::VecDeque;

#[derive(Default)]
pub(super) struct Slots(FastMap<i32, LimitedQueue>);

#[derive(Default)]
struct LimitedQueue {
    granted: usize,
    /// How many of its jobs are ready or running.
    taken: usize,
    behind: VecDeque<ClaimedJob>,
}

impl Slots {
    /// Returns the job if it may start. Otherwise it waits behind the others of its queue.
    pub(super) fn take_in(&mut self, queue: i32, waiting: ClaimedJob) -> Option<ClaimedJob> {
        let queue = self.0.entry(queue).or_default();
        // For jobs that were claimed in a lost answer: the database grants at least one slot.
        queue.granted = queue.granted.max(1);
        if queue.taken < queue.granted {
            queue.taken += 1;
            return Some(waiting);
        }
        queue.behind.push_back(waiting);
        None
    }

    /// A job that was ready or running leaves its slot. Returns the next job for it.
    pub(super) fn leave(&mut self, queue: i32) -> Option<ClaimedJob> {
        let queue = self.0.get_mut(&queue)?;
        queue.taken -= 1;
        if queue.taken >= queue.granted {
            return None;
        }
        let mut next = queue.behind.pop_front()?;
        queue.taken += 1;
        // Jobs of other queues that are already ready go first, so that a queue with many jobs does not block the others.
        next.order.1 = next.order.1.max(Utc::now());
        Some(next)
    }

    /// Sets the number of slots that the worker has of a queue. Returns whether more jobs than that are ready or running.
    pub(super) fn grant(&mut self, queue: i32, slots: usize) -> bool {
        let queue = self.0.entry(queue).or_default();
        queue.granted = slots;
        queue.taken > slots || (slots == 0 && !queue.behind.is_empty())
    }

    /// The slots of each queue that the worker keeps: those with a job. The others are free for other workers.
    pub(super) fn keep(&mut self) -> Vec<(i32, usize)> {
        self.0.retain(|_, queue| {
            queue.granted = queue.granted.min(queue.taken + queue.behind.len());
            queue.taken > 0 || !queue.behind.is_empty()
        });
        self.0.iter().map(|(id, queue)| (*id, queue.granted)).collect()
    }

    pub(super) fn behind(&self) -> impl Iterator<Item = &ClaimedJob> {
        self.0.values().flat_map(|queue| &queue.behind)
    }

    pub(super) fn count_behind(&self) -> usize {
        self.0.values().map(|queue| queue.behind.len()).sum()
    }

    /// Removes all jobs that wait behind from each queue in which any of them is unwanted.
    pub(super) fn take_behind(&mut self, is_unwanted: impl Fn(&ClaimedJob) -> bool) -> Vec<ClaimedJob> {
        let unwanted = self.0.values_mut().filter(|queue| queue.behind.iter().any(&is_unwanted));
        unwanted.flat_map(|queue| std::mem::take(&mut queue.behind)).collect()
    }

    /// Frees the slot of a ready job that is released. Returns the jobs behind it, which are released, too, to keep their order.
    pub(super) fn release(&mut self, queue: i32) -> impl Iterator<Item = ClaimedJob> + use<> {
        let queue = self.0.entry(queue).or_default();
        queue.taken = queue.taken.saturating_sub(1);
        std::mem::take(&mut queue.behind).into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use std::time::Instant;

    const QUEUE: i32 = -1;

    fn job(id: i64) -> ClaimedJob {
        ClaimedJob::new(Job { job_queue_id: Some(QUEUE), ..Job::example(id) }, 0, Instant::now())
    }

    fn id(waiting: Option<ClaimedJob>) -> Option<i64> {
        waiting.map(|waiting| waiting.job.id)
    }

    fn with_jobs(granted: usize, jobs: i64) -> Slots {
        let mut slots = Slots::default();
        slots.grant(QUEUE, granted);
        for n in 1..=jobs {
            slots.take_in(QUEUE, job(n));
        }
        slots
    }

    #[test]
    fn jobs_above_the_slots_wait_and_take_them_in_order() {
        let mut slots = Slots::default();
        slots.grant(QUEUE, 2);
        assert_eq!(
            (1..=4).map(|n| id(slots.take_in(QUEUE, job(n)))).collect::<Vec<_>>(),
            [Some(1), Some(2), None, None]
        );
        assert_eq!(slots.count_behind(), 2);
        assert_eq!((id(slots.leave(QUEUE)), id(slots.leave(QUEUE)), id(slots.leave(QUEUE))), (Some(3), Some(4), None));
    }

    #[test]
    fn a_worker_keeps_only_the_slots_for_which_it_has_jobs() {
        let mut slots = with_jobs(3, 5);
        assert_eq!(slots.keep(), [(QUEUE, 3)]);
        for _ in 0..3 {
            slots.leave(QUEUE);
        }
        assert_eq!(slots.keep(), [(QUEUE, 2)]);
        assert!(id(slots.take_in(QUEUE, job(6))).is_none(), "the third slot was released");
        for _ in 0..3 {
            slots.leave(QUEUE);
        }
        assert_eq!(slots.keep(), []);
    }

    #[test]
    fn a_lowered_number_of_slots_starts_nothing_until_enough_have_ended() {
        let mut slots = with_jobs(2, 4);
        assert!(slots.grant(QUEUE, 1));
        assert!(slots.leave(QUEUE).is_none());
        assert_eq!(id(slots.leave(QUEUE)), Some(3));
    }

    #[test]
    fn jobs_that_a_lost_answer_has_brought_run_one_after_the_other() {
        let mut slots = Slots::default();
        assert_eq!(id(slots.take_in(QUEUE, job(1))), Some(1));
        assert_eq!(id(slots.take_in(QUEUE, job(2))), None);
        assert_eq!(id(slots.leave(QUEUE)), Some(2));
    }

    #[test]
    fn the_jobs_behind_a_released_one_are_released_with_it() {
        let mut slots = with_jobs(1, 3);
        assert_eq!(slots.release(QUEUE).map(|waiting| waiting.job.id).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(slots.keep(), []);
        let mut slots = with_jobs(1, 3);
        assert_eq!(slots.take_behind(|waiting| waiting.job.id == 3).len(), 2);
        assert_eq!(slots.keep(), [(QUEUE, 1)]);
    }
}
