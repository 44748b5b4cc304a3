//! A job queue on the PostgreSQL you already have, sharing its schema with Node's `graphile-worker`.
//!
//! So far: the schema and its SQL API. [`migrate`] installs them into an empty database, takes over what
//! Node's worker installed, and moves up what its older releases left.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = sqlx::PgPool::connect("postgres://localhost/my_app").await?;
//! let migration = graphile_worker::migrate(&pool, "graphile_worker").await?;
//! println!("{migration}");
//! sqlx::query("select graphile_worker.add_job('send_email', '{\"to\": \"user@example.com\"}')")
//!     .execute(&pool)
//!     .await?;
//! # Ok(()) }
//! ```

mod context;
mod db;
mod error;
mod exchange;
mod execute;
mod hand;
mod hooks;
mod job;
mod listener;
mod migrate;
mod options;
mod settle;
mod shutdown;
mod task;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres;
mod worker;
mod worker_utils;

pub use context::WorkerContext;
pub use error::Error;
pub use hooks::{
    AfterJobRun, BeforeJobRun, BeforeJobSchedule, Event, FetchEmpty, FetchError, FetchStart, HookRegistry, HookResult,
    JobComplete, JobError, JobEventContext, JobFailed, JobScheduleResult, JobStart, JobSuccess, ListenConnecting,
    ListenError, ListenSuccess, Plugin, ScheduledJob, WorkerEventContext, WorkerFatalError, WorkerShutdown,
    WorkerStart, WorkerStop,
};
pub use job::{Job, JobKeyMode, JobSpec, JobSpecBuilder, RawJobSpec};
pub use migrate::{Migration, migrate};
pub use options::{TaskHandlers, WorkerOptions};
pub use task::{
    BatchResult, BatchTaskHandler, IntoBatchTaskHandlerResult, IntoTaskHandlerResult, TaskError, TaskHandler,
    TaskOptions, TaskOutcome,
};
#[cfg(feature = "tokio-postgres")]
pub use tokio_postgres::WithinTokioPostgres;
pub use worker::Worker;
pub use worker_utils::{CleanupTask, RescheduleJobOptions, Source, Within, WorkerUtils, add_job};
