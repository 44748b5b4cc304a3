//! The worker: wait, exchange, execute, settle.
//!
//! One loop exchanges jobs with the database; as many runners as there are slots run them. Between the two stands
//! `hand`: what is claimed, what runs, what is to be reported.

use crate::Error;
use crate::context::{Surroundings, WorkerContext};
use crate::cron::RunningCron;
use crate::exchange::{Answer, Exchange, Lane, Report, Wants};
use crate::execute::{Outcome, execute};
use crate::hand::{Hand, Running};
use crate::hooks::{
    AfterJobRun, BeforeJobRun, FetchEmpty, FetchStart, HookResult, JobError, JobFailed, JobStart, JobSuccess,
    WorkerFatalError, WorkerShutdown, WorkerStart, WorkerStop,
};
use crate::listener::{Listener, MustLeave};
use crate::options::{Settings, new_worker_id};
use crate::recovery::{Heartbeat, Pulse};
use crate::second_lane::SecondLane;
use crate::settle::{self, Settlement};
use crate::shutdown::Shutdown;
use crate::startup::Startup;
use crate::task::{Task, Tasks};
use crate::tasks_dir::{Hosts, Leftovers};
use crate::watch::{Looking, Watched};
use crate::worker_utils::WorkerUtils;
use chrono::{DateTime, Utc};
use futures_util::FutureExt;
use graphile_worker_crontab::Crontab;
use sqlx::PgConnection;
use std::collections::{BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, error, info, info_span, warn};

/// How often a waiting worker looks for locks that are older than 4 hours.
const STALE_LOCKS_INTERVAL: Duration = Duration::from_secs(10 * 60);

/// How often a worker looks whether a job has run for so long that its lock looks old.
const LOCKS_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// How often a worker that hears of nothing looks whether the schema moves on.
const LEDGERS_INTERVAL: Duration = Duration::from_secs(60);

/// How long the last report may take when the grace period is over, and when the worker was told twice.
const LAST_REPORT_TIMEOUT: Duration = Duration::from_secs(10);
const HASTY_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// How often at most the database is asked for the next job of the future, unless the last one is due.
const ASK_INTERVAL: Duration = Duration::from_millis(100);

/// How long `run_once` goes on looking if others have locked the jobs that are due.
const CONTENTION_TIMEOUT: Duration = Duration::from_secs(1);

/// How long runners that were stopped may take to notice.
const TIME_TO_STOP: Duration = Duration::from_secs(1);

/// How long a worker that was declared dead waits before it tries again to go on.
const REBIRTH_PAUSE: Duration = Duration::from_secs(1);

/// Runs jobs. Made by [`WorkerOptions::init`](crate::WorkerOptions::init).
pub struct Worker {
    pub(crate) settings: Arc<Settings>,
    /// May be replaced while it runs, and so may the items of its crontab.
    pub(crate) tasks: watch::Sender<Arc<Tasks>>,
    pub(crate) crontabs: watch::Sender<Vec<Arc<Crontab>>>,
    /// Where both are read from, if they are to be read again.
    pub(crate) watched: Option<Arc<Mutex<Watched>>>,
    pub(crate) leftovers: Leftovers,
    /// Of the folder of tasks, if there is one.
    pub(crate) hosts: Option<Arc<Hosts>>,
    pub(crate) surroundings: Arc<Surroundings>,
    pub(crate) shutdown: Shutdown,
    pub(crate) left_because: Arc<OnceLock<String>>,
    /// Made while the schema was looked at, for the first run.
    pub(crate) connection: Mutex<Option<PgConnection>>,
}

/// How a life ended.
enum Life {
    Over,
    DeclaredDead,
}

/// Whether to go on when there is nothing to do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    Told,
    NothingIsLeft,
}

impl Worker {
    /// Runs jobs until it is told to stop, then lets them finish, and returns when everything is written. Also where a newer
    /// release takes over the schema: [`left_because`](Worker::left_because) says so.
    pub async fn run(&self) -> Result<(), Error> {
        self.live(Until::Told).await
    }

    /// Runs jobs until none is left that could run now, then returns.
    pub async fn run_once(&self) -> Result<(), Error> {
        self.live(Until::NothingIsLeft).await
    }

