//! A crontab item: its data, its fire times, and whether it can be written as a crontab line. `firing`
//! computes fire times; `parse` and `print` convert items from and to text.

use crate::error::{CrontabItemError, shown};
use crate::firing;
use crate::options::CrontabOptions;
use crate::payload;
use crate::schedule::Schedule;
use chrono::{DateTime, Utc};
use serde_json::{Map, Value};
use std::iter;

/// A crontab item: adds a job of its task when it fires.
///
/// It displays as a crontab line. If [`check`](Self::check) succeeds, [`parse_crontab`](crate::parse_crontab)
/// parses that line into the same item.
#[derive(Clone, Debug, PartialEq)]
pub struct Crontab {
    /// When it fires.
    pub schedule: Schedule,
    /// The task of its jobs.
    pub task_identifier: String,
    /// How its jobs are added.
    pub options: CrontabOptions,
    /// The payload of its jobs, besides `_cron`.
    pub payload: Option<Map<String, Value>>,
}

impl Crontab {
    /// Creates an item without options and payload.
    pub fn new(schedule: Schedule, task_identifier: impl Into<String>) -> Crontab {
        Crontab { schedule, task_identifier: task_identifier.into(), options: CrontabOptions::default(), payload: None }
    }

    /// Its identifier: the option `id`, or else the task.
    pub fn identifier(&self) -> &str {
        self.options.id.as_deref().unwrap_or(&self.task_identifier)
    }

    /// Whether it fires in the minute (with a seconds field: in the second) of the given time.
    pub fn matches(&self, at: DateTime<Utc>) -> bool {
        let unit = if self.schedule.has_seconds() { 1 } else { 60 };
        let start = at.timestamp().div_euclid(unit) * unit;
        firing::first_after(&self.schedule, self.options.tz, start - 1).is_some_and(|fires| fires < start + unit)
    }

    /// The next fire time after the given time; `None` if it never fires (30 February).
    pub fn next_after(&self, after: DateTime<Utc>) -> Option<DateTime<Utc>> {
        DateTime::from_timestamp(firing::first_after(&self.schedule, self.options.tz, after.timestamp())?, 0)
    }

    /// The last fire time before the given time.
    pub fn previous_before(&self, before: DateTime<Utc>) -> Option<DateTime<Utc>> {
        // It fires at whole seconds.
        let until = if before.timestamp_subsec_nanos() > 0 { before.timestamp() } else { before.timestamp() - 1 };
        DateTime::from_timestamp(firing::last_until(&self.schedule, self.options.tz, until)?, 0)
    }

    /// The fire times after the given time.
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

    /// The fire times before the given time, newest first.
    ///
    /// ```
    /// # use chrono::{DateTime, Utc};
    /// # use graphile_worker_crontab::Crontab;
    /// // The newest two fire times that a worker missed while it was down from `from` until `to`.
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

    /// Checks that an item built in code can be written as a crontab line.
    ///
    /// A valid item displays as a line that parses into the same item, except that a whole number such as
    /// `1.0` in the payload is parsed as `1`.
    ///
    /// ```
    /// # use graphile_worker_crontab::{Crontab, Schedule};
    /// let error = Crontab::new(Schedule::every_minute(), "send email").check().unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "crontab item of the task `send email`: task is `send email`, expected a letter or `_`, then letters, \
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

/// The maximum length of task identifiers and queue names in the database.
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
