//! The commands that read: `list`, `show`, `why`, `stats`, `queues` and `workers`, with the tables that `top` shares.
//! `modify` has the commands that change something. The library queries and explains; this file prints.

use super::{OutputFormat, counted, print_json, utils};
use crate::arguments;
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use crate::table::{
    Cell, Screen, Table, Tone, length, number, relative_time, text, timestamp, truncate_to_line, wrapped,
};
use chrono::{DateTime, Utc};
use clap::Args;
use graphile_worker::{
    JobDetails, JobFilter, JobState, JobSummary, QueueSummary, WorkerState, WorkerSummary, short_worker_id,
};
use serde_json::json;
use std::time::Duration;

/// Options of `list`.
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only jobs in these states: ready, scheduled (not due yet), running, retrying (failed, waiting for its next
    /// attempt), failed (permanently), cancelled
    #[arg(long, value_name = "STATE", value_delimiter = ',', value_parser = state)]
    state: Vec<JobState>,
    /// Only jobs of this task
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Only jobs of this queue
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// Only the job with this key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Only jobs with this text in the payload, last error or key (case-insensitive)
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
    /// Start after this job id, the last one of the previous page
    #[arg(long, value_name = "ID", value_parser = arguments::job_id)]
    after: Option<i64>,
    /// Newest first
    #[arg(long)]
    newest: bool,
    /// Maximum number of jobs
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        default_value_t = 50,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    limit: u32,
    #[command(flatten)]
    output: OutputFormat,
}

/// Parses a job state. Also accepts common synonyms of the library's names.
pub(super) fn state(name: &str) -> Result<JobState, String> {
    match name {
        "future" => Ok(JobState::Scheduled),
        "locked" => Ok(JobState::Running),
        "permanently-failed" | "permafailed" => Ok(JobState::Failed),
        name => name.parse(),
    }
}

