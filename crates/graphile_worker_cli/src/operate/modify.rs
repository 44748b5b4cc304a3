//! The commands that change jobs, workers' locks and leftover rows. Each job that could not be changed gets its own
//! line on standard error, and the exit code is then 1. `inspect` has the commands that only read.

use super::{OutputFormat, counted, print_json, utils, utils_for_adding};
use crate::arguments;
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use crate::table::{Screen, length, relative_time, sanitize, wrapped};
use chrono::{DateTime, Utc};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use graphile_worker::{
    CancelOptions, CancelOutcome, CleanupTask, Job, JobFilter, JobKeyMode, JobSpec, JobState, RawJobSpec,
    ReplaceOutcome, Replacement, RescheduleJobOptions, SweepStaleWorkersOptions, WorkerState, WorkerSummary,
    WorkerUtils, short_worker_id,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use serde_json::json;
use serde_json::value::RawValue;
use sqlx::Row;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Number of jobs of a file that are sent to the server at a time.
const BATCH_SIZE: usize = 1000;

/// Options of `add`.
#[derive(Debug, Args)]
pub(crate) struct Add {
    /// Task identifier
    #[arg(value_name = "TASK", required_unless_present = "file")]
    task: Option<String>,
    /// Payload in JSON, or - to read it from standard input [default: {}]
    #[arg(value_name = "PAYLOAD", allow_negative_numbers = true)]
    payload: Option<String>,
    /// Add all jobs in this file (- for standard input), in one transaction. Each line is a JSON object with
    /// identifier and, optionally, payload, queue_name, run_at, max_attempts, job_key, job_key_mode, priority, flags,
    /// expires_at
    #[arg(
        long, value_name = "FILE",
        conflicts_with_all = [
            "task", "payload", "queue", "run_at", "delay", "max_attempts", "priority", "key", "key_mode", "expires_in",
            "flags", "replace_running", "debounce", "throttle",
        ]
    )]
    file: Option<PathBuf>,
    /// Named queue; its jobs run one at a time
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,
    #[command(flatten)]
    when: When,
    /// Maximum number of attempts [default: 25]
    #[arg(long, value_name = "N", value_parser = arguments::small)]
    max_attempts: Option<i16>,
    /// Priority; lower numbers run first [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = arguments::small)]
    priority: Option<i16>,
    /// Job key, by which you can update or remove the job later
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// What to do if a job with this key exists: replace it, replace it but keep its time, or keep it even if it is
    /// running or failed [default: replace]
    #[arg(long, value_name = "MODE", requires = "key", value_parser = key_modes())]
    key_mode: Option<JobKeyMode>,
    /// Fail the job if it has not started after this time, such as 10m
    #[arg(long, value_name = "DURATION", value_parser = arguments::duration)]
    expires_in: Option<Duration>,
    /// Flag; workers can be configured to skip jobs with it. Repeat for several flags
    #[arg(long = "flag", value_name = "FLAG")]
    flags: Vec<String>,
    /// If the job with this key is running, stop it; the new job starts when it has ended
    #[arg(long, requires = "key", conflicts_with = "key_mode")]
    replace_running: bool,
    /// End the running job if it does not stop in time: drop the handler of a task in Rust, kill a program
    #[arg(long, requires = "replace_running")]
    force: bool,
    /// Reason for stopping the job, shown as its last error
    #[arg(long, value_name = "TEXT", requires = "replace_running")]
    reason: Option<String>,
    /// Run the job when this time has passed without another call with this key, such as 5s
    #[arg(
        long, value_name = "DURATION", requires = "key", value_parser = arguments::duration,
        conflicts_with_all = [
            "run_at", "delay", "max_attempts", "priority", "key_mode", "expires_in", "flags", "replace_running", "throttle",
        ]
    )]
    debounce: Option<Duration>,
    /// With --debounce: run the job at the latest this long after the first call, such as 1m
    #[arg(long, value_name = "DURATION", requires = "debounce", value_parser = arguments::duration)]
    max_wait: Option<Duration>,
    /// Run at most one job with this key in each interval, such as 1m
    #[arg(
        long, value_name = "DURATION", requires = "key", value_parser = arguments::duration,
        conflicts_with_all = [
            "run_at", "delay", "max_attempts", "priority", "key_mode", "expires_in", "flags", "replace_running",
        ]
    )]
    throttle: Option<Duration>,
    #[command(flatten)]
    output: OutputFormat,
}

/// With the names in the help and in completions.
fn key_modes() -> impl TypedValueParser<Value = JobKeyMode> {
    let modes = [JobKeyMode::Replace, JobKeyMode::PreserveRunAt, JobKeyMode::UnsafeDedupe];
    PossibleValuesParser::new(modes.map(JobKeyMode::as_str)).try_map(|name| name.parse::<JobKeyMode>())
}

