//! Hooks: what an application can hear of, and what it can decide. A hook that nobody registered costs a look at an
//! empty list.

use crate::execute::panic_message;
use crate::job::{Job, JobSpec};
use chrono::{DateTime, Utc};
use futures_util::FutureExt;
use graphile_worker_crontab::Crontab;
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use tracing::error;

/// Something that happens in a worker: what a hook is told, and what it answers.
pub trait Event: Send + Sync + 'static {
    /// What a hook is told.
    type Context: Clone + Send + 'static;
    /// What it answers.
    type Output: Send + 'static;
}

/// The context of events of a worker.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WorkerEventContext {
    /// The worker.
    pub worker_id: Arc<str>,
    /// What went wrong, where something did.
    pub error: Option<String>,
}

/// The context of events of a job.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JobEventContext {
    /// The worker that runs it.
    pub worker_id: Arc<str>,
    /// The job.
    pub job: Arc<Job>,
    /// Why it failed, where it did.
    pub error: Option<String>,
}

/// The context of [`BeforeJobSchedule`], and what it may make of it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ScheduledJob {
    /// The task.
    pub identifier: String,
    /// The payload.
    pub payload: serde_json::Value,
    /// How it is to be scheduled.
    pub spec: JobSpec,
}

/// The context of [`CronTick`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CronTickContext {
    /// The worker that looked.
    pub worker_id: Arc<str>,
    /// What time it was.
    pub at: DateTime<Utc>,
}

/// The context of events of a recurring job.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CronJobContext {
    /// The worker that added it.
    pub worker_id: Arc<str>,
    /// The item of the crontab.
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
    /// The worker that ran it has died.
    WorkerCrashed,
}

/// The context of events of a job whose worker has died.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JobRecoveryContext {
    /// The worker that recovers it; for utilities, `worker-utils`.
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

/// What becomes of a job whose worker has died.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobRecoveryResult {
    /// It is freed, its attempt refunded, and waits for the delay of recovery.
    Default,
    /// It is freed, and runs at this time.
    Reschedule {
        /// When.
        run_at: DateTime<Utc>,
        /// Its attempts from now on, where they are to change.
        attempts: Option<i16>,
    },
    /// It has failed, and is tried again after the usual back-off.
    FailWithBackoff,
    /// It stays locked. The next sweep asks again.
    Skip,
}

/// The context of [`WorkerRecovered`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WorkerRecoveredContext {
    /// The worker that swept; for utilities, `worker-utils`.
    pub worker_id: Arc<str>,
    /// The workers that were dead.
    pub worker_ids: Vec<String>,
    /// How many of their jobs were freed.
    pub recovered_count: u64,
}

/// What becomes of a job that is to be added.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum JobScheduleResult {
    /// It is added like this.
    Add(ScheduledJob),
    /// It is not added, and the caller gets an error with this reason.
    Refuse(String),
}

/// What becomes of a job that is about to run, or has run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HookResult {
    /// What would have become of it.
    Continue,
    /// It counts as done.
    Skip,
    /// It has failed for this reason.
    Fail(String),
}

