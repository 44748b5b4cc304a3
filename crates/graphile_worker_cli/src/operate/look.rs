//! Looking at jobs, queues and workers, without changing anything.

use super::{Form, counted, print_json, utils};
use crate::arguments;
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use crate::table::{Cell, Screen, Table, Tone, away, in_short, instant, length, number, text};
use chrono::{DateTime, Utc};
use clap::Args;
use graphile_worker::{JobDetails, JobFilter, JobState, JobSummary, QueueSummary, WorkerState, WorkerSummary};
use serde_json::json;
use std::time::Duration;

/// For `list`.
#[derive(Debug, Args)]
pub(crate) struct List {
    /// In these states: ready, scheduled (not due yet), running, retrying (failed, waits for its next attempt), failed (for good)
    #[arg(long, value_name = "STATE", value_delimiter = ',', value_parser = state)]
    state: Vec<JobState>,
    /// Of this task
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Of this queue
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// With this job key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// With this text in payload, last error or key
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
    /// Beginning behind the job with this id, the last one of the page before
    #[arg(long, value_name = "ID", value_parser = arguments::job_id)]
    after: Option<i64>,
    /// The newest first
    #[arg(long)]
    newest: bool,
    /// At most so many
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    form: Form,
}

/// The names of the library, and what else people call them.
fn state(name: &str) -> Result<JobState, String> {
    match name {
        "future" => Ok(JobState::Scheduled),
        "locked" => Ok(JobState::Running),
        "permanently-failed" | "permafailed" => Ok(JobState::Failed),
        name => name.parse(),
    }
}

/// For `show`.
#[derive(Debug, Args)]
pub(crate) struct Show {
    /// The job
    #[arg(value_name = "ID", value_parser = arguments::job_id)]
    id: i64,
    #[command(flatten)]
    form: Form,
}

/// For `why`.
#[derive(Debug, Args)]
pub(crate) struct Why {
    /// The job
    #[arg(value_name = "ID", value_parser = arguments::job_id)]
    id: i64,
    #[command(flatten)]
    form: Form,
}

/// For `stats`.
#[derive(Debug, Args)]
pub(crate) struct Stats {
    #[command(flatten)]
    form: Form,
}

/// For `queues`.
#[derive(Debug, Args)]
pub(crate) struct Queues {
    /// At most so many: those that are held first, then those with the most jobs waiting
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    form: Form,
}

/// For `workers`.
#[derive(Debug, Args)]
pub(crate) struct Workers {
    /// Stale is who has not been heard of for so long
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = arguments::duration)]
    threshold: Duration,
    #[command(flatten)]
    form: Form,
}

pub(super) async fn list(asked: List, database: &Database) -> Result<(), Failure> {
    let filter = JobFilter {
        states: asked.state,
        task_identifier: asked.task,
        queue_name: asked.queue,
        key: asked.key,
        search: asked.search,
        after: asked.after,
        newest_first: asked.newest,
        // One more than is shown says whether there are more.
        limit: Some(asked.limit.saturating_add(1)),
    };
    let mut jobs = utils(database).await?.list_jobs(&filter).await?;
    let shown = asked.limit as usize;
    let has_more = jobs.len() > shown;
    jobs.truncate(shown);
    if asked.form.json {
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
        text("last error").optional(),
    ])
    .most_lines(2);
    for job in jobs {
        table.row([
            job.id.to_string().into(),
            job.task_identifier.as_str().into(),
            Cell::toned(job.state.as_str(), tone(job.state)),
            // It will not run, whatever its time says.
            if job.state == JobState::Failed { "".into() } else { away(job.run_at, now).into() },
            format!("{}/{}", job.attempts, job.max_attempts).into(),
            job.queue_name.as_deref().unwrap_or_default().into(),
            Cell::count(job.priority.into(), Tone::Plain),
            job.key.as_deref().unwrap_or_default().into(),
            job.locked_by.as_deref().unwrap_or_default().into(),
            in_short(job.last_error.as_deref().unwrap_or_default(), 80).into(),
        ]);
    }
    table
}

fn tone(state: JobState) -> Tone {
    match state {
        JobState::Running => Tone::Good,
        JobState::Retrying => Tone::Careful,
        JobState::Failed => Tone::Bad,
        JobState::Scheduled => Tone::Faint,
        _ => Tone::Plain,
    }
}

