//! Tasks: handlers, the results they can return, and the registry that finds a task by name.
//! `worker::execute` calls handlers; `worker::settle` decides what a result means for the job.

use crate::context::WorkerContext;
use crate::fast_map::FastMap;
use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// A task: a payload type with a handler.
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

    /// Runs the job.
    fn run(self, ctx: WorkerContext) -> impl Future<Output = impl IntoTaskHandlerResult> + Send;

    /// Timeout, back-off and limits of the task (default: see [`TaskOptions`]).
    fn options() -> TaskOptions {
        TaskOptions::default()
    }

    /// Returns the task without its type, for
    /// [`WorkerOptions::define_jobs`](crate::WorkerOptions::define_jobs).
    fn definition() -> JobDefinition {
        JobDefinition(Task::handler::<Self>())
    }
}

/// A task whose payload is an array. The handler gets all items at once and returns a result for each. Only
/// failed items are retried.
pub trait BatchTaskHandler: Serialize + for<'de> Deserialize<'de> + Send + Sync + 'static {
    /// The name of the task in the database.
    const IDENTIFIER: &'static str;

    /// Runs the job. Returns one result per item, in order (`Vec<Result<(), E>>`), or one result for all
    /// items.
    fn run_batch(items: Vec<Self>, ctx: WorkerContext) -> impl Future<Output = impl IntoBatchTaskHandlerResult> + Send;

    /// Timeout, back-off and limits of the task (default: see [`TaskOptions`]).
    fn options() -> TaskOptions {
        TaskOptions::default()
    }

    /// Returns the task without its type, for
    /// [`WorkerOptions::define_jobs`](crate::WorkerOptions::define_jobs).
    fn definition() -> JobDefinition {
        JobDefinition(Task::batch_handler::<Self>())
    }
}

/// A task without its type, so that different tasks can be collected in one list. Built by
/// [`TaskHandler::definition`] and [`BatchTaskHandler::definition`].
#[derive(Clone)]
pub struct JobDefinition(pub(crate) Task);

impl JobDefinition {
    /// A task that runs outside of Rust, for a [`TaskSource`](crate::task_source::TaskSource). When its timeout has passed,
    /// [`WorkerContext::timed_out`] returns, and the run has `cancel_grace` to end before it is dropped.
    pub fn external<F, Fut>(identifier: &str, options: TaskOptions, cancel_grace: Duration, run: F) -> JobDefinition
    where
        F: Fn(WorkerContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = TaskResult> + Send + 'static,
    {
        let run = move |ctx: WorkerContext| -> Pin<Box<dyn Future<Output = TaskResult> + Send>> { Box::pin(run(ctx)) };
        JobDefinition(Task { identifier: identifier.into(), options, run: Arc::new(run), cancel_grace })
    }

    /// The name of the task in the database.
    pub fn identifier(&self) -> &str {
        &self.0.identifier
    }
}

impl fmt::Debug for JobDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobDefinition({:?})", self.identifier())
    }
}

/// Options of a task.
#[derive(Clone, Default)]
#[must_use]
pub struct TaskOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) max_attempts: Option<i16>,
    pub(crate) max_concurrent: Option<usize>,
    pub(crate) repeatable: bool,
    pub(crate) backoff: Option<Arc<Backoff>>,
}

/// The tasks that are repeatable, besides those whose options say so: names, in which `*` stands for any text.
#[derive(Debug, Clone, Default)]
pub(crate) struct RepeatableTasks(Vec<String>);

impl RepeatableTasks {
    pub(crate) fn add(&mut self, names: impl IntoIterator<Item = String>) {
        self.0.extend(names);
    }

    pub(crate) fn mark(&self, task: &mut Task) {
        task.options.repeatable |= self.0.iter().any(|name| matches(name, &task.identifier));
    }

    /// Those that match none of the tasks.
    pub(crate) fn unknown(&self, tasks: &Tasks) -> Vec<&str> {
        let is_unknown = |name: &&String| !tasks.keys().any(|identifier| matches(name, identifier));
        self.0.iter().filter(is_unknown).map(String::as_str).collect()
    }
}

