//! Batches: jobs of repeatable tasks that run before their claim is written, while a transaction keeps their rows locked.
//! Decides when a batch is due, how large it is, when it ends, and where the outcomes of its jobs go. Does not touch the
//! database: `worker/deferred` holds the transactions.
//!
//! A job of a batch waits in `ready` and runs like any other. If it ends while its batch is open, its outcome belongs to
//! the batch. If the batch ends first, its claim is written, and it is an ordinary job. Jobs that have not started by then
//! are dropped: the commit frees them.

use super::{ClaimedJob, Inflight, State};
use crate::context::OpenBatch;
use crate::job::Job;
use crate::worker::claim_size::ClaimSize;
use crate::worker::next_claim::{ClaimResult, NextClaim};
use crate::worker::report::Ended;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many batches are open at the same time: one runs while another ends and claims.
pub(crate) const LANES: usize = 2;

/// How long a batch stays open at most. Others wait this long for its rows: `complete_jobs`, for example.
const LONGEST_BATCH: Duration = Duration::from_millis(50);

/// How long a batch keeps a lane from claiming at least, if slots are free. Most handlers that have started end within it,
/// and then need no claim.
const SHORTEST_BATCH: Duration = Duration::from_millis(2);

/// How long `run_once` waits for jobs that other workers have locked.
const CONTENTION_TIMEOUT: Duration = Duration::from_secs(1);

/// The claim of a batch.
#[derive(Debug, Default)]
pub(crate) struct BatchClaim {
    /// Jobs whose rows are only locked: they may start.
    pub(crate) fresh: Vec<Job>,
    /// Jobs whose claim is written: they may start once the transaction has committed.
    pub(crate) written: Vec<Job>,
    /// Whether due jobs were left, because others had locked them or because they did not fit.
    pub(crate) contended: bool,
    /// How long until the next job is due, if it is known.
    pub(crate) next_due: Option<Duration>,
    pub(crate) took: Duration,
}

/// What the database has to record at the end of a batch.
#[derive(Debug, Default)]
pub(crate) struct BatchEnd {
    pub(crate) ended: Vec<Ended>,
    pub(crate) running: Vec<Arc<Job>>,
    /// Whether some of its jobs become free for other workers.
    pub(crate) frees: bool,
    /// Whether claims were written when it began.
    pub(crate) has_written: bool,
}

/// Whether a batch stays open.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    End,
    Until(Instant),
}

pub(super) struct Batches {
    /// Whether the worker runs repeatable tasks, and has lanes for them.
    is_active: bool,
    open: Vec<Batch>,
    /// The claims under way, and how many jobs they want.
    claims: usize,
    claiming: usize,
    next_claim: NextClaim,
    claim_size: ClaimSize,
    /// The largest batch whose jobs all start while it is open: halves its way down and doubles its way up.
    limit: usize,
    last_claim: LastClaim,
}

/// What the last claim says about the jobs that are due, for `run_once`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastClaim {
    /// Jobs have started since.
    Outdated,
    /// No job was due.
    Empty,
    /// Since this time, others have locked all due jobs.
    Contended(Instant),
}

struct Batch {
    batch: Arc<OpenBatch>,
    since: Instant,
    size: usize,
    /// How many of its jobs wait for a slot.
    unstarted: usize,
    /// How many of its jobs wait or run.
    unended: usize,
    /// How many of its jobs were dropped before they started.
    dropped: usize,
    ended: Vec<Ended>,
    written: Vec<Job>,
}

impl Batches {
    pub(super) fn new(concurrency: usize) -> Batches {
        Batches {
            is_active: false,
            open: Vec::new(),
            claims: 0,
            claiming: 0,
            next_claim: NextClaim::new(),
            claim_size: ClaimSize::default(),
            limit: concurrency,
            last_claim: LastClaim::Outdated,
        }
    }

    fn find(&mut self, batch: &Arc<OpenBatch>) -> Option<&mut Batch> {
        self.open.iter_mut().find(|open| Arc::ptr_eq(&open.batch, batch))
    }

    pub(super) fn are_ended(&self) -> bool {
        self.open.is_empty() && self.claims == 0
    }

