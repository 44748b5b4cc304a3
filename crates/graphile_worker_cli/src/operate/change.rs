//! Adding and changing jobs. What could not be done is told for each job, and makes the exit code 1.

use super::{Form, counted, print_json, utils};
use crate::arguments;
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use crate::table::{Screen, away, harmless, length, wrapped};
use chrono::{DateTime, Utc};
use clap::{Args, ValueEnum};
use graphile_worker::{
    CleanupTask, Job, JobKeyMode, JobSpec, RawJobSpec, RescheduleJobOptions, SweepStaleWorkersOptions, WorkerState,
    WorkerSummary, WorkerUtils,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use serde_json::json;
use serde_json::value::RawValue;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// So many jobs of a file go to the server at a time.
const PIECE: usize = 1000;

/// For `add`.
#[derive(Debug, Args)]
pub(crate) struct Add {
    /// The task
    #[arg(value_name = "TASK", required_unless_present = "file")]
    task: Option<String>,
    /// The payload in JSON, or - to read it from standard input [default: {}]
    #[arg(value_name = "PAYLOAD", allow_negative_numbers = true)]
    payload: Option<String>,
    /// Add the jobs of this file (- is standard input), all or none: one object a line, with identifier and, if wanted,
    /// payload, queue_name, run_at, max_attempts, job_key, job_key_mode, priority, flags
    #[arg(
        long, value_name = "FILE",
        conflicts_with_all = ["task", "payload", "queue", "run_at", "delay", "max_attempts", "priority", "key", "key_mode", "flags"]
    )]
    file: Option<PathBuf>,
    /// The queue, whose jobs run one at a time
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,
    #[command(flatten)]
    when: When,
    /// How often it may be tried [default: 25]
    #[arg(long, value_name = "N", value_parser = arguments::small)]
    max_attempts: Option<i16>,
    /// Lower runs first [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = arguments::small)]
    priority: Option<i16>,
    /// A key by which it can be changed or removed later
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// What happens when a job with this key exists [default: replace]
    #[arg(long, value_name = "MODE", requires = "key")]
    key_mode: Option<KeyMode>,
    /// A flag that workers may be told not to run; can be given again
    #[arg(long = "flag", value_name = "FLAG")]
    flags: Vec<String>,
    #[command(flatten)]
    form: Form,
}

/// When a job is due.
#[derive(Debug, Args)]
struct When {
    /// Not before this time, such as 2030-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", conflicts_with = "delay", value_parser = arguments::time)]
    run_at: Option<DateTime<Utc>>,
    /// Not before so long from now, such as 90s, 10m or "1h 30m"
    #[arg(long = "in", id = "delay", value_name = "DURATION", value_parser = arguments::duration)]
    delay: Option<Duration>,
}

#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
enum KeyMode {
    // A waiting job gets everything new.
    Replace,
    // The same, but it keeps its time.
    PreserveRunAt,
    // The existing job stays as it is.
    UnsafeDedupe,
}

impl From<KeyMode> for JobKeyMode {
    fn from(mode: KeyMode) -> JobKeyMode {
        match mode {
            KeyMode::Replace => JobKeyMode::Replace,
            KeyMode::PreserveRunAt => JobKeyMode::PreserveRunAt,
            KeyMode::UnsafeDedupe => JobKeyMode::UnsafeDedupe,
        }
    }
}

/// For `complete`.
#[derive(Debug, Args)]
pub(crate) struct Complete {
    /// The jobs
    #[arg(value_name = "ID", required = true, value_parser = arguments::job_id)]
    ids: Vec<i64>,
    #[command(flatten)]
    form: Form,
}

/// For `fail`.
#[derive(Debug, Args)]
pub(crate) struct Fail {
    /// The jobs
    #[arg(value_name = "ID", required = true, value_parser = arguments::job_id)]
    ids: Vec<i64>,
    /// What becomes their last error
    #[arg(long, value_name = "TEXT", default_value = "Manually marked as failed")]
    reason: String,
    #[command(flatten)]
    form: Form,
}

