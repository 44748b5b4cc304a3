//! Schedules: the sets of their fields, and the search for the next or the previous local time. `firing`
//! handles local times that a time zone skips or repeats.

use crate::error::ScheduleError;
use crate::field::{DAY, Field, HOUR, MINUTE, MONTH, SECOND, WEEKDAY};
use chrono::{Datelike, NaiveDate, Weekday};
use std::fmt;

/// When an item fires: in every minute (with a seconds field: every second) that matches all fields.
///
/// If both the days of the month and the days of the week are restricted, a day that matches either is
/// enough.
///
/// ```
/// use graphile_worker_crontab::Schedule;
///
/// let schedule: Schedule = "30 4 * * mon".parse()?;
/// assert_eq!(schedule, Schedule::weekly_on(chrono::Weekday::Mon, 4, 30)?);
/// assert_eq!(schedule.to_string(), "30 4 * * 1");
/// # Ok::<(), graphile_worker_crontab::ScheduleError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// `None` without a seconds field: it fires at second 0.
    pub(crate) seconds: Option<u64>,
    pub(crate) minutes: u64,
    pub(crate) hours: u64,
    pub(crate) days: u64,
    pub(crate) months: u64,
    /// Starts with Sunday, which is 0.
    pub(crate) weekdays: u64,
}

const SECONDS_OF_DAY: i64 = 24 * 60 * 60;

/// Nine years: 29 February occurs every eight years around 1900, and no day is rarer.
const MONTHS_SEARCHED: usize = 12 * 9;

impl Schedule {
    /// `* * * * *`.
    pub const fn every_minute() -> Schedule {
        Schedule {
            seconds: None,
            minutes: MINUTE.all(),
            hours: HOUR.all(),
            days: DAY.all(),
            months: MONTH.all(),
            weekdays: WEEKDAY.all(),
        }
    }

    /// `*/n * * * *`, counted from the start of each hour.
    pub fn every_n_minutes(n: u32) -> Result<Schedule, ScheduleError> {
        if n == 0 || n > MINUTE.max {
            return Err(schedule_error(format!("the step of the minutes is {n}, expected 1–59")));
        }
        let minutes = (0..=MINUTE.max).step_by(n as usize).fold(0, |mask, minute| mask | 1 << minute);
        Ok(Schedule { minutes, ..Schedule::every_minute() })
    }

    /// `minute * * * *`.
    pub fn hourly_at(minute: u32) -> Result<Schedule, ScheduleError> {
        Ok(Schedule { minutes: only(&MINUTE, minute)?, ..Schedule::every_minute() })
    }

    /// `minute hour * * *`.
    pub fn daily_at(hour: u32, minute: u32) -> Result<Schedule, ScheduleError> {
        Ok(Schedule { hours: only(&HOUR, hour)?, ..Schedule::hourly_at(minute)? })
    }

    /// `minute hour * * weekday`.
    pub fn weekly_on(weekday: Weekday, hour: u32, minute: u32) -> Result<Schedule, ScheduleError> {
        Ok(Schedule { weekdays: 1 << weekday.num_days_from_sunday(), ..Schedule::daily_at(hour, minute)? })
    }

    /// `minute hour day * *`. Skips months without this day.
    pub fn monthly_on(day: u32, hour: u32, minute: u32) -> Result<Schedule, ScheduleError> {
        Ok(Schedule { days: only(&DAY, day)?, ..Schedule::daily_at(hour, minute)? })
    }

    /// `minute hour day month *`. 29 February fires in leap years only.
    pub fn yearly_on(month: u32, day: u32, hour: u32, minute: u32) -> Result<Schedule, ScheduleError> {
        let schedule = Schedule { months: only(&MONTH, month)?, ..Schedule::monthly_on(day, hour, minute)? };
        let longest = days_in_month(2000, month);
        if day > longest {
            return Err(schedule_error(format!(
                "the day of the month is {day}, expected 1–{longest} in month {month}"
            )));
        }
        Ok(schedule)
    }

    /// Whether it has a seconds field, so that it can fire more than once a minute.
    pub const fn has_seconds(&self) -> bool {
        self.seconds.is_some()
    }

    /// Whether the hour is `*`.
    pub(crate) fn fires_every_hour(&self) -> bool {
        self.hours == HOUR.all()
    }

    /// The first local time of the schedule at or after the given one, in seconds since 1970-01-01.
    pub(crate) fn first_from(&self, from: i64) -> Option<i64> {
        let day = from.div_euclid(SECONDS_OF_DAY);
        let found = self.day_from(day)?;
        if found == day
            && let Some(time) = self.time_from(from.rem_euclid(SECONDS_OF_DAY) as u32)
        {
            return Some(day * SECONDS_OF_DAY + time);
        }
        let found = if found == day { self.day_from(day + 1)? } else { found };
        Some(found * SECONDS_OF_DAY + self.time_from(0)?)
    }

    /// The last local time of the schedule at or before the given one.
    pub(crate) fn last_until(&self, until: i64) -> Option<i64> {
        let day = until.div_euclid(SECONDS_OF_DAY);
        let found = self.day_until(day)?;
        if found == day
            && let Some(time) = self.time_until(until.rem_euclid(SECONDS_OF_DAY) as u32)
        {
            return Some(day * SECONDS_OF_DAY + time);
        }
        let found = if found == day { self.day_until(day - 1)? } else { found };
        Some(found * SECONDS_OF_DAY + self.time_until(SECONDS_OF_DAY as u32 - 1)?)
    }

