//! Tasks: what a handler is, what it may answer, and the registry that finds it by name.
//! Calling one is `execute`'s business; what its answer means for the job is `settle`'s.

use crate::context::WorkerContext;
use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// A task: a payload that knows how to run itself.
///
/// ```
/// use graphile_worker::{IntoTaskHandlerResult, TaskHandler, WorkerContext};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct SendEmail {
///     to: String,
/// }
///
/// impl TaskHandler for SendEmail {
///     const IDENTIFIER: &'static str = "send_email";
///
///     async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {
///         println!("to {}", self.to);
///     }
/// }
/// ```
pub trait TaskHandler: Serialize + for<'de> Deserialize<'de> + Send + Sync + 'static {
    /// The name of the task in the database.
    const IDENTIFIER: &'static str;

    /// Does the work.
    fn run(self, ctx: WorkerContext) -> impl Future<Output = impl IntoTaskHandlerResult> + Send;

    /// Its timeout, back-off, limits (default: none of its own).
    fn options() -> TaskOptions {
        TaskOptions::default()
    }
}

/// A task whose payload is an array: it gets all items at once and answers for each. Only the items that
/// failed are tried again.
pub trait BatchTaskHandler: Serialize + for<'de> Deserialize<'de> + Send + Sync + 'static {
    /// The name of the task in the database.
    const IDENTIFIER: &'static str;

    /// Does the work: an answer for each item in their order (`Vec<Result<(), E>>`), or one for all.
    fn run_batch(items: Vec<Self>, ctx: WorkerContext) -> impl Future<Output = impl IntoBatchTaskHandlerResult> + Send;

    /// Its timeout, back-off, limits (default: none of its own).
    fn options() -> TaskOptions {
        TaskOptions::default()
    }
}

/// What a task has of its own; see each method.
#[derive(Clone, Default)]
pub struct TaskOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) max_attempts: Option<i16>,
    pub(crate) max_concurrent: Option<usize>,
    pub(crate) backoff: Option<Arc<dyn Fn(i16) -> Duration + Send + Sync>>,
}

impl TaskOptions {
    /// A run that takes longer is cancelled and has failed (default: no limit).
    pub fn timeout(mut self, timeout: Duration) -> TaskOptions {
        self.timeout = Some(timeout);
        self
    }

    /// How often a job of this task may be tried, where its spec does not say (default: 25).
    pub fn max_attempts(mut self, max_attempts: i16) -> TaskOptions {
        self.max_attempts = Some(max_attempts);
        self
    }

    /// How many jobs of this task one worker runs at the same time (default: its concurrency).
    pub fn max_concurrent(mut self, jobs: usize) -> TaskOptions {
        self.max_concurrent = Some(jobs.max(1));
        self
    }

    /// How long to wait after the given attempt has failed (default: exp(min(attempt, 10)) seconds).
    pub fn backoff(mut self, backoff: impl Fn(i16) -> Duration + Send + Sync + 'static) -> TaskOptions {
        self.backoff = Some(Arc::new(backoff));
        self
    }
}

impl fmt::Debug for TaskOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskOptions")
            .field("timeout", &self.timeout)
            .field("max_attempts", &self.max_attempts)
            .field("max_concurrent", &self.max_concurrent)
            .field("backoff", &self.backoff.is_some())
            .finish()
    }
}

/// What a handler that did not fail may say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TaskOutcome {
    /// The work is done.
    Done,
    /// Not now: run it again after this long. Costs no attempt.
    Snooze(Duration),
    /// Not now: run it again at this time. Costs no attempt.
    SnoozeUntil(DateTime<Utc>),
}

/// Why a handler failed, and whether to try again. Any error converts into one with `?`.
///
/// ```
/// use graphile_worker::TaskError;
/// use std::time::Duration;
///
/// fn charge(card: &str) -> Result<(), TaskError> {
///     if card.is_empty() {
///         return Err(TaskError::permanent("there is no card"));
///     }
///     let amount: u32 = "12".parse()?;
///     Err(TaskError::retry_after(Duration::from_secs(60), format!("the bank is closed for {amount}")))
/// }
/// # assert!(charge("").is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskError {
    pub(crate) message: String,
    pub(crate) retry: Retry,
}

