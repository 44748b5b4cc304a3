//! The run loop: maintain, exchange jobs with the database, receive the answer, wait. One loop talks to the database;
//! one runner per slot runs jobs. Between them stands `inflight`, with the jobs that are claimed, running, or to be
//! reported.
//!
//! Not here: `exchange` makes the round trip; `maintenance` has the timers and the housekeeping; `execute` runs one
//! job; `settle` decides what its outcome means.

use super::Worker;
use super::deferred::DeferredLanes;
use super::exchange::{Exchange, Reply};
use super::execute::{Outcome, execute};
use super::inflight::Inflight;
use super::listener::Listener;
use super::maintenance::Maintenance;
use super::report::{Answer, ClaimRequest, Lane, Report};
use super::second_lane::SecondLane;
use super::settings::Settings;
use super::settle::{self, Settlement};
use crate::Error;
use crate::context::{Running, Shared};
use crate::flags::FlagFilter;
use crate::hooks::{
    AfterJobRun, BeforeJobRun, FetchEmpty, FetchStart, HookResult, JobCancelled, JobError, JobExpired, JobFailed,
    JobRateLimited, JobStart, JobSuccess, LimitCause, LimitReached,
};
use crate::recovery::heartbeat::StartLease;
use crate::task::Tasks;
use chrono::{DateTime, Utc};
use futures_util::FutureExt;
use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span, error, info, info_span, warn};

/// How long the last report may take, and how long after a second request to stop.
const LAST_REPORT_TIMEOUT: Duration = Duration::from_secs(10);
const HASTY_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The minimum interval between two queries for the next due time, unless the last answer has become due.
const DUE_QUERY_INTERVAL: Duration = Duration::from_millis(100);

/// How long `run_once` keeps polling if other workers have locked the due jobs.
const CONTENTION_TIMEOUT: Duration = Duration::from_secs(1);

/// How long aborted runners may take to end.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// When a run ends by itself.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Never: the worker waits for more jobs.
    Continuous,
    /// When no job is left that could run now.
    Drain,
}

/// One run of a worker under one id.
pub(super) struct RunLoop<'w> {
    worker: &'w Worker,
    mode: Mode,
    inflight: Arc<Inflight>,
    exchange: Exchange,
    listener: Listener,
    maintenance: Maintenance,
    tasks: watch::Receiver<Arc<Tasks>>,
    runners: JoinSet<()>,
    second_lane: JoinSet<()>,
    stop_second_lane: CancellationToken,
    /// Started once the worker has a repeatable task.
    deferred_lanes: Option<DeferredLanes>,
    declared_dead: CancellationToken,
    /// Set once the worker is leaving: when running jobs are interrupted.
    leave_at: Option<Instant>,
    next_due: NextDue,
    /// Since when all due jobs have been locked by other workers.
    contended_since: Option<Instant>,
}

/// When the database was last asked for the next due time, and its answer.
#[derive(Default)]
struct NextDue {
    asked_at: Option<Instant>,
    due_at: Option<Instant>,
}

/// Whether the loop continues.
#[derive(PartialEq, Eq)]
enum Next {
    Continue,
    Leave,
}