/// When a job is due.
#[derive(Debug, Args)]
struct When {
    /// Earliest time to run, such as 2030-01-31T12:00:00Z; UTC if it has no time zone
    #[arg(long, value_name = "TIME", conflicts_with = "delay", value_parser = arguments::time)]
    run_at: Option<DateTime<Utc>>,
    /// Delay from now until it may run, such as 90s, 10m or "1h 30m"
    #[arg(long = "in", id = "delay", value_name = "DURATION", value_parser = arguments::duration)]
    delay: Option<Duration>,
}

/// Options of `complete`.
#[derive(Debug, Args)]
pub(crate) struct Complete {
    /// Job ids
    #[arg(value_name = "ID", required = true, value_parser = arguments::job_id)]
    ids: Vec<i64>,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `fail`.
#[derive(Debug, Args)]
pub(crate) struct Fail {
    /// Job ids
    #[arg(value_name = "ID", required = true, value_parser = arguments::job_id)]
    ids: Vec<i64>,
    /// Error message to store with the jobs
    #[arg(long, value_name = "TEXT", default_value = "Manually marked as failed")]
    reason: String,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `cancel`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("which").required(true).multiple(true))]
pub(crate) struct Cancel {
    /// Job ids
    #[arg(
        value_name = "ID",
        group = "which",
        conflicts_with_all = ["state", "task", "queue", "key", "search"],
        value_parser = arguments::job_id
    )]
    ids: Vec<i64>,
    /// Instead of ids: all jobs in these states: ready, scheduled, running, retrying
    #[arg(long, value_name = "STATE", group = "which", value_delimiter = ',', value_parser = super::inspect::state)]
    state: Vec<JobState>,
    /// Instead of ids: all jobs of this task
    #[arg(long, value_name = "TASK", group = "which")]
    task: Option<String>,
    /// Instead of ids: all jobs of this queue
    #[arg(long, value_name = "QUEUE", group = "which")]
    queue: Option<String>,
    /// Instead of ids: the job with this key
    #[arg(long, value_name = "KEY", group = "which")]
    key: Option<String>,
    /// Instead of ids: all jobs with this text in the payload, last error or key (case-insensitive)
    #[arg(long, value_name = "TEXT", group = "which")]
    search: Option<String>,
    /// Reason, which the jobs show as their last error
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// End running jobs that do not stop in time: drop the handlers of tasks in Rust, kill programs
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `reschedule`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("changes").required(true).multiple(true))]
pub(crate) struct Reschedule {
    /// Job ids
    #[arg(value_name = "ID", required = true, value_parser = arguments::job_id)]
    ids: Vec<i64>,
    /// Earliest time to run, such as 2030-01-31T12:00:00Z; UTC if it has no time zone
    #[arg(long, value_name = "TIME", group = "changes", conflicts_with = "delay", value_parser = arguments::time)]
    run_at: Option<DateTime<Utc>>,
    /// Delay from now until it may run, such as 90s, 10m or "1h 30m"
    #[arg(long = "in", id = "delay", value_name = "DURATION", group = "changes", value_parser = arguments::duration)]
    delay: Option<Duration>,
    /// Priority; lower numbers run first
    #[arg(long, value_name = "N", group = "changes", allow_negative_numbers = true, value_parser = arguments::small)]
    priority: Option<i16>,
    /// Number of attempts to count as used
    #[arg(long, value_name = "N", group = "changes", value_parser = arguments::small)]
    attempts: Option<i16>,
    /// Maximum number of attempts
    #[arg(long, value_name = "N", group = "changes", value_parser = arguments::small)]
    max_attempts: Option<i16>,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `run-now`.
#[derive(Debug, Args)]
pub(crate) struct RunNow {
    /// Job ids
    #[arg(value_name = "ID", required = true, value_parser = arguments::job_id)]
    ids: Vec<i64>,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `remove`.
#[derive(Debug, Args)]
pub(crate) struct Remove {
    /// Job keys
    #[arg(value_name = "KEY", required = true)]
    keys: Vec<String>,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `sweep`.
#[derive(Debug, Args)]
pub(crate) struct Sweep {
    /// Only list the dead workers
    #[arg(long)]
    dry_run: bool,
    /// How long after its last heartbeat a worker counts as dead; at least two of its heartbeat intervals [default: 5m]
    #[arg(long, value_name = "DURATION", value_parser = arguments::duration)]
    threshold: Option<Duration>,
    /// Delay before the released jobs run again [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = arguments::duration)]
    delay: Option<Duration>,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `unlock`.
#[derive(Debug, Args)]
pub(crate) struct Unlock {
    /// Worker ids, as shown by `workers`
    #[arg(value_name = "WORKER_ID", required = true)]
    worker_ids: Vec<String>,
    /// Also release workers that seem to be alive; their jobs may run twice
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `cleanup`.
#[derive(Debug, Args)]
pub(crate) struct Cleanup {
    /// What to delete: tasks without jobs, queues without jobs, permanently failed jobs
    /// [default: GC_TASK_IDENTIFIERS GC_JOB_QUEUES]
    #[arg(value_name = "TASKS", ignore_case = true, value_delimiter = ',')]
    tasks: Vec<arguments::Cleanup>,
    #[command(flatten)]
    output: OutputFormat,
}

/// A job that was added or changed, as `--json` prints it.
#[derive(Serialize)]
struct JobOutput<'a> {
    id: i64,
    task_identifier: &'a str,
    priority: i16,
    run_at: DateTime<Utc>,
    attempts: i16,
    max_attempts: i16,
    last_error: Option<&'a str>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    key: Option<&'a str>,
    revision: i32,
    flags: Vec<&'a String>,
    payload: &'a RawValue,
}

impl<'a> From<&'a Job> for JobOutput<'a> {
    fn from(job: &'a Job) -> JobOutput<'a> {
        let flags = job.flags.as_ref().and_then(|flags| flags.as_object());
        JobOutput {
            id: job.id,
            task_identifier: &job.task_identifier,
            priority: job.priority,
            run_at: job.run_at,
            attempts: job.attempts,
            max_attempts: job.max_attempts,
            last_error: job.last_error.as_deref(),
            created_at: job.created_at,
            updated_at: job.updated_at,
            key: job.key.as_deref(),
            revision: job.revision,
            flags: flags.into_iter().flat_map(|flags| flags.keys()).collect(),
            payload: &job.payload,
        }
    }
}

/// A job that was added in place of another, as `--json` prints it.
#[derive(Serialize)]
struct ReplacementOutput<'a> {
    #[serde(flatten)]
    job: JobOutput<'a>,
    outcome: ReplaceOutcome,
    waits_for: &'a [i64],
    worker_id: Option<&'a str>,
}

/// A job, key or worker that was not changed, and why.
#[derive(Serialize)]
struct NotDone<T> {
    #[serde(flatten)]
    what: T,
    reason: String,
}

/// The id of a job.
#[derive(Serialize)]
struct Id {
    id: i64,
}

pub(super) async fn add(args: Add, database: &Database) -> Result<(), Failure> {
    if let Some(file) = &args.file {
        let jobs = read_jobs(file).await?;
        return add_all(&jobs, &utils_for_adding(database).await?, database, args.output).await;
    }
    args.check()?;
    let payload = payload(args.payload.as_deref()).await?;
    let utils = utils_for_adding(database).await?;
    let task = args.task.unwrap_or_default();
    if args.debounce.is_some() || args.throttle.is_some() {
        let key = args.key.unwrap_or_default();
        let job = match (args.debounce, args.throttle) {
            (Some(wait), _) => utils.debounce_in_queue(&task, payload, &key, (wait, args.max_wait), args.queue).await?,
            (None, every) => {
                utils.throttle_in_queue(&task, payload, &key, every.unwrap_or_default(), args.queue).await?
            }
        };
        return print_added(&job, args.output);
    }
    let spec = JobSpec {
        run_at: due(args.when.run_at, args.when.delay, database).await?,
        queue_name: args.queue,
        max_attempts: args.max_attempts,
        priority: args.priority,
        job_key: args.key,
        job_key_mode: args.key_mode,
        flags: (!args.flags.is_empty()).then_some(args.flags),
        expires_at: due(None, args.expires_in, database).await?,
    };
    if args.replace_running {
        let key = spec.job_key.clone().unwrap_or_default();
        let options = CancelOptions::default().reason(args.reason).force(args.force);
        let replaced = utils.replace_raw_job(&task, payload, &key, spec, options).await?;
        return print_replaced(&replaced, args.output);
    }
    let job = utils.add_raw_job(&task, payload, spec).await?;
    print_added(&job, args.output)
}

impl Add {
    /// Checks combinations of options that clap cannot check.
    fn check(&self) -> Result<(), Failure> {
        let (Some(wait), Some(max)) = (self.debounce, self.max_wait) else { return Ok(()) };
        if max >= wait {
            return Ok(());
        }
        let [wait, max] = [wait, max].map(|time| length(time.as_secs_f64()));
        Err(Failure::Usage(format!("--max-wait must be at least as long as --debounce ({wait}), got {max}")))
    }
}

fn print_added(job: &Job, output: OutputFormat) -> Result<(), Failure> {
    if output.json {
        return print_json(&JobOutput::from(job));
    }
    let done = if job.revision > 0 { "changed" } else { "added" };
    let due = relative_time(job.run_at.max(Utc::now()), Utc::now());
    print_line(&format!("job {} {done}: {}, due {due}", job.id, sanitize(&job.task_identifier)))
}

fn print_replaced(replaced: &Replacement, output: OutputFormat) -> Result<(), Failure> {
    let Replacement { job, outcome, waits_for, worker_id, .. } = replaced;
    let worker_id = worker_id.as_deref();
    if output.json {
        let job = JobOutput::from(job);
        return print_json(&ReplacementOutput { job, outcome: *outcome, waits_for, worker_id });
    }
    let how = match outcome {
        ReplaceOutcome::Stopping => "stopped in",
        ReplaceOutcome::Unstoppable => "ended in",
        _ => return print_added(job, output),
    };
    let jobs: Vec<String> = waits_for.iter().map(|id| format!("job {id}")).collect();
    let (jobs, has) = (jobs.join(", "), if waits_for.len() == 1 { "has" } else { "have" });
    let done = if job.revision > 0 { "changed" } else { "added" };
    let worker = sanitize(short_worker_id(worker_id.unwrap_or_default()));
    let note = if *outcome == ReplaceOutcome::Unstoppable { ", which cannot stop it" } else { "" };
    let task = sanitize(&job.task_identifier);
    print_line(&format!("job {} {done}: {task}, starts when {jobs} {has} {how} worker {worker}{note}", job.id))
}

/// Reads all of standard input, on another thread, so that a signal can interrupt it.
async fn standard_input() -> std::io::Result<String> {
    let reading = tokio::task::spawn_blocking(|| std::io::read_to_string(std::io::stdin()));
    reading.await.map_err(std::io::Error::other)?
}

/// Reads and checks the payload.
async fn payload(given: Option<&str>) -> Result<Box<RawValue>, Failure> {
    let text = match given {
        None => "{}".to_owned(),
        Some("-") => standard_input()
            .await
            .map_err(|error| format!("could not read the payload from standard input: {error}"))?,
        Some(text) => text.to_owned(),
    };
    let wrong = |error| {
        Failure::Usage(format!("the payload is not valid JSON, such as '{{\"id\": 1}}' or '\"text\"': {error}"))
    };
    RawValue::from_string(text.trim().to_owned()).map_err(wrong)
}

/// The time at which the job may run. A delay counts from the database's clock.
async fn due(
    run_at: Option<DateTime<Utc>>,
    delay: Option<Duration>,
    database: &Database,
) -> Result<Option<DateTime<Utc>>, Failure> {
    match delay {
        None => Ok(run_at),
        Some(delay) => Ok(Some(time_in(delay, database).await?)),
    }
}

pub(super) async fn time_in(delay: Duration, database: &Database) -> Result<DateTime<Utc>, Failure> {
    let mut connection = database.connect().await?;
    let row = sqlx::raw_sql("select pg_catalog.now()").fetch_one(&mut connection).await?;
    let now: DateTime<Utc> = row.try_get(0)?;
    let _ = sqlx::Connection::close(connection).await;
    let out_of_range = || Failure::Usage(format!("{} from now is out of range", length(delay.as_secs_f64())));
    let delay = chrono::TimeDelta::from_std(delay).map_err(|_| out_of_range())?;
    now.checked_add_signed(delay).ok_or_else(out_of_range)
}

/// A line of a file of jobs. Its keys are the parameters of the SQL function `add_job`, or the names that Node uses.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(alias = "task", alias = "taskIdentifier", alias = "task_identifier")]
    identifier: String,
    #[serde(default = "empty_payload")]
    payload: Box<RawValue>,
    #[serde(default, alias = "queueName", alias = "queue")]
    queue_name: Option<String>,
    #[serde(default, alias = "runAt", deserialize_with = "time")]
    run_at: Option<DateTime<Utc>>,
    #[serde(default, alias = "maxAttempts")]
    max_attempts: Option<i16>,
    #[serde(default, alias = "jobKey", alias = "key")]
    job_key: Option<String>,
    #[serde(default, alias = "jobKeyMode")]
    job_key_mode: Option<JobKeyMode>,
    #[serde(default)]
    priority: Option<i16>,
    #[serde(default)]
    flags: Option<Vec<String>>,
    #[serde(default, alias = "expiresAt", deserialize_with = "expiry")]
    expires_at: Option<DateTime<Utc>>,
}

fn empty_payload() -> Box<RawValue> {
    RawValue::from_string("{}".to_owned()).expect("an empty object is JSON")
}

fn time<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    named_time("run_at", value)
}

fn expiry<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    named_time("expires_at", value)
}