pub(super) async fn show(asked: Show, database: &Database) -> Result<(), Failure> {
    let Some(details) = utils(database).await?.find_job(asked.id).await? else {
        return Err(Failure::because(format!("there is no job {}: it is done, was removed, or never was", asked.id)));
    };
    if asked.form.json {
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
    table.pair("run at", instant(job.run_at, now));
    table.pair("attempts", format!("{} of {}", job.attempts, job.max_attempts));
    table.pair("priority", job.priority.to_string());
    if let Some(queue) = &job.queue_name {
        let held = match (&details.queue_locked_by, details.queue_locked_at) {
            (Some(worker), Some(since)) => format!(", held by {worker} since {}", instant(since, now)),
            _ => ", free".to_owned(),
        };
        table.pair("queue", format!("{queue}{held}"));
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
        table.pair("worker", format!("{worker} since {}", instant(since, now)));
    }
    table.pair("created", instant(job.created_at, now));
    table.pair("updated", instant(job.updated_at, now));
    if details.recoveries > 0 {
        table.pair("workers died", counted(details.recoveries, "time", "times"));
    }
    if let Some(error) = &job.last_error {
        table.pair("last error", Cell::toned(error.as_str(), Tone::Bad));
    }
    table.pair("payload", indented(payload.get()));
    Ok(table)
}

/// JSON with a line for each item. Nothing of it is read: order, numbers and depth stay as they are stored.
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

pub(super) async fn why(asked: Why, database: &Database) -> Result<(), Failure> {
    let why = utils(database).await?.why(asked.id).await?;
    if asked.form.json {
        let mut answer = serde_json::to_value(&why)?;
        for (reason, written) in why.reasons.iter().zip(answer["reasons"].as_array_mut().into_iter().flatten()) {
            written["message"] = json!(reason.to_string());
        }
        print_json(&answer)?;
    } else {
        let mut table = Table::of_pairs();
        let state = why.job.as_ref().map_or("none".to_owned(), |job| job.state.to_string());
        for (position, reason) in why.reasons.iter().enumerate() {
            let beginning = if position == 0 { format!("job {} ({state})", why.id) } else { String::new() };
            table.pair(&beginning, reason.to_string());
        }
        print(&table.show(Screen::of_stdout()))?;
    }
    if why.job.is_some() { Ok(()) } else { Err(Failure::Said) }
}

pub(super) async fn stats(asked: Stats, database: &Database) -> Result<(), Failure> {
    let stats = utils(database).await?.stats().await?;
    if asked.form.json {
        return print_json(&stats);
    }
    print(&stats_table(&stats, usize::MAX).show(Screen::of_stdout()))
}

/// All jobs, then those of the tasks with the most to do.
pub(super) fn stats_table(stats: &graphile_worker::Stats, most_tasks: usize) -> Table {
    let mut table = Table::new(&[
        text("task"),
        number("ready"),
        number("running"),
        number("retrying").optional(),
        number("failed"),
        number("scheduled").optional(),
        text("lag"),
    ]);
    let mut row = |name: Cell, counts: [i64; 5], lag: Option<f64>| {
        let [ready, running, retrying, failed, scheduled] = counts;
        table.row([
            name,
            Cell::count(ready, Tone::Plain),
            Cell::count(running, Tone::Good),
            Cell::count(retrying, Tone::Careful),
            Cell::count(failed, Tone::Bad),
            Cell::count(scheduled, Tone::Plain),
            lag.map(length).unwrap_or_default().into(),
        ]);
    };
    let graphile_worker::Stats { ready, running, retrying, failed, scheduled, lag_seconds, .. } = *stats;
    row(Cell::toned("(all)", Tone::Faint), [ready, running, retrying, failed, scheduled], lag_seconds);
    let mut tasks: Vec<_> = stats.tasks.iter().collect();
    // Where only some are shown, those with nothing to do now come last.
    if most_tasks < usize::MAX {
        let busy = |task: &&graphile_worker::TaskStats| (task.running, task.ready, task.retrying, task.failed);
        tasks.sort_by_key(|task| std::cmp::Reverse(busy(task)));
    }
    for task in tasks.into_iter().take(most_tasks) {
        let counts = [task.ready, task.running, task.retrying, task.failed, task.scheduled];
        row(task.task_identifier.as_str().into(), counts, task.lag_seconds);
    }
    table
}

pub(super) async fn queues(asked: Queues, database: &Database) -> Result<(), Failure> {
    let queues = utils(database).await?.list_queues(asked.limit).await?;
    if asked.form.json {
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
        number("runs job"),
        text("held for").optional(),
        text("held by").optional(),
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
            queue.locked_by.as_deref().unwrap_or_default().into(),
        ]);
    }
    table
}

pub(super) async fn workers(asked: Workers, database: &Database) -> Result<(), Failure> {
    let workers = utils(database).await?.list_workers(asked.threshold).await?;
    if asked.form.json {
        return print_json(&workers);
    }
    if workers.is_empty() {
        return print_line("no workers to be seen");
    }
    print(&workers_table(&workers, Utc::now()).show(Screen::of_stdout()))
}

pub(super) fn workers_table(workers: &[WorkerSummary], now: DateTime<Utc>) -> Table {
    let mut table = Table::new(&[
        text("worker"),
        text("state"),
        number("jobs"),
        number("queues").optional(),
        text("holds since").optional(),
        text("heard of").optional(),
        text("started").optional(),
        text("version").optional(),
        text("tasks").optional(),
    ]);
    let ago = |time: Option<DateTime<Utc>>| time.map(|time| away(time, now)).unwrap_or_default();
    for worker in workers {
        let state = match worker.state {
            WorkerState::Alive if !worker.is_connected => "alive, but without a connection",
            state => state.as_str(),
        };
        let tone = match worker.state {
            WorkerState::Alive if !worker.is_connected => Tone::Careful,
            WorkerState::Alive => Tone::Good,
            WorkerState::Stale | WorkerState::Dead => Tone::Bad,
            _ => Tone::Careful,
        };
        table.row([
            worker.worker_id.as_str().into(),
            Cell::toned(state, tone),
            Cell::count(worker.jobs, Tone::Plain),
            Cell::count(worker.queues, Tone::Plain),
            ago(worker.holds_since).into(),
            ago(worker.last_heartbeat_at).into(),
            ago(worker.started_at).into(),
            worker.version.as_deref().unwrap_or_default().into(),
            in_short(&worker.tasks.as_deref().unwrap_or_default().join(", "), 60).into(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::indented;

    #[test]
    fn a_payload_is_shown_as_it_is_stored_a_line_an_item() {
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