/// Whether the name has this form, in which `*` stands for any text.
fn matches(form: &str, name: &str) -> bool {
    let Some((first, rest)) = form.split_once('*') else { return form == name };
    let Some(mut name) = name.strip_prefix(first) else { return false };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return name.ends_with(part);
        }
        let Some(at) = name.find(part) else { return false };
        name = &name[at + part.len()..];
    }
    true
}

/// The delay before the retry, by the number of the failed attempt.
pub(crate) type Backoff = dyn Fn(i16) -> Duration + Send + Sync;

impl TaskOptions {
    /// Sets the time limit of a run. Longer runs are cancelled and fail (default: no limit; 4 hours for
    /// executable files in the tasks folder).
    pub fn timeout(mut self, timeout: Duration) -> TaskOptions {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the maximum number of attempts of jobs whose spec does not set one (default 25).
    pub fn max_attempts(mut self, max_attempts: i16) -> TaskOptions {
        self.max_attempts = Some(max_attempts);
        self
    }

    /// Sets how many jobs of this task one worker runs at the same time (default: the worker's concurrency).
    pub fn max_concurrent(mut self, jobs: usize) -> TaskOptions {
        self.max_concurrent = Some(jobs.max(1));
        self
    }

    /// Declares that it does no harm to run a job of this task twice (default: no). Short jobs then cost less: the worker
    /// does not write that it has claimed a job, and deletes the job after its run.
    /// Until then it keeps the row locked, for at most 50 milliseconds. If the worker loses its connection meanwhile, the
    /// job may run a second time, even at the same moment. After 50 milliseconds, or if a job has run before, has a key or
    /// a queue, the worker claims it like any other job. No effect on tasks with
    /// [`max_concurrent`](TaskOptions::max_concurrent), and behind a pooler.
    pub fn repeatable(mut self, repeatable: bool) -> TaskOptions {
        self.repeatable = repeatable;
        self
    }

    /// Whether jobs of this task may run before their claim is written.
    pub(crate) fn defers_claims(&self) -> bool {
        self.repeatable && self.max_concurrent.is_none()
    }

    /// Sets the delay before the retry, by the number of the failed attempt (default: exp(min(attempt, 10))
    /// seconds).
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
            .field("repeatable", &self.repeatable)
            .field("backoff", &self.backoff.is_some())
            .finish()
    }
}

/// What a handler that did not fail can return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TaskOutcome {
    /// The work is done.
    Done,
    /// Run again after this delay. Does not count as an attempt.
    Snooze(Duration),
    /// Run again at this time. Does not count as an attempt.
    SnoozeUntil(DateTime<Utc>),
}

/// Why a handler failed, and whether to retry. Any error converts into it with `?`.
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
    /// The limit that a rate-limited job closes, if it named one.
    pub(crate) limit: Option<String>,
}

/// When a failed job is retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    Backoff,
    /// With random jitter, so that jobs that failed together are not retried together.
    JitteredBackoff,
    After(Duration),
    Never,
    /// The job has not failed: it runs again after this delay, and its limit is closed until then.
    RateLimited(Duration),
}

impl TaskError {
    /// A failure; retried after the task's back-off.
    pub fn new(error: impl Into<Box<dyn StdError + Send + Sync>>) -> TaskError {
        let error = error.into();
        match error.downcast::<Carried>() {
            Ok(carried) => carried.0,
            Err(error) => TaskError { message: display_chain(error.as_ref()), retry: Retry::Backoff, limit: None },
        }
    }

    /// Failed together with other jobs: retried after the task's back-off and up to half as long again, different for each
    /// job, so that they do not fail together again.
    pub fn jittered(error: impl Into<Box<dyn StdError + Send + Sync>>) -> TaskError {
        TaskError { retry: Retry::JitteredBackoff, ..TaskError::new(error) }
    }

    /// A failure; retried after this delay.
    pub fn retry_after(wait: Duration, error: impl Into<Box<dyn StdError + Send + Sync>>) -> TaskError {
        TaskError { retry: Retry::After(wait), ..TaskError::new(error) }
    }