/// For `reschedule`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("changes").required(true).multiple(true))]
pub(crate) struct Reschedule {
    /// The jobs
    #[arg(value_name = "ID", required = true, value_parser = arguments::job_id)]
    ids: Vec<i64>,
    /// Not before this time, such as 2030-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", group = "changes", conflicts_with = "delay", value_parser = arguments::time)]
    run_at: Option<DateTime<Utc>>,
    /// Not before so long from now, such as 90s, 10m or "1h 30m"
    #[arg(long = "in", id = "delay", value_name = "DURATION", group = "changes", value_parser = arguments::duration)]
    delay: Option<Duration>,
    /// Lower runs first
    #[arg(long, value_name = "N", group = "changes", allow_negative_numbers = true, value_parser = arguments::small)]
    priority: Option<i16>,
    /// How often they count as tried
    #[arg(long, value_name = "N", group = "changes", value_parser = arguments::small)]
    attempts: Option<i16>,
    /// How often they may be tried
    #[arg(long, value_name = "N", group = "changes", value_parser = arguments::small)]
    max_attempts: Option<i16>,
    #[command(flatten)]
    form: Form,
}

/// For `run-now`.
#[derive(Debug, Args)]
pub(crate) struct RunNow {
    /// The jobs
    #[arg(value_name = "ID", required = true, value_parser = arguments::job_id)]
    ids: Vec<i64>,
    #[command(flatten)]
    form: Form,
}

/// For `remove`.
#[derive(Debug, Args)]
pub(crate) struct Remove {
    /// The job keys
    #[arg(value_name = "KEY", required = true)]
    keys: Vec<String>,
    #[command(flatten)]
    form: Form,
}

/// For `sweep`.
#[derive(Debug, Args)]
pub(crate) struct Sweep {
    /// Only say which workers are dead
    #[arg(long)]
    dry_run: bool,
    /// Dead is who has not been heard of for so long, and never before two of its own heartbeat intervals have passed [default:
    /// 5m]
    #[arg(long, value_name = "DURATION", value_parser = arguments::duration)]
    threshold: Option<Duration>,
    /// How long their jobs wait before they run again [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = arguments::duration)]
    delay: Option<Duration>,
    #[command(flatten)]
    form: Form,
}

/// For `unlock`.
#[derive(Debug, Args)]
pub(crate) struct Unlock {
    /// The workers
    #[arg(value_name = "WORKER_ID", required = true)]
    worker_ids: Vec<String>,
    /// Also workers that seem to live, whose jobs would then run twice
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    form: Form,
}

/// For `cleanup`.
#[derive(Debug, Args)]
pub(crate) struct Cleanup {
    /// What to delete [default: GC_TASK_IDENTIFIERS GC_JOB_QUEUES]
    #[arg(value_name = "TASKS", ignore_case = true, value_delimiter = ',')]
    tasks: Vec<arguments::Cleanup>,
    #[command(flatten)]
    form: Form,
}

/// A job as `--json` says it after it was added or changed.
#[derive(Serialize)]
struct Told<'a> {
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

