//! A job queue on the PostgreSQL you already have, sharing its schema with Node's `graphile-worker`.
//!
//! ```no_run
//! use graphile_worker::{
//!     IntoTaskHandlerResult, JobSpec, TaskHandler, WorkerContext, WorkerOptions, WorkerRecoveryConfig,
//! };
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct SendEmail {
//!     to: String,
//! }
//!
//! impl TaskHandler for SendEmail {
//!     const IDENTIFIER: &'static str = "send_email";
//!
//!     async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
//!         println!("sending to {}", self.to);
//!     }
//! }
//!
//! # async fn example() -> Result<(), graphile_worker::Error> {
//! let worker = WorkerOptions::default()
//!     .database_url("postgres://user:password@localhost/my_app")
//!     .define_job::<SendEmail>()
//!     .worker_recovery(WorkerRecoveryConfig::default().enabled(true))
//!     .init()
//!     .await?;
//! let email = SendEmail { to: "user@example.com".to_owned() };
//! worker.create_utils().add_job(email, JobSpec::default()).await?;
//! worker.run().await
//! # }
//! ```
//!
//! # Recovery
//!
//! The quick start turns recovery on, which is off by default. A worker with recovery sends heartbeats, and
//! releases the jobs of workers whose heartbeats have stopped: after a crash they run again 5 to 7 minutes
//! later. Without recovery, they stay locked for 4 hours. See [`WorkerRecoveryConfig`].
//!
//! # Where to look
//!
//! | to | use |
//! | --- | --- |
//! | define a task | [`TaskHandler`], or [`BatchTaskHandler`] for many items at once |
//! | use the job, the pool or your own values in a handler | [`WorkerContext`] |
//! | configure and run a worker | [`WorkerOptions`], [`Worker`] |
//! | add, change, list and remove jobs | [`WorkerUtils`], [`JobSpec`] |
//! | limit how many jobs run at a time, or start in a period, in all workers | [`Limit`], [`WorkerOptions::limit`] |
//! | schedule recurring jobs | [`Cron`], [`parse_crontab`] |
//! | observe events and override outcomes | [`HookRegistry`] |
//! | find out why a job does not run | [`WorkerUtils::why`] |
//! | install or update the schema | [`migrate`] |
//!
//! The SQL API is the one of Node's worker.

mod adding;
mod cancel;
mod context;
mod cron;
mod db;
mod error;
mod fast_map;
mod flags;
pub mod hooks;
mod inspect;
mod job;
mod limits;
mod options;
mod port_names;
mod recovery;
mod replace;
mod retry;
mod schema;
mod shutdown;
mod task;
pub mod task_source;
mod text;
mod worker;
#[doc(hidden)]
pub mod worker_utils;

// Running jobs.
pub use context::WorkerContext;
pub use job::{InvalidJobKeyMode, Job, JobKeyMode, JobSpec, JobSpecBuilder, RawJobSpec};
pub use options::WorkerOptions;
pub use shutdown::WorkerShutdownConfig;
pub use task::{
    BatchResult, BatchTaskHandler, IntoBatchTaskHandlerResult, IntoTaskHandlerResult, JobDefinition, TaskError,
    TaskHandler, TaskOptions, TaskOutcome, TaskResult,
};
pub use worker::Worker;

// Adding and administering jobs.
pub use db::executor::{UtilsExecutor, WithinSqlx};
#[cfg(feature = "tokio-postgres")]
pub use db::tokio_postgres::WithinTokioPostgres;
pub use worker_utils::{CleanupTask, RescheduleJobOptions, WorkerUtils, add_job};

// Limits.
pub use inspect::limits::LimitSummary;
pub use limits::Limit;
#[doc(hidden)]
pub use limits::LimitChange;
// Cancelling and replacing jobs.
pub use cancel::{CancelOptions, CancelOutcome, Cancellation};
pub use replace::{ReplaceOutcome, Replacement};

// Recurring jobs.
pub use cron::clock::TestClock;
pub use cron::items::{Cron, CronItem};
pub use graphile_worker_crontab::{
    Crontab, CrontabError, CrontabFill, CrontabItemError, CrontabJobKeyMode as CronJobKeyMode, CrontabJobKeyMode,
    CrontabOptions, CrontabParseError, Schedule, ScheduleError, Tz, crontab_warnings, parse_crontab,
};
pub use options::IntoCron;

// Recovery of dead workers' jobs.
pub use recovery::{
    ActiveWorker, INFRASTRUCTURE_RESILIENT_FLAG, SweepStaleWorkersOptions, SweepStaleWorkersResult,
    WorkerRecoveryConfig,
};

// Hooks.
pub use hooks::{
    AfterJobRun, BeforeJobRun, BeforeJobRunContext, BeforeJobSchedule, CronJobBackfilled, CronJobContext,
    CronJobScheduled, CronTick, CronTickContext, Event, FailureReason, FetchEmpty, FetchError, FetchStart,
    HookRegistry, HookResult, JobCancelled, JobComplete, JobError, JobEventContext, JobExpired, JobFailed,
    JobInterrupted, JobInterruptedContext, JobQuarantined, JobRateLimited, JobRecovery, JobRecoveryContext,
    JobRecoveryResult, JobScheduleResult, JobStart, JobSuccess, LimitCause, LimitEventContext, LimitPaused,
    LimitReached, LimitResumed, LimitTripped, ListenConnecting, ListenError, ListenSuccess, Plugin, ScheduledJob,
    ShutdownReason, WorkerEventContext, WorkerFatalError, WorkerHeartbeatMissed, WorkerRecovered,
    WorkerRecoveredContext, WorkerRegistered, WorkerShutdown, WorkerShutdownContext, WorkerStart, WorkerStop,
};

// Inspecting the queue.
pub use inspect::doctor::{DoctorCheck, DoctorLevel, DoctorReport};
pub use inspect::explain::Why;
#[doc(hidden)]
pub use inspect::reasons::program;
pub use inspect::reasons::{LockHolder, WhyReason, WhyWorker};
pub use inspect::{
    CronExecution, JobCounters, JobDetails, JobFilter, JobState, JobSummary, QueueStats, QueueSummary, TaskStats,
    WorkerState, WorkerSummary, short_worker_id,
};

// The database and its schema.
pub use db::allow_invalid_utf8;
pub use db::connect::DatabaseConfig;
#[doc(hidden)]
pub use db::session::commit as commit_transaction;
pub use error::Error;
pub use schema::migrate::{
    Migration, force_migrate_from_rust_port, migrate, migrate_from_rust_port, migrate_with_max_wait,
};
pub use schema::roles::{RoleRight, grant_sql, revoke_sql};
pub use schema::uninstall::Uninstall;

// Names of the Rust port.
pub use port_names::{
    LocalQueueConfig, LocalQueueConfigBuilder, RefetchDelayConfig, RefetchDelayConfigBuilder, WorkerContextExt, errors,
};

/// Runs the Rust code of the README and the guide as documentation tests.
#[cfg(doctest)]
mod guide {
    macro_rules! pages {
        ($($name:ident: $path:literal;)*) => { $(#[doc = include_str!($path)] struct $name;)* };
    }

    pages! {
        Readme: "../../../README.md";
        AddingJobs: "../../../docs/adding-jobs.md";
        CancellingJobs: "../../../docs/cancelling-jobs.md";
        Deploying: "../../../docs/deploying.md";
        GettingStarted: "../../../docs/getting-started-rust.md";
        HostProtocol: "../../../docs/host-protocol.md";
        Limits: "../../../docs/limits.md";
        MovingFromTheRustPort: "../../../docs/moving-from-the-rust-port.md";
        Operating: "../../../docs/operating.md";
        QueuesAndKeys: "../../../docs/queues-and-keys.md";
        Recovery: "../../../docs/recovery.md";
        RecurringJobs: "../../../docs/recurring-jobs.md";
        RepeatableTasks: "../../../docs/repeatable-tasks.md";
        RetriesAndErrors: "../../../docs/retries-and-errors.md";
        Testing: "../../../docs/testing.md";
    }
}
