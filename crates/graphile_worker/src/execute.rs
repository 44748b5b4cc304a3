//! Executing: a job in, an outcome out. Decodes, calls, catches panics, enforces the timeout. No database.

use crate::context::WorkerContext;
use crate::hooks::HookResult;
use crate::task::{Answer, Retry, Task, TaskError, TaskOutcome};
use futures_util::FutureExt;
use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// What came of running a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// Done, and already written by the handler's own transaction.
    DoneByHandler,
    Snoozed(TaskOutcome),
    Failed {
        error: TaskError,
        /// The payload of what is left to do.
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

    /// What a hook has made of it.
    pub(crate) fn decided(decision: HookResult) -> Outcome {
        match decision {
            HookResult::Continue | HookResult::Skip => Outcome::Done,
            HookResult::Fail(reason) => Outcome::Failed { error: TaskError::new(reason), remaining: None },
        }
    }
}

/// Runs a job to its end, whatever that is.
pub(crate) async fn execute(task: &Task, ctx: WorkerContext) -> Outcome {
    // The handler's own code runs already when the future is made: a panic there counts as well.
    let running = AssertUnwindSafe(async { (task.run)(ctx.clone()).await }).catch_unwind();
    let ended = match task.options.timeout {
        None => running.await,
        Some(timeout) => {
            let mut running = std::pin::pin!(running);
            match tokio::time::timeout(timeout, &mut running).await {
                Ok(ended) => ended,
                Err(_) => {
                    ctx.tell_to_end();
                    let ended = tokio::time::timeout(task.time_to_notice, running).await;
                    let last_words = ended.ok().and_then(Result::ok).map(|answer| answer.last_words);
                    Ok(timed_out(timeout, &last_words.unwrap_or_default()).into())
                }
            }
        }
    };
    outcome(ended.unwrap_or_else(|panic| panicked(panic.as_ref()).into()), ctx.completed_by_handler())
}

fn outcome(answer: Answer, completed_by_handler: bool) -> Outcome {
    match answer.result {
        _ if completed_by_handler => Outcome::DoneByHandler,
        Ok(TaskOutcome::Done) => Outcome::Done,
        Ok(snooze) => Outcome::Snoozed(snooze),
        Err(error) => Outcome::Failed { error, remaining: answer.remaining },
    }
}

fn timed_out(timeout: Duration, last_words: &str) -> Result<TaskOutcome, TaskError> {
    let message = match last_words {
        "" => format!("timed out after {timeout:?}"),
        _ => format!("timed out after {timeout:?}:\n{last_words}"),
    };
    Err(TaskError { message, retry: Retry::Backoff })
}

fn panicked(panic: &(dyn Any + Send)) -> Result<TaskOutcome, TaskError> {
    Err(TaskError { message: format!("panicked: {}", panic_message(panic)), retry: Retry::Backoff })
}

/// What somebody who panicked said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "with a value that is not text".to_owned())
}