    /// A permanent failure; not retried.
    pub fn permanent(error: impl Into<Box<dyn StdError + Send + Sync>>) -> TaskError {
        TaskError { retry: Retry::Never, ..TaskError::new(error) }
    }

    /// A service rate limited the job, for example with HTTP 429 and `Retry-After`. The job has not failed: it runs again
    /// after this delay, and the attempt does not count. Until then, the [limit](crate::Limit) of its queue is closed, or, if it
    /// has no limited queue, that of its task: no worker starts a job under it.
    ///
    /// ```
    /// use graphile_worker::TaskError;
    /// use std::time::Duration;
    ///
    /// fn checked(status: u16, retry_after: u64) -> Result<(), TaskError> {
    ///     if status == 429 {
    ///         return Err(TaskError::rate_limited(Duration::from_secs(retry_after)));
    ///     }
    ///     Ok(())
    /// }
    /// # assert!(checked(429, 30).is_err());
    /// ```
    pub fn rate_limited(after: Duration) -> TaskError {
        let message = format!("rate limited: runs again after {:?}", after.min(Duration::from_secs(u32::MAX.into())));
        TaskError { message, retry: Retry::RateLimited(after), limit: None }
    }

    /// Like [`rate_limited`](TaskError::rate_limited), but closes the limit with this name, such as `group:api`. If the job is
    /// not under that limit, its own limit is closed.
    pub fn rate_limited_in(limit: &str, after: Duration) -> TaskError {
        TaskError { limit: Some(limit.to_owned()), ..TaskError::rate_limited(after) }
    }

    /// Which error decides when a batch is retried: the first failure, or, if no item failed, the longest delay.
    fn of_items<'e>(errors: impl Iterator<Item = &'e TaskError>) -> Option<&'e TaskError> {
        errors.reduce(|first, next| match (first.retry, next.retry) {
            (Retry::RateLimited(wait), Retry::RateLimited(longer)) if longer > wait => next,
            (Retry::RateLimited(_), Retry::RateLimited(_)) => first,
            (Retry::RateLimited(_), _) => next,
            _ => first,
        })
    }
}

impl fmt::Display for TaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// `TaskError` does not implement `std::error::Error`, so that every error converts into it. This wrapper
/// carries it inside a box.
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

/// The message of an error and of its sources. Skips a source that the error already prints.
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

/// What a handler can return: `()`, a [`TaskOutcome`], or a `Result` of either with any error, a string, a
/// box or a [`TaskError`].
pub trait IntoTaskHandlerResult {
    /// Converts the value into a result.
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

/// What a batch handler can return: `()` or a `Result<(), E>` for all items, or a `Vec` with one result per
/// item.
pub trait IntoBatchTaskHandlerResult {
    /// Converts the value into a result.
    fn into_batch_task_handler_result(self) -> BatchResult;
}

/// Result of a batch handler.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BatchResult {
    /// One result for all items.
    All(Result<TaskOutcome, TaskError>),
    /// One result per item, in order.
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

/// The result of one run of a job: the handler's answer and, if only a part of a batch failed, the payload of the items that
/// are left. For tasks of a [`TaskSource`](crate::task_source::TaskSource).
#[derive(Debug)]
pub struct TaskResult {
    pub(crate) result: Result<TaskOutcome, TaskError>,
    /// The payload of the retry, if only some items of a batch failed.
    pub(crate) remaining: Option<String>,
    pub(crate) last_output: String,
    pub(crate) is_released: bool,
}

impl TaskResult {
    /// The run ended through no fault of the job: the worker releases it, and no attempt counts.
    pub fn released() -> TaskResult {
        TaskResult { is_released: true, ..TaskResult::from(Ok(TaskOutcome::Done)) }
    }

