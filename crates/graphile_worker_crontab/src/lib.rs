//! Crontabs in the syntax of Node's `graphile-worker`: parses and prints them, and computes fire times. Uses
//! neither a database nor a clock, and can be used alone.
//!
//! ```
//! use chrono::{DateTime, Utc};
//! use graphile_worker_crontab::parse_crontab;
//!
//! let items = parse_crontab(
//!     "# minute hour day month weekday task ?options {payload}\n\
//!      30 4 * * 1   send_weekly_email ?fill=2d&max=10 {onboarding: false}\n\
//!      0 9 * * mon-fri  open_shop ?tz=Europe/Paris\n",
//! )?;
//! assert_eq!(items[0].options.max_attempts, Some(10));
//!
//! let now: DateTime<Utc> = "2026-03-27T12:00:00Z".parse()?;
//! let next = items[1].next_after(now).ok_or("it never fires")?;
//! // Monday in Paris, in summer time since the day before.
//! assert_eq!(next.to_rfc3339(), "2026-03-30T07:00:00+00:00");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`parse_crontab`] parses a file into [`Crontab`] items; [`Schedule`] says when an item fires,
//! [`CrontabOptions`] how its jobs are added. Items can also be built in code:
//!
//! ```
//! use chrono::Weekday;
//! use graphile_worker_crontab::{Crontab, CrontabFill, Schedule};
//!
//! let mut item = Crontab::new(Schedule::weekly_on(Weekday::Mon, 4, 30)?, "send_weekly_email");
//! item.options.fill = Some(CrontabFill::days(2));
//! item.check()?;
//! assert_eq!(item.to_string(), "30 4 * * 1 send_weekly_email ?fill=2d");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Syntax
//!
//! Everything that Node's worker accepts means the same here. These extensions are errors in Node's worker:
//!
//! - `?tz=Europe/Paris`: the fields are in this time zone, see [`CrontabOptions::tz`];
//! - a seconds field before the other five. A line that can be read as five fields and a task is read so: `*
//!   * * * * mon` runs the task `mon` every minute;
//! - names of months and weekdays in any case (`jan`, `mon-fri`), steps of ranges (`8-18/2`), and `@hourly`, `@daily`,
//!   `@midnight`, `@weekly`, `@monthly`, `@yearly` and `@annually`;
//! - `?fillLimit=n`: backfills only the newest `n` missed jobs.
//!
//! Some lines that Node's parser accepts are errors here. First, jobs that the database would reject each
//! time:
//!
//! - `max` outside 1–32767 and `priority` outside −32768–32767;
//! - a task identifier or `queue` of more than 128 characters, a `jobKey` that is empty or has more than 512;
//! - NUL in a `jobKey` or in a payload.
//!
//! Second, values that Rust cannot represent: a `fill` quantity above 4294967295, half of a surrogate pair in
//! a payload, and a payload that is nested more than 100 levels deep.
//!
//! The crate `json5` parses payloads. It differs from JavaScript's package in three details: it keeps all
//! digits of an integer between 2⁵³ and 2⁶⁴, it rejects hexadecimal numbers of more than 32 digits, and it
//! allows slightly different letters in unquoted keys, because the two use different Unicode versions.

mod crontab;
mod error;
mod field;
mod firing;
mod options;
mod parse;
mod payload;
mod print;
mod query;
mod schedule;

pub use chrono_tz::Tz;
pub use crontab::Crontab;
pub use error::{CrontabError, CrontabItemError, CrontabParseError, ScheduleError};
pub use options::{CrontabFill, CrontabJobKeyMode, CrontabOptions};
pub use parse::{crontab_warnings, parse_crontab};
pub use schedule::Schedule;