    fn has_idle_lane(&self) -> bool {
        self.open.len() + self.claims < LANES
    }

    pub(super) fn unstarted(&self) -> usize {
        self.open.iter().map(|open| open.unstarted).sum()
    }

    pub(super) fn ended(&self) -> impl Iterator<Item = &Ended> {
        self.open.iter().flat_map(|open| &open.ended)
    }

    /// Whether the claim of the job was written at the beginning of a batch that is still open.
    pub(super) fn has_written(&self, job: &Job) -> bool {
        self.open
            .iter()
            .flat_map(|open| &open.written)
            .any(|written| written.id == job.id && written.is_same_claim(job))
    }

    pub(super) fn notify_changed(&self) {
        self.open.iter().for_each(|open| open.batch.changed.notify_one());
    }

    /// A job of any kind has started.
    pub(super) fn started(&mut self, batch: Option<&Arc<OpenBatch>>) {
        self.last_claim = LastClaim::Outdated;
        if let Some(open) = batch.and_then(|batch| self.find(batch)) {
            open.unstarted -= 1;
        }
    }

    /// A job of a batch has run for this long.
    pub(super) fn ran(&mut self, took: Duration) {
        self.claim_size.job(took);
    }

    /// Takes the outcome of a job if its batch is open. Returns it otherwise, or if the job was claimed again meanwhile: the
    /// outcome is then reported.
    pub(super) fn take_ended(
        &mut self,
        batch: Option<&Arc<OpenBatch>>,
        ended: Ended,
        is_claimed_again: bool,
    ) -> Option<Ended> {
        let Some(open) = batch.and_then(|batch| self.find(batch)) else { return Some(ended) };
        open.unended -= 1;
        if open.unstarted == 0 {
            open.batch.changed.notify_one();
        }
        if is_claimed_again {
            return Some(ended);
        }
        open.ended.push(ended);
        None
    }

    /// A job of the batch will not start.
    pub(super) fn dropped(&mut self, batch: &Arc<OpenBatch>) {
        if let Some(open) = self.find(batch) {
            open.unstarted -= 1;
            open.unended -= 1;
            open.dropped += 1;
            open.batch.changed.notify_one();
        }
    }

    /// Learns how many jobs can start in time.
    fn adapt(&mut self, ended: &Batch, largest: usize) {
        let started = ended.size - ended.dropped;
        if ended.dropped > 0 {
            self.limit = started.max(1);
        } else if ended.size >= self.limit && ended.since.elapsed() < LONGEST_BATCH / 2 {
            self.limit = (self.limit * 2).min(largest);
        }
    }
}

impl State {
    /// How many jobs the next batch claims.
    fn batch_wanted(&self) -> usize {
        let batches = &self.batches;
        if self.closed || !batches.is_active {
            return 0;
        }
        let in_flight = batches.unstarted() + self.running.len() + batches.claiming;
        // As many as the slots can run while it is open, with a margin.
        let size = |in_flight| {
            batches.claim_size.wanted_for(LONGEST_BATCH / 2, self.concurrency, in_flight).min(batches.limit)
        };
        let wanted = size(in_flight);
        // Not a few at a time, as long as no slot needs them.
        let has_idle_slots = self.running.len() + self.ready.len() < self.concurrency;
        if has_idle_slots || wanted * 2 >= size(0) { wanted } else { 0 }
    }

    /// Whether a lane should claim a batch now.
    pub(super) fn is_batch_due(&self) -> bool {
        let batches = &self.batches;
        batches.is_active
            && batches.has_idle_lane()
            && batches.next_claim.is_due(Instant::now())
            && self.batch_wanted() > 0
    }

    fn open_batch(&mut self, claim: BatchClaim, now: Instant) -> Arc<OpenBatch> {
        let batch = Arc::new(OpenBatch::default());
        self.take_new_tasks();
        self.replies += 1;
        self.release_claimed_again(&claim.fresh);
        let mut open = Batch {
            batch: batch.clone(),
            since: now,
            size: 0,
            unstarted: 0,
            unended: 0,
            dropped: 0,
            ended: Vec::new(),
            written: claim.written,
        };
        for job in claim.fresh {
            // A job may run here under a claim that was lost. The end of the batch frees the row.
            if !self.running.contains_key(&job.id) && !self.closed {
                open.size += 1;
                let waiting = ClaimedJob::new(job, self.replies, now);
                self.ready.push(Reverse(ClaimedJob { batch: Some(batch.clone()), ..waiting }));
            }
        }
        (open.unstarted, open.unended) = (open.size, open.size);
        self.batches.open.push(open);
        batch
    }
}