    fn time_from(&self, from: u32) -> Option<i64> {
        let (hour, minute, second) = (from / 3600, from / 60 % 60, from % 60);
        let seconds = self.seconds.unwrap_or(1);
        let of_day = |hour: u32, minute: u32, second: u32| i64::from(hour * 3600 + minute * 60 + second);
        let first_second = lowest(seconds, 0)?;
        if self.hours >> hour & 1 == 1 {
            if self.minutes >> minute & 1 == 1
                && let Some(second) = lowest(seconds, second)
            {
                return Some(of_day(hour, minute, second));
            }
            if let Some(minute) = lowest(self.minutes, minute + 1) {
                return Some(of_day(hour, minute, first_second));
            }
        }
        Some(of_day(lowest(self.hours, hour + 1)?, lowest(self.minutes, 0)?, first_second))
    }

    fn time_until(&self, until: u32) -> Option<i64> {
        let (hour, minute, second) = (until / 3600, until / 60 % 60, until % 60);
        let seconds = self.seconds.unwrap_or(1);
        let of_day = |hour: u32, minute: u32, second: u32| i64::from(hour * 3600 + minute * 60 + second);
        let last_second = highest(seconds, 59)?;
        if self.hours >> hour & 1 == 1 {
            if self.minutes >> minute & 1 == 1
                && let Some(second) = highest(seconds, second)
            {
                return Some(of_day(hour, minute, second));
            }
            if let Some(minute) = minute.checked_sub(1).and_then(|before| highest(self.minutes, before)) {
                return Some(of_day(hour, minute, last_second));
            }
        }
        let hour = hour.checked_sub(1).and_then(|before| highest(self.hours, before))?;
        Some(of_day(hour, highest(self.minutes, 59)?, last_second))
    }

    /// The first day of the schedule at or after the given one, in days since 1970-01-01.
    fn day_from(&self, day: i64) -> Option<i64> {
        let date = NaiveDate::from_epoch_days(day.try_into().ok()?)?;
        let (mut year, mut month, mut from) = (date.year(), date.month(), date.day());
        for _ in 0..MONTHS_SEARCHED {
            if let Some(day) = lowest(self.days_of_month(year, month)?, from) {
                return epoch_day(year, month, day);
            }
            (year, month) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
            from = 1;
        }
        None
    }

    /// The last day of the schedule at or before the given one.
    fn day_until(&self, day: i64) -> Option<i64> {
        let date = NaiveDate::from_epoch_days(day.try_into().ok()?)?;
        let (mut year, mut month, mut until) = (date.year(), date.month(), date.day());
        for _ in 0..MONTHS_SEARCHED {
            if let Some(day) = highest(self.days_of_month(year, month)?, until) {
                return epoch_day(year, month, day);
            }
            (year, month) = if month == 1 { (year - 1, 12) } else { (year, month - 1) };
            until = 31;
        }
        None
    }

    /// The days of a month that are in the schedule.
    fn days_of_month(&self, year: i32, month: u32) -> Option<u64> {
        if self.months >> month & 1 == 0 {
            return Some(0);
        }
        let existing = (2 << days_in_month(year, month)) - 2;
        let of_the_week = || {
            let first = NaiveDate::from_ymd_opt(year, month, 1)?.weekday().num_days_from_sunday();
            // A week starting with the weekday of the first, five times, from bit 1 on.
            let week = (self.weekdays | self.weekdays << 7) >> first & WEEKDAY.all();
            Some((0..5).fold(0, |days, nth| days | week << (7 * nth + 1)))
        };
        let days = match (self.days == DAY.all(), self.weekdays == WEEKDAY.all()) {
            (true, true) => existing,
            (false, true) => self.days,
            (true, false) => of_the_week()?,
            (false, false) => self.days | of_the_week()?,
        };
        Some(days & existing)
    }
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Schedule({self})")
    }
}

/// The fields, as in a crontab line.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(seconds) = self.seconds {
            SECOND.print(seconds, f)?;
            f.write_str(" ")?;
        }
        MINUTE.print(self.minutes, f)?;
        let rest = [(&HOUR, self.hours), (&DAY, self.days), (&MONTH, self.months), (&WEEKDAY, self.weekdays)];
        rest.iter().try_for_each(|(field, values)| {
            f.write_str(" ")?;
            field.print(*values, f)
        })
    }
}

fn only(field: &Field, value: u32) -> Result<u64, ScheduleError> {
    let Field { name, min, max, .. } = field;
    if value < *min || value > *max {
        return Err(schedule_error(format!("the {name} is {value}, expected {min}–{max}")));
    }
    Ok(1 << value)
}

fn schedule_error(message: String) -> ScheduleError {
    ScheduleError { message }
}

/// The lowest value of a set from `from` on.
fn lowest(set: u64, from: u32) -> Option<u32> {
    let rest = set & u64::MAX.checked_shl(from)?;
    (rest != 0).then(|| rest.trailing_zeros())
}

/// The highest value of a set up to `until`.
fn highest(set: u64, until: u32) -> Option<u32> {
    let rest = set & (u64::MAX >> (63 - until.min(63)));
    rest.checked_ilog2()
}

fn days_in_month(year: i32, month: u32) -> u32 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

fn epoch_day(year: i32, month: u32, day: u32) -> Option<i64> {
    Some(i64::from(NaiveDate::from_ymd_opt(year, month, day)?.to_epoch_days()))
}
