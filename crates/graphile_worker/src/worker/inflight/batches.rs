//! Batches: jobs of repeatable tasks that run before their claim is written, while a transaction keeps their rows locked.
//! Decides when a batch is due, how large it is, when it ends, and where the outcomes of its jobs go. Does not touch the
//! database: `worker/deferred` holds the transactions.
//!
//! A batch takes four round trips. So it pays only if there is a backlog of fast jobs: until an exchange finds one, and as
//! soon as a batch claims only a few jobs, exchanges claim the jobs of all tasks.
//!
//! A job of a batch waits in `ready` and runs like any other. If it ends while its batch is open, its outcome belongs to
//! the batch. If the batch ends first, its claim is written, and it is an ordinary job. Jobs that have not started by then
//! are dropped: the commit frees them.

use super::{ClaimedJob, Inflight, State};
use crate::context::OpenBatch;
use crate::job::Job;
use crate::worker::claim_size::ClaimSize;
use crate::worker::claim_start::{ClaimStart, Position};
use crate::worker::next_claim::{ClaimResult, NextClaim};
use crate::worker::report::Ended;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How many batches are open at the same time: one runs while another ends and claims.
pub(crate) const LANES: usize = 2;

/// How long a batch stays open at most. Others wait this long for its rows: `complete_jobs`, for example.
pub(crate) const LONGEST_BATCH: Duration = Duration::from_millis(50);

/// How long a batch keeps a lane from claiming at least, if slots are free. Most handlers that have started end within it,
/// and then need no claim.
const SHORTEST_BATCH: Duration = Duration::from_millis(2);

/// The smallest batch that is worth its round trips.
const SMALLEST_BATCH: usize = 16;

/// How long `run_once` waits for jobs that other workers have locked.
const CONTENTION_TIMEOUT: Duration = Duration::from_secs(1);

/// What a batch claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchRequest {
    pub(crate) jobs: usize,
    /// The job behind which the claim starts; `None` for the head.
    pub(crate) behind: Option<Position>,
}

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
    /// Whether there is a backlog. Otherwise exchanges claim the jobs of all tasks.
    are_running: bool,
    /// Whether batches run always, however few jobs are due.
    run_always: bool,
    /// `LONGEST_BATCH`, except in tests.
    longest: Duration,
    open: Vec<Batch>,
    /// The claims under way, and how many jobs they want.
    claims: usize,
    claiming: usize,
    next_claim: NextClaim,
    claim_size: ClaimSize,
    /// Claims start behind the last job of the claim before, most of the time: the rows in front of it are locked by the
    /// batches that are open, or gone.
    claim_start: ClaimStart,
    /// The largest batch whose jobs all start while it is open: halves its way down and doubles its way up.
    limit: usize,
    last_claim: LastClaim,
    /// Since when others have locked all due jobs.
    contended_since: Option<Instant>,
}

/// What the last claim says about the jobs that are due, for `run_once`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastClaim {
    /// Nothing: jobs were running when it began, and may have added others, or have started since.
    Outdated,
    /// It is under way.
    Begun,
    /// No job was due.
    Empty,
    /// Others have locked all due jobs.
    Contended,
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
            are_running: false,
            run_always: false,
            longest: LONGEST_BATCH,
            open: Vec::new(),
            claims: 0,
            claiming: 0,
            next_claim: NextClaim::new(),
            claim_size: ClaimSize::default(),
            claim_start: ClaimStart::default(),
            limit: concurrency,
            last_claim: LastClaim::Outdated,
            contended_since: None,
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

fn position(job: &Job) -> Position {
    Position { priority: job.priority, run_at: job.run_at, id: job.id }
}