    /// Lives until its end; under another name each time that it was declared dead while it was only slow.
    async fn live(&self, until: Until) -> Result<(), Error> {
        let custom = self.settings.shutdown_signal.as_ref().map(|signal| signal());
        let _watching = self.shutdown.watch(self.settings.listen_os_shutdown_signals, custom);
        let recurs = self.settings.crontab_may_change || !self.crontabs.borrow().is_empty();
        let clock = (until == Until::Told && recurs).then(|| {
            RunningCron::start(&self.settings, self.crontabs.subscribe(), self.surroundings.clone(), &self.shutdown)
        });
        let _looking = self.watched.clone().filter(|_| until == Until::Told).map(Looking::start);
        let ended = self.live_under_any_name(until).await;
        if let Some(hosts) = &self.hosts {
            hosts.stop().await;
        }
        if let Some(clock) = clock {
            clock.stop(&self.shutdown).await;
        }
        ended
    }

    async fn live_under_any_name(&self, until: Until) -> Result<(), Error> {
        let mut reborn: Option<Worker> = None;
        loop {
            let life = reborn.as_ref().unwrap_or(self);
            match life.one_life(until).await {
                Ok(Life::Over) => return Ok(()),
                Ok(Life::DeclaredDead) => reborn = Some(life.under_another_name()),
                // It was cut off a moment ago: the first connections may fail as well.
                Err(error) if reborn.is_some() && error.is_retryable() && !self.shutdown.leaving.is_cancelled() => {
                    warn!(label = "worker", error = &error as &dyn std::error::Error, "cannot go on yet");
                    let _ = tokio::time::timeout(REBIRTH_PAUSE, self.shutdown.leaving.cancelled()).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// From `WorkerStart` to `WorkerStop`: each life tells of both, however it ends.
    async fn one_life(&self, until: Until) -> Result<Life, Error> {
        let (settings, surroundings) = (&self.settings, &self.surroundings);
        let mut startup = Startup::new(settings.startup_timeout);
        surroundings.hooks.emit(WorkerStart, || surroundings.event(None)).await;
        let heartbeat = tokio::select! {
            heartbeat = self.register(&mut startup) => match heartbeat {
                Ok(heartbeat) => heartbeat,
                Err(error) => return self.could_not_begin(error).await.map(|()| Life::Over),
            },
            () = self.shutdown.leaving.cancelled() => return self.stopped_before_it_began().await.map(|()| Life::Over),
        };
        let declared_dead = heartbeat.as_ref().map(|heartbeat| heartbeat.declared_dead.clone()).unwrap_or_default();
        let listener = if until == Until::Told && settings.listen {
            Listener::start(settings.connect_options.clone(), surroundings.clone())
        } else {
            Listener::deaf(surroundings)
        };
        if until == Until::Told {
            info!(
                label = "worker",
                worker_id = self.worker_id(),
                tasks = ?self.tasks.borrow().keys().collect::<BTreeSet<_>>(),
                "connected and looking for jobs"
            );
        }
        let pulse = heartbeat.as_ref().map(Heartbeat::pulse).unwrap_or_default();
        let ended = self.work(listener, until, declared_dead.clone(), pulse, startup).await;
        // Where outcomes are not written, some may be on their way: nobody is to take the jobs for orphans yet.
        let not_written = matches!(ended, Err(Error::OutcomesNotWritten { .. }));
        if let Some(heartbeat) = heartbeat
            && !not_written
        {
            heartbeat.end().await;
        }
        if declared_dead.is_cancelled() && !self.shutdown.leaving.is_cancelled() && (ended.is_ok() || not_written) {
            return Ok(Life::DeclaredDead);
        }
        ended.map(|()| Life::Over)
    }

    /// Registers the worker, if its recovery is on, and waits for the database if it is not ready.
    async fn register(&self, startup: &mut Startup) -> Result<Option<Heartbeat>, Error> {
        if !self.settings.recovery.enabled {
            return Ok(None);
        }
        loop {
            match Heartbeat::start(&self.settings, self.surroundings.clone(), self.tasks.subscribe()).await {
                Ok(heartbeat) => return Ok(Some(heartbeat)),
                Err(error) => startup.wait_after(error).await?,
            }
        }
    }

    fn under_another_name(&self) -> Worker {
        let worker_id = new_worker_id(&self.settings.recovery);
        info!(label = "worker", before = self.worker_id(), worker_id, "going on under another name");
        Worker {
            settings: self.settings.clone(),
            tasks: self.tasks.clone(),
            crontabs: self.crontabs.clone(),
            watched: self.watched.clone(),
            leftovers: self.leftovers.clone(),
            hosts: self.hosts.clone(),
            surroundings: Arc::new(self.surroundings.of(worker_id.into())),
            shutdown: self.shutdown.clone(),
            left_because: self.left_because.clone(),
            connection: Mutex::default(),
        }
    }

    /// Tells the worker to stop: the first time it lets jobs finish, the second time it leaves at once.
    pub fn request_shutdown(&self) {
        self.shutdown.ask();
    }

    /// Why the worker has stopped although nobody has told it to: the schema moves on to where this release must not follow.
    pub fn left_because(&self) -> Option<&str> {
        self.left_because.get().map(String::as_str)
    }

    /// Kills the programs of the tasks folder that run just now: for a process that ends without waiting for its worker.
    pub fn kill_programs(&self) {
        self.leftovers.kill();
    }

    /// Adds and administers jobs.
    pub fn create_utils(&self) -> WorkerUtils {
        self.surroundings.utils.clone()
    }

    /// The name under which this worker locks jobs; its first one, should it have been declared dead.
    pub fn worker_id(&self) -> &str {
        &self.surroundings.worker_id
    }

    async fn work(
        &self,
        listener: Listener,
        until: Until,
        declared_dead: CancellationToken,
        pulse: Arc<Pulse>,
        startup: Startup,
    ) -> Result<(), Error> {
        let exchange = tokio::select! {
            exchange = self.open_exchange(startup) => match exchange {
                Ok(exchange) => exchange,
                Err(error) => return self.could_not_begin(error).await,
            },
            () = self.shutdown.leaving.cancelled() => return self.stopped_before_it_began().await,
        };
        let mut shift = self.begin_shift(exchange, listener, until, declared_dead, pulse);
        let ended = shift.exchange_until_done().await;
        shift.leave(ended).await
    }

    async fn stopped_before_it_began(&self) -> Result<(), Error> {
        self.surroundings.hooks.emit(WorkerShutdown, || self.surroundings.event(None)).await;
        self.stopped(Ok(())).await
    }

    async fn could_not_begin(&self, error: Error) -> Result<(), Error> {
        self.cannot_go_on(&error).await;
        self.stopped(Err(error)).await
    }

    /// Opens the first lane, and waits for the database if it is not ready.
    async fn open_exchange(&self, mut startup: Startup) -> Result<Exchange, Error> {
        loop {
            let opened = Exchange::open(
                self.connection.lock().await.take(),
                self.settings.connect_options.clone(),
                self.surroundings.statements.clone(),
                self.surroundings.clone(),
                self.tasks.borrow().keys().cloned().collect(),
                self.settings.prepared_statements,
            );
            match opened.await {
                Ok(exchange) => {
                    startup.succeeded();
                    return Ok(exchange);
                }
                Err(error) => startup.wait_after(error).await?,
            }
        }
    }

    fn begin_shift(
        &self,
        mut exchange: Exchange,
        listener: Listener,
        until: Until,
        declared_dead: CancellationToken,
        pulse: Arc<Pulse>,
    ) -> Shift<'_> {
        let mut tasks = self.tasks.subscribe();
        exchange.tasks_are(tasks.borrow_and_update().keys().cloned().collect());
        let Settings { concurrency, poll_interval, .. } = *self.settings;
        let hand = Arc::new(Hand::new(self.tasks.subscribe(), concurrency, poll_interval, pulse));
        let mut runners = JoinSet::new();
        for _ in 0..self.settings.concurrency {
            runners.spawn(run_jobs(hand.clone(), self.surroundings.clone()));
        }
        let second_lane = SecondLane {
            exchange: exchange.second_lane(),
            hand: hand.clone(),
            settings: self.settings.clone(),
            surroundings: self.surroundings.clone(),
        };
        let end_of_second_lane = CancellationToken::new();
        let mut second_lane_ends = JoinSet::new();
        second_lane_ends.spawn(second_lane.help_until(end_of_second_lane.clone()));
        Shift {
            worker: self,
            tasks,
            hand,
            exchange,
            end_of_second_lane,
            second_lane_ends,
            listener,
            runners,
            until,
            declared_dead,
            asked_at: None,
            due_at: None,
            contended_since: None,
            complained_of_blocked: false,
        }
    }

    async fn cannot_go_on(&self, error: &Error) {
        let text = error.to_string_with_sources();
        error!(label = "worker", worker_id = self.worker_id(), error = text, "cannot go on");
        self.surroundings.hooks.emit(WorkerFatalError, || self.surroundings.event(Some(text))).await;
    }

    async fn stopped(&self, ended: Result<(), Error>) -> Result<(), Error> {
        let error = ended.as_ref().err().map(Error::to_string_with_sources);
        self.surroundings.hooks.emit(WorkerStop, || self.surroundings.event(error)).await;
        debug!(label = "worker", worker_id = self.worker_id(), "stopped");
        ended
    }
}

impl Worker {
    /// Claims nothing any more; says when whatever still runs has to be left.
    async fn begin_to_leave(&self, hand: &Hand, must_leave: &MustLeave) -> Instant {
        info!(label = "worker", worker_id = self.worker_id(), "stopping: letting jobs finish");
        hand.close();
        self.surroundings.hooks.emit(WorkerShutdown, || self.surroundings.event(None)).await;
        let time_to_finish = must_leave.notice().map(|notice| notice.time_to_finish).unwrap_or_default();
        Instant::now() + self.settings.shutdown_grace_period.max(time_to_finish)
    }
}

/// A runner: one slot.
async fn run_jobs(hand: Arc<Hand>, surroundings: Arc<Surroundings>) {
    while let Some(running) = hand.next().await {
        let started = Instant::now();
        let span = info_span!(
            "job",
            label = "job",
            worker_id = &*surroundings.worker_id,
            task_identifier = &*running.job.task_identifier,
            job_id = running.job.id
        );
        let outcome = AssertUnwindSafe(run_job(&running.task, &running, &surroundings))
            .catch_unwind()
            .instrument(span.clone())
            .await
            // The handler's own panics are caught before; this is a hook's.
            .unwrap_or_else(|panic| Outcome::panicked(panic.as_ref()));
        let error = outcome.error().map(str::to_owned);
        let settlement = hand.finished(&running, outcome);
        span.in_scope(|| log_end(&running, &settlement, started.elapsed()));
        if AssertUnwindSafe(tell_end(&running, &settlement, error, &surroundings)).catch_unwind().await.is_err() {
            span.in_scope(|| error!("a hook panicked; the job is settled all the same"));
        }
    }
}

async fn run_job(task: &Task, running: &Running, surroundings: &Arc<Surroundings>) -> Outcome {
    let hooks = &surroundings.hooks;
    let job = &running.job;
    hooks.emit(JobStart, || surroundings.job_event(job, None)).await;
    let outcome = match hooks.decide(BeforeJobRun, || surroundings.job_event(job, None)).await {
        HookResult::Continue => {
            let ctx = WorkerContext::new(job.clone(), running.cancellation.clone(), surroundings.clone());
            execute(task, ctx).await
        }
        decision => Outcome::decided(decision),
    };
    let error = || outcome.error().map(str::to_owned);
    match hooks.decide(AfterJobRun, || surroundings.job_event(job, error())).await {
        HookResult::Continue => outcome,
        decision => Outcome::decided(decision),
    }
}

async fn tell_end(running: &Running, settlement: &Settlement, error: Option<String>, surroundings: &Surroundings) {
    let hooks = &surroundings.hooks;
    let event = || surroundings.job_event(&running.job, error.clone());
    if error.is_none() {
        hooks.emit(JobSuccess, event).await;
        return;
    }
    hooks.emit(JobError, event).await;
    if settle::failed_for_good(&running.job, settlement) {
        hooks.emit(JobFailed, event).await;
    }
}

fn log_end(running: &Running, settlement: &Settlement, took: Duration) {
    let ms = (took.as_secs_f64() * 1e6).round() / 1e3;
    let job = &running.job;
    match settlement {
        Settlement::Complete | Settlement::Nothing => info!(ms, "job completed"),
        Settlement::GiveBack(back) if back.error.is_none() => info!(ms, "job snoozed"),
        Settlement::GiveBack(back) if settle::failed_for_good(job, settlement) => {
            error!(ms, attempts = job.attempts, error = back.error, "job failed for good");
        }
        Settlement::GiveBack(back) => {
            warn!(ms, attempts = job.attempts, max_attempts = job.max_attempts, error = back.error, "job failed");
        }
    }
}

/// One run of a worker.
struct Shift<'w> {
    worker: &'w Worker,
    tasks: watch::Receiver<Arc<Tasks>>,
    hand: Arc<Hand>,
    exchange: Exchange,
    end_of_second_lane: CancellationToken,
    second_lane_ends: JoinSet<()>,
    listener: Listener,
    runners: JoinSet<()>,
    until: Until,
    declared_dead: CancellationToken,
    /// When the database was last asked for the next job of the future, and what it said.
    asked_at: Option<Instant>,
    due_at: Option<Instant>,
    /// Since when all that is due is locked by others.
    contended_since: Option<Instant>,
    complained_of_blocked: bool,
}

impl Shift<'_> {
    /// The loop. Ends when the worker is told to stop and everything in hand is settled, when the grace period for
    /// that is over, or with an error that the worker cannot outlive.
    async fn exchange_until_done(&mut self) -> Result<(), Error> {
        let settings = &self.worker.settings;
        let shutdown = &self.worker.shutdown;
        let grace_period = settings.shutdown_grace_period;
        let surroundings = &self.worker.surroundings;
        let hooks = &surroundings.hooks;
        // An empty queue is not looked at twice: making the plan of the first exchange takes longer than all the rest.
        if self.until == Until::NothingIsLeft && !self.exchange.jobs_wait() {
            return Ok(());
        }
        let mut stale_locks_at = Instant::now();
        let mut fresh_at = Instant::now();
        let mut ledgers_at = Instant::now() + LEDGERS_INTERVAL;
        let mut leave_at: Option<Instant> = None;
        loop {
            if fresh_at <= Instant::now() {
                fresh_at = Instant::now() + LOCKS_INTERVAL.min(settings.keep_locks_fresh_after);
                self.exchange.keep_locks_fresh(self.hand.running_for(settings.keep_locks_fresh_after)).await;
            }
            let is_time_to_look = self.listener.is_deaf() && ledgers_at <= Instant::now();
            if leave_at.is_none() && (is_time_to_look || self.listener.may_have_missed_something()) {
                ledgers_at = Instant::now() + LEDGERS_INTERVAL.mul_f64(0.5 + crate::exchange::jitter());
                if !self.exchange.look_at_ledgers(&self.listener.must_leave).await {
                    self.listener.has_missed_something();
                }
            }
            if leave_at.is_none()
                && let Some(notice) = self.listener.must_leave.notice()
            {
                let reason = notice.reason.to_string();
                warn!(label = "worker", worker_id = self.worker.worker_id(), reason, "the schema moves on: leaving");
                let _ = self.worker.left_because.set(reason);
                shutdown.leaving.cancel();
            }
            if leave_at.is_none() && shutdown.leaving.is_cancelled() {
                leave_at = Some(self.worker.begin_to_leave(&self.hand, &self.listener.must_leave).await);
            }
            if self.declared_dead.is_cancelled() || (leave_at.is_some() && self.hand.is_empty()) {
                return Ok(());
            }
            if self.tasks.has_changed().unwrap_or(false) {
                self.exchange.tasks_are(self.tasks.borrow_and_update().keys().cloned().collect());
                self.hand.wake_claim();
            }
            if self.listener.tasks_may_have_changed() {
                self.exchange.learn_tasks_again();
                self.hand.wake_claim();
            }
            let forbidden_flags = if leave_at.is_some() {
                None
            } else {
                tokio::select! {
                    flags = settings.forbidden_flags.current() => flags?,
                    () = shutdown.leaving.cancelled() => continue,
                }
            };
            let limits = self.hand.limits();
            if let Some((report, room)) = self.hand.begin(Lane::First, !limits.is_empty()) {
                let now = settings.use_local_time.then(Utc::now);
                let freshness = settings.recovery.freshness();
                let wants = Wants { jobs: room, forbidden_flags, limits, now, freshness };
                if room > 0 {
                    hooks.emit(FetchStart, || surroundings.event(None)).await;
                }
                let reply = {
                    let mut exchanging = std::pin::pin!(self.exchange.exchange(&report, &wants));
                    loop {
                        tokio::select! {
                            reply = &mut exchanging => break reply.map(Some),
                            () = shutdown.leaving.cancelled(), if leave_at.is_none() => {
                                leave_at = Some(self.worker.begin_to_leave(&self.hand, &self.listener.must_leave).await);
                            }
                            () = shutdown.is_over(leave_at, grace_period) => break Ok(None),
                            () = self.declared_dead.cancelled() => break Ok(None),
                        }
                    }
                };
                let reply = match reply {
                    Ok(Some(reply)) => reply,
                    ended => {
                        self.hand.not_written(Lane::First, report);
                        return ended.map(|_| ());
                    }
                };
                let (claimed, contended, clock) = (reply.answer.jobs.len(), reply.answer.contended, reply.answer.clock);
                self.hand.measured_round_trip(reply.answer.took);
                self.hand.receive_unknown(reply.found_again);
                let written = self.receive(report, reply.answer);
                drop(reply.under_way);
                if claimed > 0 {
                    // Their runners begin before this loop asks the database for anything else.
                    tokio::task::yield_now().await;
                }
                surroundings.tell_written(written).await;
                if leave_at.is_some() {
                    // What came while we were told to leave.
                    self.hand.close();
                    continue;
                }
                if claimed == 0 && room > 0 {
                    hooks.emit(FetchEmpty, || surroundings.event(None)).await;
                    if self.until == Until::NothingIsLeft && self.hand.is_empty() && self.is_nothing_left(contended) {
                        return Ok(());
                    }
                }
                if room > claimed && !contended {
                    self.contended_since = None;
                    self.claim_when_due(clock, now).await;
                }
                continue;
            }
            if stale_locks_at <= Instant::now() && leave_at.is_none() {
                stale_locks_at = Instant::now() + STALE_LOCKS_INTERVAL.mul_f64(0.5 + crate::exchange::jitter());
                self.exchange.clear_stale_locks().await;
            }
            tokio::select! {
                () = self.hand.exchange_due.notified() => {
                    if self.until == Until::NothingIsLeft {
                        self.hand.wake_claim();
                    }
                }
                () = self.listener.wait() => self.hand.wake_claim(),
                () = sleep_until(self.hand.next_exchange_at()) => {}
                () = has_changed(&self.tasks) => {}
                () = tokio::time::sleep_until(fresh_at.into()) => {}
                () = tokio::time::sleep_until(ledgers_at.into()), if self.listener.is_deaf() && leave_at.is_none() => {}
                () = shutdown.leaving.cancelled(), if leave_at.is_none() => {}
                () = self.listener.must_leave.told(), if leave_at.is_none() => {}
                () = shutdown.is_over(leave_at, grace_period) => return Ok(()),
                () = self.declared_dead.cancelled() => return Ok(()),
            }
        }
    }

    /// Takes what an exchange has brought. Returns the report without the jobs that were not written.
    fn receive(&mut self, report: Report, answer: Answer) -> Report {
        let is_blocked = !answer.blocked_jobs.is_empty();
        let written = self.hand.receive(Lane::First, report, answer);
        // Most locks are gone in a moment: those of other workers' claims.
        if is_blocked && !self.complained_of_blocked && self.hand.is_blocked_for_long() {
            self.complained_of_blocked = true;
            warn!(
                label = "worker",
                worker_id = self.worker.worker_id(),
                jobs = ?self.hand.blocked(),
                "an open transaction has locked the rows of jobs that have ended: their outcomes are written when it ends"
            );
        } else if !is_blocked {
            self.complained_of_blocked = false;
        }
        written
    }

    /// Whether `run_once` is done, after a claim that has brought nothing.
    fn is_nothing_left(&mut self, contended: bool) -> bool {
        !contended || self.contended_since.get_or_insert_with(Instant::now).elapsed() >= CONTENTION_TIMEOUT
    }

    /// Nothing more is due: the next claim is due when the next job is, and at the latest when the poll interval is over.
    async fn claim_when_due(&mut self, claimed: Option<DateTime<Utc>>, now: Option<DateTime<Utc>>) {
        if !self.hand.has_free_slots() {
            return;
        }
        let now_here = Instant::now();
        let was_asked = self.asked_at.is_some_and(|asked| asked.elapsed() < ASK_INTERVAL);
        if was_asked && self.due_at.is_none_or(|due| due > now_here) {
            // Under load, an exchange a millisecond, the answer of a moment ago will do for a moment.
            return self
                .hand
                .claim_not_after(self.due_at.unwrap_or(now_here + ASK_INTERVAL).min(now_here + ASK_INTERVAL));
        }
        let Some(claimed) = claimed else { return };
        self.asked_at = Some(now_here);
        let wait = self.exchange.next_due(claimed, now).await;
        self.due_at = wait.and_then(|wait| Instant::now().checked_add(wait));
        if let Some(due) = self.due_at {
            self.hand.claim_not_after(due);
        }
    }

    /// Hands back whatever is still in hand, and goes.
    async fn leave(mut self, ended: Result<(), Error>) -> Result<(), Error> {
        self.hand.close();
        self.runners.abort_all();
        // One that is stuck in code which never waits cannot be stopped; we do not wait for it.
        let stopped = async { while self.runners.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(TIME_TO_STOP, stopped).await;
        // Before anybody hears that their jobs are free: the next one of a queue must not meet a program or script of the last.
        self.worker.leftovers.gone(&self.worker.shutdown.insisted).await;
        if let Some(hosts) = &self.worker.hosts {
            hosts.end_jobs(&self.worker.shutdown.insisted).await;
        }
        for job in self.hand.interrupt(self.worker.settings.interrupted_job_retry_delay) {
            warn!(
                label = "job",
                worker_id = self.worker.worker_id(),
                task_identifier = &*job.task_identifier,
                job_id = job.id,
                "job interrupted: handed back"
            );
        }
        self.end_of_second_lane.cancel();
        let patience = self.patience();
        let ended_too = async { while self.second_lane_ends.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(patience, ended_too).await;
        self.second_lane_ends.shutdown().await;
        let ended = match ended {
            Ok(()) => self.last_report().await,
            Err(error) => {
                self.worker.cannot_go_on(&error).await;
                let _ = self.last_report().await;
                Err(error)
            }
        };
        self.exchange.close().await;
        self.worker.stopped(ended).await
    }

    /// How long the database may take now that the worker leaves.
    fn patience(&self) -> Duration {
        if self.worker.shutdown.insisted.is_cancelled() { HASTY_REPORT_TIMEOUT } else { LAST_REPORT_TIMEOUT }
    }

    /// Writes what is left to write. Where the last exchange broke off, it may have claimed jobs that we have not
    /// heard of: they come with the first answer, and go back with a second report.
    async fn last_report(&mut self) -> Result<(), Error> {
        let patience = self.patience();
        let now = self.worker.settings.use_local_time.then(Utc::now);
        let wants = Wants { jobs: 0, forbidden_flags: None, limits: HashMap::new(), now, freshness: None };
        let written = async {
            while !self.hand.is_empty() || self.exchange.is_uncertain() {
                let begun = self.hand.begin(Lane::First, false);
                if begun.is_none() && !self.exchange.is_uncertain() {
                    // What is left are rows that others have locked.
                    sleep_until(self.hand.next_exchange_at()).await;
                    continue;
                }
                let (report, _) = begun.unwrap_or_default();
                let reply = self.exchange.exchange(&report, &wants).await?;
                self.hand.receive_unknown(reply.found_again);
                self.receive(report, reply.answer);
                self.hand.close();
            }
            Ok(())
        };
        match tokio::time::timeout(patience, written).await {
            Ok(result) => result,
            Err(_) => Err(Error::OutcomesNotWritten { worker_id: self.worker.worker_id().to_owned() }),
        }
    }
}

/// Returns when there are other tasks than those last seen, and leaves it to others to see them.
async fn has_changed(tasks: &watch::Receiver<Arc<Tasks>>) {
    if tasks.clone().changed().await.is_err() {
        std::future::pending().await
    }
}

/// Returns at that time; never, if there is none.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