    /// The result of a batch: only the items that failed remain.
    pub fn of_batch(items: &[Box<RawValue>], result: BatchResult) -> TaskResult {
        let results = match result {
            BatchResult::All(result) => return result.into(),
            BatchResult::Each(results) => results,
        };
        if results.len() != items.len() {
            let message = format!("the batch handler returned {} results for {} items", results.len(), items.len());
            return Err(TaskError::new(message)).into();
        }
        let failed: Vec<(&str, TaskError)> =
            items.iter().zip(results).filter_map(|(item, result)| Some((item.get(), result.err()?))).collect();
        let Some(first) = TaskError::of_items(failed.iter().map(|(_, error)| error)) else {
            return Ok(TaskOutcome::Done).into();
        };
        let message = match failed.len() {
            1 => format!("1 of {} items failed: {first}", items.len()),
            n => format!("{n} of {} items failed, the first with: {first}", items.len()),
        };
        let remaining: Vec<&str> = failed.iter().map(|(item, _)| *item).collect();
        TaskResult {
            remaining: (remaining.len() < items.len()).then(|| format!("[{}]", remaining.join(","))),
            ..TaskResult::from(Err(TaskError { message, ..first.clone() }))
        }
    }

    /// Adds the last lines of output, which the error shows if the run timed out.
    pub fn with_last_output(mut self, output: String) -> TaskResult {
        self.last_output = output;
        self
    }
}

impl From<Result<TaskOutcome, TaskError>> for TaskResult {
    fn from(result: Result<TaskOutcome, TaskError>) -> TaskResult {
        TaskResult { result, remaining: None, last_output: String::new(), is_released: false }
    }
}

type Run = dyn Fn(WorkerContext) -> Pin<Box<dyn Future<Output = TaskResult> + Send>> + Send + Sync;

/// A task of any kind.
#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) identifier: Arc<str>,
    pub(crate) options: TaskOptions,
    pub(crate) run: Arc<Run>,
    /// How long the handler may keep running after its timeout was signalled.
    pub(crate) cancel_grace: Duration,
}

/// How long a handler may take to react to its cancellation before it is dropped.
const CANCEL_GRACE: Duration = Duration::from_millis(100);

/// The tasks of a worker, by name.
pub(crate) type Tasks = FastMap<Arc<str>, Arc<Task>>;

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
        let run = move |ctx: WorkerContext| -> Pin<Box<dyn Future<Output = TaskResult> + Send>> {
            match decode::<P>(&ctx) {
                Ok(payload) => {
                    let running = function(payload, ctx);
                    Box::pin(async move { running.await.into_task_handler_result().into() })
                }
                Err(error) => Box::pin(std::future::ready(Err(error).into())),
            }
        };
        Task { identifier: identifier.into(), options, run: Arc::new(run), cancel_grace: CANCEL_GRACE }
    }

    pub(crate) fn batch_handler<T: BatchTaskHandler>() -> Task {
        let run = |ctx: WorkerContext| -> Pin<Box<dyn Future<Output = TaskResult> + Send>> {
            Box::pin(async move {
                let items: Vec<Box<RawValue>> = match decode(&ctx) {
                    Ok(items) => items,
                    Err(error) => return Err(error).into(),
                };
                match decode::<Vec<T>>(&ctx) {
                    Ok(decoded) => {
                        let answer = T::run_batch(decoded, ctx).await.into_batch_task_handler_result();
                        TaskResult::of_batch(&items, answer)
                    }
                    Err(error) => Err(error).into(),
                }
            })
        };
        Task { identifier: T::IDENTIFIER.into(), options: T::options(), run: Arc::new(run), cancel_grace: CANCEL_GRACE }
    }
}

/// A payload that does not match the type will not match after a retry either. But a newer release of the
/// application may accept it, so this is an ordinary failure and is retried.
fn decode<P: DeserializeOwned>(ctx: &WorkerContext) -> Result<P, TaskError> {
    decode_text(ctx.job().payload.get())
        .map_err(|error| TaskError::new(format!("the payload does not match the task's type: {error}")))
}