fn named_time<'de, D: serde::Deserializer<'de>>(name: &str, value: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    let text = Option::<String>::deserialize(value)?;
    let wrong = |problem| serde::de::Error::custom(format!("{name} is not a time: {problem}"));
    text.map(|text| arguments::time(&text).map_err(wrong)).transpose()
}

/// What is wrong with a line, without the parser's jargon.
fn problem(error: &serde_json::Error) -> String {
    // The parser sees a single line, so its line number is always 1.
    let message = error.to_string().replace(" at line 1 column", " at column");
    match error.classify() {
        Category::Data => message
            .replace("missing field `identifier`", "missing field `identifier` (the task)")
            .replace("invalid type: ", "found ")
            .replace("invalid value: ", "found ")
            .replace("expected i16", "expected a whole number from -32768 to 32767")
            .replace("expected struct Line", "expected an object such as {\"identifier\": \"hello\"}"),
        _ => format!("not a JSON object such as {{\"identifier\": \"hello\", \"payload\": {{}}}}: {message}"),
    }
}

/// A job of a file. Its payload keeps its exact text, because a number may have more digits than Rust can represent.
type FileJob = RawJobSpec<Box<RawValue>>;

/// Reads all jobs of a file. If any line is invalid, prints an error for each invalid line and fails.
async fn read_jobs(file: &Path) -> Result<Vec<FileJob>, Failure> {
    let (name, text) = if file == Path::new("-") {
        ("standard input".to_owned(), standard_input().await)
    } else {
        (file.display().to_string(), std::fs::read_to_string(file))
    };
    let text = text.map_err(|error| format!("could not read {name}: {error}"))?;
    let (mut jobs, mut invalid) = (Vec::new(), 0);
    for (position, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match serde_json::from_str::<Line>(line) {
            Ok(line) => jobs.push(FileJob::from(line)),
            Err(error) => {
                invalid += 1;
                eprintln!("graphile-worker: {name} line {}: {}", position + 1, problem(&error));
            }
        }
    }
    if invalid > 0 { Err(Failure::AlreadyReported) } else { Ok(jobs) }
}

