//! The commands `limit set`, `limit list` and `limit drop`, `pause` and `resume`. The library sets and lists the limits.

use super::modify::{finish, time_in};
use super::{OutputFormat, print_json, utils};
use crate::arguments;
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use crate::table::{Cell, Screen, Table, Tone, number, relative_time, sanitize, text, timestamp};
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use graphile_worker::{Limit, LimitChange, LimitSummary, WorkerUtils};
use indicatif::ProgressBar;
use serde_json::json;
use std::time::Duration;

const NAMES: &str = "\
Names:
  task:NAME        all jobs of a task
  queue:NAME       the jobs of a queue
  queue:PREFIX*    each queue whose name begins with PREFIX, by itself
  group:NAME       all tasks and queues that are set with --group NAME";

/// The subcommands of `limit`.
#[derive(Debug, Subcommand)]
pub(crate) enum LimitCommand {
    /// Set a limit, or replace it with all its settings
    Set(Box<Set>),
    /// List limits and pauses: use, room, waiting jobs, next start, and who paused what
    List(List),
    /// Drop limits, and their pauses
    Drop(Drop),
}

/// Options of `limit set`.
#[derive(Debug, Args)]
#[command(after_help = NAMES)]
pub(crate) struct Set {
    /// What to limit, such as task:send_email or 'queue:tenant:*'
    #[arg(value_name = "NAME")]
    name: String,
    /// How many jobs may run at the same time in all workers; in a group, the sum of their costs
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = arguments::whole::<u32>)]
    concurrency: Option<u32>,
    /// How many jobs may start in a period, such as 100/m, 5/10s, 1000/h or 1/day
    #[arg(long, value_name = "N/PERIOD", value_parser = arguments::rate)]
    rate: Option<(u32, Duration)>,
    /// How many jobs may start at once, if fewer started before than the rate allows [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = arguments::whole::<u32>)]
    burst: Option<u32>,
    /// The share of a queue beside other queues; 2 gets twice as much of the workers' time as 1 [default: 1]
    #[arg(long, value_name = "W", allow_negative_numbers = true)]
    weight: Option<f64>,
    /// How much a job takes of the limit of the group [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = arguments::whole::<u32>)]
    cost: Option<u32>,
    /// Group whose limit the jobs share; set the limit of the group first
    #[arg(long, value_name = "G")]
    group: Option<String>,
    /// Number of failures in a row after which no job starts for --trip-for; then one job at a time, until one succeeds
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = arguments::whole::<u32>)]
    trip: Option<u32>,
    /// How long no job starts after --trip failures in a row, such as 30s or 5m
    #[arg(long, value_name = "DURATION", value_parser = arguments::duration)]
    trip_for: Option<Duration>,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `limit list`.