/// `{}` and `null` both mean an empty payload: a type that accepts one of them accepts both.
fn decode_text<P: DeserializeOwned>(payload: &str) -> serde_json::Result<P> {
    serde_json::from_str(payload).or_else(|error| {
        let other = match payload.trim() {
            "null" => "{}",
            text if text.starts_with('{') && text.ends_with('}') && text[1..text.len() - 1].trim().is_empty() => "null",
            _ => return Err(error),
        };
        serde_json::from_str(other).map_err(|_| error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_in_the_name_of_a_repeatable_task_stands_for_any_text() {
        for (form, name) in
            [("a", "a"), ("*", "a"), ("report/*", "report/a/b"), ("*.mail", "x.mail"), ("a*b*c", "a-b-b-c")]
        {
            assert!(matches(form, name), "{form} {name}");
        }
        for (form, name) in [("a", "ab"), ("report/*", "reports"), ("a*b", "ab-"), ("a*b*c", "a-c-b"), ("a*a", "a")] {
            assert!(!matches(form, name), "{form} {name}");
        }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("could not send")]
    struct Sending(#[source] std::num::ParseIntError);

    fn result_of(value: impl IntoTaskHandlerResult) -> Result<TaskOutcome, TaskError> {
        value.into_task_handler_result()
    }

    #[test]
    fn a_handler_can_return_unit_an_outcome_or_any_error() {
        assert_eq!(result_of(()), Ok(TaskOutcome::Done));
        assert_eq!(result_of(Ok::<(), String>(())), Ok(TaskOutcome::Done));
        assert_eq!(result_of(Err::<(), _>("text")).unwrap_err().message, "text");
        assert_eq!(result_of(Err::<(), _>(String::from("text"))).unwrap_err().message, "text");
        let boxed: Box<dyn StdError + Send + Sync> = "boxed".into();
        assert_eq!(result_of(Err::<(), _>(boxed)).unwrap_err().message, "boxed");
        let snooze = TaskOutcome::Snooze(Duration::from_secs(1));
        assert_eq!(result_of(Ok::<_, String>(snooze)), Ok(snooze));
    }

    #[test]
    fn an_error_is_kept_with_its_sources_and_without_its_debug_form() {
        let source = "x".parse::<u8>().expect_err("not a number");
        let error = result_of(Err::<(), _>(Sending(source))).unwrap_err();
        assert_eq!(error.message, "could not send: invalid digit found in string");
    }

    #[test]
    fn a_boxed_task_error_keeps_its_retry_decision() {
        fn inner() -> Result<(), Box<dyn StdError + Send + Sync>> {
            Err(TaskError::permanent("never"))?;
            Ok(())
        }
        assert_eq!(result_of(inner()).unwrap_err(), TaskError::permanent("never"));
    }

    #[test]
    fn a_batch_is_rate_limited_only_if_none_of_its_items_failed() {
        let items: Vec<Box<RawValue>> = serde_json::from_str("[1, 2, 3]").expect("an array");
        let retry = |results: Vec<Result<(), TaskError>>| {
            TaskResult::of_batch(&items, BatchResult::Each(results)).result.unwrap_err().retry
        };
        let limited = |seconds| Err(TaskError::rate_limited(Duration::from_secs(seconds)));
        assert_eq!(retry(vec![limited(1), Ok(()), limited(2)]), Retry::RateLimited(Duration::from_secs(2)));
        assert_eq!(retry(vec![limited(1), Err(TaskError::permanent("x")), Ok(())]), Retry::Never);
    }

    #[test]
    fn only_the_failed_items_of_a_batch_remain() {
        let items: Vec<Box<RawValue>> = serde_json::from_str(r#"[1, {"a":  2}, 3]"#).expect("an array");
        let each =
            |results: Vec<Result<(), &str>>| TaskResult::of_batch(&items, results.into_batch_task_handler_result());
        assert_eq!(each(vec![Ok(()), Ok(()), Ok(())]).result, Ok(TaskOutcome::Done));

        let partly = each(vec![Ok(()), Err("oops"), Ok(())]);
        assert_eq!(partly.remaining.as_deref(), Some(r#"[{"a":  2}]"#));
        assert_eq!(partly.result.unwrap_err().message, "1 of 3 items failed: oops");

        let wholly = each(vec![Err("a"), Err("b"), Err("c")]);
        assert_eq!(wholly.remaining, None);
        assert_eq!(wholly.result.unwrap_err().message, "3 of 3 items failed, the first with: a");

        let wrong = each(vec![Ok(())]);
        assert_eq!(wrong.result.unwrap_err().message, "the batch handler returned 1 results for 3 items");
    }
}