impl From<Line> for FileJob {
    fn from(line: Line) -> FileJob {
        let spec = JobSpec {
            queue_name: line.queue_name,
            run_at: line.run_at,
            max_attempts: line.max_attempts,
            job_key: line.job_key,
            job_key_mode: line.job_key_mode,
            priority: line.priority,
            flags: line.flags,
            expires_at: line.expires_at,
        };
        RawJobSpec { identifier: line.identifier, payload: line.payload, spec }
    }
}

/// Adds all jobs or none, in one transaction, in the order of the file.
async fn add_all(
    jobs: &[FileJob],
    utils: &WorkerUtils,
    database: &Database,
    output: OutputFormat,
) -> Result<(), Failure> {
    let mut connection = database.connect().await?;
    let mut transaction = sqlx::Connection::begin(&mut connection).await?;
    let progress = progress_of(jobs.len());
    let mut ids = Vec::with_capacity(jobs.len());
    for batch in batches(jobs) {
        let within = utils.within(&mut transaction);
        let wrong = |error: graphile_worker::Error| {
            let (first, last) = (ids.len() + 1, ids.len() + batch.len());
            Failure::because(format!(
                "no job was added, because of an error in jobs {first} to {last} of the file: {}",
                crate::failure::explain(&error)
            ))
        };
        if let [job] = batch {
            let added = within.add_raw_job(&job.identifier, &job.payload, job.spec.clone()).await;
            ids.push(added.map_err(wrong)?.id);
        } else {
            let added = within.add_raw_jobs(batch).await.map_err(wrong)?;
            ids.extend(added.iter().map(|job| job.id));
        }
        progress.set_position(ids.len() as u64);
    }
    graphile_worker::commit_transaction(transaction).await?;
    progress.finish_and_clear();
    if output.json {
        return print_json(&json!({ "added": ids.len(), "ids": ids }));
    }
    print_line(&format!("{} added", counted(ids.len() as i64, "job", "jobs")))
}

