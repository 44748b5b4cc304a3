//! Executing a job: decodes the payload, calls the handler, catches panics, and enforces the timeout and cancellations by
//! force. Returns an outcome; does not touch the database. `settle` decides what the outcome means for the job.

use crate::context::{Cancelled, Running, Shared, WorkerContext};
use crate::error::panic_message;
use crate::hooks::HookResult;
use crate::task::{Retry, TaskError, TaskOutcome, TaskResult};
use chrono::{DateTime, Utc};
use futures_util::FutureExt;
use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

/// How a run of a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// Done, and already recorded by the handler's own transaction.
    CompletedByHandler,
    Snoozed(TaskOutcome),
    /// A service rate limited the job.
    RateLimited {
        error: TaskError,
        wait: Duration,
        /// The payload of the items of a batch that still have to run.
        remaining: Option<String>,
    },
    /// The run ended through no fault of the job: it is released, and the attempt does not count.
    Released,
    /// The job did not start, because it had expired at this time.
    Expired(DateTime<Utc>),
    Failed {
        error: TaskError,
        /// The payload of the items of a batch that still have to run.
        remaining: Option<String>,
    },
}

impl Outcome {
    /// Why the job failed, if it did.
    pub(crate) fn error(&self) -> Option<&str> {
        match self {
            Outcome::Failed { error, .. } => Some(&error.message),
            _ => None,
        }
    }

    pub(crate) fn panicked(panic: &(dyn Any + Send)) -> Outcome {
        outcome(panicked(panic).into(), false)
    }

    /// The outcome that a hook decided on.
    pub(crate) fn from_hook(decision: HookResult) -> Outcome {
        match decision {
            HookResult::Continue | HookResult::Skip => Outcome::Done,
            HookResult::Fail(reason) => Outcome::Failed { error: TaskError::new(reason), remaining: None },
        }
    }
}

/// Runs a job until it ends, panics or times out.
pub(crate) async fn execute(running: &Arc<Running>, shared: &Arc<Shared>) -> Outcome {
    let task = &running.task;
    if !running.job.is_utf8 {
        let message = "the payload is not valid UTF-8: correct it in the database, then retry the job";
        return Outcome::Failed { error: TaskError::new(message), remaining: None };
    }
    // In an async block, because the handler may also panic while it creates its future.
    if task.options.timeout.is_some() {
        running.restart_timeout();
    }
    let ctx = WorkerContext::new(running.clone(), shared.clone());
    let run = AssertUnwindSafe(async { (task.run)(ctx).await }).catch_unwind();
    let mut run = std::pin::pin!(run);
    let ended = tokio::select! {
        biased;
        ended = &mut run => ended,
        why = must_end(running) => {
            running.request_end();
            let ended = tokio::time::timeout(task.cancel_grace, run).await;
            let last_output = ended.ok().and_then(Result::ok).map(|answer| answer.last_output);
            Ok(stopped(why, &last_output.unwrap_or_default()).into())
        }
    };
    outcome(ended.unwrap_or_else(|panic| panicked(panic.as_ref()).into()), running.completed_by_handler())
}

fn outcome(answer: TaskResult, completed_by_handler: bool) -> Outcome {
    match answer.result {
        _ if completed_by_handler => Outcome::CompletedByHandler,
        _ if answer.is_released => Outcome::Released,
        Ok(TaskOutcome::Done) => Outcome::Done,
        Ok(snooze) => Outcome::Snoozed(snooze),
        Err(error) => match error.retry {
            Retry::RateLimited(wait) => Outcome::RateLimited { error, wait, remaining: answer.remaining },
            _ => Outcome::Failed { error, remaining: answer.remaining },
        },
    }
}

/// Why a run has to end now.
enum MustEnd {
    TimedOut(Duration),
    Cancelled,
}

/// Returns when the run has to end.
async fn must_end(running: &Running) -> MustEnd {
    let timed_out = async {
        match running.task.options.timeout {
            Some(timeout) => {
                running.has_run_for(timeout).await;
                MustEnd::TimedOut(timeout)
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        why = timed_out => why,
        () = running.cancellation_reached(Cancelled::ByForce) => MustEnd::Cancelled,
    }
}

fn stopped(why: MustEnd, last_output: &str) -> Result<TaskOutcome, TaskError> {
    let why = match why {
        MustEnd::TimedOut(timeout) => format!("timed out after {timeout:?}"),
        MustEnd::Cancelled => "cancelled by force".to_owned(),
    };
    let message = if last_output.is_empty() { why } else { format!("{why}:\n{last_output}") };
    Err(TaskError { message, retry: Retry::Backoff, limit: None })
}

fn panicked(panic: &(dyn Any + Send)) -> Result<TaskOutcome, TaskError> {
    Err(TaskError { message: format!("panicked: {}", panic_message(panic)), retry: Retry::Backoff, limit: None })
}