impl Inflight {
    /// Turns batches on or off. Without them, exchanges claim the jobs of all tasks.
    pub(crate) fn set_batches(&self, is_active: bool) {
        let mut state = self.state();
        if std::mem::replace(&mut state.batches.is_active, is_active) == is_active {
            return;
        }
        state.batches.next_claim.wake(Instant::now());
        drop(state);
        self.batch_due.notify_one();
    }

    /// There may be new jobs of repeatable tasks.
    pub(crate) fn wake_batch(&self) {
        let mut state = self.state();
        if !state.batches.is_active {
            return;
        }
        state.batches.next_claim.wake(Instant::now());
        if !state.batches.has_idle_lane() {
            // One of them may have to end.
            state.batches.notify_changed();
        }
        drop(state);
        self.batch_due.notify_one();
    }

    /// Waits until a batch is due.
    pub(crate) async fn batch_due(&self) {
        loop {
            let mut notified = std::pin::pin!(self.batch_due.notified());
            let mut heartbeat_sent = std::pin::pin!(self.start_lease.heartbeat_sent.notified());
            notified.as_mut().enable();
            heartbeat_sent.as_mut().enable();
            let may_start = self.start_lease.may_start();
            let at = {
                let state = self.state();
                if may_start && state.is_batch_due() {
                    return;
                }
                (may_start && state.batch_wanted() > 0).then(|| state.batches.next_claim.at())
            };
            let due = async {
                match at {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = notified => {}
                () = due => {}
                () = heartbeat_sent, if !may_start => {}
            }
        }
    }

    /// Begins a batch, if one is due. Returns how many jobs to claim.
    pub(crate) fn begin_batch(&self) -> Option<usize> {
        let mut state = self.state();
        if !state.is_batch_due() || !self.start_lease.may_start() {
            return None;
        }
        let wanted = state.batch_wanted();
        state.batches.next_claim.begin(Instant::now());
        state.batches.claims += 1;
        state.batches.claiming += wanted;
        Some(wanted)
    }

    /// Ends a claim that failed.
    pub(crate) fn batch_failed(&self, wanted: usize, pause: Duration) {
        let mut state = self.state();
        state.batches.claims -= 1;
        state.batches.claiming -= wanted;
        state.batches.next_claim.not_after(Instant::now() + pause);
    }

    /// Takes in the claimed jobs. Returns their batch, unless there are none.
    pub(crate) fn open_batch(&self, wanted: usize, claim: BatchClaim) -> Option<Arc<OpenBatch>> {
        let mut state = self.state();
        let now = Instant::now();
        let poll_interval = state.poll_interval;
        let batches = &mut state.batches;
        batches.claims -= 1;
        batches.claiming -= wanted;
        let got = claim.fresh.len() + claim.written.len();
        let bytes = claim.fresh.iter().chain(&claim.written).map(|job| job.payload.get().len()).sum();
        batches.claim_size.claimed(got, bytes);
        batches.claim_size.round_trip(claim.took);
        let result = ClaimResult { wanted, got, limited: false, contended: claim.contended };
        batches.next_claim.finish(result, now, poll_interval);
        if let Some(due) = claim.next_due {
            batches.next_claim.not_after(now + due.min(poll_interval));
        }
        batches.last_claim = match (got, claim.contended, batches.last_claim) {
            (0, false, _) => LastClaim::Empty,
            (0, true, LastClaim::Contended(since)) => LastClaim::Contended(since),
            (0, true, _) => LastClaim::Contended(now),
            _ => LastClaim::Outdated,
        };
        let fresh = claim.fresh.len();
        let batch = (got > 0).then(|| state.open_batch(claim, now));
        let is_batch_due = state.is_batch_due();
        drop(state);
        for _ in 0..fresh {
            self.job_ready.notify_one();
        }
        if is_batch_due {
            self.batch_due.notify_one();
        }
        if batch.is_none() {
            // `run_once` may be done.
            self.exchange_due.notify_one();
        }
        batch
    }

    /// Whether another batch is due when the one that is about to end has ended.
    pub(crate) fn is_batch_due_after_this(&self) -> bool {
        let state = self.state();
        state.batches.next_claim.is_due(Instant::now()) && state.batch_wanted() > 0
    }

    /// Whether the batch stays open.
    pub(crate) fn hold(&self, batch: &Arc<OpenBatch>) -> Hold {
        let mut guard = self.state();
        let state = &mut *guard;
        let slots_are_idle = state.ready.is_empty() && state.running.len() < state.concurrency;
        let all_lanes_are_busy = !state.batches.has_idle_lane();
        let claim_at = state.batches.next_claim.at();
        let Some(open) = state.batches.find(batch) else { return Hold::End };
        let mut until = open.since + LONGEST_BATCH;
        if slots_are_idle && all_lanes_are_busy {
            until = until.min(claim_at.max(open.since + SHORTEST_BATCH));
        }
        if open.unended == 0 || state.closed || batch.is_claim_wanted() || until <= Instant::now() {
            return Hold::End;
        }
        Hold::Until(until)
    }

    /// Begins the end of a batch: drops its jobs that have not started. Jobs that end from now on are in the next `BatchEnd`
    /// or, if the batch has ended, in the report.
    pub(crate) fn end_batch(&self, batch: &Arc<OpenBatch>) -> BatchEnd {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.batches.find(batch).is_some_and(|open| open.unstarted > 0) {
            state.release_waiting(|waiting| waiting.batch.as_ref().is_some_and(|other| Arc::ptr_eq(other, batch)));
        }
        let is_of_batch =
            |other: &Option<Arc<OpenBatch>>| other.as_ref().is_some_and(|other| Arc::ptr_eq(other, batch));
        let running = state.running.values().filter(|running| is_of_batch(&running.batch));
        let running = running.map(|running| running.job.clone()).collect();
        let Some(open) = state.batches.find(batch) else { return BatchEnd::default() };
        BatchEnd {
            ended: std::mem::take(&mut open.ended),
            running,
            frees: open.dropped > 0,
            has_written: !open.written.is_empty(),
        }
    }

    /// A batch has ended. If its own commit was confirmed, the jobs whose claim was written when it began may start.
    /// Otherwise the worker finds out which jobs it holds. `unrecorded` are outcomes to be reported like those of other jobs.
    pub(crate) fn batch_ended(&self, batch: &Arc<OpenBatch>, is_confirmed: bool, unrecorded: Vec<Ended>) {
        let mut state = self.state();
        let largest = state.batches.claim_size.largest(state.concurrency);
        let position = state.batches.open.iter().position(|open| Arc::ptr_eq(&open.batch, batch));
        let Some(mut ended) = position.map(|position| state.batches.open.swap_remove(position)) else { return };
        state.batches.adapt(&ended, largest);
        state.report.extend(unrecorded);
        state.report.append(&mut ended.ended);
        let written = if is_confirmed { std::mem::take(&mut ended.written) } else { Vec::new() };
        let count = written.len();
        if count > 0 {
            state.receive(written);
        }
        if state.closed {
            state.release_waiting(|_| true);
        }
        drop(state);
        batch.ended.cancel();
        for _ in 0..count {
            self.job_ready.notify_one();
        }
        self.exchange_due.notify_one();
    }

    /// Whether `run_once` need not wait for jobs of repeatable tasks. Otherwise the next claim finds out.
    pub(crate) fn batches_are_drained(&self) -> bool {
        let mut state = self.state();
        if !state.batches.is_active {
            return true;
        }
        match state.batches.last_claim {
            LastClaim::Empty => return state.batches.are_ended(),
            LastClaim::Contended(since) => return since.elapsed() >= CONTENTION_TIMEOUT,
            LastClaim::Outdated => state.batches.next_claim.wake(Instant::now()),
        }
        drop(state);
        self.batch_due.notify_one();
        false
    }
}