/// Splits the jobs into batches for one call each. The key mode applies to a whole call, and a job with `unsafe_dedupe`
/// needs a call of its own.
fn batches(jobs: &[FileJob]) -> impl Iterator<Item = &[FileJob]> {
    let alone = |job: &FileJob| job.spec.job_key_mode == Some(JobKeyMode::UnsafeDedupe);
    let preserves = |job: &FileJob| job.spec.job_key_mode == Some(JobKeyMode::PreserveRunAt);
    let alike = move |a: &FileJob, b: &FileJob| !alone(a) && !alone(b) && preserves(a) == preserves(b);
    jobs.chunk_by(alike).flat_map(|alike| alike.chunks(BATCH_SIZE))
}

/// A progress bar, which is drawn only if standard error is a terminal.
fn progress_of(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos} of {len} jobs, {eta} left");
    ProgressBar::new(length as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

pub(super) async fn complete(args: Complete, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let done = utils.complete_jobs(&args.ids).await?;
    report(&args.ids, done, &utils, args.output, |job| format!("job {} completed", job.id)).await
}

pub(super) async fn fail(args: Fail, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let done = utils.permanently_fail_jobs(&args.ids, &args.reason).await?;
    report(&args.ids, done, &utils, args.output, |job| format!("job {} failed permanently", job.id)).await
}

pub(super) async fn cancel(args: Cancel, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let options = CancelOptions::default().reason(args.reason).force(args.force);
    let all = if args.ids.is_empty() {
        let filter = JobFilter::default()
            .states(args.state)
            .task_identifier(args.task)
            .queue_name(args.queue)
            .key(args.key)
            .search(args.search);
        utils.cancel_matching_jobs(&filter, options).await?
    } else {
        utils.cancel_jobs(&args.ids, options).await?
    };
    let (mut done, mut not_done, mut lines) = (Vec::new(), Vec::new(), String::new());
    for job in all {
        let id = job.id;
        let worker = sanitize(job.worker_id.as_deref().unwrap_or("a worker without an id"));
        let reason = match job.outcome {
            CancelOutcome::Cancelled => {
                lines.push_str(&format!("job {id} cancelled\n"));
                None
            }
            CancelOutcome::Stopping => {
                lines.push_str(&format!("job {id} is running: worker {worker} was asked to stop it\n"));
                None
            }
            CancelOutcome::Unstoppable => Some(format!(
                "is running on {worker}, which cannot stop it: it runs to its end, and will not be retried"
            )),
            CancelOutcome::Failed => Some("has failed permanently, or was cancelled, before".to_owned()),
            _ => Some("does not exist".to_owned()),
        };
        match reason {
            None => done.push(job),
            Some(reason) => not_done.push(NotDone { what: Id { id }, reason }),
        }
    }
    if args.output.json {
        print_json(&json!({ "done": done, "not_done": not_done }))?;
    } else if done.is_empty() && not_done.is_empty() {
        print_line("no jobs")?;
    } else {
        print(&lines)?;
    }
    finish(not_done.iter().map(|not_done| format!("job {} {}", not_done.what.id, not_done.reason)))
}

pub(super) async fn reschedule(args: Reschedule, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let run_at = due(args.run_at, args.delay, database).await?;
    let changes = RescheduleJobOptions::default()
        .run_at(run_at)
        .priority(args.priority)
        .attempts(args.attempts)
        .max_attempts(args.max_attempts);
    let done = utils.reschedule_jobs(&args.ids, changes).await?;
    report(&args.ids, done, &utils, args.output, |job| format!("job {} {}", job.id, schedule_text(job))).await
}

pub(super) async fn run_now(args: RunNow, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let now = RescheduleJobOptions::default().run_at(time_in(Duration::ZERO, database).await?);
    let mut connection = database.connect().await?;
    let mut transaction = sqlx::Connection::begin(&mut connection).await?;
    let within = utils.within(&mut transaction);
    let mut done = within.reschedule_jobs(&args.ids, now.clone()).await?;
    let exhausted: Vec<i64> = done.iter().filter(|job| job.attempts >= job.max_attempts).map(|job| job.id).collect();
    if !exhausted.is_empty() {
        let again = within.reschedule_jobs(&exhausted, now.attempts(0)).await?;
        done.retain(|job| !exhausted.contains(&job.id));
        done.extend(again);
    }
    drop(within);
    graphile_worker::commit_transaction(transaction).await?;
    report(&args.ids, done, &utils, args.output, |job| format!("job {} {}", job.id, schedule_text(job))).await
}

fn schedule_text(job: &Job) -> String {
    let Job { attempts, max_attempts, priority, .. } = job;
    if attempts >= max_attempts {
        return format!("will not run: {attempts} of {max_attempts} attempts are used");
    }
    let due = relative_time(job.run_at.max(Utc::now()), Utc::now());
    format!("is due {due}, priority {priority}, {attempts} of {max_attempts} attempts used")
}

/// Prints the jobs that were changed, and why the others were not.
async fn report(
    ids: &[i64],
    mut done: Vec<Job>,
    utils: &WorkerUtils,
    output: OutputFormat,
    sentence: impl Fn(&Job) -> String,
) -> Result<(), Failure> {
    done.sort_by_key(|job| job.id);
    let mut missing: Vec<i64> = ids.iter().copied().filter(|id| !done.iter().any(|job| job.id == *id)).collect();
    missing.sort_unstable();
    missing.dedup();
    let mut not_done = Vec::new();
    for id in missing {
        not_done.push(NotDone { what: Id { id }, reason: reason_not_done(id, utils).await? });
    }
    if output.json {
        let done: Vec<JobOutput<'_>> = done.iter().map(JobOutput::from).collect();
        print_json(&json!({ "done": done, "not_done": not_done }))?;
    } else {
        print(&done.iter().map(|job| sentence(job) + "\n").collect::<String>())?;
    }
    finish(not_done.iter().map(|not_done| format!("job {} {}", not_done.what.id, not_done.reason)))
}

async fn reason_not_done(id: i64, utils: &WorkerUtils) -> Result<String, Failure> {
    Ok(match utils.find_job(id).await? {
        None => "does not exist".to_owned(),
        Some(details) => match (&details.job.locked_by, details.job.locked_at) {
            (worker, Some(since)) => {
                let worker = sanitize(worker.as_deref().unwrap_or("a worker without an id"));
                format!("is running on {worker}, since {}", relative_time(since, Utc::now()))
            }
            _ => "was running a moment ago: try again".to_owned(),
        },
    })
}

/// Prints a line for each job that was not changed, and fails if there is any.
pub(super) fn finish(not_done: impl Iterator<Item = String>) -> Result<(), Failure> {
    let mut ended = Ok(());
    for line in not_done {
        eprintln!("graphile-worker: {line}");
        ended = Err(Failure::AlreadyReported);
    }
    ended
}

pub(super) async fn remove(args: Remove, database: &Database) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Key {
        key: String,
    }
    let utils = utils(database).await?;
    let (mut done, mut not_done, mut lines) = (Vec::new(), Vec::new(), String::new());
    for key in args.keys {
        let Some(job) = utils.remove_job(&key).await? else {
            not_done.push(NotDone { what: Key { key }, reason: "no job has this key".to_owned() });
            continue;
        };
        lines.push_str(&if job.locked_at.is_some() && job.key.is_none() {
            format!("job {} is running: its key was removed, and it will not be retried\n", job.id)
        } else {
            format!("job {} removed\n", job.id)
        });
        done.push(job);
    }
    if args.output.json {
        let done: Vec<JobOutput<'_>> = done.iter().map(JobOutput::from).collect();
        print_json(&json!({ "done": done, "not_done": not_done }))?;
    } else {
        print(&lines)?;
    }
    finish(not_done.iter().map(|not_done| format!("key {:?}: {}", not_done.what.key, not_done.reason)))
}

