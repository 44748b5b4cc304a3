//! A job queue on the PostgreSQL you already have, sharing its schema with Node's `graphile-worker`.
//!
//! ```no_run
//! use graphile_worker::{IntoTaskHandlerResult, JobSpec, TaskHandler, WorkerContext, WorkerOptions};
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
//!     .init()
//!     .await?;
//! let email = SendEmail { to: "user@example.com".to_owned() };
//! worker.create_utils().add_job(email, JobSpec::default()).await?;
//! worker.run().await
//! # }
//! ```
//!
//! [`WorkerOptions`] describes a worker, [`WorkerUtils`] adds and administers jobs, [`TaskHandler`] is a task and
//! [`WorkerContext`] what it is given; [`Cron`] and [`parse_crontab`] say what recurs, [`HookRegistry`] lets an application hear and decide, [`migrate`] installs the
//! schema or brings it up to date. The SQL API is the same as that of Node's worker.

mod adding;
mod checkup;
mod context;
mod cron;
mod cron_items;
mod db;
mod error;
mod exchange;
mod execute;
mod hand;
mod hooks;
mod inspect;
mod job;
mod listener;
mod migrate;
mod next_claim;
mod options;
mod recovery;
mod second_lane;
mod settle;
mod shutdown;
mod startup;
mod task;
mod tasks_dir;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres;
mod uninstall;
mod upgrade;
mod watch;
mod why;
mod worker;
mod worker_utils;

pub use checkup::{Check, CheckLevel, Checkup};
pub use context::WorkerContext;
pub use cron::TestClock;
pub use cron_items::{Cron, CronItem, IntoCron};
pub use error::Error;
pub use graphile_worker_crontab::{
    Crontab, CrontabError, CrontabFill, CrontabItemError, CrontabJobKeyMode, CrontabOptions, CrontabParseError,
    Schedule, ScheduleError, Tz, parse_crontab,
};
pub use hooks::{
    AfterJobRun, BeforeJobRun, BeforeJobSchedule, CronJobBackfilled, CronJobContext, CronJobScheduled, CronTick,
    CronTickContext, Event, FailureReason, FetchEmpty, FetchError, FetchStart, HookRegistry, HookResult, JobComplete,
    JobError, JobEventContext, JobFailed, JobInterrupted, JobInterruptedContext, JobQuarantined, JobRecovery,
    JobRecoveryContext, JobRecoveryResult, JobScheduleResult, JobStart, JobSuccess, ListenConnecting, ListenError,
    ListenSuccess, Plugin, ScheduledJob, WorkerEventContext, WorkerFatalError, WorkerHeartbeatMissed, WorkerRecovered,
    WorkerRecoveredContext, WorkerRegistered, WorkerShutdown, WorkerStart, WorkerStop,
};
pub use inspect::{
    JobCounters, JobDetails, JobFilter, JobState, JobSummary, QueueSummary, Stats, TaskStats, WorkerState,
    WorkerSummary,
};
pub use job::{Job, JobKeyMode, JobSpec, JobSpecBuilder, RawJobSpec};
pub use migrate::{Migration, migrate, migrate_within};
pub use options::{TaskHandlers, WorkerOptions};
pub use recovery::{
    ActiveWorker, INFRASTRUCTURE_RESILIENT_FLAG, SweepStaleWorkersOptions, SweepStaleWorkersResult,
    WorkerRecoveryConfig,
};
pub use task::{
    BatchResult, BatchTaskHandler, IntoBatchTaskHandlerResult, IntoTaskHandlerResult, TaskError, TaskHandler,
    TaskOptions, TaskOutcome,
};
pub use tasks_dir::HostOptions;
#[cfg(feature = "tokio-postgres")]
pub use tokio_postgres::WithinTokioPostgres;
pub use uninstall::Uninstall;
pub use why::{Reason, Why};
pub use worker::Worker;
pub use worker_utils::{CleanupTask, RescheduleJobOptions, Source, Within, WorkerUtils, add_job};

/// The README's Rust compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