/// Options of `show`.
#[derive(Debug, Args)]
pub(crate) struct Show {
    /// Job id
    #[arg(value_name = "ID", value_parser = arguments::job_id)]
    id: i64,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `why`.
#[derive(Debug, Args)]
pub(crate) struct Why {
    /// Job id
    #[arg(value_name = "ID", value_parser = arguments::job_id)]
    id: i64,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `stats`.
#[derive(Debug, Args)]
pub(crate) struct Stats {
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `queues`.
#[derive(Debug, Args)]
pub(crate) struct Queues {
    /// Maximum number of queues: those with a running job first, then those with the most waiting jobs
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        default_value_t = 50,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    limit: u32,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `workers`.
#[derive(Debug, Args)]
pub(crate) struct Workers {
    /// How long after its last heartbeat a worker counts as stale
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = arguments::duration)]
    threshold: Duration,
    #[command(flatten)]
    output: OutputFormat,
}

pub(super) async fn list(args: List, database: &Database) -> Result<(), Failure> {
    let filter = JobFilter::default()
        .states(args.state)
        .task_identifier(args.task)
        .queue_name(args.queue)
        .key(args.key)
        .search(args.search)
        .after(args.after)
        .newest_first(args.newest)
        // One more than is shown, to know whether there are more.
        .limit(args.limit.saturating_add(1));
    let mut jobs = utils(database).await?.list_jobs(&filter).await?;
    let shown = args.limit as usize;
    let has_more = jobs.len() > shown;
    jobs.truncate(shown);
    if args.output.json {
        return print_json(&jobs);
    }
    if jobs.is_empty() {
        return print_line("no jobs");
    }
    let mut text = jobs_table(&jobs, Utc::now()).show(Screen::of_stdout());
    if let (true, Some(last)) = (has_more, jobs.last()) {
        text.push_str(&format!("more: --after {}\n", last.id));
    }
    print(&text)
}

pub(super) fn jobs_table(jobs: &[JobSummary], now: DateTime<Utc>) -> Table {
    let mut table = Table::new(&[
        number("id"),
        text("task"),
        text("state"),
        text("run at"),
        number("tries").optional(),
        text("queue").optional(),
        number("priority").optional(),
        text("key").optional(),
        text("worker").optional(),
        // Not optional: it is what an operator needs most.
        text("last error"),
    ])
    .max_lines(2);
    for job in jobs {
        table.row([
            job.id.to_string().into(),
            job.task_identifier.as_str().into(),
            Cell::toned(job.state.as_str(), tone(job.state)),
            // Such a job does not run, whatever its run_at is.
            if matches!(job.state, JobState::Failed | JobState::Cancelled) {
                "".into()
            } else if let Some(replaced) = job.replaces.first() {
                format!("after job {replaced}").into()
            } else {
                relative_time(job.run_at, now).into()
            },
            format!("{}/{}", job.attempts, job.max_attempts).into(),
            job.queue_name.as_deref().unwrap_or_default().into(),
            Cell::count(job.priority.into(), Tone::Plain),
            job.key.as_deref().unwrap_or_default().into(),
            job.locked_by.as_deref().map(short_worker_id).unwrap_or_default().into(),
            truncate_to_line(job.last_error.as_deref().unwrap_or_default(), 80).into(),
        ]);
    }
    table
}

fn tone(state: JobState) -> Tone {
    match state {
        JobState::Running => Tone::Good,
        JobState::Retrying => Tone::Careful,
        JobState::Failed => Tone::Bad,
        JobState::Scheduled | JobState::Cancelled => Tone::Faint,
        _ => Tone::Plain,
    }
}

pub(super) async fn show(args: Show, database: &Database) -> Result<(), Failure> {
    let Some(details) = utils(database).await?.find_job(args.id).await? else {
        return Err(Failure::because(format!(
            "there is no job {}: it completed, was removed, or never existed",
            args.id
        )));
    };
    if args.output.json {
        return print_json(&details);
    }
    print(&details_table(&details, Utc::now())?.show(Screen::of_stdout()))
}

fn details_table(details: &JobDetails, now: DateTime<Utc>) -> Result<Table, Failure> {
    let JobDetails { job, payload, .. } = details;
    let mut table = Table::of_pairs();
    table.pair("id", job.id.to_string());
    table.pair("task", job.task_identifier.as_str());
    table.pair("state", Cell::toned(job.state.as_str(), tone(job.state)));
    table.pair("run at", timestamp(job.run_at, now));
    if !job.replaces.is_empty() {
        let replaced: Vec<String> = job.replaces.iter().map(|id| format!("job {id}")).collect();
        table.pair("replaces", format!("{}, starts afterwards", replaced.join(", ")));
    }
    table.pair("attempts", format!("{} of {}", job.attempts, job.max_attempts));
    table.pair("priority", job.priority.to_string());
    if let Some(queue) = &job.queue_name {
        let held = match (&details.queue_locked_by, details.queue_locked_at) {
            _ if details.is_in_lane => String::new(),
            (Some(worker), Some(since)) => format!(", held by {worker} since {}", timestamp(since, now)),
            _ => ", free".to_owned(),
        };
        table.pair("queue", format!("{queue}{held}"));
    }
    if !details.limits.is_empty() {
        table.pair("limits", details.limits.join(", "));
    }
    if let Some(key) = &job.key {
        table.pair("key", key.as_str());
    }
    if job.revision > 0 {
        table.pair("changed by key", counted(job.revision, "time", "times"));
    }
    if !job.flags.is_empty() {
        table.pair("flags", job.flags.join(", "));
    }
    if let (Some(worker), Some(since)) = (&job.locked_by, job.locked_at) {
        table.pair("worker", format!("{worker} since {}", timestamp(since, now)));
    }
    table.pair("created", timestamp(job.created_at, now));
    table.pair("updated", timestamp(job.updated_at, now));
    if details.recoveries > 0 {
        table.pair("worker deaths", counted(details.recoveries, "time", "times"));
    }
    if let Some(error) = &job.last_error {
        table.pair("last error", Cell::toned(error.as_str(), Tone::Bad));
    }
    table.pair("payload", indented(payload.get()));
    Ok(table)
}

/// Indents JSON with one item per line. It does not parse it, so key order and numbers stay as stored.
fn indented(json: &str) -> String {
    let mut text = String::with_capacity(json.len() * 2);
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    let new_line = |text: &mut String, depth: usize| {
        text.push('\n');
        text.push_str(&"  ".repeat(depth.min(20)));
    };
    let mut characters = json.chars().filter(|c| *c != '\r').peekable();
    while let Some(c) = characters.next() {
        if in_string {
            text.push(c);
            in_string = escaped || c != '"';
            escaped = c == '\\' && !escaped;
            continue;
        }
        match c {
            c if c.is_whitespace() => {}
            '{' | '[' => {
                text.push(c);
                while characters.next_if(|c| c.is_whitespace()).is_some() {}
                if characters.peek().is_some_and(|next| !"]}".contains(*next)) {
                    depth += 1;
                    new_line(&mut text, depth);
                } else if let Some(end) = characters.next() {
                    text.push(end);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                new_line(&mut text, depth);
                text.push(c);
            }
            ',' => {
                text.push(c);
                new_line(&mut text, depth);
            }
            ':' => text.push_str(": "),
            c => {
                in_string = c == '"';
                text.push(c);
            }
        }
    }
    text
}

pub(super) async fn why(args: Why, database: &Database) -> Result<(), Failure> {
    let why = utils(database).await?.why(args.id).await?;
    if args.output.json {
        let mut json = serde_json::to_value(&why)?;
        for (reason, output) in why.reasons.iter().zip(json["reasons"].as_array_mut().into_iter().flatten()) {
            output["message"] = json!(reason.to_string());
        }
        print_json(&json)?;
    } else {
        let mut table = Table::of_pairs();
        let state = why.job.as_ref().map_or("none".to_owned(), |job| job.state.to_string());
        for (position, reason) in why.reasons.iter().enumerate() {
            let beginning = if position == 0 { format!("job {} ({state})", why.id) } else { String::new() };
            table.pair(&beginning, reason.to_string());
        }
        if let Some(fix) = &why.fix {
            table.pair("→", fix.as_str());
        }
        print(&table.show(Screen::of_stdout()))?;
    }
    if why.job.is_some() { Ok(()) } else { Err(Failure::AlreadyReported) }
}

pub(super) async fn stats(args: Stats, database: &Database) -> Result<(), Failure> {
    let stats = utils(database).await?.stats().await?;
    if args.output.json {
        return print_json(&stats);
    }
    print(&stats_table(&stats, usize::MAX).show(Screen::of_stdout()))
}

/// A row for all jobs, then one for each task. With a limit, the busiest tasks come first.
pub(super) fn stats_table(stats: &graphile_worker::QueueStats, max_tasks: usize) -> Table {
    let mut table = Table::new(&[
        text("task"),
        number("ready"),
        number("running"),
        number("retrying").optional(),
        number("failed"),
        number("cancelled").optional(),
        number("scheduled").optional(),
        text("lag"),
    ]);
    let mut row = |name: Cell, counts: [i64; 6], lag: Option<f64>| {
        let [ready, running, retrying, failed, cancelled, scheduled] = counts;
        table.row([
            name,
            Cell::count(ready, Tone::Plain),
            Cell::count(running, Tone::Good),
            Cell::count(retrying, Tone::Careful),
            Cell::count(failed, Tone::Bad),
            Cell::count(cancelled, Tone::Faint),
            Cell::count(scheduled, Tone::Plain),
            lag.map(length).unwrap_or_default().into(),
        ]);
    };
    let graphile_worker::QueueStats { ready, running, retrying, failed, cancelled, scheduled, lag_seconds, .. } =
        *stats;
    row(Cell::toned("(all)", Tone::Faint), [ready, running, retrying, failed, cancelled, scheduled], lag_seconds);
    let mut tasks: Vec<_> = stats.tasks.iter().collect();
    // If only some tasks are shown, the idle ones come last.
    if max_tasks < usize::MAX {
        let busy = |task: &&graphile_worker::TaskStats| (task.running, task.ready, task.retrying, task.failed);
        tasks.sort_by_key(|task| std::cmp::Reverse(busy(task)));
    }
    for task in tasks.into_iter().take(max_tasks) {
        let counts = [task.ready, task.running, task.retrying, task.failed, task.cancelled, task.scheduled];
        row(task.task_identifier.as_str().into(), counts, task.lag_seconds);
    }
    table
}

pub(super) async fn queues(args: Queues, database: &Database) -> Result<(), Failure> {
    let queues = utils(database).await?.list_queues(args.limit).await?;
    if args.output.json {
        return print_json(&queues);
    }
    if queues.is_empty() {
        return print_line("no queues");
    }
    print(&queues_table(&queues, Utc::now()).show(Screen::of_stdout()))
}

pub(super) fn queues_table(queues: &[QueueSummary], now: DateTime<Utc>) -> Table {
    let mut table = Table::new(&[
        text("queue"),
        number("waiting"),
        number("ready"),
        text("lag").optional(),
        number("running job"),
        text("held for").optional(),
        text("held by").optional(),
        text("limit").optional(),
    ]);
    let since = |time: DateTime<Utc>| length((now - time).as_seconds_f64().max(0.0));
    for queue in queues {
        table.row([
            queue.queue_name.as_str().into(),
            Cell::count(queue.waiting, Tone::Plain),
            Cell::count(queue.ready, Tone::Plain),
            queue.oldest_due_at.map(since).unwrap_or_default().into(),
            Cell::toned(queue.running_job_id.map(|id| id.to_string()).unwrap_or_default(), Tone::Good),
            queue.locked_at.map(since).unwrap_or_default().into(),
            queue.locked_by.as_deref().map(short_worker_id).unwrap_or_default().into(),
            limit_of_queue(queue).into(),
        ]);
    }
    table
}

/// The limit of a queue with its use, such as `2 of 5, queue:tenant:*`.
fn limit_of_queue(queue: &QueueSummary) -> String {
    let Some(limit) = &queue.limit else { return String::new() };
    let paused = if queue.is_paused { ", paused" } else { "" };
    format!("{} of {}, {limit}{paused}", queue.running, queue.concurrency)
}

pub(super) async fn workers(args: Workers, database: &Database) -> Result<(), Failure> {
    let workers = utils(database).await?.list_workers(args.threshold).await?;
    if args.output.json {
        return print_json(&workers);
    }
    if workers.is_empty() {
        return print_line("no workers found");
    }
    let mut text = workers_table(&workers, Utc::now()).show(Screen::of_stdout());
    if workers.iter().any(is_unregistered) {
        let note = "not registered: Node's workers, those of the Rust port, and ours with recovery off; their host, pid and slots are not known. To turn recovery on, start a worker without --no-recovery, or in Rust with `WorkerOptions::worker_recovery`";
        text.push_str(&wrapped(note, Screen::of_stdout().width));
        text.push('\n');
    }
    print(&text)
}

/// Whether the worker does not register. One that was declared dead did.
fn is_unregistered(worker: &WorkerSummary) -> bool {
    worker.last_heartbeat_at.is_none() && worker.state != WorkerState::Dead
}

pub(super) fn workers_table(workers: &[WorkerSummary], now: DateTime<Utc>) -> Table {
    let mut table = Table::new(&[
        text("worker"),
        text("state"),
        number("jobs"),
        text("host"),
        number("pid"),
        text("heartbeat").optional(),
        text("version").optional(),
        text("started").optional(),
        number("queues").optional(),
        text("holds since").optional(),
        text("tasks").optional(),
    ]);
    let ago = |time: Option<DateTime<Utc>>| time.map(|time| relative_time(time, now)).unwrap_or_default();
    for worker in workers {
        let state = match worker.state {
            WorkerState::Unknown if worker.of_rust_port => "unknown, of the Rust port".to_owned(),
            state if is_unregistered(worker) => format!("{state}, not registered"),
            WorkerState::Alive if worker.is_connected == Some(false) => "alive, but without a connection".to_owned(),
            WorkerState::Silent => {
                format!("silent: no heartbeat for {}", length(worker.heartbeat_seconds.unwrap_or_default()))
            }
            state => state.to_string(),
        };
        // Jobs that it holds, of the number that it can run at the same time.
        let jobs = match worker.slots {
            Some(slots) => format!("{}/{slots}", worker.jobs),
            None => worker.jobs.to_string(),
        };
        let tone = match worker.state {
            WorkerState::Alive if worker.is_connected == Some(false) => Tone::Careful,
            WorkerState::Alive => Tone::Good,
            WorkerState::Stale | WorkerState::Dead => Tone::Bad,
            _ => Tone::Careful,
        };
        table.row([
            short_worker_id(&worker.worker_id).into(),
            Cell::toned(state, tone),
            Cell::toned(jobs, if worker.jobs == 0 { Tone::Faint } else { Tone::Plain }),
            worker.host.as_deref().unwrap_or_default().into(),
            worker.pid.map(|pid| pid.to_string()).unwrap_or_default().into(),
            ago(worker.last_heartbeat_at).into(),
            worker.version.as_deref().unwrap_or_default().into(),
            ago(worker.started_at).into(),
            Cell::count(worker.queues, Tone::Plain),
            ago(worker.holds_since).into(),
            truncate_to_line(&worker.tasks.as_deref().unwrap_or_default().join(", "), 60).into(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::indented;

    #[test]
    fn payload_is_indented_but_otherwise_unchanged() {
        let shown = indented(r#"{"b" : 123456789012345678901234567890,"a":[],"t":"x, {y}: \"z\"", "n":[1e999,{}]}"#);
        let lines = [
            "{",
            "  \"b\": 123456789012345678901234567890,",
            "  \"a\": [],",
            r#"  "t": "x, {y}: \"z\"","#,
            "  \"n\": [",
            "    1e999,",
            "    {}",
            "  ]",
            "}",
        ];
        assert_eq!(shown, lines.join("\n"));
        assert_eq!(indented("\"text\""), "\"text\"");
    }
}