impl State {
    /// How many jobs the next batch claims.
    fn batch_wanted(&self) -> usize {
        let batches = &self.batches;
        if self.closed || !batches.is_active || !batches.are_running {
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
            && batches.are_running
            && batches.has_idle_lane()
            && batches.next_claim.is_due(Instant::now())
            && self.batch_wanted() > 0
    }

    fn open_batch(&mut self, claim: BatchClaim, now: Instant) -> Arc<OpenBatch> {
        let batch = Arc::new(OpenBatch::default());
        self.take_new_tasks();
        self.replies += 1;
        self.release_claimed_again(claim.fresh.iter().map(|job| job.id));
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
                self.ready.push(ClaimedJob { batch: Some(batch.clone()), ..waiting });
            }
        }
        (open.unstarted, open.unended) = (open.size, open.size);
        self.batches.open.push(open);
        batch
    }
}

impl Inflight {
    pub(crate) fn set_longest_batch(&self, longest: Duration) {
        self.state().batches.longest = longest;
    }

    /// Runs batches also if there is no backlog, so that each job of a repeatable task is in one.
    pub(crate) fn always_batch(&self) {
        let mut state = self.state();
        state.batches.run_always = true;
        self.set_running(&mut state.batches, true);
    }

    fn set_running(&self, batches: &mut Batches, are_running: bool) {
        batches.are_running = are_running || batches.run_always;
        self.batches_run.store(batches.are_running, Ordering::Release);
    }

