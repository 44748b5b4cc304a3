//! Hooks: the events that an application can observe, and the outcomes that it can override. An event without
//! hooks costs one lookup. The code that emits an event decides when.

use crate::error::panic_message;
use crate::job::{Job, JobSpec};
use chrono::{DateTime, Utc};
use futures_util::FutureExt;
use graphile_worker_crontab::Crontab;
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tracing::error;

/// An event of a worker: the context that hooks get, and the value they return.
pub trait Event: sealed::Event + Send + Sync + 'static {
    /// The context passed to hooks.
    type Context: Clone + Send + 'static;
    /// The value returned by hooks.
    type Output: Send + 'static;
}

/// Only this crate defines events.
mod sealed {
    pub trait Event {}
}

/// Context of worker events.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WorkerEventContext {
    /// The worker.
    pub worker_id: Arc<str>,
    /// The error, if there was one.
    pub error: Option<String>,
}

/// Context of job events.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JobEventContext {
    /// The worker that runs it.
    pub worker_id: Arc<str>,
    /// The job.
    pub job: Arc<Job>,
    /// The job's error, if it failed.
    pub error: Option<String>,
    /// How long the job has run; zero before it starts.
    pub duration: Duration,
    /// Whether the failed job will be retried.
    pub will_retry: bool,
}

/// The context of limit events.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LimitEventContext {
    /// The worker that noticed the event.
    pub worker_id: Arc<str>,
    /// The full name of the limit, such as `task:send_email`; `all` for a pause of everything. For a queue under a pattern, the
    /// name of the queue, such as `queue:tenant:7`.
    pub limit: String,
    /// Why no job under it starts; for [`LimitResumed`], why none started before.
    pub cause: LimitCause,
    /// When jobs may start again; `None` if that is unknown.
    pub until: Option<DateTime<Utc>>,
}

/// Why no job under a limit starts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitCause {
    /// It has no room: as many jobs run, or have started, as it allows.
    Reached,
    /// It was paused.
    Paused {
        /// The role that paused it.
        by: Option<String>,
    },
    /// A job under it was [rate limited](crate::TaskError::rate_limited).
    RateLimited,
    /// Its [breaker](crate::Limit::breaker) has tripped.
    Tripped {
        /// How many jobs have failed in a row.
        failures: i32,
    },
}

/// The context of [`BeforeJobRun`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BeforeJobRunContext {
    /// The worker that is about to run it.
    pub worker_id: Arc<str>,
    /// The job.
    pub job: Arc<Job>,
    /// The payload; `null` if it contains a number that Rust cannot represent, such as `1e999`. The stored
    /// text is in `job`.
    pub payload: serde_json::Value,
}

/// Why a worker stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShutdownReason {
    /// The process received a signal: see
    /// [`listen_os_shutdown_signals`](crate::WorkerOptions::listen_os_shutdown_signals).
    Signal,
    /// The application requested it, with [`request_shutdown`](crate::Worker::request_shutdown) or
    /// [`shutdown_signal`](crate::WorkerOptions::shutdown_signal).
    Graceful,
    /// A newer release is about to migrate the schema.
    SchemaChange,
}

/// The context of [`WorkerShutdown`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WorkerShutdownContext {
    /// The worker.
    pub worker_id: Arc<str>,
    /// Why it stops.
    pub reason: ShutdownReason,
}

/// Context and result of [`BeforeJobSchedule`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ScheduledJob {
    /// The task.
    pub identifier: String,
    /// The payload.
    pub payload: serde_json::Value,
    /// How the job is scheduled.
    pub spec: JobSpec,
}

/// The context of [`CronTick`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CronTickContext {
    /// The worker that checked the crontab.
    pub worker_id: Arc<str>,
    /// The time of the check.
    pub at: DateTime<Utc>,
}

/// The context of events of a recurring job.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CronJobContext {
    /// The worker that added it.
    pub worker_id: Arc<str>,
    /// The crontab item.
    pub crontab: Arc<Crontab>,
    /// When it was due.
    pub at: DateTime<Utc>,
    /// The job.
    pub job_id: i64,
}

/// Why a job was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureReason {
    /// The worker that ran it died.
    WorkerCrashed,
}

/// Context of recovery events.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JobRecoveryContext {
    /// The worker that recovers the job; `worker-utils` for utilities.
    pub worker_id: Arc<str>,
    /// The worker that died.
    pub previous_worker_id: Arc<str>,
    /// The job.
    pub job: Arc<Job>,
    /// Why it was interrupted.
    pub reason: FailureReason,
}

/// The context of [`JobInterrupted`] and [`JobQuarantined`].
pub type JobInterruptedContext = JobRecoveryContext;

