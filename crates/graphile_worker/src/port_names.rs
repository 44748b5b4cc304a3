//! Names of the Rust port, the `graphile_worker` of crates.io, that have no counterpart here: code written for it compiles.
//!
//! Names that mean the same as one of ours are beside it.

use crate::{WorkerContext, WorkerOptions};
use std::time::Duration;

/// A name of the Rust port. Its settings have no effect: the worker claims jobs ahead by itself.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct LocalQueueConfig {}

impl LocalQueueConfig {
    /// Has the methods below without `with_`.
    pub fn builder() -> LocalQueueConfigBuilder {
        LocalQueueConfigBuilder::default()
    }

    /// No effect.
    pub fn with_size(self, _jobs: usize) -> LocalQueueConfig {
        self
    }

    /// No effect.
    pub fn with_ttl(self, _ttl: Duration) -> LocalQueueConfig {
        self
    }

    /// No effect.
    pub fn with_queue_count(self, _queues: usize) -> LocalQueueConfig {
        self
    }

    /// No effect.
    pub fn with_refetch_delay(self, _delay: RefetchDelayConfig) -> LocalQueueConfig {
        self
    }
}

/// See [`LocalQueueConfig::builder`].
#[derive(Debug, Clone, Default)]
pub struct LocalQueueConfigBuilder(LocalQueueConfig);

impl LocalQueueConfigBuilder {
    /// No effect.
    pub fn size(self, jobs: usize) -> LocalQueueConfigBuilder {
        LocalQueueConfigBuilder(self.0.with_size(jobs))
    }

    /// No effect.
    pub fn ttl(self, ttl: Duration) -> LocalQueueConfigBuilder {
        LocalQueueConfigBuilder(self.0.with_ttl(ttl))
    }

    /// No effect.
    pub fn queue_count(self, queues: usize) -> LocalQueueConfigBuilder {
        LocalQueueConfigBuilder(self.0.with_queue_count(queues))
    }

    /// No effect.
    pub fn refetch_delay(self, delay: RefetchDelayConfig) -> LocalQueueConfigBuilder {
        LocalQueueConfigBuilder(self.0.with_refetch_delay(delay))
    }

    /// The settings.
    pub fn build(self) -> LocalQueueConfig {
        self.0
    }
}

/// A name of the Rust port. Its settings have no effect: the worker decides by itself when to claim.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct RefetchDelayConfig {}

impl RefetchDelayConfig {
    /// Has the methods below without `with_`.
    pub fn builder() -> RefetchDelayConfigBuilder {
        RefetchDelayConfigBuilder::default()
    }

    /// No effect.
    pub fn with_duration(self, _delay: Duration) -> RefetchDelayConfig {
        self
    }

    /// No effect.
    pub fn with_threshold(self, _jobs: usize) -> RefetchDelayConfig {
        self
    }

    /// No effect.
    pub fn with_max_abort_threshold(self, _jobs: usize) -> RefetchDelayConfig {
        self
    }
}

/// See [`RefetchDelayConfig::builder`].
#[derive(Debug, Clone, Default)]
pub struct RefetchDelayConfigBuilder(RefetchDelayConfig);

impl RefetchDelayConfigBuilder {
    /// No effect.
    pub fn duration(self, delay: Duration) -> RefetchDelayConfigBuilder {
        RefetchDelayConfigBuilder(self.0.with_duration(delay))
    }

    /// No effect.
    pub fn threshold(self, jobs: usize) -> RefetchDelayConfigBuilder {
        RefetchDelayConfigBuilder(self.0.with_threshold(jobs))
    }

    /// No effect.
    pub fn max_abort_threshold(self, jobs: usize) -> RefetchDelayConfigBuilder {
        RefetchDelayConfigBuilder(self.0.with_max_abort_threshold(jobs))
    }

    /// The settings.
    pub fn build(self) -> RefetchDelayConfig {
        self.0
    }
}

impl WorkerOptions {
    /// A name of the Rust port, without effect.
    #[deprecated(note = "remove it: the worker claims jobs ahead by itself")]
    pub fn local_queue(self, _config: LocalQueueConfig) -> WorkerOptions {
        self
    }

    /// A name of the Rust port, without effect.
    #[deprecated(note = "remove it: the worker reports jobs in batches by itself")]
    pub fn complete_job_batch_delay(self, _delay: Duration) -> WorkerOptions {
        self
    }

    /// A name of the Rust port, without effect.
    #[deprecated(note = "remove it: the worker reports jobs in batches by itself")]
    pub fn fail_job_batch_delay(self, _delay: Duration) -> WorkerOptions {
        self
    }
}

/// A name of the Rust port. [`WorkerContext`] has the methods itself.
pub trait WorkerContextExt {}

impl WorkerContextExt for WorkerContext {}

/// Names of the Rust port for [`Error`](crate::Error).
pub mod errors {
    pub use crate::Error as GraphileWorkerError;

    /// The result of most functions.
    pub type Result<T> = std::result::Result<T, crate::Error>;
}
