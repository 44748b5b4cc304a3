//! `crontab check` and `crontab next`: errors in crontabs, and when their items fire. The database is used only to read
//! when the items last fired. Parsing and scheduling are left to the library.

use crate::arguments;
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use chrono::{DateTime, SecondsFormat, Utc};
use clap::Subcommand;
use graphile_worker::{Crontab, WorkerUtils, crontab_warnings, parse_crontab};
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The subcommands of `crontab`.
#[derive(Debug, Subcommand)]
pub(crate) enum CrontabCommand {
    /// Report all errors and warnings in the files; exit code 1 if there are errors. Prints when each item fires next
    /// and, with a database, when it last fired
    Check {
        /// Crontab files
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// List when the items fire next
    Next {
        /// Crontab files
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Number of times to list for each item
        #[arg(long, value_name = "N", default_value_t = 10, value_parser = arguments::at_least_one)]
        count: usize,
        /// List times after this one, such as 2026-01-31T12:00:00Z [default: now]
        #[arg(long, value_name = "TS", value_parser = arguments::time)]
        from: Option<DateTime<Utc>>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Runs the subcommand. The database is optional.
pub(crate) async fn run(command: CrontabCommand, database: Option<&Database>) -> Result<(), Failure> {
    match command {
        CrontabCommand::Check { files } => check(&files, database).await,
        CrontabCommand::Next { files, count, from, json } => next(&files, count, from.unwrap_or_else(Utc::now), json),
    }
}

async fn check(files: &[PathBuf], database: Option<&Database>) -> Result<(), Failure> {
    let crontabs = read_all(files)?;
    for file in files {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        for warning in crontab_warnings(&text) {
            eprintln!("{}: warning: {warning}", file.display());
        }
    }
    let identifiers = crontabs.iter().flat_map(|(_, items)| items.iter().map(|item| item.identifier().to_owned()));
    let last = match database {
        Some(database) => last_times(identifiers.collect(), database).await,
        None => None,
    };
    let mut report = String::new();
    for (file, items) in crontabs {
        let count = match items.len() {
            1 => "1 item".to_owned(),
            items => format!("{items} items"),
        };
        let _ = writeln!(report, "{}: {count}", file.display());
        for item in items {
            let identifier = item.identifier();
            let next = item.next_after(Utc::now()).map_or("never".to_owned(), |at| format!("next {}", seconds(at)));
            let last = match &last {
                Some(last) => last.get(identifier).map_or(", not known to any worker yet".to_owned(), |at| match at {
                    Some(at) => format!(", last {}", seconds(*at)),
                    None => ", not fired yet".to_owned(),
                }),
                None => String::new(),
            };
            let _ = writeln!(report, "  {identifier}: {next}{last}");
        }
    }
    print(&report)
}

/// Reads when the items last fired. If that fails, prints a warning, and the check continues without it.
async fn last_times(identifiers: Vec<String>, database: &Database) -> Option<HashMap<String, Option<DateTime<Utc>>>> {
    let reading = async {
        // As all commands do: behind a pooler, statements cannot be prepared.
        let utils = WorkerUtils::new(database.pool(1).await?, database.schema()).with_prepared_statements(false);
        Ok::<_, Failure>(utils.cron_executions(&identifiers).await?)
    };
    match reading.await {
        Ok(known) => Some(known.into_iter().map(|item| (item.identifier, item.last_execution)).collect()),
        Err(Failure::Failed(error)) => {
            eprintln!("warning: could not read when the items last fired: {}", crate::failure::explain(error.as_ref()));
            None
        }
        Err(_) => None,
    }
}

fn seconds(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// When an item fires, as `--json` prints it.
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
            next: item.fire_times(from).take(count).map(seconds).collect(),
        })
        .collect();
    if json {
        return print_line(&serde_json::to_string(&firings)?);
    }
    print(&as_text(&firings))
}

fn as_text(firings: &[Firing<'_>]) -> String {
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

/// Reads the items of all files. If any file is invalid, prints the errors of all files.
fn read_all(files: &[PathBuf]) -> Result<Vec<(&Path, Vec<Crontab>)>, Failure> {
    let mut crontabs = Vec::new();
    let mut errors = String::new();
    for file in files {
        match std::fs::read_to_string(file) {
            Ok(text) => match parse_crontab(&text) {
                Ok(items) => crontabs.push((file.as_path(), items)),
                Err(error) => error.errors.iter().for_each(|error| {
                    let _ = writeln!(errors, "{}: {error}", file.display());
                }),
            },
            Err(error) => {
                let _ = writeln!(errors, "{}: could not read: {error}", file.display());
            }
        }
    }
    if errors.is_empty() {
        return Ok(crontabs);
    }
    eprint!("{errors}");
    Err(Failure::AlreadyReported)
}