impl<'w> RunLoop<'w> {
    pub(super) fn new(
        worker: &'w Worker,
        mut exchange: Exchange,
        listener: Listener,
        mode: Mode,
        declared_dead: CancellationToken,
        start_lease: Arc<StartLease>,
    ) -> RunLoop<'w> {
        let mut tasks = worker.tasks.subscribe();
        exchange.set_tasks(tasks.borrow_and_update().keys().cloned().collect());
        let Settings { concurrency, poll_interval, .. } = *worker.settings;
        let inflight = Arc::new(Inflight::new(worker.tasks.subscribe(), concurrency, poll_interval, start_lease));
        inflight.set_longest_batch(worker.settings.longest_batch);
        if mode == Mode::Drain || worker.settings.always_batch {
            inflight.always_batch();
        }
        exchange.lanes().set_batches_run(inflight.batches_run.clone());
        let mut runners = JoinSet::new();
        for _ in 0..concurrency {
            runners.spawn(run_jobs(inflight.clone(), worker.shared.clone()));
        }
        let helper = SecondLane {
            exchange: exchange.second_lane(),
            inflight: inflight.clone(),
            settings: worker.settings.clone(),
            shared: worker.shared.clone(),
        };
        let stop_second_lane = CancellationToken::new();
        let mut second_lane = JoinSet::new();
        second_lane.spawn(helper.run_until(stop_second_lane.clone()));
        let mut run_loop = RunLoop {
            worker,
            mode,
            inflight,
            exchange,
            listener,
            maintenance: Maintenance::new(worker.settings.keep_locks_fresh_after, poll_interval),
            tasks,
            runners,
            second_lane,
            stop_second_lane,
            deferred_lanes: None,
            declared_dead,
            leave_at: None,
            next_due: NextDue::default(),
            contended_since: None,
        };
        run_loop.defer_claims();
        run_loop
    }

    /// Lets the deferred lanes claim the jobs of repeatable tasks. Not behind a pooler: their transactions would occupy its
    /// server connections.
    fn defer_claims(&mut self) {
        let tasks = self.tasks.borrow().clone();
        let deferred = tasks.values().filter(|task| task.options.defers_claims() && !self.exchange.is_pooled());
        let mut deferred: HashSet<Arc<str>> = deferred.map(|task| task.identifier.clone()).collect();
        if self.deferred_lanes.as_ref().is_none_or(DeferredLanes::have_ended) && !deferred.is_empty() {
            let RunLoop { worker, exchange, inflight, .. } = &*self;
            match DeferredLanes::start(exchange, inflight, &worker.settings, &worker.shared) {
                Ok(lanes) => self.deferred_lanes = Some(lanes),
                Err(error) => {
                    warn!(label = "worker", %error, "could not start a thread: repeatable tasks run like others");
                    deferred.clear();
                }
            }
        }
        self.inflight.set_batches(!deferred.is_empty());
        self.exchange.lanes().set_deferred_tasks(deferred);
    }

    /// Runs jobs until the worker leaves, then records or releases everything that is left.
    pub(super) async fn run(mut self) -> Result<(), Error> {
        let ended = self.run_until_done().await;
        self.leave(ended).await
    }

    /// The loop. Ends when the worker was asked to stop and nothing is in flight, when the grace period is over, when
    /// `run_once` finds no more jobs, or with a fatal error.
    async fn run_until_done(&mut self) -> Result<(), Error> {
        // Opening the exchange has already looked for jobs: if there are none, skip the exchange, whose planning takes
        // longer than the rest of the run.
        if self.mode == Mode::Drain && !self.exchange.jobs_wait() && !self.release_successors().await {
            return Ok(());
        }
        loop {
            self.maintain().await;
            if self.is_done() {
                return Ok(());
            }
            let Some(flags) = self.flags().await? else { continue };
            let next = match self.begin_exchange(flags) {
                Some((report, request)) => self.exchange(report, request).await?,
                None => self.wait().await,
            };
            if next == Next::Leave {
                return Ok(());
            }
        }
    }

    /// Handles everything that is due besides jobs: locks, a newer schema, a request to stop, changed tasks.
    async fn maintain(&mut self) {
        self.maintenance.keep_locks_fresh(&mut self.exchange, &self.inflight).await;
        self.cancel_jobs().await;
        self.expire_jobs().await;
        self.release_successors().await;
        if self.leave_at.is_none() {
            self.maintenance.check_schema(&mut self.exchange, &self.listener).await;
            if let Some(notice) = self.listener.shutdown_notice.notice() {
                let reason = notice.reason.to_string();
                warn!(
                    label = "worker",
                    worker_id = self.worker.worker_id(),
                    reason,
                    "a newer release changes the schema: stopping"
                );
                let _ = self.worker.exit_reason.set(reason);
                self.worker.shutdown.leaving.cancel();
            }
            if self.worker.shutdown.leaving.is_cancelled() {
                self.leave_at = Some(self.worker.begin_leaving(&self.inflight, &self.listener).await);
            }
        }
        if self.tasks.has_changed().unwrap_or(false) {
            self.exchange.set_tasks(self.tasks.borrow_and_update().keys().cloned().collect());
            self.defer_claims();
            self.inflight.wake_claim();
        }
        if self.listener.take_tasks_changed() {
            self.exchange.reload_task_ids();
            self.inflight.wake_claim();
        }
        if self.leave_at.is_none() {
            self.follow_limits().await;
        }
    }

    /// Applies changed limits, and calls the hooks of the changes.
    async fn follow_limits(&mut self) {
        let changed = self.maintenance.follow_limits(&mut self.exchange, &self.listener, &self.inflight).await;
        let shared = &self.worker.shared;
        for change in changed {
            shared.emit_limit_change(change).await;
        }
        for (limit, until) in self.maintenance.reached_limits(&mut self.exchange, &shared.hooks).await {
            shared.hooks.emit(LimitReached, || shared.limit_event(limit, LimitCause::Reached, until)).await;
        }
    }

    /// Asks the jobs to stop that were cancelled since.
    async fn cancel_jobs(&mut self) {
        let cancelled = self.maintenance.cancelled_jobs(&mut self.exchange, &self.listener, &self.inflight).await;
        let Some(cancelled) = cancelled else { return };
        let shared = &self.worker.shared;
        for job in self.inflight.cancel(&cancelled) {
            info!(
                label = "job",
                worker_id = &*shared.worker_id,
                task_identifier = &*job.task_identifier,
                job_id = job.id,
                "job cancelled before it started"
            );
            shared.hooks.emit(JobCancelled, || shared.job_event(&job, Duration::ZERO, None)).await;
        }
    }

    /// Fails the jobs that have expired before any worker started them.
    async fn expire_jobs(&mut self) {
        let shared = &self.worker.shared;
        for job in self.maintenance.expire_jobs(&mut self.exchange, &self.listener).await {
            let job = Arc::new(job);
            let error = job.last_error.clone();
            warn!(
                label = "job",
                worker_id = &*shared.worker_id,
                task_identifier = &*job.task_identifier,
                job_id = job.id,
                error,
                "job expired before it started"
            );
            shared.hooks.emit(JobExpired, || shared.job_event(&job, Duration::ZERO, error.clone())).await;
        }
    }

    /// Lets jobs start if the jobs that they replace have ended. Returns whether there are any.
    async fn release_successors(&mut self) -> bool {
        let RunLoop { maintenance, exchange, listener, inflight, .. } = self;
        let any = maintenance.release_successors(exchange, listener, inflight).await;
        if any {
            self.inflight.wake_claim();
        }
        any
    }

    fn is_done(&self) -> bool {
        self.declared_dead.is_cancelled() || (self.leave_at.is_some() && self.inflight.is_empty())
    }

    /// Which jobs may run, by their flags; `None` if the worker was asked to stop meanwhile.
    async fn flags(&self) -> Result<Option<FlagFilter>, Error> {
        if self.leave_at.is_some() {
            return Ok(Some(FlagFilter::default()));
        }
        tokio::select! {
            flags = self.worker.settings.flags.current() => flags.map(Some),
            () = self.worker.shutdown.leaving.cancelled() => Ok(None),
        }
    }

    /// Prepares the next report and claim, if there is anything to report or a claim is due.
    fn begin_exchange(&self, flags: FlagFilter) -> Option<(Report, ClaimRequest)> {
        let limits = self.inflight.limits();
        let (report, jobs) = self.inflight.begin(Lane::First, !limits.is_empty())?;
        let freshness = self.worker.settings.recovery.freshness();
        let request = ClaimRequest {
            jobs,
            most_slots: self.worker.settings.concurrency,
            ahead: self.inflight.ahead(),
            flags,
            limits,
            now: self.now(),
            freshness,
        };
        Some((report, request))
    }

    /// Makes one round trip, and handles its answer.
    async fn exchange(&mut self, report: Report, request: ClaimRequest) -> Result<Next, Error> {
        let shared = &self.worker.shared;
        if request.jobs > 0 {
            shared.hooks.emit(FetchStart, || shared.event(None)).await;
        }
        let reply = match self.round_trip(&report, &request).await {
            Ok(Some(reply)) => reply,
            ended => {
                self.inflight.not_written(Lane::First, report);
                return ended.map(|_| Next::Leave);
            }
        };
        self.receive(report, request, reply).await
    }

    /// Exchanges, unless the worker has to leave before the database answers.
    async fn round_trip(&mut self, report: &Report, request: &ClaimRequest) -> Result<Option<Reply>, Error> {
        let RunLoop { worker, exchange, inflight, listener, declared_dead, leave_at, .. } = self;
        let shutdown = &worker.shutdown;
        let mut exchanging = std::pin::pin!(exchange.exchange(report, request));
        loop {
            tokio::select! {
                reply = &mut exchanging => return reply.map(Some),
                () = shutdown.leaving.cancelled(), if leave_at.is_none() => {
                    *leave_at = Some(worker.begin_leaving(inflight, listener).await);
                }
                () = shutdown.grace_period_over(*leave_at, worker.settings.shutdown_grace_period) => return Ok(None),
                () = declared_dead.cancelled() => return Ok(None),
            }
        }
    }

    /// Takes in the claimed jobs, emits the hooks of the recorded ones, and plans the next claim.
    async fn receive(&mut self, report: Report, request: ClaimRequest, reply: Reply) -> Result<Next, Error> {
        if self.exchange.take_tasks_loaded() {
            self.inflight.wake_batch();
        }
        let Answer { contended, is_partial, nothing_waits, clock, .. } = reply.answer;
        let is_limited = report.is_limited;
        let claimed = reply.answer.jobs.len();
        self.inflight.record_round_trip(reply.answer.took);
        let recorded = self.take_in(report, reply);
        self.maintenance.limited_jobs_reported(&recorded);
        if claimed > 0 {
            // Lets the runners start the jobs before this loop queries the database again.
            tokio::task::yield_now().await;
        }
        let shared = &self.worker.shared;
        shared.emit_completed(recorded).await;
        if self.leave_at.is_some() {
            // Jobs that arrived after the worker was asked to stop.
            self.inflight.close();
            return Ok(Next::Continue);
        }
        if is_partial {
            return Ok(Next::Continue);
        }
        if claimed == 0 && request.jobs > 0 {
            shared.hooks.emit(FetchEmpty, || shared.event(None)).await;
            if self.is_drained(contended) {
                return Ok(Next::Leave);
            }
        }
        if request.jobs > claimed && !contended {
            self.contended_since = None;
            if !nothing_waits && !is_limited {
                self.claim_when_due(clock, request.now).await;
            }
        }
        Ok(Next::Continue)
    }

    /// Puts the claimed jobs in flight. Returns the report without the jobs that were not recorded.
    fn take_in(&mut self, report: Report, Reply { answer, held, under_way }: Reply) -> Report {
        if let Some((jobs, queues)) = held {
            self.inflight.reconcile(jobs, &queues);
        }
        let is_blocked = !answer.blocked_jobs.is_empty();
        let recorded = self.inflight.receive(Lane::First, report, answer);
        self.maintenance.warn_of_blocked_rows(is_blocked, &self.inflight, self.worker.worker_id());
        drop(under_way);
        recorded
    }

    /// Whether `run_once` is done, after a claim that has brought nothing.
    fn is_drained(&mut self, contended: bool) -> bool {
        self.mode == Mode::Drain
            && self.inflight.is_empty()
            && self.inflight.no_claim_is_due()
            && self.inflight.batches_are_drained()
            && (!contended || self.contended_since.get_or_insert_with(Instant::now).elapsed() >= CONTENTION_TIMEOUT)
    }

    /// Waits until an exchange or maintenance is due, or until the worker has to leave.
    async fn wait(&mut self) -> Next {
        let is_leaving = self.leave_at.is_some();
        if !is_leaving {
            self.maintenance.release_stale_locks(&mut self.exchange).await;
            self.maintenance.count_workers(&mut self.exchange, &self.listener).await;
        }
        let shutdown = &self.worker.shutdown;
        tokio::select! {
            () = self.inflight.exchange_due.notified() => {
                if self.mode == Mode::Drain {
                    self.inflight.wake_exchange();
                }
            }
            () = self.listener.wait() => self.inflight.wake_claim(),
            () = self.listener.something_changed() => {}
            () = sleep_until(self.inflight.next_exchange_at()) => self.poll_if_idle().await,
            () = has_changed(&self.tasks) => {}
            () = self.maintenance.is_due(self.listener.is_poll_only() && !is_leaving) => {}
            () = self.maintenance.cancellations_due(&self.listener, &self.inflight) => {}
            () = self.maintenance.expiries_due() => {}
            () = self.maintenance.limit_hooks_due(&self.worker.shared.hooks), if !is_leaving => {}
            () = self.maintenance.successors_due() => {}
            () = shutdown.leaving.cancelled(), if !is_leaving => {}
            () = self.listener.shutdown_notice.notified(), if !is_leaving => {}
            () = shutdown.grace_period_over(self.leave_at, self.worker.settings.shutdown_grace_period) => return Next::Leave,
            () = self.declared_dead.cancelled() => return Next::Leave,
        }
        Next::Continue
    }

    /// Plans the next claim if no more jobs are due: when the next job is due, and at the latest after the poll
    /// interval.
    async fn claim_when_due(&mut self, claimed_at: Option<DateTime<Utc>>, now: Option<DateTime<Utc>>) {
        if !self.inflight.has_free_slots() {
            return;
        }
        let here = Instant::now();
        let NextDue { asked_at, due_at } = self.next_due;
        let was_asked = asked_at.is_some_and(|asked| asked.elapsed() < DUE_QUERY_INTERVAL);
        if was_asked && due_at.is_none_or(|due| due > here) {
            // Under load, with an exchange per millisecond, a recent answer is good enough.
            let latest = here + DUE_QUERY_INTERVAL;
            return self.inflight.claim_not_after(due_at.unwrap_or(latest).min(latest));
        }
        let Some(claimed_at) = claimed_at else { return };
        let wait = self.exchange.next_due(Some(claimed_at), now).await;
        let due_at = wait.and_then(|wait| Instant::now().checked_add(wait));
        self.next_due = NextDue { asked_at: Some(here), due_at };
        if let Some(due) = due_at {
            self.inflight.claim_not_after(due);
        }
    }

    /// Polls, if the worker is idle: runs a short query first, and claims only if a job is due. An exchange is a long
    /// statement, which would fill the log of a server that logs all statements.
    async fn poll_if_idle(&mut self) {
        let is_idle = self.mode == Mode::Continuous && self.inflight.is_empty() && self.exchange.has_all_task_ids();
        if !is_idle || !self.inflight.begin_poll() {
            return;
        }
        let wait = self.exchange.next_due(None, self.now()).await.filter(|wait| !wait.is_zero());
        self.inflight.end_poll(wait);
        if wait.is_some() {
            let shared = &self.worker.shared;
            shared.hooks.emit(FetchStart, || shared.event(None)).await;
            shared.hooks.emit(FetchEmpty, || shared.event(None)).await;
        }
    }

    /// This machine's time, if its clock decides which jobs are due.
    fn now(&self) -> Option<DateTime<Utc>> {
        self.worker.settings.use_local_time.then(Utc::now)
    }

    /// Interrupts the jobs that are still running, records or releases everything in flight, and closes the
    /// connections.
    async fn leave(mut self, ended: Result<(), Error>) -> Result<(), Error> {
        self.stop_runners().await;
        for job in self.inflight.interrupt(self.worker.settings.interrupted_job_retry_delay) {
            warn!(
                label = "job",
                worker_id = self.worker.worker_id(),
                task_identifier = &*job.task_identifier,
                job_id = job.id,
                "job interrupted and released"
            );
        }
        self.stop_second_lane().await;
        if let Some(lanes) = self.deferred_lanes.take() {
            lanes.stop(self.report_timeout()).await;
        }
        let ended = match ended {
            Ok(()) => self.last_report().await,
            Err(error) => {
                self.worker.emit_fatal_error(&error).await;
                let _ = self.last_report().await;
                Err(error)
            }
        };
        self.exchange.close().await;
        self.worker.stopped(ended).await
    }

    /// Stops the running handlers, then the programs and scripts. They must end before their jobs are released, because
    /// the next job of a queue must not run at the same time as the program of the previous one.
    async fn stop_runners(&mut self) {
        self.inflight.close();
        self.runners.abort_all();
        // A runner in code that never yields cannot be stopped; the worker does not wait for it.
        let stopped = async { while self.runners.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(ABORT_TIMEOUT, stopped).await;
        if let Some(external) = &self.worker.external {
            external.source.end_jobs(&self.worker.shutdown.insisted).await;
        }
    }

    async fn stop_second_lane(&mut self) {
        self.stop_second_lane.cancel();
        let timeout = self.report_timeout();
        let stopped = async { while self.second_lane.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(timeout, stopped).await;
        self.second_lane.shutdown().await;
    }

    /// How long the database may take now that the worker leaves.
    fn report_timeout(&self) -> Duration {
        if self.worker.shutdown.insisted.is_cancelled() { HASTY_REPORT_TIMEOUT } else { LAST_REPORT_TIMEOUT }
    }

    /// Records the remaining outcomes. If the last exchange was cut off, it may have claimed jobs that this worker does
    /// not know: the first answer lists them, and a second report releases them.
    async fn last_report(&mut self) -> Result<(), Error> {
        let timeout = self.report_timeout();
        let request = ClaimRequest { now: self.now(), ..ClaimRequest::default() };
        let recorded = async {
            while !self.inflight.is_empty() || self.exchange.is_uncertain() {
                let begun = self.inflight.begin(Lane::First, false);
                if begun.is_none() && !self.exchange.is_uncertain() {
                    // Only rows that other transactions have locked are left.
                    sleep_until(self.inflight.next_exchange_at()).await;
                    continue;
                }
                let (report, _) = begun.unwrap_or_default();
                let reply = self.exchange.exchange(&report, &request).await?;
                self.take_in(report, reply);
                self.inflight.close();
            }
            Ok(())
        };
        match tokio::time::timeout(timeout, recorded).await {
            Ok(result) => result,
            Err(_) => Err(Error::OutcomesNotWritten { worker_id: self.worker.worker_id().to_owned() }),
        }
    }
}

impl Worker {
    /// Claims nothing more. Returns the time at which running jobs are interrupted.
    async fn begin_leaving(&self, inflight: &Inflight, listener: &Listener) -> Instant {
        info!(label = "worker", worker_id = self.worker_id(), "stopping: waiting for running jobs to finish");
        inflight.close();
        self.emit_shutdown().await;
        let time_to_finish = listener.shutdown_notice.notice().map(|notice| notice.time_to_finish).unwrap_or_default();
        Instant::now() + self.settings.shutdown_grace_period.max(time_to_finish)
    }
}

/// A runner: one slot, which runs one job after the other.
async fn run_jobs(inflight: Arc<Inflight>, shared: Arc<Shared>) {
    let mut next = inflight.next().await;
    while let Some(running) = next {
        let span = info_span!(
            "job",
            label = "job",
            worker_id = &*shared.worker_id,
            task_identifier = &*running.job.task_identifier,
            job_id = running.job.id
        );
        let run = std::pin::pin!(AssertUnwindSafe(run_job(&running, &shared)).catch_unwind());
        let outcome = if span.is_disabled() { run.await } else { run.instrument(span.clone()).await };
        // `execute` catches the panics of handlers, so this is a hook's.
        let outcome = outcome.unwrap_or_else(|panic| Outcome::panicked(panic.as_ref()));
        let settlement = settle::settlement(&running.job, outcome, &running.task.options);
        let settlement = if running.is_cancelled() { settlement.cancelled() } else { settlement };
        let ended = Instant::now();
        in_span(&span, || log_end(&running, &settlement, ended));
        if shared.hooks.is_empty() {
            next = inflight.finished_and_next(&running, settlement, ended).await;
            continue;
        }
        inflight.finished(&running, settlement.clone(), ended);
        let emitted = emit_end(&running, &settlement, ended - running.started, &shared);
        if AssertUnwindSafe(emitted).catch_unwind().await.is_err() {
            span.in_scope(|| error!("a hook panicked; the job's outcome is recorded anyway"));
        }
        next = inflight.next().await;
    }
}

/// Calls `log` in the span. To enter a span that nobody collects would only look for a logger, several times.
fn in_span(span: &Span, log: impl FnOnce()) {
    if span.is_disabled() { log() } else { span.in_scope(log) }
}

async fn run_job(running: &Arc<Running>, shared: &Arc<Shared>) -> Outcome {
    if let Some(at) = running.expired_at() {
        return Outcome::Expired(at);
    }
    let hooks = &shared.hooks;
    if hooks.is_empty() {
        return execute(running, shared).await;
    }
    let job = &running.job;
    hooks.emit(JobStart, || shared.job_event(job, Duration::ZERO, None)).await;
    let began = Instant::now();
    let outcome = match hooks.decide(BeforeJobRun, || shared.before_run(job)).await {
        HookResult::Continue => execute(running, shared).await,
        decision => Outcome::from_hook(decision),
    };
    if outcome == Outcome::Released {
        return outcome;
    }
    let error = || outcome.error().map(str::to_owned);
    let ran = began.elapsed();
    match hooks.decide(AfterJobRun, || shared.job_event(job, ran, error())).await {
        HookResult::Continue => outcome,
        decision => Outcome::from_hook(decision),
    }
}

async fn emit_end(running: &Running, settlement: &Settlement, ran: Duration, shared: &Shared) {
    let hooks = &shared.hooks;
    let event = || shared.job_ended(&running.job, ran, settlement);
    match settlement {
        Settlement::Release { .. } => {}
        Settlement::Cancel { .. } => hooks.emit(JobCancelled, event).await,
        Settlement::Expire { .. } => hooks.emit(JobExpired, event).await,
        Settlement::RateLimited { .. } => hooks.emit(JobRateLimited, event).await,
        Settlement::Retry { .. } => hooks.emit(JobError, event).await,
        Settlement::GiveUp { .. } => {
            hooks.emit(JobError, event).await;
            hooks.emit(JobFailed, event).await;
        }
        _ => hooks.emit(JobSuccess, event).await,
    }
}

/// Logs how the handler has ended. The outcome is recorded later, with others. If the database rejects it, because the job was
/// taken from this worker, a warning with the job follows (`warn_of_rejected` in `exchange`).
fn log_end(running: &Running, settlement: &Settlement, ended: Instant) {
    let ms = || ((ended - running.started).as_secs_f64() * 1e6).round() / 1e3;
    let job = &running.job;
    match settlement {
        Settlement::Complete | Settlement::CompletedByHandler => info!(ms = ms(), "job completed"),
        Settlement::Release { .. } | Settlement::Interrupt { .. } => info!(ms = ms(), "job released"),
        Settlement::Cancel { .. } => info!(ms = ms(), "job cancelled"),
        Settlement::Expire { error } => warn!(error, "job expired before it started"),
        Settlement::Snooze { .. } => info!(ms = ms(), "job snoozed"),
        Settlement::RateLimited { wait, limit, .. } => {
            info!(ms = ms(), wait_ms = wait.as_secs_f64() * 1e3, limit, "job rate limited");
        }
        Settlement::Retry { error, .. } => {
            warn!(ms = ms(), attempts = job.attempts, max_attempts = job.max_attempts, error, "job failed");
        }
        Settlement::GiveUp { error, .. } => {
            error!(ms = ms(), attempts = job.attempts, error, "job failed permanently");
        }
    }
}

/// Returns when the tasks have changed since they were last read here.
async fn has_changed(tasks: &watch::Receiver<Arc<Tasks>>) {
    if tasks.clone().changed().await.is_err() {
        std::future::pending().await
    }
}

/// Returns at that time; never returns if there is none.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
