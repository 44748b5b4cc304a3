//! Crontab items: how an application defines recurring jobs, in code or as text. `cron` adds their jobs; the crate
//! `graphile_worker_crontab` parses the text.

use crate::task::{TaskHandler, Tasks};
use crate::{Error, error};
use chrono::Weekday;
use graphile_worker_crontab::{
    Crontab, CrontabFill, CrontabJobKeyMode, CrontabParseError, Schedule, ScheduleError, Tz,
};
use serde_json::Value;
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use tracing::warn;

/// Defines recurring jobs in code. Times are UTC unless [`tz`](CronItem::tz) sets another time zone.
///
/// ```
/// # use graphile_worker::{IntoTaskHandlerResult, TaskHandler, WorkerContext};
/// use graphile_worker::{Cron, CrontabFill, WorkerOptions};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct SendDailyReport {}
/// # impl TaskHandler for SendDailyReport {
/// #     const IDENTIFIER: &'static str = "send_daily_report";
/// #     async fn run(self, _ctx: WorkerContext) -> impl IntoTaskHandlerResult {}
/// # }
///
/// let report = Cron::daily_at::<SendDailyReport>(8, 0)?.fill(CrontabFill::hours(1));
/// assert_eq!(report.to_string(), "0 8 * * * send_daily_report ?fill=1h");
/// let options = WorkerOptions::default().define_job::<SendDailyReport>().with_cron(report);
/// # Ok::<(), graphile_worker::Error>(())
/// ```
#[derive(Debug)]
pub struct Cron;

impl Cron {
    /// Every minute.
    pub fn every_minute<T: TaskHandler>() -> CronItem<T> {
        Cron::on_schedule(Schedule::every_minute())
    }

    /// Every `n` minutes (1–59), counted from each full hour.
    pub fn every_n_minutes<T: TaskHandler>(n: u32) -> Result<CronItem<T>, Error> {
        Ok(Cron::on_schedule(Schedule::every_n_minutes(n)?))
    }

    /// Every hour at this minute (0–59).
    pub fn hourly_at<T: TaskHandler>(minute: u32) -> Result<CronItem<T>, Error> {
        Ok(Cron::on_schedule(Schedule::hourly_at(minute)?))
    }

    /// Every day at this time.
    pub fn daily_at<T: TaskHandler>(hour: u32, minute: u32) -> Result<CronItem<T>, Error> {
        Ok(Cron::on_schedule(Schedule::daily_at(hour, minute)?))
    }

    /// Every week on this day at this time.
    pub fn weekly_on<T: TaskHandler>(weekday: Weekday, hour: u32, minute: u32) -> Result<CronItem<T>, Error> {
        Ok(Cron::on_schedule(Schedule::weekly_on(weekday, hour, minute)?))
    }

    /// Every month that has this day, at this time.
    pub fn monthly_on<T: TaskHandler>(day: u32, hour: u32, minute: u32) -> Result<CronItem<T>, Error> {
        Ok(Cron::on_schedule(Schedule::monthly_on(day, hour, minute)?))
    }

    /// Every year on this day at this time.
    pub fn yearly_on<T: TaskHandler>(month: u32, day: u32, hour: u32, minute: u32) -> Result<CronItem<T>, Error> {
        Ok(Cron::on_schedule(Schedule::yearly_on(month, day, hour, minute)?))
    }

    /// On any schedule that a crontab can express: `"0 8-18/2 * * mon-fri".parse()?`.
    pub fn on_schedule<T: TaskHandler>(schedule: Schedule) -> CronItem<T> {
        CronItem { crontab: Crontab::new(schedule, T::IDENTIFIER), task: PhantomData }
    }
}

/// A crontab item that adds jobs of the task `T`, built by [`Cron`]. It displays as a line of a crontab.
pub struct CronItem<T> {
    crontab: Crontab,
    task: PhantomData<fn() -> T>,
}

impl<T: TaskHandler> CronItem<T> {
    /// Sets the identifier of the item (default: the name of the task). Required if several items have the same task.
    /// An item with a new identifier is a new item: its missed times are not backfilled.
    pub fn id(mut self, id: impl Into<String>) -> CronItem<T> {
        self.crontab.options.id = Some(id.into());
        self
    }

    /// Sets how far back to add jobs that were missed while no worker ran (default: missed jobs are not added).
    pub fn fill(mut self, fill: CrontabFill) -> CronItem<T> {
        self.crontab.options.fill = Some(fill);
        self
    }