pub(super) async fn sweep(args: Sweep, database: &Database) -> Result<(), Failure> {
    let options = SweepStaleWorkersOptions::default()
        .sweep_threshold(args.threshold)
        .recovery_delay(args.delay)
        .dry_run(args.dry_run);
    let utils = utils(database).await?;
    let swept = utils.sweep_stale_workers(options).await?;
    let silent = utils.list_workers(args.threshold.unwrap_or(Duration::from_secs(5 * 60))).await?;
    let not_yet: Vec<&WorkerSummary> = silent
        .iter()
        .filter(|worker| worker.state == WorkerState::Stale && !swept.worker_ids.contains(&worker.worker_id))
        .collect();
    if args.output.json {
        return print_json(&json!({
            "dry_run": args.dry_run,
            "worker_ids": swept.worker_ids,
            "not_dead_yet": not_yet.iter().map(|worker| &worker.worker_id).collect::<Vec<_>>(),
            "recovered_count": swept.recovered_count,
            "somebody_else_sweeps": swept.already_sweeping,
        }));
    }
    if swept.already_sweeping {
        return Err(Failure::because("another sweep is running, so nothing was checked: try again in a moment"));
    }
    let mut text: String = swept.worker_ids.iter().map(|id| format!("worker {} is dead\n", sanitize(id))).collect();
    for worker in not_yet {
        let last_heartbeat = worker.last_heartbeat_at.map(|time| relative_time(time, Utc::now())).unwrap_or_default();
        text.push_str(&format!(
            "worker {} sent its last heartbeat {last_heartbeat}, but counts as dead only after two of its heartbeat \
             intervals\n",
            sanitize(&worker.worker_id)
        ));
    }
    text.push_str(&match (swept.worker_ids.is_empty(), args.dry_run) {
        (true, _) => "no dead workers\n".to_owned(),
        (false, true) => "nothing was changed: run without --dry-run to release their jobs\n".to_owned(),
        (false, false) => format!("{} released\n", counted(swept.recovered_count, "job", "jobs")),
    });
    print(&text)
}