#[derive(Debug, Args)]
pub(crate) struct List {
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `limit drop`.
#[derive(Debug, Args)]
pub(crate) struct Drop {
    /// Names of limits, as `limit list` shows them
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `pause`.
#[derive(Debug, Args)]
#[command(after_help = "\
Targets:
  all              all jobs of these workers; Node's workers continue
  task:NAME        all jobs of a task
  queue:NAME       the jobs of a queue
  queue:PREFIX*    the jobs of all queues whose names begin with PREFIX
  group:NAME       all tasks and queues of a group

Running jobs continue.")]
pub(crate) struct Pause {
    /// What to pause
    #[arg(value_name = "TARGET")]
    target: String,
    /// When the pause ends: a time such as 2030-01-31T12:00:00Z (UTC if it has no time zone), or a duration such as 2h
    /// [default: when it is resumed]
    #[arg(long, value_name = "TIME", value_parser = arguments::until)]
    until: Option<arguments::Until>,
    #[command(flatten)]
    output: OutputFormat,
}

/// Options of `resume`.
#[derive(Debug, Args)]
pub(crate) struct Resume {
    /// What to resume: the name that was paused, or a limit that a rate-limited job has closed or whose breaker has tripped
    #[arg(value_name = "TARGET")]
    target: String,
    #[command(flatten)]
    output: OutputFormat,
}

pub(super) async fn limit(command: LimitCommand, database: &Database) -> Result<(), Failure> {
    match command {
        LimitCommand::Set(args) => set(*args, database).await,
        LimitCommand::List(args) => list(args, database).await,
        LimitCommand::Drop(args) => drop(args, database).await,
    }
}

/// Makes the change, and shows how many jobs have been moved if standard error is a terminal.
async fn change(utils: &WorkerUtils, change: LimitChange<'_>) -> Result<bool, Failure> {
    let progress = ProgressBar::new_spinner();
    let changed = utils.change_limit(change, |moved| progress.set_message(format!("{moved} jobs moved"))).await;
    progress.finish_and_clear();
    Ok(changed?)
}

/// The limit as it is now; `None` if another session has dropped it.
async fn find(utils: &WorkerUtils, name: &str) -> Result<Option<LimitSummary>, Failure> {
    Ok(utils.limits().await?.into_iter().find(|limit| limit.name == name))
}

async fn set(args: Set, database: &Database) -> Result<(), Failure> {
    let mut limit = Limit::named(&args.name);
    if let Some(jobs) = args.concurrency {
        limit = limit.concurrency(jobs);
    }
    if let Some((jobs, period)) = args.rate {
        limit = limit.rate(jobs, period);
    }
    if let Some(jobs) = args.burst {
        limit = limit.burst(jobs);
    }
    if let Some(weight) = args.weight {
        limit = limit.weight(weight);
    }
    if let Some(cost) = args.cost {
        limit = limit.cost(cost);
    }
    if let Some(group) = &args.group {
        limit = limit.in_group(group);
    }
    if let Some(failures) = args.trip {
        limit = limit.trip(failures);
    }
    if let Some(pause) = args.trip_for {
        limit = limit.trip_for(pause);
    }
    limit.check().map_err(|error| Failure::Usage(error.to_string()))?;
    let utils = utils(database).await?;
    change(&utils, LimitChange::Set(&limit)).await?;
    let found = find(&utils, &args.name).await?;
    if args.output.json {
        return print_json(&found);
    }
    let settings = found.as_ref().map(settings).unwrap_or_default();
    let waiting = found.map_or(0, |limit| limit.waiting);
    print_line(&format!("limit {} set: {settings}; {waiting} waiting", sanitize(&args.name)))
}

/// What is set, in words.
fn settings(limit: &LimitSummary) -> String {
    let mut parts = Vec::new();
    parts.extend(limit.concurrency.map(|jobs| format!("concurrency {jobs}")));
    parts.extend(rate(limit).map(|rate| format!("rate {rate}, burst {}", limit.burst)));
    parts.extend((limit.weight != 1.0).then(|| format!("weight {}", limit.weight)));
    parts.extend((limit.cost != 1).then(|| format!("cost {}", limit.cost)));
    parts.extend(limit.group.clone());
    parts.extend(breaker(limit).map(|breaker| format!("trips {breaker}")));
    if parts.is_empty() { "no limit of its own".to_owned() } else { parts.join(", ") }
}

/// When its breaker trips, and for how long.
fn breaker(limit: &LimitSummary) -> Option<String> {
    let (failures, seconds) = limit.trip.zip(limit.trip_seconds)?;
    let pause = humantime::format_duration(Duration::try_from_secs_f64(seconds).ok()?);
    Some(format!("after {failures} for {pause}"))
}

/// The rate as `--rate` takes it.
fn rate(limit: &LimitSummary) -> Option<String> {
    let (jobs, seconds) = limit.rate.zip(limit.per_seconds)?;
    let period = humantime::format_duration(Duration::try_from_secs_f64(seconds).ok()?).to_string();
    let short = match period.as_str() {
        "1s" => "s",
        "1m" => "m",
        "1h" => "h",
        "1day" => "day",
        longer => longer,
    };
    Some(format!("{jobs}/{short}"))
}

async fn list(args: List, database: &Database) -> Result<(), Failure> {
    let limits = utils(database).await?.limits().await?;
    if args.output.json {
        return print_json(&limits);
    }
    if limits.is_empty() {
        return print_line("no limits");
    }
    print(&limits_table(&limits, Utc::now()).show(Screen::of_stdout()))
}

fn limits_table(limits: &[LimitSummary], now: DateTime<Utc>) -> Table {
    let mut table = Table::new(&[
        text("limit"),
        text("in use"),
        number("room"),
        number("waiting"),
        text("rate"),
        text("next start").optional(),
        text("paused"),
        text("group").optional(),
        number("burst").optional(),
        number("weight").optional(),
        number("cost").optional(),
        text("trips").optional(),
        text("state").optional(),
    ]);
    for limit in limits {
        let is_pattern = limit.name.ends_with('*');
        let in_use = match (limit.concurrency, limit.queues) {
            (Some(concurrency), Some(queues)) if is_pattern => {
                format!("{} ({concurrency} a queue, {queues} queues)", limit.in_use)
            }
            (Some(concurrency), _) => format!("{} of {concurrency}", limit.in_use),
            _ if limit.name == "all" => String::new(),
            (None, _) => limit.in_use.to_string(),
        };
        let room_tone = if limit.room == Some(0) { Tone::Careful } else { Tone::Plain };
        table.row([
            limit.name.as_str().into(),
            in_use.into(),
            Cell::toned(limit.room.map(|room| room.to_string()).unwrap_or_default(), room_tone),
            Cell::count(limit.waiting, Tone::Plain),
            rate(limit).unwrap_or_default().into(),
            limit.next_at.map(|time| relative_time(time, now)).unwrap_or_default().into(),
            Cell::toned(pause_text(limit, now), Tone::Careful),
            limit.group.as_deref().unwrap_or_default().into(),
            unless_one(limit.burst).into(),
            unless_one(limit.weight).into(),
            unless_one(limit.cost).into(),
            breaker(limit).unwrap_or_default().into(),
            Cell::toned(closed_text(limit, now), Tone::Careful),
        ]);
    }
    table
}

fn unless_one<N: ToString>(number: N) -> String {
    Some(number.to_string()).filter(|number| number != "1").unwrap_or_default()
}

/// Who paused it, since when, and until when.
fn pause_text(limit: &LimitSummary, now: DateTime<Utc>) -> String {
    if !limit.is_paused {
        return String::new();
    }
    let by = limit.paused_by.as_deref().unwrap_or("unknown");
    let since = limit.paused_at.map(|at| relative_time(at, now)).unwrap_or_default();
    let until = limit.paused_until.map(|until| format!(", ends {}", relative_time(until, now))).unwrap_or_default();
    format!("by {by} {since}{until}")
}

/// Whether its breaker has tripped, with the times and the failures in a row, or whether a job was rate limited.
fn closed_text(limit: &LimitSummary, now: DateTime<Utc>) -> String {
    let failures = match limit.failures {
        0 => String::new(),
        1 => "1 failure".to_owned(),
        failures => format!("{failures} failures in a row"),
    };
    let queues = match limit.closed_queues {
        Some(queues) if limit.name.ends_with('*') && queues > 0 => {
            if queues == 1 {
                "1 queue: ".to_owned()
            } else {
                format!("{queues} queues: ")
            }
        }
        _ => String::new(),
    };
    let until = limit.closed_until.map(|until| relative_time(until, now));
    match (limit.tripped_at, until) {
        (Some(at), Some(until)) => format!("{queues}tripped {}, ends {until}, {failures}", relative_time(at, now)),
        (Some(at), None) => format!("{queues}tripped {}, one job at a time, {failures}", relative_time(at, now)),
        (None, Some(until)) => format!("{queues}rate limited, ends {until}"),
        (None, None) => failures,
    }
}

async fn drop(args: Drop, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let (mut done, mut not_done) = (Vec::new(), Vec::new());
    for name in args.names {
        let is_dropped = change(&utils, LimitChange::Drop(&name)).await?;
        if is_dropped { done.push(name) } else { not_done.push(name) }
    }
    if args.output.json {
        print_json(&json!({ "done": done, "not_done": not_done }))?;
    } else {
        print(&done.iter().map(|name| format!("limit {} dropped\n", sanitize(name))).collect::<String>())?;
    }
    finish(not_done.iter().map(|name| format!("there is no limit {}: see `limit list`", sanitize(name))))
}

pub(super) async fn pause(args: Pause, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let until = match args.until {
        None => None,
        Some(arguments::Until::Time(time)) => Some(time),
        Some(arguments::Until::After(delay)) => Some(time_in(delay, database).await?),
    };
    change(&utils, LimitChange::Pause(&args.target, until)).await?;
    let found = find(&utils, &args.target).await?;
    if args.output.json {
        return print_json(&found);
    }
    let until = until.map_or("it is resumed".to_owned(), |until| timestamp(until, Utc::now()));
    let mut said = format!("{} is paused until {until}", sanitize(&args.target));
    if args.target == "all" {
        said.push_str("; Node's workers continue");
    }
    print_line(&said)
}

pub(super) async fn resume(args: Resume, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let is_resumed = change(&utils, LimitChange::Resume(&args.target)).await?;
    let name = sanitize(&args.target);
    if args.output.json {
        print_json(&json!({ "name": args.target, "resumed": is_resumed }))?;
    } else if is_resumed {
        print_line(&format!("{name} is resumed"))?;
    }
    finish((!is_resumed).then(|| format!("{name} is not paused: see `limit list`")).into_iter())
}