    /// An exchange has claimed as many jobs as it wanted: if they are short jobs of repeatable tasks, batches claim the next
    /// ones. Returns whether they have started to.
    pub(super) fn start_batches(&self, state: &mut State, claimed: &[Arc<Job>]) -> bool {
        if !state.batches.is_active || state.batches.are_running {
            return false;
        }
        let defers = |job: &&Arc<Job>| {
            let task = state.tasks.get(&job.task_identifier);
            job.job_queue_id.is_none() && task.is_some_and(|task| task.options.defers_claims())
        };
        let in_a_batch = state.claim_size.wanted_for(LONGEST_BATCH / 2, state.concurrency, 0);
        if in_a_batch < SMALLEST_BATCH || 2 * claimed.iter().filter(defers).count() < claimed.len() {
            return false;
        }
        self.set_running(&mut state.batches, true);
        state.batches.claim_start = ClaimStart::default();
        state.batches.next_claim.wake(Instant::now());
        true
    }

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
        if !state.batches.is_active || !state.batches.are_running {
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

    /// Begins a batch, if one is due. Returns what to claim.
    pub(crate) fn begin_batch(&self) -> Option<BatchRequest> {
        let mut state = self.state();
        if !state.is_batch_due() || !self.start_lease.may_start() {
            return None;
        }
        let now = Instant::now();
        let wanted = state.batch_wanted();
        let behind = state.batches.claim_start.next(now);
        state.batches.next_claim.begin(now);
        let is_idle = state.running.is_empty();
        state.batches.last_claim = if is_idle { LastClaim::Begun } else { LastClaim::Outdated };
        state.batches.claims += 1;
        state.batches.claiming += wanted;
        Some(BatchRequest { jobs: wanted, behind })
    }

    /// Ends a claim that failed.
    pub(crate) fn batch_failed(&self, wanted: BatchRequest, pause: Duration) {
        let mut state = self.state();
        state.batches.claims -= 1;
        state.batches.claiming -= wanted.jobs;
        // After a pause, exchanges claim the jobs of all tasks.
        state.batches.last_claim = if pause.is_zero() { LastClaim::Outdated } else { LastClaim::Empty };
        state.batches.next_claim.not_after(Instant::now() + pause);
    }

    /// Takes in the claimed jobs. Returns their batch, unless there are none.
    pub(crate) fn open_batch(&self, wanted: BatchRequest, claim: BatchClaim) -> Option<Arc<OpenBatch>> {
        let mut state = self.state();
        let now = Instant::now();
        let poll_interval = state.poll_interval;
        let batches = &mut state.batches;
        batches.claims -= 1;
        batches.claiming -= wanted.jobs;
        let got = claim.fresh.len() + claim.written.len();
        let bytes = claim.fresh.iter().chain(&claim.written).map(|job| job.payload.get().len()).sum();
        batches.claim_size.claimed(got, bytes);
        batches.claim_size.round_trip(claim.took);
        let last =
            claim.fresh.last().into_iter().chain(claim.written.iter().max_by_key(|job| position(job))).map(position);
        let is_full = got >= wanted.jobs;
        batches.claim_start.claimed(wanted.behind, last.max(), is_full, claim.took, now);
        let partial = !is_full && wanted.behind.is_some();
        let result = ClaimResult { wanted: wanted.jobs, got, limited: false, contended: claim.contended, partial };
        batches.next_claim.finish(result, now, poll_interval);
        if let Some(due) = claim.next_due {
            batches.next_claim.not_after(now + due.min(poll_interval));
        }
        let is_contended = got == 0 && claim.contended;
        batches.contended_since = is_contended.then(|| batches.contended_since.unwrap_or(now));
        batches.last_claim = match batches.last_claim {
            LastClaim::Outdated => LastClaim::Outdated,
            _ if got > 0 || partial => LastClaim::Outdated,
            _ if is_contended => LastClaim::Contended,
            _ => LastClaim::Empty,
        };
        let fresh = claim.fresh.len();
        let is_backlog_over = !batches.run_always && !partial && got < SMALLEST_BATCH.min(wanted.jobs);
        if is_backlog_over {
            self.set_running(batches, false);
            // An exchange under way may have left a job to the batches.
            state.next_claim.wake(now);
        }
        let batch = (got > 0).then(|| state.open_batch(claim, now));
        let (is_batch_due, idle_slots) = (state.is_batch_due(), state.idle_slots());
        drop(state);
        self.notify_runners(fresh, idle_slots);
        if is_batch_due {
            self.batch_due.notify_one();
        }
        if batch.is_none() || is_backlog_over {
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
        let longest = state.batches.longest;
        let Some(open) = state.batches.find(batch) else { return Hold::End };
        let mut until = open.since + longest;
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
            state.receive(written.into_iter().map(Arc::new).collect());
        }
        if state.closed {
            state.release_waiting(|_| true);
        }
        let idle_slots = state.idle_slots();
        drop(state);
        batch.ended.cancel();
        self.notify_runners(count, idle_slots);
        self.exchange_due.notify_one();
    }

    /// Whether `run_once` need not wait for jobs of repeatable tasks. Otherwise the next claim finds out.
    pub(crate) fn batches_are_drained(&self) -> bool {
        let mut state = self.state();
        if !state.batches.is_active {
            return true;
        }
        match state.batches.last_claim {
            LastClaim::Begun => return false,
            LastClaim::Empty => return state.batches.are_ended(),
            LastClaim::Contended => {
                return state.batches.contended_since.is_some_and(|since| since.elapsed() >= CONTENTION_TIMEOUT);
            }
            LastClaim::Outdated => state.batches.next_claim.wake(Instant::now()),
        }
        drop(state);
        self.batch_due.notify_one();
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TaskOptions;
    use crate::context::Running;
    use crate::task::Task;
    use crate::worker::execute::Outcome;
    use crate::worker::report::{Answer, Lane};
    use crate::worker::settle;
    use tokio::sync::watch;

    fn inflight(concurrency: usize) -> Inflight {
        let inflight = inflight_that_waits_for_a_backlog(concurrency, true);
        inflight.always_batch();
        inflight
    }

    fn inflight_that_waits_for_a_backlog(concurrency: usize, repeatable: bool) -> Inflight {
        let options = TaskOptions::default().repeatable(repeatable);
        let task = Task::function("t", options, |_: serde_json::Value, _| async {});
        let tasks = watch::Sender::new(Arc::new([("t".into(), Arc::new(task))].into_iter().collect()));
        let inflight = Inflight::new(tasks.subscribe(), concurrency, Duration::from_secs(2), Arc::default());
        inflight.set_batches(true);
        inflight
    }

    /// An exchange that claims as many jobs as it wants, if there are that many.
    fn exchange(inflight: &Inflight, there_are: usize) {
        inflight.wake_exchange();
        let (report, wanted) = inflight.begin(Lane::First, false).expect("an exchange");
        let jobs = jobs(0..i64::try_from(wanted.min(there_are)).expect("a number"));
        inflight.receive(Lane::First, report, claimed(jobs));
        finish_all(inflight);
    }

    fn jobs(ids: std::ops::Range<i64>) -> Vec<Job> {
        ids.map(Job::example).collect()
    }

    fn claimed(jobs: Vec<Job>) -> Answer {
        Answer { jobs: jobs.into_iter().map(Arc::new).collect(), ..Answer::default() }
    }

    /// A batch of these jobs.
    fn open(inflight: &Inflight, fresh: std::ops::Range<i64>, written: std::ops::Range<i64>) -> Arc<OpenBatch> {
        inflight.wake_batch();
        let wanted = inflight.begin_batch().expect("a batch is due");
        let claim = BatchClaim { fresh: jobs(fresh), written: jobs(written), ..BatchClaim::default() };
        inflight.open_batch(wanted, claim).expect("a batch")
    }

    fn finish(inflight: &Inflight, running: &Running, outcome: Outcome) {
        let settlement = settle::settlement(&running.job, outcome, &running.task.options);
        inflight.finished(running, settlement, Instant::now());
    }

    fn start(inflight: &Inflight) -> Option<Arc<Running>> {
        inflight.state().start(Instant::now())
    }

    fn finish_all(inflight: &Inflight) {
        while let Some(running) = start(inflight) {
            finish(inflight, &running, Outcome::Done);
        }
        reported(inflight);
    }

    fn ids(ended: &[Ended]) -> Vec<i64> {
        ended.iter().map(|ended| ended.job.id).collect()
    }

    fn reported(inflight: &Inflight) -> Vec<i64> {
        let Some((report, _)) = inflight.begin(Lane::First, false) else { return Vec::new() };
        let ids = ids(&report.ended);
        inflight.receive(Lane::First, report, Answer::default());
        ids
    }

    #[test]
    fn an_outcome_belongs_to_the_batch_while_it_is_open_and_to_the_report_afterwards() {
        let inflight = inflight(4);
        let batch = open(&inflight, 1..4, 0..0);
        let running: Vec<Arc<Running>> = std::iter::from_fn(|| start(&inflight)).collect();
        assert_eq!(running.len(), 3);
        finish(&inflight, &running[0], Outcome::Done);
        let end = inflight.end_batch(&batch);
        let mut still_running: Vec<i64> = end.running.iter().map(|job| job.id).collect();
        still_running.sort_unstable();
        assert_eq!((ids(&end.ended), still_running, end.frees), (vec![1], vec![2, 3], false));
        // One ends while its claim is written, the other one later.
        finish(&inflight, &running[1], Outcome::Done);
        assert!(reported(&inflight).is_empty());
        inflight.batch_ended(&batch, true, Vec::new());
        assert!(batch.ended.is_cancelled());
        finish(&inflight, &running[2], Outcome::Done);
        assert_eq!(reported(&inflight), [2, 3]);
        assert!(inflight.is_empty());
    }

    #[test]
    fn a_batch_ends_as_soon_as_all_its_jobs_have_ended() {
        let inflight = inflight(1);
        let batch = open(&inflight, 1..3, 0..0);
        for id in 1..3 {
            assert!(matches!(inflight.hold(&batch), Hold::Until(_)));
            let running = start(&inflight).expect("a job");
            assert_eq!(running.job.id, id);
            finish(&inflight, &running, Outcome::Done);
        }
        assert_eq!(inflight.hold(&batch), Hold::End);
        let end = inflight.end_batch(&batch);
        assert_eq!((ids(&end.ended), end.running.len()), (vec![1, 2], 0));
        inflight.batch_ended(&batch, true, Vec::new());
        assert!(inflight.is_empty() && reported(&inflight).is_empty());
    }

    #[test]
    fn jobs_that_have_not_started_are_dropped_and_the_next_batch_is_smaller() {
        let inflight = inflight(4);
        let batch = open(&inflight, 1..5, 0..0);
        let running = start(&inflight).expect("a job");
        let end = inflight.end_batch(&batch);
        assert!(end.frees && end.running.len() == 1);
        inflight.batch_ended(&batch, true, Vec::new());
        assert!(start(&inflight).is_none());
        finish(&inflight, &running, Outcome::Done);
        assert_eq!(reported(&inflight), [1], "to release the others changes nothing");
        inflight.wake_batch();
        assert_eq!(inflight.begin_batch().map(|wanted| wanted.jobs), Some(1));
    }

    #[test]
    fn batches_grow_as_long_as_their_jobs_end_in_time() {
        let inflight = inflight(2);
        let mut sizes = Vec::new();
        for _ in 0..4 {
            inflight.wake_batch();
            let wanted = inflight.begin_batch().expect("a batch is due");
            sizes.push(wanted.jobs);
            let fresh = jobs(0..i64::try_from(wanted.jobs).expect("a number"));
            let batch = inflight.open_batch(wanted, BatchClaim { fresh, ..BatchClaim::default() }).expect("a batch");
            while let Some(running) = start(&inflight) {
                finish(&inflight, &running, Outcome::Done);
            }
            inflight.end_batch(&batch);
            inflight.batch_ended(&batch, true, Vec::new());
        }
        assert_eq!(sizes, [2, 4, 8, 16]);
    }

    #[test]
    fn claims_start_behind_the_last_job_and_return_to_the_head_when_they_find_too_few() {
        let inflight = inflight(1);
        let claim = |written: std::ops::Range<i64>, fresh: std::ops::Range<i64>| {
            inflight.wake_batch();
            let wanted = inflight.begin_batch().expect("a batch is due");
            let claim = BatchClaim { fresh: jobs(fresh), written: jobs(written), ..BatchClaim::default() };
            if let Some(batch) = inflight.open_batch(wanted, claim) {
                while let Some(running) = start(&inflight) {
                    finish(&inflight, &running, Outcome::Done);
                }
                inflight.end_batch(&batch);
                inflight.batch_ended(&batch, true, Vec::new());
            }
            wanted.behind.map(|job| job.id)
        };
        assert_eq!(claim(0..0, 1..2), None);
        // Reading from the head takes long: the next claims do not, for two seconds.
        let (now, first) = (Instant::now(), Some(position(&Job::example(1))));
        inflight.state().batches.claim_start.claimed(first, first, true, Duration::ZERO, now);
        inflight.state().batches.claim_start.claimed(None, first, true, Duration::from_secs(1), now);
        assert_eq!(claim(6..8, 2..5), Some(1));
        finish_all(&inflight);
        assert_eq!(claim(0..0, 9..99), Some(7), "a job that is claimed with a write may be the last one");
        assert_eq!(claim(0..0, 0..0), Some(98));
        assert!(!inflight.batches_are_drained(), "it has not read from the head");
        assert_eq!(claim(0..0, 0..0), None);
        assert!(inflight.batches_are_drained());
    }

    #[test]
    fn batches_begin_with_a_backlog_of_short_repeatable_jobs_and_end_with_it() {
        let inflight = inflight_that_waits_for_a_backlog(4, true);
        exchange(&inflight, 3);
        assert_eq!(inflight.begin_batch(), None, "there was no other job");
        exchange(&inflight, usize::MAX);
        assert!(inflight.batches_run.load(Ordering::Acquire));
        let wanted = inflight.begin_batch().expect("a batch is due");
        assert_eq!(wanted, BatchRequest { jobs: 4, behind: None });
        let batch = inflight.open_batch(wanted, BatchClaim { fresh: jobs(0..4), ..BatchClaim::default() });
        finish_all(&inflight);
        let batch = batch.expect("a batch");
        inflight.end_batch(&batch);
        inflight.batch_ended(&batch, true, Vec::new());
        inflight.wake_batch();
        let wanted = inflight.begin_batch().expect("another one is due");
        inflight.open_batch(BatchRequest { behind: None, ..wanted }, BatchClaim::default());
        assert!(!inflight.batches_run.load(Ordering::Acquire));
        inflight.wake_batch();
        assert_eq!(inflight.begin_batch(), None);
        assert!(inflight.begin(Lane::First, false).is_some(), "an exchange claims what was left to the batches");
    }

    #[test]
    fn a_backlog_of_other_tasks_or_of_slow_jobs_begins_no_batch() {
        let of_another_task = inflight_that_waits_for_a_backlog(4, false);
        exchange(&of_another_task, 1);
        exchange(&of_another_task, usize::MAX);
        assert_eq!(of_another_task.begin_batch(), None);
        let slow = inflight_that_waits_for_a_backlog(4, true);
        slow.state().claim_size.job(Duration::from_secs(1));
        exchange(&slow, usize::MAX);
        assert_eq!(slow.begin_batch(), None);
    }

    #[test]
    fn jobs_whose_claim_is_written_start_once_the_batch_has_committed() {
        let inflight = inflight(4);
        let batch = open(&inflight, 0..0, 1..3);
        assert_eq!(inflight.hold(&batch), Hold::End, "no job keeps it open");
        assert!(start(&inflight).is_none());
        assert!(inflight.end_batch(&batch).has_written);
        inflight.batch_ended(&batch, true, Vec::new());
        while let Some(running) = start(&inflight) {
            finish(&inflight, &running, Outcome::Done);
        }
        assert_eq!(reported(&inflight), [1, 2]);
    }

    #[test]
    fn after_a_lost_commit_the_worker_asks_which_jobs_it_holds() {
        let inflight = inflight(4);
        let batch = open(&inflight, 1..2, 2..3);
        let running = start(&inflight).expect("a job");
        let end = inflight.end_batch(&batch);
        assert_eq!(end.running.len(), 1);
        // The connection is lost. Meanwhile the job ends, and the first lane sees the claim that was written.
        finish(&inflight, &running, Outcome::Done);
        inflight.reconcile(jobs(2..3), &[]);
        assert!(start(&inflight).is_none(), "its batch is not over");
        let end = inflight.end_batch(&batch);
        assert_eq!((ids(&end.ended), end.running.len()), (vec![1], 0));
        inflight.batch_ended(&batch, false, end.ended);
        assert_eq!(reported(&inflight), [1], "it may have been recorded, or be an ordinary job");
        assert!(start(&inflight).is_none() && inflight.is_empty());
        inflight.reconcile(jobs(2..3), &[]);
        assert_eq!(start(&inflight).map(|running| running.job.id), Some(2));
    }

    #[test]
    fn a_job_of_a_lost_batch_that_is_claimed_again_is_reported_under_its_new_claim() {
        let inflight = inflight(4);
        let batch = open(&inflight, 1..2, 0..0);
        let running = start(&inflight).expect("a job");
        inflight.wake_exchange();
        let (report, _) = inflight.begin(Lane::First, false).expect("an exchange");
        inflight.receive(Lane::First, report, claimed(jobs(1..2)));
        assert!(start(&inflight).is_none(), "it runs already");
        finish(&inflight, &running, Outcome::Done);
        assert!(inflight.end_batch(&batch).ended.is_empty());
        inflight.batch_ended(&batch, true, Vec::new());
        assert_eq!(reported(&inflight), [1]);
        assert!(inflight.is_empty());
    }

    #[test]
    fn two_batches_are_open_at_most_and_one_ends_early_if_slots_would_be_idle() {
        let inflight = inflight(4);
        let first = open(&inflight, 1..3, 0..0);
        let _slow = [start(&inflight), start(&inflight)];
        let second = open(&inflight, 3..4, 0..0);
        let _slow_too = start(&inflight);
        assert!(matches!(inflight.hold(&first), Hold::Until(_)), "no claim is due");
        inflight.wake_batch();
        assert_eq!(inflight.begin_batch(), None, "both lanes are busy");
        std::thread::sleep(SHORTEST_BATCH);
        assert_eq!((inflight.hold(&first), inflight.hold(&second)), (Hold::End, Hold::End));
    }

    #[test]
    fn a_stopping_worker_drops_the_jobs_of_a_batch_and_ends_it() {
        let inflight = inflight(1);
        let batch = open(&inflight, 1..4, 0..0);
        let running = start(&inflight).expect("a job");
        inflight.close();
        assert_eq!(inflight.hold(&batch), Hold::End);
        finish(&inflight, &running, Outcome::Done);
        let end = inflight.end_batch(&batch);
        assert_eq!((ids(&end.ended), end.frees), (vec![1], true));
        assert!(reported(&inflight).is_empty() && !inflight.is_empty());
        inflight.batch_ended(&batch, true, Vec::new());
        assert!(inflight.is_empty() && inflight.begin_batch().is_none());
    }

    #[test]
    fn a_waiting_batch_does_not_keep_exchanges_from_claiming() {
        let inflight = inflight(4);
        let _batch = open(&inflight, 1..5, 0..0);
        inflight.wake_exchange();
        let (_, wanted) = inflight.begin(Lane::First, false).expect("a claim");
        assert_eq!(wanted, 4);
    }

    #[test]
    fn run_once_ends_when_a_claim_has_found_nothing_since_the_last_job_started() {
        let inflight = inflight(4);
        assert!(!inflight.batches_are_drained());
        let claim = |claim| {
            let wanted = inflight.begin_batch().expect("a claim is due");
            inflight.open_batch(wanted, claim)
        };
        assert!(claim(BatchClaim::default()).is_none());
        assert!(inflight.batches_are_drained());
        inflight.wake_batch();
        let batch = claim(BatchClaim { fresh: jobs(1..2), ..BatchClaim::default() }).expect("a batch");
        let running = start(&inflight).expect("a job");
        finish(&inflight, &running, Outcome::Done);
        inflight.end_batch(&batch);
        inflight.batch_ended(&batch, true, Vec::new());
        assert!(!inflight.batches_are_drained(), "it may have added a job");
        assert!(claim(BatchClaim { contended: true, ..BatchClaim::default() }).is_none());
        assert!(!inflight.batches_are_drained(), "another worker may free it");
    }

    #[test]
    fn a_claim_that_began_while_a_job_ran_does_not_end_run_once() {
        let inflight = inflight(4);
        inflight.wake_exchange();
        let (report, _) = inflight.begin(Lane::First, false).expect("an exchange");
        inflight.receive(Lane::First, report, claimed(jobs(1..2)));
        let running = start(&inflight).expect("a job");
        let wanted = inflight.begin_batch().expect("a claim is due");
        // The job adds another one, which the claim does not see.
        finish(&inflight, &running, Outcome::Done);
        assert!(inflight.open_batch(wanted, BatchClaim::default()).is_none());
        assert_eq!(reported(&inflight), [1]);
        assert!(!inflight.batches_are_drained());
        let wanted = inflight.begin_batch().expect("the next claim is due");
        assert!(!inflight.batches_are_drained(), "it is under way");
        inflight.open_batch(wanted, BatchClaim::default());
        assert!(inflight.batches_are_drained());
    }
}
