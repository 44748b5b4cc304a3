//! The crate from outside: what lines mean, what is refused and in which words, and when items fire.

#![allow(missing_docs, clippy::unwrap_used)]

mod built_items;
mod errors;
mod fields;
mod firing;
mod lines;
mod options;
mod payloads;
mod properties;
mod zones;

use chrono::{DateTime, Utc};
use graphile_worker_crontab::{Crontab, parse_crontab};

/// The one item of a line that must be right.
fn item(line: &str) -> Crontab {
    line.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// What is said of a crontab that must be wrong.
fn complaint(crontab: &str) -> String {
    parse_crontab(crontab).expect_err("a wrong crontab").to_string()
}

fn at(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

/// The next `count` firings of an item after an instant.
fn firings(line: &str, after: &str, count: usize) -> Vec<String> {
    item(line).fire_times(at(after)).take(count).map(|at| at.format("%FT%TZ").to_string()).collect()
}