    /// Sets the maximum number of missed jobs to add, newest first (default: no limit).
    pub fn fill_limit(mut self, limit: u32) -> CronItem<T> {
        self.crontab.options.fill_limit = Some(limit);
        self
    }

    /// Sets the maximum number of attempts of each job (default 25).
    pub fn max_attempts(mut self, attempts: i16) -> CronItem<T> {
        self.crontab.options.max_attempts = Some(attempts);
        self
    }

    /// Sets the named queue of the jobs. A queue runs one job at a time (default: no queue).
    pub fn queue(mut self, queue: impl Into<String>) -> CronItem<T> {
        self.crontab.options.queue = Some(queue.into());
        self
    }

    /// Sets the priority of the jobs. Lower numbers run first (default 0).
    pub fn priority(mut self, priority: i16) -> CronItem<T> {
        self.crontab.options.priority = Some(priority);
        self
    }

    /// Sets the key of the jobs. A new job replaces the waiting job with the same key, so that jobs do not pile up.
    pub fn job_key(mut self, key: impl Into<String>) -> CronItem<T> {
        self.crontab.options.job_key = Some(key.into());
        self
    }

    /// Sets how a new job replaces the waiting job with the same key (default:
    /// [`Replace`](CrontabJobKeyMode::Replace)).
    pub fn job_key_mode(mut self, mode: CrontabJobKeyMode) -> CronItem<T> {
        self.crontab.options.job_key_mode = Some(mode);
        self
    }

    /// Sets the time zone of the schedule (default: UTC).
    pub fn tz(mut self, zone: Tz) -> CronItem<T> {
        self.crontab.options.tz = Some(zone);
        self
    }

    /// Sets the payload of the jobs, which must serialize to a JSON object. The worker adds the key `_cron`, with the
    /// time at which the job was due.
    pub fn payload(mut self, payload: T) -> Result<CronItem<T>, Error> {
        let identifier = || T::IDENTIFIER.to_owned();
        match serde_json::to_value(payload) {
            Ok(Value::Object(payload)) => self.crontab.payload = Some(payload),
            Ok(_) => return Err(Error::CronPayloadNotAnObject { identifier: identifier() }),
            Err(source) => return Err(Error::InvalidPayload { identifier: identifier(), source }),
        }
        Ok(self)
    }
}

impl<T> CronItem<T> {
    /// Converts the item into a [`Crontab`], so that items of several tasks fit into one list.
    pub fn build(self) -> Crontab {
        self.crontab
    }
}

impl<T> From<CronItem<T>> for Crontab {
    fn from(item: CronItem<T>) -> Crontab {
        item.crontab
    }
}

impl<T> Clone for CronItem<T> {
    fn clone(&self) -> CronItem<T> {
        CronItem { crontab: self.crontab.clone(), task: PhantomData }
    }
}

impl<T> fmt::Display for CronItem<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.crontab.fmt(f)
    }
}

impl<T> fmt::Debug for CronItem<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CronItem({self})")
    }
}

/// Rejects invalid items, and items with the same identifier.
pub(crate) fn checked(crontabs: Vec<Crontab>) -> Result<Vec<Arc<Crontab>>, Error> {
    let mut tasks: HashMap<&str, &str> = HashMap::new();
    for crontab in &crontabs {
        crontab.check().map_err(|source| Error::InvalidCronItem { source })?;
        if let Some(other) = tasks.insert(crontab.identifier(), &crontab.task_identifier) {
            return Err(Error::CronIdentifierTwice {
                identifier: crontab.identifier().to_owned(),
                tasks: [other.to_owned(), crontab.task_identifier.clone()],
            });
        }
    }
    Ok(crontabs.into_iter().map(Arc::new).collect())
}

/// The items whose task is not one of these. Another worker may run it, but usually the name is a mistake.
pub(crate) fn of_unknown_tasks(crontabs: &[Arc<Crontab>], tasks: &Tasks) -> Vec<Arc<Crontab>> {
    crontabs.iter().filter(|item| !tasks.contains_key(&*item.task_identifier)).cloned().collect()
}

pub(crate) fn warn_of_unknown_tasks(unknown: &[Arc<Crontab>]) {
    for item in unknown {
        let (task_identifier, item) = (&item.task_identifier, item.identifier());
        warn!(label = "cron", task_identifier, item, "this worker does not define the task of a crontab item");
    }
}

impl From<CrontabParseError> for error::Error {
    fn from(source: CrontabParseError) -> Error {
        Error::InvalidCrontab { source }
    }
}

impl From<ScheduleError> for error::Error {
    fn from(source: ScheduleError) -> Error {
        Error::InvalidSchedule { source }
    }
}