/// When a failed job is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    Backoff,
    After(Duration),
    Never,
}

impl TaskError {
    /// Failed; to be tried again after the task's back-off.
    pub fn new(error: impl Into<Box<dyn StdError + Send + Sync>>) -> TaskError {
        let error = error.into();
        match error.downcast::<Carried>() {
            Ok(carried) => carried.0,
            Err(error) => TaskError { message: display_chain(error.as_ref()), retry: Retry::Backoff },
        }
    }

    /// Failed; to be tried again after this long.
    pub fn retry_after(wait: Duration, error: impl Into<Box<dyn StdError + Send + Sync>>) -> TaskError {
        TaskError { retry: Retry::After(wait), ..TaskError::new(error) }
    }

    /// Failed for good; not to be tried again.
    pub fn permanent(error: impl Into<Box<dyn StdError + Send + Sync>>) -> TaskError {
        TaskError { retry: Retry::Never, ..TaskError::new(error) }
    }
}

impl fmt::Display for TaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// `TaskError` is no `std::error::Error` itself, so that every such error can convert into it; inside a box
/// it travels in this.
#[derive(Debug)]
struct Carried(TaskError);

impl fmt::Display for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for Carried {}

impl From<TaskError> for Box<dyn StdError + Send + Sync> {
    fn from(error: TaskError) -> Self {
        Box::new(Carried(error))
    }
}

impl<E: StdError + Send + Sync + 'static> From<E> for TaskError {
    fn from(error: E) -> TaskError {
        TaskError::new(error)
    }
}

/// An error with its sources. Some errors print their source themselves: it is not said twice.
fn display_chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let message = error.to_string();
        if !text.ends_with(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        source = error.source();
    }
    text
}

/// What a handler may return: `()`, a [`TaskOutcome`], or a `Result` of either with any error, a string, a
/// box or a [`TaskError`].
pub trait IntoTaskHandlerResult {
    /// Says what the handler meant.
    fn into_task_handler_result(self) -> Result<TaskOutcome, TaskError>;
}

impl IntoTaskHandlerResult for () {
    fn into_task_handler_result(self) -> Result<TaskOutcome, TaskError> {
        Ok(TaskOutcome::Done)
    }
}

impl IntoTaskHandlerResult for TaskOutcome {
    fn into_task_handler_result(self) -> Result<TaskOutcome, TaskError> {
        Ok(self)
    }
}

impl<T: IntoTaskHandlerResult, E: Into<Box<dyn StdError + Send + Sync>>> IntoTaskHandlerResult for Result<T, E> {
    fn into_task_handler_result(self) -> Result<TaskOutcome, TaskError> {
        match self {
            Ok(value) => value.into_task_handler_result(),
            Err(error) => Err(TaskError::new(error)),
        }
    }
}

/// What a batch handler may return: what a handler may, for all items alike, or a `Vec` of results, one for
/// each item.
pub trait IntoBatchTaskHandlerResult {
    /// Says what the handler meant.
    fn into_batch_task_handler_result(self) -> BatchResult;
}

/// The answer of a batch handler.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BatchResult {
    /// One answer for all items.
    All(Result<TaskOutcome, TaskError>),
    /// One answer for each item, in their order.
    Each(Vec<Result<(), TaskError>>),
}

impl IntoBatchTaskHandlerResult for () {
    fn into_batch_task_handler_result(self) -> BatchResult {
        BatchResult::All(Ok(TaskOutcome::Done))
    }
}

impl<E: Into<Box<dyn StdError + Send + Sync>>> IntoBatchTaskHandlerResult for Result<(), E> {
    fn into_batch_task_handler_result(self) -> BatchResult {
        BatchResult::All(self.into_task_handler_result())
    }
}