impl<'a> From<&'a Job> for Told<'a> {
    fn from(job: &'a Job) -> Told<'a> {
        let flags = job.flags.as_ref().and_then(|flags| flags.as_object());
        Told {
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

/// What was not done, and why.
#[derive(Serialize)]
struct NotDone<T> {
    #[serde(flatten)]
    what: T,
    reason: String,
}

/// Which job.
#[derive(Serialize)]
struct Id {
    id: i64,
}

pub(super) async fn add(asked: Add, database: &Database) -> Result<(), Failure> {
    if let Some(file) = &asked.file {
        let jobs = read_jobs(file).await?;
        return add_all(&jobs, &utils(database).await?, database, asked.form).await;
    }
    let payload = payload(asked.payload.as_deref()).await?;
    let utils = utils(database).await?;
    let mut spec = JobSpec::default();
    spec.run_at = due(asked.when.run_at, asked.when.delay, database).await?;
    spec.queue_name = asked.queue;
    spec.max_attempts = asked.max_attempts;
    spec.priority = asked.priority;
    spec.job_key = asked.key;
    spec.job_key_mode = asked.key_mode.map(JobKeyMode::from);
    spec.flags = (!asked.flags.is_empty()).then_some(asked.flags);
    let job = utils.add_raw_job(&asked.task.unwrap_or_default(), payload, spec).await?;
    if asked.form.json {
        return print_json(&Told::from(&job));
    }
    let done = if job.revision > 0 { "changed" } else { "added" };
    let due = away(job.run_at.max(Utc::now()), Utc::now());
    print_line(&format!("job {} {done}: {}, due {due}", job.id, harmless(&job.task_identifier)))
}

/// All of it; a signal ends the program meanwhile.
async fn standard_input() -> std::io::Result<String> {
    let reading = tokio::task::spawn_blocking(|| std::io::read_to_string(std::io::stdin()));
    reading.await.map_err(std::io::Error::other)?
}

/// The payload, checked before anything is done.
async fn payload(given: Option<&str>) -> Result<Box<RawValue>, Failure> {
    let text = match given {
        None => "{}".to_owned(),
        Some("-") => standard_input()
            .await
            .map_err(|error| format!("the payload cannot be read from standard input: {error}"))?,
        Some(text) => text.to_owned(),
    };
    let wrong =
        |error| Failure::Usage(format!("the payload is not JSON, such as '{{\"id\": 1}}' or '\"text\"': {error}"));
    RawValue::from_string(text.trim().to_owned()).map_err(wrong)
}

/// When a job is due; so long from now by the database's clock.
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

async fn time_in(delay: Duration, database: &Database) -> Result<DateTime<Utc>, Failure> {
    let mut connection = database.connect().await?;
    let now: DateTime<Utc> = sqlx::query_scalar("select now()").fetch_one(&mut connection).await?;
    let _ = sqlx::Connection::close(connection).await;
    let far = || Failure::Usage(format!("{} from now is no time any more", length(delay.as_secs_f64())));
    let delay = chrono::TimeDelta::from_std(delay).map_err(|_| far())?;
    now.checked_add_signed(delay).ok_or_else(far)
}

/// A line of a file of jobs, by the names of the SQL function's parameters or of Node's.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(alias = "task", alias = "taskIdentifier", alias = "task_identifier")]
    identifier: String,
    #[serde(default = "nothing")]
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
    job_key_mode: Option<KeyMode>,
    #[serde(default)]
    priority: Option<i16>,
    #[serde(default)]
    flags: Option<Vec<String>>,
}

fn nothing() -> Box<RawValue> {
    RawValue::from_string("{}".to_owned()).expect("an empty object is JSON")
}

fn time<'de, D: serde::Deserializer<'de>>(written: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    let text = Option::<String>::deserialize(written)?;
    let wrong = |problem| serde::de::Error::custom(format!("run_at is not a time: {problem}"));
    text.map(|text| arguments::time(&text).map_err(wrong)).transpose()
}

/// What is wrong with a line, for somebody who has never seen a parser.
fn problem(error: &serde_json::Error) -> String {
    // The parser counts lines, too, and there is only one.
    let words = error.to_string().replace(" at line 1 column", " at column");
    match error.classify() {
        Category::Data => words
            .replace("missing field `identifier`", "identifier, the task, is missing")
            .replace("invalid type: ", "found ")
            .replace("invalid value: ", "found ")
            .replace("expected i16", "expected a whole number from -32768 to 32767")
            .replace("expected struct Line", "expected an object such as {\"identifier\": \"hello\"}"),
        _ => format!("no JSON object such as {{\"identifier\": \"hello\", \"payload\": {{}}}}: {words}"),
    }
}

/// A job of a file, its payload as it is written there: a number may have more digits than a program can count.
type FileJob = RawJobSpec<Box<RawValue>>;

/// All jobs of a file; where any line is wrong, those that are wrong are told, and nothing is done.
async fn read_jobs(file: &Path) -> Result<Vec<FileJob>, Failure> {
    let (name, text) = if file == Path::new("-") {
        ("standard input".to_owned(), standard_input().await)
    } else {
        (file.display().to_string(), std::fs::read_to_string(file))
    };
    let text = text.map_err(|error| format!("{name} cannot be read: {error}"))?;
    let (mut jobs, mut wrong) = (Vec::new(), 0);
    for (position, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match serde_json::from_str::<Line>(line) {
            Ok(line) => jobs.push(FileJob::from(line)),
            Err(error) => {
                wrong += 1;
                eprintln!("graphile-worker: {name} line {}: {}", position + 1, problem(&error));
            }
        }
    }
    if wrong > 0 { Err(Failure::Said) } else { Ok(jobs) }
}

impl From<Line> for FileJob {
    fn from(line: Line) -> FileJob {
        let mut spec = JobSpec::default();
        spec.queue_name = line.queue_name;
        spec.run_at = line.run_at;
        spec.max_attempts = line.max_attempts;
        spec.job_key = line.job_key;
        spec.job_key_mode = line.job_key_mode.map(JobKeyMode::from);
        spec.priority = line.priority;
        spec.flags = line.flags;
        RawJobSpec { identifier: line.identifier, payload: line.payload, spec }
    }
}

/// Adds all jobs or none, in one transaction, in the order of the file.
async fn add_all(jobs: &[FileJob], utils: &WorkerUtils, database: &Database, form: Form) -> Result<(), Failure> {
    let mut connection = database.connect().await?;
    let mut transaction = sqlx::Connection::begin(&mut connection).await?;
    let progress = progress_of(jobs.len());
    let mut ids = Vec::with_capacity(jobs.len());
    for piece in pieces(jobs) {
        let within = utils.within(&mut transaction);
        let wrong = |error: graphile_worker::Error| {
            let (first, last) = (ids.len() + 1, ids.len() + piece.len());
            Failure::because(format!(
                "no job was added: jobs {first} to {last} of the file: {}",
                crate::failure::explain(&error)
            ))
        };
        if let [job] = piece {
            let added = within.add_raw_job(&job.identifier, &job.payload, job.spec.clone()).await;
            ids.push(added.map_err(wrong)?.id);
        } else {
            let added = within.add_raw_jobs(piece).await.map_err(wrong)?;
            ids.extend(added.iter().map(|job| job.id));
        }
        progress.set_position(ids.len() as u64);
    }
    transaction.commit().await?;
    progress.finish_and_clear();
    if form.json {
        return print_json(&json!({ "added": ids.len(), "ids": ids }));
    }
    print_line(&format!("{} added", counted(ids.len() as i64, "job", "jobs")))
}

/// Jobs that can go together: the key mode holds for a whole call, and some cannot go with others at all.
fn pieces(jobs: &[FileJob]) -> impl Iterator<Item = &[FileJob]> {
    let alone = |job: &FileJob| job.spec.job_key_mode == Some(JobKeyMode::UnsafeDedupe);
    let preserves = |job: &FileJob| job.spec.job_key_mode == Some(JobKeyMode::PreserveRunAt);
    let alike = move |a: &FileJob, b: &FileJob| !alone(a) && !alone(b) && preserves(a) == preserves(b);
    jobs.chunk_by(alike).flat_map(|alike| alike.chunks(PIECE))
}

/// On a terminal only: where standard error is none, nothing is drawn.
fn progress_of(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos} of {len} jobs, {eta} left");
    ProgressBar::new(length as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

pub(super) async fn complete(asked: Complete, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let done = utils.complete_jobs(&asked.ids).await?;
    tell(&asked.ids, done, &utils, asked.form, |job| format!("job {} completed", job.id)).await
}

pub(super) async fn fail(asked: Fail, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let done = utils.permanently_fail_jobs(&asked.ids, &asked.reason).await?;
    tell(&asked.ids, done, &utils, asked.form, |job| format!("job {} failed for good", job.id)).await
}

pub(super) async fn reschedule(asked: Reschedule, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let run_at = due(asked.run_at, asked.delay, database).await?;
    let (priority, attempts, max_attempts) = (asked.priority, asked.attempts, asked.max_attempts);
    let done =
        utils.reschedule_jobs(&asked.ids, RescheduleJobOptions { run_at, priority, attempts, max_attempts }).await?;
    tell(&asked.ids, done, &utils, asked.form, |job| format!("job {} {}", job.id, outlook(job))).await
}

pub(super) async fn run_now(asked: RunNow, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let now = RescheduleJobOptions {
        run_at: Some(time_in(Duration::ZERO, database).await?),
        ..RescheduleJobOptions::default()
    };
    let mut connection = database.connect().await?;
    let mut transaction = sqlx::Connection::begin(&mut connection).await?;
    let within = utils.within(&mut transaction);
    let mut done = within.reschedule_jobs(&asked.ids, now.clone()).await?;
    let used_up: Vec<i64> = done.iter().filter(|job| job.attempts >= job.max_attempts).map(|job| job.id).collect();
    if !used_up.is_empty() {
        let again = within.reschedule_jobs(&used_up, RescheduleJobOptions { attempts: Some(0), ..now }).await?;
        done.retain(|job| !used_up.contains(&job.id));
        done.extend(again);
    }
    drop(within);
    transaction.commit().await?;
    tell(&asked.ids, done, &utils, asked.form, |job| format!("job {} {}", job.id, outlook(job))).await
}

fn outlook(job: &Job) -> String {
    let Job { attempts, max_attempts, priority, .. } = job;
    if attempts >= max_attempts {
        return format!("will not run: {attempts} of {max_attempts} attempts are used up");
    }
    let due = away(job.run_at.max(Utc::now()), Utc::now());
    format!("is due {due}, priority {priority}, {attempts} of {max_attempts} attempts used")
}

/// Says what was done with which jobs, and of the others why not.
async fn tell(
    asked: &[i64],
    mut done: Vec<Job>,
    utils: &WorkerUtils,
    form: Form,
    sentence: impl Fn(&Job) -> String,
) -> Result<(), Failure> {
    done.sort_by_key(|job| job.id);
    let mut missing: Vec<i64> = asked.iter().copied().filter(|id| !done.iter().any(|job| job.id == *id)).collect();
    missing.sort_unstable();
    missing.dedup();
    let mut not_done = Vec::new();
    for id in missing {
        not_done.push(NotDone { what: Id { id }, reason: why_not(id, utils).await? });
    }
    if form.json {
        let done: Vec<Told<'_>> = done.iter().map(Told::from).collect();
        print_json(&json!({ "done": done, "not_done": not_done }))?;
    } else {
        print(&done.iter().map(|job| sentence(job) + "\n").collect::<String>())?;
    }
    finish(not_done.iter().map(|not_done| format!("job {} {}", not_done.what.id, not_done.reason)))
}

async fn why_not(id: i64, utils: &WorkerUtils) -> Result<String, Failure> {
    Ok(match utils.find_job(id).await? {
        None => "does not exist".to_owned(),
        Some(details) => match (&details.job.locked_by, details.job.locked_at) {
            (worker, Some(since)) => {
                let worker = harmless(worker.as_deref().unwrap_or("a worker without a name"));
                format!("is running on {worker}, since {}", away(since, Utc::now()))
            }
            _ => "was running a moment ago: try again".to_owned(),
        },
    })
}

/// Exit code 1 where anything was not done, a line for each.
fn finish(not_done: impl Iterator<Item = String>) -> Result<(), Failure> {
    let mut ended = Ok(());
    for line in not_done {
        eprintln!("graphile-worker: {line}");
        ended = Err(Failure::Said);
    }
    ended
}

pub(super) async fn remove(asked: Remove, database: &Database) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Key {
        key: String,
    }
    let utils = utils(database).await?;
    let (mut done, mut not_done, mut said) = (Vec::new(), Vec::new(), String::new());
    for key in asked.keys {
        let Some(job) = utils.remove_job(&key).await? else {
            not_done.push(NotDone { what: Key { key }, reason: "no job has this key".to_owned() });
            continue;
        };
        said.push_str(&if job.locked_at.is_some() && job.key.is_none() {
            format!("job {} is running: it lost its key, and will not run again\n", job.id)
        } else {
            format!("job {} removed\n", job.id)
        });
        done.push(job);
    }
    if asked.form.json {
        let done: Vec<Told<'_>> = done.iter().map(Told::from).collect();
        print_json(&json!({ "done": done, "not_done": not_done }))?;
    } else {
        print(&said)?;
    }
    finish(not_done.iter().map(|not_done| format!("key {:?}: {}", not_done.what.key, not_done.reason)))
}

pub(super) async fn sweep(asked: Sweep, database: &Database) -> Result<(), Failure> {
    let options = SweepStaleWorkersOptions {
        sweep_threshold: asked.threshold,
        recovery_delay: asked.delay,
        dry_run: asked.dry_run,
    };
    let utils = utils(database).await?;
    let swept = utils.sweep_stale_workers(options).await?;
    let silent = utils.list_workers(asked.threshold.unwrap_or(Duration::from_secs(5 * 60))).await?;
    let not_yet: Vec<&WorkerSummary> = silent
        .iter()
        .filter(|worker| worker.state == WorkerState::Stale && !swept.worker_ids.contains(&worker.worker_id))
        .collect();
    if asked.form.json {
        return print_json(&json!({
            "dry_run": asked.dry_run,
            "worker_ids": swept.worker_ids,
            "not_dead_yet": not_yet.iter().map(|worker| &worker.worker_id).collect::<Vec<_>>(),
            "recovered_count": swept.recovered_count,
            "somebody_else_sweeps": swept.somebody_else_sweeps,
        }));
    }
    if swept.somebody_else_sweeps {
        return Err(Failure::because("a worker is just sweeping: nothing was looked at; try again in a moment"));
    }
    let mut text: String = swept.worker_ids.iter().map(|id| format!("worker {} is dead\n", harmless(id))).collect();
    for worker in not_yet {
        let heard_of = worker.last_heartbeat_at.map(|time| away(time, Utc::now())).unwrap_or_default();
        text.push_str(&format!(
            "worker {} was last heard of {heard_of}, but is not dead before two of its own heartbeat intervals have passed\n",
            harmless(&worker.worker_id)
        ));
    }
    text.push_str(&match (swept.worker_ids.is_empty(), asked.dry_run) {
        (true, _) => "no dead workers\n".to_owned(),
        (false, true) => "nothing was changed: leave out --dry-run to free their jobs\n".to_owned(),
        (false, false) => format!("{} freed\n", counted(swept.recovered_count, "job", "jobs")),
    });
    print(&text)
}

pub(super) async fn unlock(asked: Unlock, database: &Database) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Worker {
        worker_id: String,
        jobs: i64,
        queues: i64,
    }
    let utils = utils(database).await?;
    let known = utils.list_workers(Duration::from_secs(5 * 60)).await?;
    let (mut done, mut not_done) = (Vec::new(), Vec::new());
    for worker_id in asked.worker_ids {
        let found = known.iter().find(|worker| worker.worker_id == worker_id);
        let (jobs, queues) = found.map_or((0, 0), |worker| (worker.jobs, worker.queues));
        let is_alive = found.is_some_and(|worker| worker.state == WorkerState::Alive);
        let is_connected = found.is_some_and(|worker| worker.is_connected);
        let worker = Worker { worker_id, jobs, queues };
        if jobs + queues == 0 {
            not_done.push(NotDone { what: worker, reason: "holds nothing".to_owned() });
        } else if is_alive && !asked.force {
            let reason = if is_connected {
                "lives, and its jobs would run twice: stop it, or use --force"
            } else {
                "was heard of lately, though no connection of it is to be seen: if it is dead, use --force"
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
    if asked.form.json {
        print_json(&json!({ "done": done, "not_done": not_done }))?;
    } else {
        let sentence = |worker: &Worker| {
            let (jobs, queues) = (counted(worker.jobs, "job", "jobs"), counted(worker.queues, "queue", "queues"));
            format!("worker {}: {jobs} and {queues} freed\n", harmless(&worker.worker_id))
        };
        print(&done.iter().map(sentence).collect::<String>())?;
    }
    let reasons = not_done.iter().map(|not_done| {
        let NotDone { what, reason } = not_done;
        format!("worker {} {reason}", harmless(&what.worker_id))
    });
    finish(reasons)
}

pub(super) async fn cleanup(asked: Cleanup, database: &Database) -> Result<(), Failure> {
    use arguments::Cleanup::{DeletePermafailedJobs, GcJobQueues, GcTaskIdentifiers};
    let utils = utils(database).await?;
    let tasks = if asked.tasks.is_empty() { vec![GcTaskIdentifiers, GcJobQueues] } else { asked.tasks };
    let progress = ProgressBar::new_spinner();
    progress.enable_steady_tick(Duration::from_millis(100));
    let mut deleted = [("failed_jobs", 0), ("task_identifiers", 0), ("job_queues", 0)];
    // Jobs first: then the tasks and queues go that only they belonged to.
    for (position, (task, cleanup, words)) in [
        (DeletePermafailedJobs, CleanupTask::DeletePermanentlyFailedJobs, "deleting jobs that failed for good"),
        (GcTaskIdentifiers, CleanupTask::GcTaskIdentifiers, "deleting tasks without jobs"),
        (GcJobQueues, CleanupTask::GcJobQueues, "deleting queues without jobs"),
    ]
    .into_iter()
    .enumerate()
    {
        if tasks.contains(&task) {
            progress.set_message(words);
            deleted[position].1 = utils.cleanup(&[cleanup]).await?;
        }
    }
    progress.finish_and_clear();
    let [(_, jobs), (_, identifiers), (_, queues)] = deleted;
    if asked.form.json {
        let total = jobs + identifiers + queues;
        return print_json(&json!({
            "deleted": total, "failed_jobs": jobs, "task_identifiers": identifiers, "job_queues": queues,
        }));
    }
    let said = format!(
        "deleted: {}, {}, {}",
        counted(jobs, "failed job", "failed jobs"),
        counted(identifiers, "task", "tasks"),
        counted(queues, "queue", "queues")
    );
    print_line(&wrapped(&said, Screen::of_stdout().width))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(modes: &[Option<JobKeyMode>]) -> Vec<FileJob> {
        let job = |mode: &Option<JobKeyMode>| {
            let mut spec = JobSpec::default();
            spec.job_key_mode = *mode;
            RawJobSpec { identifier: "t".to_owned(), payload: nothing(), spec }
        };
        modes.iter().map(job).collect()
    }

    #[test]
    fn jobs_go_together_in_their_order_as_far_as_their_key_modes_allow() {
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
        let lengths: Vec<usize> = pieces(&jobs).map(<[_]>::len).collect();
        assert_eq!(lengths, [2, 2, 1, 1, 1]);
    }

    #[test]
    fn many_jobs_go_piece_by_piece() {
        let jobs = jobs(&vec![None; 2 * PIECE + 1]);
        assert_eq!(pieces(&jobs).map(<[_]>::len).collect::<Vec<_>>(), [PIECE, PIECE, 1]);
    }
}