/// What to do with a job whose worker died.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobRecoveryResult {
    /// Release it, refund the attempt, and wait for the recovery delay.
    Default,
    /// Release it and run it at this time.
    Reschedule {
        /// The earliest time to run.
        run_at: DateTime<Utc>,
        /// The new number of attempts; `None` keeps it.
        attempts: Option<i16>,
    },
    /// Fail the attempt and retry with the usual back-off.
    FailWithBackoff,
    /// Leave it locked. The next sweep calls the hook again.
    Skip,
}

/// The context of [`WorkerRecovered`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WorkerRecoveredContext {
    /// The worker that swept; `worker-utils` for utilities.
    pub worker_id: Arc<str>,
    /// The dead workers.
    pub worker_ids: Vec<String>,
    /// Number of released jobs.
    pub recovered_count: u64,
}

/// What to do with a job that is about to be added.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum JobScheduleResult {
    /// Add it, as returned.
    Add(ScheduledJob),
    /// Reject it; the caller gets an error with this reason.
    Refuse(String),
}

/// What to do with a job before or after it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HookResult {
    /// No change.
    Continue,
    /// Count the job as done.
    Skip,
    /// Fail the attempt with this error.
    Fail(String),
}

macro_rules! events {
    ($($(#[$doc:meta])* $name:ident: $context:ty => $output:ty;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub struct $name;

            impl sealed::Event for $name {}

            impl Event for $name {
                type Context = $context;
                type Output = $output;
            }
        )*
    };
}

events! {
    /// A worker starts.
    WorkerStart: WorkerEventContext => ();
    /// A worker begins to shut down and lets its jobs finish.
    WorkerShutdown: WorkerShutdownContext => ();
    /// A worker stops because of a fatal error.
    WorkerFatalError: WorkerEventContext => ();
    /// A worker has stopped.
    WorkerStop: WorkerEventContext => ();
    /// A worker connects its listener.
    ListenConnecting: WorkerEventContext => ();
    /// A worker listens for notifications.
    ListenSuccess: WorkerEventContext => ();
    /// The listener lost its connection and will reconnect.
    ListenError: WorkerEventContext => ();
    /// A worker is about to claim jobs.
    FetchStart: WorkerEventContext => ();
    /// A claim failed; the worker retries.
    FetchError: WorkerEventContext => ();
    /// A claim found no jobs.
    FetchEmpty: WorkerEventContext => ();
    /// A job is about to run.
    JobStart: JobEventContext => ();
    /// A handler succeeded.
    JobSuccess: JobEventContext => ();
    /// A handler failed.
    JobError: JobEventContext => ();
    /// A handler failed and the job will not be retried.
    JobFailed: JobEventContext => ();
    /// A service rate limited a job: the job runs again later, and the attempt does not count. See
    /// [`TaskError::rate_limited`](crate::TaskError::rate_limited).
    JobRateLimited: JobEventContext => ();
    /// A job of this worker was cancelled: it has stopped, or will not start. [`WorkerUtils`](crate::WorkerUtils) with hooks
    /// emit it, too, for the waiting jobs that they cancel.
    JobCancelled: JobEventContext => ();
    /// A job has expired before it started, and has failed. Emitted by one of the workers.
    JobExpired: JobEventContext => ();
    /// The outcome of a job is recorded in the database.
    JobComplete: JobEventContext => ();
    /// Due jobs wait because a limit is reached. Emitted at most once a second for each limit, by each worker that has this hook.
    LimitReached: LimitEventContext => ();
    /// A limit was paused, or a job under it was rate limited, or one of these was extended. Emitted by each worker that has
    /// this hook.
    LimitPaused: LimitEventContext => ();
    /// The breaker of a limit has tripped, or has tripped again. Emitted by each worker that has this hook.
    LimitTripped: LimitEventContext => ();
    /// Jobs under a limit start again as usual: it is no longer paused or closed, or its breaker was reset. Emitted by each
    /// worker that has this hook.
    LimitResumed: LimitEventContext => ();
    /// A worker has registered and sends heartbeats.
    WorkerRegistered: WorkerEventContext => ();
    /// A heartbeat failed; the worker retries.
    WorkerHeartbeatMissed: WorkerEventContext => ();
    /// A sweep found dead workers and recovered their jobs.
    WorkerRecovered: WorkerRecoveredContext => ();
    /// Decides what to do with a job whose worker died.
    JobRecovery: JobRecoveryContext => JobRecoveryResult;
    /// A job of a dead worker was released.
    JobInterrupted: JobInterruptedContext => ();
    /// A job failed permanently because its workers keep dying.
    JobQuarantined: JobInterruptedContext => ();
    /// The crontab was checked and due jobs were added. Emitted at least once a minute.
    CronTick: CronTickContext => ();
    /// This worker added a recurring job on time.
    CronJobScheduled: CronJobContext => ();
    /// This worker added a recurring job that had been missed.
    CronJobBackfilled: CronJobContext => ();
    /// Decides whether and how a job is added. For recurring jobs, every worker calls it, because any of them
    /// may add the job: a job that one worker rejects may be added by another.
    BeforeJobSchedule: ScheduledJob => JobScheduleResult;
    /// Decides whether a job runs.
    BeforeJobRun: BeforeJobRunContext => HookResult;
    /// Decides the outcome of a job. The context has its error, if it failed.
    AfterJobRun: JobEventContext => HookResult;
}

type Handler<E> =
    dyn Fn(<E as Event>::Context) -> Pin<Box<dyn Future<Output = <E as Event>::Output> + Send>> + Send + Sync;

/// The hooks of a worker or of utilities.
///
/// Every event of Node's `WorkerEvents` has its counterpart:
///
/// | Node | here | when |
/// | --- | --- | --- |
/// | `pool:create`, `worker:create` | [`WorkerStart`] | a worker starts |
/// | `pool:listen:connecting` | [`ListenConnecting`] | it connects its listener |
/// | `pool:listen:success` | [`ListenSuccess`] | it listens for notifications |
/// | `pool:listen:error` | [`ListenError`] | it lost the listener's connection and will reconnect |
/// | `pool:gracefulShutdown`, `gracefulShutdown`, `worker:release` | [`WorkerShutdown`] | it begins to shut down |
/// | `worker:fatalError`, `pool:gracefulShutdown:error` | [`WorkerFatalError`] | it stops because of a fatal error |
/// | `worker:stop`, `pool:release`, `stop` | [`WorkerStop`] | it has stopped; all outcomes are recorded |
/// | `worker:getJob:start` | [`FetchStart`] | it is about to claim jobs |
/// | `worker:getJob:error` | [`FetchError`] | the claim failed; it retries |
/// | `worker:getJob:empty` | [`FetchEmpty`] | the claim found no jobs |
/// | `job:start` | [`JobStart`] | a job is about to run |
/// | `job:success` | [`JobSuccess`] | its handler succeeded |
/// | `job:error` | [`JobError`] | its handler failed |
/// | `job:failed` | [`JobFailed`] | … for the last time |
/// | `job:complete` | [`JobComplete`] | its outcome is recorded |
/// | `cron:started`, `cron:schedule`, `cron:prematureTimer`, `cron:overdueTimer` | [`CronTick`] | the crontab was checked |
/// | `cron:scheduled` | [`CronJobScheduled`] | a recurring job was added |
/// | `cron:backfill` | [`CronJobBackfilled`] | … that had been missed |
///
/// Four events can override the outcome: [`BeforeJobSchedule`], [`BeforeJobRun`], [`AfterJobRun`],
/// [`JobRecovery`].
///
/// ```
/// use graphile_worker::{HookRegistry, JobFailed};
///
/// let mut hooks = HookRegistry::new();
/// hooks.on(JobFailed, |ctx| async move {
///     eprintln!("job {} failed permanently: {:?}", ctx.job.id, ctx.error);
/// });
/// ```
#[derive(Clone, Default)]
pub struct HookRegistry {
    /// For each event, a `Vec<Arc<Handler<E>>>`.
    handlers: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
}

/// A group of hooks, for [`WorkerOptions::add_plugin`](crate::WorkerOptions::add_plugin).
pub trait Plugin {
    /// Registers the hooks.
    fn register(self, hooks: &mut HookRegistry);
}

impl fmt::Debug for HookRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookRegistry").field("events", &self.handlers.len()).finish_non_exhaustive()
    }
}