impl<E: Into<Box<dyn StdError + Send + Sync>>> IntoBatchTaskHandlerResult for Vec<Result<(), E>> {
    fn into_batch_task_handler_result(self) -> BatchResult {
        BatchResult::Each(self.into_iter().map(|result| result.map_err(TaskError::new)).collect())
    }
}

/// What came of a run: the handler's answer and, where only part of a batch failed, the payload of what is
/// left to do.
pub(crate) struct Answer {
    pub(crate) result: Result<TaskOutcome, TaskError>,
    pub(crate) remaining: Option<String>,
    /// What is worth knowing of a run that had to end.
    pub(crate) last_words: String,
}

impl From<Result<TaskOutcome, TaskError>> for Answer {
    fn from(result: Result<TaskOutcome, TaskError>) -> Answer {
        Answer { result, remaining: None, last_words: String::new() }
    }
}

type Run = dyn Fn(WorkerContext) -> Pin<Box<dyn Future<Output = Answer> + Send>> + Send + Sync;

/// A task of any kind.
#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) identifier: Arc<str>,
    pub(crate) options: TaskOptions,
    pub(crate) run: Arc<Run>,
    /// How long it has to end by itself once it was told that its timeout has passed.
    pub(crate) time_to_notice: Duration,
}

/// What a handler has to notice that it was cancelled, before it is dropped.
const TIME_TO_NOTICE: Duration = Duration::from_millis(100);

/// The tasks of a worker, by name.
pub(crate) type Tasks = HashMap<Arc<str>, Arc<Task>>;

impl Task {
    pub(crate) fn handler<T: TaskHandler>() -> Task {
        Task::function(T::IDENTIFIER, T::options(), |payload: T, ctx| async move {
            payload.run(ctx).await.into_task_handler_result()
        })
    }

