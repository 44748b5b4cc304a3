//! Crontabs in the language of Node's `graphile-worker`: reads and prints them, and says when an item fires.
//! It touches no database and no clock, and can be used alone.
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
//! [`parse_crontab`] reads a file, [`Crontab`] is one item of it, [`Schedule`] says when and [`CrontabOptions`] how.
//! Items can be made by code, too:
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
//! # The language
//!
//! What Node's worker accepts means the same here. To that we add, in places where Node's worker refuses the line:
//!
//! - `?tz=Europe/Paris`: the fields are read in that zone, see [`CrontabOptions::tz`];
//! - a seconds field before the five others. Where a line can be read as five fields and a task, it is:
//!   `* * * * * mon` runs the task `mon` every minute;
//! - names of months and weekdays in any case (`jan`, `mon-fri`), steps of ranges (`8-18/2`), and `@hourly`, `@daily`,
//!   `@midnight`, `@weekly`, `@monthly`, `@yearly` and `@annually`;
//! - `?fillLimit=n`: of what is to be backfilled, only the newest `n`.
//!
//! And we refuse some of what Node's parser lets through. First, what the database refuses each time such a job is due:
//!
//! - `max` outside 1–32767 and `priority` outside −32768–32767;
//! - a task identifier or `queue` of more than 128 characters, a `jobKey` that is empty or has more than 512;
//! - NUL in a `jobKey` or in a payload.
//!
//! Then, what has no place in a value of Rust: a quantity of `fill` above 4294967295, half of a surrogate pair in a
//! payload, and a payload that is nested more than 100 levels deep.
//!
//! The payload is read by the crate `json5`, which differs from JavaScript's package in three corners: an integer
//! between 2⁵³ and 2⁶⁴ keeps all its digits, a hexadecimal number of more than 32 digits is refused, and a few letters
//! can or cannot be in an unquoted key, because the two know different versions of Unicode.

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
pub use parse::parse_crontab;
pub use schedule::Schedule;
