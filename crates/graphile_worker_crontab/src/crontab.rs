//! An item of a crontab: what it is, when it fires, and whether the text form can say it.

use crate::error::{CrontabItemError, shown};
use crate::firing;
use crate::options::CrontabOptions;
use crate::payload;
use crate::schedule::Schedule;
use chrono::{DateTime, Utc};
use serde_json::{Map, Value};
use std::iter;

/// An item of a crontab: when it fires, a job of its task is added.
///
/// Its text is the line that [`parse_crontab`](crate::parse_crontab) reads as the same item, if [`check`](Self::check)
/// finds nothing wrong with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Crontab {
    /// When it fires.
    pub schedule: Schedule,
    /// The task of its jobs.
    pub task_identifier: String,
    /// How its jobs are added.
    pub options: CrontabOptions,
    /// What its jobs are told, beside when they were due.
    pub payload: Option<Map<String, Value>>,
}

impl Crontab {
    /// An item with no options and no payload.
    pub fn new(schedule: Schedule, task_identifier: impl Into<String>) -> Crontab {
        Crontab { schedule, task_identifier: task_identifier.into(), options: CrontabOptions::default(), payload: None }
    }

    /// What tells it from the other items: the option `id`, or else its task.
    pub fn identifier(&self) -> &str {
        self.options.id.as_deref().unwrap_or(&self.task_identifier)
    }

    /// Whether it fires in the minute (with a seconds field: the second) of an instant.
    pub fn matches(&self, at: DateTime<Utc>) -> bool {
        let unit = if self.schedule.has_seconds() { 1 } else { 60 };
        let start = at.timestamp().div_euclid(unit) * unit;
        firing::first_after(&self.schedule, self.options.tz, start - 1).is_some_and(|fires| fires < start + unit)
    }

    /// The first instant after the given one at which it fires; none if it never does (30 February).
    pub fn next_after(&self, after: DateTime<Utc>) -> Option<DateTime<Utc>> {
        DateTime::from_timestamp(firing::first_after(&self.schedule, self.options.tz, after.timestamp())?, 0)
    }

    /// The last instant before the given one at which it fired.
    pub fn previous_before(&self, before: DateTime<Utc>) -> Option<DateTime<Utc>> {
        // It fires at whole seconds.
        let until = if before.timestamp_subsec_nanos() > 0 { before.timestamp() } else { before.timestamp() - 1 };
        DateTime::from_timestamp(firing::last_until(&self.schedule, self.options.tz, until)?, 0)
    }

    /// The instants after the given one at which it fires, for as long as there are any.
    ///
    /// ```
    /// # use graphile_worker_crontab::Crontab;
    /// let item: Crontab = "0 */4 * * * rollup".parse()?;
    /// let noon = "2026-01-01T12:00:00Z".parse()?;
    /// let hours: Vec<String> = item.fire_times(noon).take(3).map(|at| at.format("%H:%M").to_string()).collect();
    /// assert_eq!(hours, ["16:00", "20:00", "00:00"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fire_times(&self, after: DateTime<Utc>) -> impl Iterator<Item = DateTime<Utc>> + '_ {
        iter::successors(self.next_after(after), |fired| self.next_after(*fired))
    }

    /// The instants before the given one at which it fired, the newest first.
    ///
    /// ```
    /// # use chrono::{DateTime, Utc};
    /// # use graphile_worker_crontab::Crontab;
    /// // The newest two of what a worker missed that was away from `from` until `to`.
    /// let item: Crontab = "0 */4 * * * rollup".parse()?;
    /// let (from, to): (DateTime<Utc>, DateTime<Utc>) = ("2026-01-01T00:00:00Z".parse()?, "2026-01-03T00:00:00Z".parse()?);
    /// let missed: Vec<String> =
    ///     item.fire_times_before(to).take_while(|at| *at >= from).take(2).map(|at| at.format("%d. %H:%M").to_string()).collect();
    /// assert_eq!(missed, ["02. 20:00", "02. 16:00"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fire_times_before(&self, before: DateTime<Utc>) -> impl Iterator<Item = DateTime<Utc>> + '_ {
        iter::successors(self.previous_before(before), |fired| self.previous_before(*fired))
    }

    /// Refuses an item that was made by code if a line of a crontab could not say it.
    ///
    /// What passes is printed as a line that is read as the same item; but a whole number that was made as `1.0` is
    /// read as `1`.
    ///
    /// ```
    /// # use graphile_worker_crontab::{Crontab, Schedule};
    /// let error = Crontab::new(Schedule::every_minute(), "send email").check().unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "the crontab item of the task `send email`: task is `send email`, expected a letter or `_`, then letters, \
    ///      digits, `_`, `-`, `:` or `/`"
    /// );
    /// ```
    pub fn check(&self) -> Result<(), CrontabItemError> {
        let mut problems: Vec<String> = check_task(&self.task_identifier).err().into_iter().collect();
        problems.extend(self.options.problems());
        problems.extend(self.payload.as_ref().and_then(|payload| payload::check(payload).err()));
        if problems.is_empty() {
            return Ok(());
        }
        Err(CrontabItemError { task_identifier: self.task_identifier.clone(), problems })
    }
}

/// The longest task identifier and queue name that the database takes.
pub(crate) const LONGEST_NAME: usize = 128;

pub(crate) fn is_task_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-:/".contains(&byte))
}

pub(crate) fn check_task(task: &str) -> Result<(), String> {
    if !is_task_identifier(task) {
        return Err(format!(
            "task is {}, expected a letter or `_`, then letters, digits, `_`, `-`, `:` or `/`",
            shown(task)
        ));
    }
    if task.len() > LONGEST_NAME {
        return Err(format!("task has {} characters, expected at most {LONGEST_NAME}", task.len()));
    }
    Ok(())
}
