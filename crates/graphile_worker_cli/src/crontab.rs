//! `crontab check` and `crontab next`: what is wrong with crontabs, and when they fire. No database.

use crate::arguments;
use crate::failure::Failure;
use crate::output::{print, print_line};
use chrono::{DateTime, SecondsFormat, Utc};
use clap::Subcommand;
use graphile_worker::{Crontab, parse_crontab};
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What can be asked of crontabs.
#[derive(Debug, Subcommand)]
pub(crate) enum CrontabCommand {
    /// Tell all mistakes of all files; exit code 1 if there are any
    Check {
        /// Crontabs
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Tell when the items fire next
    Next {
        /// Crontabs
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// How many times of each item
        #[arg(long, value_name = "N", default_value_t = 10, value_parser = arguments::at_least_one)]
        count: usize,
        /// After this instant, such as 2026-01-31T12:00:00Z [default: now]
        #[arg(long, value_name = "TS", value_parser = arguments::time)]
        from: Option<DateTime<Utc>>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(command: CrontabCommand) -> Result<(), Failure> {
    match command {
        CrontabCommand::Check { files } => check(&files),
        CrontabCommand::Next { files, count, from, json } => next(&files, count, from.unwrap_or_else(Utc::now), json),
    }
}

fn check(files: &[PathBuf]) -> Result<(), Failure> {
    let mut report = String::new();
    for (file, items) in read_all(files)? {
        let items = match items.len() {
            1 => "1 item".to_owned(),
            items => format!("{items} items"),
        };
        let _ = writeln!(report, "{}: {items}", file.display());
    }
    print(&report)
}

/// When an item fires, as `--json` says it.
#[derive(Serialize)]
struct Firing<'a> {
    file: String,
    identifier: &'a str,
    task: &'a str,
    next: Vec<String>,
}

fn next(files: &[PathBuf], count: usize, from: DateTime<Utc>, json: bool) -> Result<(), Failure> {
    let crontabs = read_all(files)?;
    let firings: Vec<Firing<'_>> = crontabs
        .iter()
        .flat_map(|(file, items)| items.iter().map(move |item| (file, item)))
        .map(|(file, item)| Firing {
            file: file.display().to_string(),
            identifier: item.identifier(),
            task: &item.task_identifier,
            next: item.fire_times(from).take(count).map(|at| at.to_rfc3339_opts(SecondsFormat::Secs, true)).collect(),
        })
        .collect();
    if json {
        return print_line(&serde_json::to_string(&firings)?);
    }
    print(&for_people(&firings))
}

fn for_people(firings: &[Firing<'_>]) -> String {
    let mut text = String::new();
    for firing in firings {
        let task = if firing.task == firing.identifier { String::new() } else { format!(" (task {})", firing.task) };
        let _ = writeln!(text, "{}: {}{task}", firing.file, firing.identifier);
        for at in &firing.next {
            let _ = writeln!(text, "  {at}");
        }
        if firing.next.is_empty() {
            text.push_str("  never\n");
        }
    }
    text
}

/// The items of all files; where any has mistakes, those of all files are told.
fn read_all(files: &[PathBuf]) -> Result<Vec<(&Path, Vec<Crontab>)>, Failure> {
    let mut crontabs = Vec::new();
    let mut mistakes = String::new();
    for file in files {
        match std::fs::read_to_string(file) {
            Ok(text) => match parse_crontab(&text) {
                Ok(items) => crontabs.push((file.as_path(), items)),
                Err(error) => error.errors.iter().for_each(|error| {
                    let _ = writeln!(mistakes, "{}: {error}", file.display());
                }),
            },
            Err(error) => {
                let _ = writeln!(mistakes, "{}: cannot be read: {error}", file.display());
            }
        }
    }
    if mistakes.is_empty() {
        return Ok(crontabs);
    }
    eprint!("{mistakes}");
    Err(Failure::Said)
}