macro_rules! events {
    ($($(#[$doc:meta])* $name:ident: $context:ty => $output:ty;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub struct $name;

            impl Event for $name {
                type Context = $context;
                type Output = $output;
            }
        )*
    };
}

events! {
    /// A worker begins to look for jobs.
    WorkerStart: WorkerEventContext => ();
    /// A worker was told to stop, and lets its jobs finish.
    WorkerShutdown: WorkerEventContext => ();
    /// A worker has met an error that it cannot outlive.
    WorkerFatalError: WorkerEventContext => ();
    /// A worker has stopped.
    WorkerStop: WorkerEventContext => ();
    /// A worker is about to listen for jobs.
    ListenConnecting: WorkerEventContext => ();
    /// A worker listens for jobs.
    ListenSuccess: WorkerEventContext => ();
    /// A worker has lost the connection that listens, and will make another.
    ListenError: WorkerEventContext => ();
    /// A worker is about to claim jobs.
    FetchStart: WorkerEventContext => ();
    /// The database did not answer a claim; the worker will try again.
    FetchError: WorkerEventContext => ();
    /// There was nothing to claim.
    FetchEmpty: WorkerEventContext => ();
    /// A job is about to run.
    JobStart: JobEventContext => ();
    /// A handler is done.
    JobSuccess: JobEventContext => ();
    /// A handler has failed.
    JobError: JobEventContext => ();
    /// A handler has failed, and the job will not be tried again.
    JobFailed: JobEventContext => ();
    /// What became of a job is written.
    JobComplete: JobEventContext => ();
    /// A worker has registered, and its heart beats.
    WorkerRegistered: WorkerEventContext => ();
    /// A heartbeat did not reach the database; the worker will try again.
    WorkerHeartbeatMissed: WorkerEventContext => ();
    /// Dead workers were swept.
    WorkerRecovered: WorkerRecoveredContext => ();
    /// Decides what becomes of a job whose worker has died.
    JobRecovery: JobRecoveryContext => JobRecoveryResult;
    /// A job was freed whose worker had died.
    JobInterrupted: JobInterruptedContext => ();
    /// A job has failed because its workers keep dying with it.
    JobQuarantined: JobInterruptedContext => ();
    /// The crontab was looked at, and what was due is added: at least once a minute.
    CronTick: CronTickContext => ();
    /// A recurring job was added, by this worker, when it was due.
    CronJobScheduled: CronJobContext => ();
    /// A recurring job was added that had been missed.
    CronJobBackfilled: CronJobContext => ();
    /// Decides whether and how a job is added. For one that recurs every worker asks, since it does not know who will be
    /// the first to add it; another worker may add what this one refuses.
    BeforeJobSchedule: ScheduledJob => JobScheduleResult;
    /// Decides whether a job is run.
    BeforeJobRun: JobEventContext => HookResult;
    /// Decides what a job has come to; its error, if any, is in the context.
    AfterJobRun: JobEventContext => HookResult;
}

type Handler<E> =
    dyn Fn(<E as Event>::Context) -> Pin<Box<dyn Future<Output = <E as Event>::Output> + Send>> + Send + Sync;

/// The hooks of a worker, or of utilities.
///
/// Every event of Node's `WorkerEvents` has its counterpart:
///
/// | Node | here | when |
/// | --- | --- | --- |
/// | `pool:create`, `worker:create` | [`WorkerStart`] | a worker begins to look for jobs |
/// | `pool:listen:connecting` | [`ListenConnecting`] | it is about to listen |
/// | `pool:listen:success` | [`ListenSuccess`] | it listens |
/// | `pool:listen:error` | [`ListenError`] | it listens no more, and will try again |
/// | `pool:gracefulShutdown`, `gracefulShutdown`, `worker:release` | [`WorkerShutdown`] | it was told to stop |
/// | `worker:fatalError`, `pool:gracefulShutdown:error` | [`WorkerFatalError`] | it cannot go on |
/// | `worker:stop`, `pool:release`, `stop` | [`WorkerStop`] | it has stopped, and everything is written |
/// | `worker:getJob:start` | [`FetchStart`] | it is about to claim jobs |
/// | `worker:getJob:error` | [`FetchError`] | the database did not answer; it will try again |
/// | `worker:getJob:empty` | [`FetchEmpty`] | there were none |
/// | `job:start` | [`JobStart`] | a job is about to run |
/// | `job:success` | [`JobSuccess`] | its handler is done |
/// | `job:error` | [`JobError`] | its handler failed |
/// | `job:failed` | [`JobFailed`] | … for the last time |
/// | `job:complete` | [`JobComplete`] | what became of it is written |
/// | `cron:started`, `cron:schedule`, `cron:prematureTimer`, `cron:overdueTimer` | [`CronTick`] | the crontab was looked at |
/// | `cron:scheduled` | [`CronJobScheduled`] | a recurring job was added |
/// | `cron:backfill` | [`CronJobBackfilled`] | … that had been missed |
///
/// Four more can decide: [`BeforeJobSchedule`], [`BeforeJobRun`], [`AfterJobRun`], [`JobRecovery`].
///
/// ```
/// use graphile_worker::{HookRegistry, JobFailed};
///
/// let mut hooks = HookRegistry::new();
/// hooks.on(JobFailed, |ctx| async move {
///     eprintln!("job {} has failed for good: {:?}", ctx.job.id, ctx.error);
/// });
/// ```
#[derive(Clone, Default)]
pub struct HookRegistry {
    /// For each event, a `Vec<Arc<Handler<E>>>`.
    handlers: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
}

/// Hooks that belong together, for [`WorkerOptions::add_plugin`](crate::WorkerOptions::add_plugin).
pub trait Plugin {
    /// Registers them.
    fn register(self, hooks: &mut HookRegistry);
}

impl HookRegistry {
    /// No hooks.
    pub fn new() -> HookRegistry {
        HookRegistry::default()
    }

    /// Calls `handler` whenever the event happens, after those that were registered before.
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

    pub(crate) fn has<E: Event>(&self) -> bool {
        !self.handlers.is_empty() && !self.handlers::<E>().is_empty()
    }

    /// Tells all who want to know; the context is made only if somebody does.
    pub(crate) async fn emit<E: Event<Output = ()>>(&self, _event: E, context: impl FnOnce() -> E::Context) {
        if self.has::<E>() {
            let context = context();
            for handler in self.handlers::<E>() {
                handler(context.clone()).await;
            }
        }
    }

    /// Asks all who want to decide; the first who does not say `Continue` has decided.
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

    /// The first hook that does not say `Default` has decided.
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

    /// Lets each hook change the job, one after the other; `Err` is the reason of the one that refused.
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

/// Waits for a hook that runs beside the jobs; `None` if it panics, which is told.
pub(crate) async fn guarded<T>(hook: &str, call: impl Future<Output = T>) -> Option<T> {
    match AssertUnwindSafe(call).catch_unwind().await {
        Ok(answer) => Some(answer),
        Err(panic) => {
            let panic = panic_message(panic.as_ref());
            error!(label = "worker", hook, panic, "a hook panicked; going on");
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
        let (sender, mut heard) = tokio::sync::mpsc::unbounded_channel();
        let mut hooks = HookRegistry::new();
        for n in 1..=3 {
            let sender = sender.clone();
            hooks.on(WorkerStart, move |_| {
                sender.send(n).unwrap();
                async {}
            });
        }
        hooks.emit(WorkerStart, context).await;
        hooks.emit(WorkerStop, || panic!("nobody has asked for this one")).await;
        assert_eq!([heard.recv().await, heard.recv().await, heard.recv().await], [Some(1), Some(2), Some(3)]);
    }

    #[tokio::test]
    async fn a_job_to_be_added_passes_through_all_hooks_until_one_refuses() {
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