impl HookRegistry {
    /// Creates an empty registry.
    pub fn new() -> HookRegistry {
        HookRegistry::default()
    }

    /// Registers a hook. Hooks of the same event run in the order of registration.
    pub fn on<E: Event, F, Fut>(&mut self, _event: E, handler: F) -> &mut HookRegistry
    where
        F: Fn(E::Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = E::Output> + Send + 'static,
    {
        let mut handlers: Vec<Arc<Handler<E>>> = self.handlers::<E>().to_vec();
        handlers.push(Arc::new(move |context| Box::pin(handler(context))));
        self.handlers.insert(TypeId::of::<E>(), Arc::new(handlers));
        self
    }

    /// Registers the hooks of a plugin.
    pub fn add_plugin(&mut self, plugin: impl Plugin) -> &mut HookRegistry {
        plugin.register(self);
        self
    }

    fn handlers<E: Event>(&self) -> &[Arc<Handler<E>>] {
        let handlers = self.handlers.get(&TypeId::of::<E>()).and_then(|handlers| handlers.downcast_ref::<Vec<_>>());
        handlers.map_or(&[], Vec::as_slice)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.handlers.is_empty()
    }

    pub(crate) fn has<E: Event>(&self) -> bool {
        !self.is_empty() && !self.handlers::<E>().is_empty()
    }

    /// Whether any hook observes that limits are paused, tripped or resumed.
    pub(crate) fn follow_limits(&self) -> bool {
        self.has::<LimitPaused>() || self.has::<LimitTripped>() || self.has::<LimitResumed>()
    }

    /// Calls all hooks of the event. Builds the context only if there are any.
    pub(crate) async fn emit<E: Event<Output = ()>>(&self, _event: E, context: impl FnOnce() -> E::Context) {
        if self.has::<E>() {
            let context = context();
            for handler in self.handlers::<E>() {
                handler(context.clone()).await;
            }
        }
    }

    /// Calls the hooks in order; the first one that does not return `Continue` decides.
    pub(crate) async fn decide<E: Event<Output = HookResult>>(
        &self,
        _event: E,
        context: impl FnOnce() -> E::Context,
    ) -> HookResult {
        if self.has::<E>() {
            let context = context();
            for handler in self.handlers::<E>() {
                match handler(context.clone()).await {
                    HookResult::Continue => {}
                    decision => return decision,
                }
            }
        }
        HookResult::Continue
    }

    /// Calls the hooks in order; the first one that does not return `Default` decides.
    pub(crate) async fn recover(&self, context: impl FnOnce() -> JobRecoveryContext) -> JobRecoveryResult {
        if self.has::<JobRecovery>() {
            let context = context();
            for handler in self.handlers::<JobRecovery>() {
                match handler(context.clone()).await {
                    JobRecoveryResult::Default => {}
                    decision => return decision,
                }
            }
        }
        JobRecoveryResult::Default
    }

    /// Passes the job through all hooks, each of which may change it. `Err` is the reason of the hook that
    /// rejected it.
    pub(crate) async fn schedule(&self, mut job: ScheduledJob) -> Result<ScheduledJob, String> {
        for handler in self.handlers::<BeforeJobSchedule>() {
            match handler(job).await {
                JobScheduleResult::Add(changed) => job = changed,
                JobScheduleResult::Refuse(reason) => return Err(reason),
            }
        }
        Ok(job)
    }
}

/// Runs a hook outside of a job's task. Returns `None` and logs if the hook panics.
pub(crate) async fn catch_panic<T>(hook: &str, call: impl Future<Output = T>) -> Option<T> {
    match AssertUnwindSafe(call).catch_unwind().await {
        Ok(answer) => Some(answer),
        Err(panic) => {
            let panic = panic_message(panic.as_ref());
            error!(label = "worker", hook, panic, "a hook panicked; continuing");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> WorkerEventContext {
        WorkerEventContext { worker_id: "w".into(), error: None }
    }

    #[tokio::test]
    async fn hooks_are_called_in_the_order_of_their_registration() {
        let (sender, mut announced) = tokio::sync::mpsc::unbounded_channel();
        let mut hooks = HookRegistry::new();
        for n in 1..=3 {
            let sender = sender.clone();
            hooks.on(WorkerStart, move |_| {
                sender.send(n).unwrap();
                async {}
            });
        }
        hooks.emit(WorkerStart, context).await;
        hooks.emit(WorkerStop, || panic!("this event has no hooks")).await;
        assert_eq!(
            [announced.recv().await, announced.recv().await, announced.recv().await],
            [Some(1), Some(2), Some(3)]
        );
    }

    #[tokio::test]
    async fn a_job_to_be_added_passes_through_all_hooks_until_one_rejects_it() {
        let mut hooks = HookRegistry::new();
        hooks.on(BeforeJobSchedule, |mut job| async move {
            job.spec.priority = Some(5);
            JobScheduleResult::Add(job)
        });
        let job = |identifier: &str| ScheduledJob {
            identifier: identifier.to_owned(),
            payload: serde_json::Value::Null,
            spec: JobSpec::default(),
        };
        assert_eq!(hooks.schedule(job("a")).await.unwrap().spec.priority, Some(5));
        hooks.on(
            BeforeJobSchedule,
            |job| async move { JobScheduleResult::Refuse(format!("{} is off", job.identifier)) },
        );
        assert_eq!(hooks.schedule(job("a")).await.unwrap_err(), "a is off");
    }
}