pub(super) async fn unlock(args: Unlock, database: &Database) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Worker {
        worker_id: String,
        jobs: i64,
        queues: i64,
    }
    let utils = utils(database).await?;
    let known = utils.list_workers(Duration::from_secs(5 * 60)).await?;
    let (mut done, mut not_done) = (Vec::new(), Vec::new());
    for worker_id in args.worker_ids {
        // Accept the short ids that tables and log lines show.
        let mut short = known.iter().filter(|worker| short_worker_id(&worker.worker_id) == worker_id);
        let only = short.next().filter(|_| short.next().is_none());
        let found = known.iter().find(|worker| worker.worker_id == worker_id).or(only);
        let worker_id = found.map_or(worker_id, |worker| worker.worker_id.clone());
        let (jobs, queues) = found.map_or((0, 0), |worker| (worker.jobs, worker.queues));
        let is_alive = found.is_some_and(|worker| matches!(worker.state, WorkerState::Alive | WorkerState::Silent));
        let is_unseen = found.is_some_and(|worker| worker.is_connected == Some(false));
        let worker = Worker { worker_id, jobs, queues };
        if jobs + queues == 0 {
            not_done.push(NotDone { what: worker, reason: "holds nothing".to_owned() });
        } else if is_alive && !args.force {
            let reason = if is_unseen {
                "has sent a heartbeat recently, but no connection has its name: if it is dead, use --force"
            } else {
                "is alive, and its jobs would run twice: stop it, or use --force"
            };
            not_done.push(NotDone { what: worker, reason: reason.to_owned() });
        } else {
            done.push(worker);
        }
    }
    if !done.is_empty() {
        let ids: Vec<&str> = done.iter().map(|worker| worker.worker_id.as_str()).collect();
        utils.force_unlock_workers(&ids).await?;
    }
    if args.output.json {
        print_json(&json!({ "done": done, "not_done": not_done }))?;
    } else {
        let sentence = |worker: &Worker| {
            let (jobs, queues) = (counted(worker.jobs, "job", "jobs"), counted(worker.queues, "queue", "queues"));
            format!("worker {}: {jobs} and {queues} released\n", sanitize(&worker.worker_id))
        };
        print(&done.iter().map(sentence).collect::<String>())?;
    }
    let reasons = not_done.iter().map(|not_done| {
        let NotDone { what, reason } = not_done;
        format!("worker {} {reason}", sanitize(&what.worker_id))
    });
    finish(reasons)
}