    pub(crate) fn function<P, F, Fut, R>(identifier: &str, options: TaskOptions, function: F) -> Task
    where
        P: DeserializeOwned + Send,
        F: Fn(P, WorkerContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: IntoTaskHandlerResult,
    {
        let run = move |ctx: WorkerContext| -> Pin<Box<dyn Future<Output = Answer> + Send>> {
            match decode::<P>(&ctx) {
                Ok(payload) => {
                    let running = function(payload, ctx);
                    Box::pin(async move { running.await.into_task_handler_result().into() })
                }
                Err(error) => Box::pin(std::future::ready(Err(error).into())),
            }
        };
        Task { identifier: identifier.into(), options, run: Arc::new(run), time_to_notice: TIME_TO_NOTICE }
    }

    pub(crate) fn batch_handler<T: BatchTaskHandler>() -> Task {
        let run = |ctx: WorkerContext| -> Pin<Box<dyn Future<Output = Answer> + Send>> {
            Box::pin(async move {
                let items: Vec<Box<serde_json::value::RawValue>> = match decode(&ctx) {
                    Ok(items) => items,
                    Err(error) => return Err(error).into(),
                };
                match decode::<Vec<T>>(&ctx) {
                    Ok(decoded) => {
                        let answer = T::run_batch(decoded, ctx).await.into_batch_task_handler_result();
                        batch_answer(&items, answer)
                    }
                    Err(error) => Err(error).into(),
                }
            })
        };
        Task {
            identifier: T::IDENTIFIER.into(),
            options: T::options(),
            run: Arc::new(run),
            time_to_notice: TIME_TO_NOTICE,
        }
    }
}

/// A payload that is not what the task expects will not be after a retry either, but a new release of the
/// program may understand it: it is a failure like any other.
fn decode<P: DeserializeOwned>(ctx: &WorkerContext) -> Result<P, TaskError> {
    serde_json::from_str(ctx.job().payload.get())
        .map_err(|error| TaskError::new(format!("the payload is not what the task expects: {error}")))
}

pub(crate) fn batch_answer(items: &[Box<serde_json::value::RawValue>], answer: BatchResult) -> Answer {
    let results = match answer {
        BatchResult::All(result) => return result.into(),
        BatchResult::Each(results) => results,
    };
    if results.len() != items.len() {
        let message = format!("the batch handler answered for {} of {} items", results.len(), items.len());
        return Err(TaskError::new(message)).into();
    }
    let failed: Vec<(&str, TaskError)> =
        items.iter().zip(results).filter_map(|(item, result)| Some((item.get(), result.err()?))).collect();
    let Some((_, first)) = failed.first() else {
        return Ok(TaskOutcome::Done).into();
    };
    let message = match failed.len() {
        1 => format!("1 of {} items failed: {first}", items.len()),
        n => format!("{n} of {} items failed, the first with: {first}", items.len()),
    };
    let remaining: Vec<&str> = failed.iter().map(|(item, _)| *item).collect();
    Answer {
        remaining: (remaining.len() < items.len()).then(|| format!("[{}]", remaining.join(","))),
        result: Err(TaskError { message, retry: first.retry }),
        last_words: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("could not send")]
    struct Sending(#[source] std::num::ParseIntError);

    fn said(answer: impl IntoTaskHandlerResult) -> Result<TaskOutcome, TaskError> {
        answer.into_task_handler_result()
    }

    #[test]
    fn a_handler_can_return_what_comes_naturally() {
        assert_eq!(said(()), Ok(TaskOutcome::Done));
        assert_eq!(said(Ok::<(), String>(())), Ok(TaskOutcome::Done));
        assert_eq!(said(Err::<(), _>("text")).unwrap_err().message, "text");
        assert_eq!(said(Err::<(), _>(String::from("text"))).unwrap_err().message, "text");
        let boxed: Box<dyn StdError + Send + Sync> = "boxed".into();
        assert_eq!(said(Err::<(), _>(boxed)).unwrap_err().message, "boxed");
        let snooze = TaskOutcome::Snooze(Duration::from_secs(1));
        assert_eq!(said(Ok::<_, String>(snooze)), Ok(snooze));
    }

    #[test]
    fn an_error_is_kept_with_its_sources_and_without_its_debug_form() {
        let source = "x".parse::<u8>().expect_err("not a number");
        let error = said(Err::<(), _>(Sending(source))).unwrap_err();
        assert_eq!(error.message, "could not send: invalid digit found in string");
    }

    #[test]
    fn when_to_try_again_survives_a_box() {
        fn inner() -> Result<(), Box<dyn StdError + Send + Sync>> {
            Err(TaskError::permanent("never"))?;
            Ok(())
        }
        assert_eq!(said(inner()).unwrap_err(), TaskError { message: "never".to_owned(), retry: Retry::Never });
    }

    #[test]
    fn only_the_failed_items_of_a_batch_remain() {
        let items: Vec<Box<serde_json::value::RawValue>> =
            serde_json::from_str(r#"[1, {"a":  2}, 3]"#).expect("an array");
        let each = |results: Vec<Result<(), &str>>| batch_answer(&items, results.into_batch_task_handler_result());
        assert_eq!(each(vec![Ok(()), Ok(()), Ok(())]).result, Ok(TaskOutcome::Done));

        let partly = each(vec![Ok(()), Err("oops"), Ok(())]);
        assert_eq!(partly.remaining.as_deref(), Some(r#"[{"a":  2}]"#));
        assert_eq!(partly.result.unwrap_err().message, "1 of 3 items failed: oops");

        let wholly = each(vec![Err("a"), Err("b"), Err("c")]);
        assert_eq!(wholly.remaining, None);
        assert_eq!(wholly.result.unwrap_err().message, "3 of 3 items failed, the first with: a");

        let wrong = each(vec![Ok(())]);
        assert_eq!(wrong.result.unwrap_err().message, "the batch handler answered for 1 of 3 items");
    }
}