pub(super) async fn cleanup(args: Cleanup, database: &Database) -> Result<(), Failure> {
    use arguments::Cleanup::{DeletePermafailedJobs, GcJobQueues, GcTaskIdentifiers};
    let utils = utils(database).await?;
    let tasks = if args.tasks.is_empty() { vec![GcTaskIdentifiers, GcJobQueues] } else { args.tasks };
    let progress = ProgressBar::new_spinner();
    progress.enable_steady_tick(Duration::from_millis(100));
    let mut deleted = [("failed_jobs", 0), ("task_identifiers", 0), ("job_queues", 0)];
    // Jobs first, so that their tasks and queues become unused and are deleted too.
    for (position, (task, cleanup, message)) in [
        (DeletePermafailedJobs, CleanupTask::DeletePermanentlyFailedJobs, "deleting permanently failed jobs"),
        (GcTaskIdentifiers, CleanupTask::GcTaskIdentifiers, "deleting tasks without jobs"),
        (GcJobQueues, CleanupTask::GcJobQueues, "deleting queues without jobs"),
    ]
    .into_iter()
    .enumerate()
    {
        if tasks.contains(&task) {
            progress.set_message(message);
            deleted[position].1 = utils.cleanup(&[cleanup]).await?;
        }
    }
    progress.finish_and_clear();
    let [(_, jobs), (_, identifiers), (_, queues)] = deleted;
    if args.output.json {
        let total = jobs + identifiers + queues;
        return print_json(&json!({
            "deleted": total, "failed_jobs": jobs, "task_identifiers": identifiers, "job_queues": queues,
        }));
    }
    let summary = format!(
        "deleted: {}, {}, {}",
        counted(jobs, "failed job", "failed jobs"),
        counted(identifiers, "task", "tasks"),
        counted(queues, "queue", "queues")
    );
    print_line(&wrapped(&summary, Screen::of_stdout().width))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(modes: &[Option<JobKeyMode>]) -> Vec<FileJob> {
        let job = |mode: &Option<JobKeyMode>| {
            let spec = JobSpec { job_key_mode: *mode, ..JobSpec::default() };
            RawJobSpec { identifier: "t".to_owned(), payload: empty_payload(), spec }
        };
        modes.iter().map(job).collect()
    }

    #[test]
    fn batches_keep_the_order_and_do_not_mix_key_modes() {
        use JobKeyMode::{PreserveRunAt, Replace, UnsafeDedupe};
        let jobs = jobs(&[
            None,
            Some(Replace),
            Some(PreserveRunAt),
            Some(PreserveRunAt),
            Some(UnsafeDedupe),
            Some(UnsafeDedupe),
            None,
        ]);
        let lengths: Vec<usize> = batches(&jobs).map(<[_]>::len).collect();
        assert_eq!(lengths, [2, 2, 1, 1, 1]);
    }

    #[test]
    fn many_jobs_are_split_into_batches() {
        let jobs = jobs(&vec![None; 2 * BATCH_SIZE + 1]);
        assert_eq!(batches(&jobs).map(<[_]>::len).collect::<Vec<_>>(), [BATCH_SIZE, BATCH_SIZE, 1]);
    }
}
