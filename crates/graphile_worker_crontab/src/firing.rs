//! Fire times: converts the local times of a schedule to UTC. `schedule` finds the local times.
//!
//! A local time that the time zone skips fires right after the gap. One that it repeats fires the first time
//! only; if the hour is `*`, it fires both times, so that an hourly item never pauses.
//!
//! To find a DST change near a time, we compare the offsets at two ends and bisect between them: no table of
//! changes is needed, and days without one cost a few lookups.

use crate::schedule::Schedule;
use chrono::{DateTime, Offset, TimeZone, Utc};
use chrono_tz::Tz;

/// The largest offset from UTC is 15 hours and 13 minutes, in Alaska until 1867.
const FURTHEST: i64 = 16 * 60 * 60;
/// The longest repetition is a day, when the date line was moved.
const LONGEST_REPEAT: i64 = 24 * 60 * 60;

/// The first fire time after the given second.
pub(crate) fn first_after(schedule: &Schedule, zone: Option<Tz>, after: i64) -> Option<i64> {
    let clock = Clock(zone.filter(|zone| *zone != Tz::UTC));
    let local = after + clock.offset(after);
    let repeat = clock.repeat_at(after);
    // During a repetition, the times up to its end have already fired once.
    let mut time = schedule.first_from(repeat.map_or(local + 1, |repeat| repeat.end()))?;
    let mut fires = clock.first_instant(time);
    while fires <= after {
        time = schedule.first_from(time + 1)?;
        fires = clock.first_instant(time);
    }
    if !schedule.fires_every_hour() {
        return Some(fires);
    }
    let again = match repeat {
        Some(repeat) => schedule.first_from(local + 1).and_then(|time| repeat.second_instant(time)),
        None => clock
            .change_between(after, fires.min(after + LONGEST_REPEAT))
            .and_then(|change| change.second_instant(schedule.first_from(change.start())?)),
    };
    Some(again.map_or(fires, |again| again.min(fires)))
}

/// The last fire time up to the given second.
pub(crate) fn last_until(schedule: &Schedule, zone: Option<Tz>, until: i64) -> Option<i64> {
    let clock = Clock(zone.filter(|zone| *zone != Tz::UTC));
    let local = until + clock.offset(until);
    let repeat = clock.repeat_at(until);
    let mut time = schedule.last_until(repeat.map_or(local, |repeat| repeat.end() - 1))?;
    let mut fires = clock.first_instant(time);
    while fires > until {
        time = schedule.last_until(time - 1)?;
        fires = clock.first_instant(time);
    }
    if !schedule.fires_every_hour() {
        return Some(fires);
    }
    let again = match repeat {
        Some(repeat) => schedule.last_until(local).and_then(|time| repeat.second_instant(time)),
        None => clock.change_near(time).and_then(|change| change.second_instant(time)),
    };
    Some(again.filter(|again| *again <= until).map_or(fires, |again| again.max(fires)))
}

/// The clock of a time zone. All times are in seconds since 1970-01-01, in UTC or local time.
struct Clock(Option<Tz>);

/// A change of the offset, such as DST.
#[derive(Clone, Copy)]
struct Change {
    at: i64,
    offset_before: i64,
    offset_after: i64,
}

impl Change {
    /// The local time right before the change.
    fn end(&self) -> i64 {
        self.at + self.offset_before
    }

    /// The local time right after the change.
    fn start(&self) -> i64 {
        self.at + self.offset_after
    }

    /// When a local time occurs the second time, if it does.
    fn second_instant(&self, local: i64) -> Option<i64> {
        (self.start()..self.end()).contains(&local).then(|| local - self.offset_after)
    }
}

impl Clock {
    /// How far the local time is ahead of UTC, in seconds.
    fn offset(&self, instant: i64) -> i64 {
        let Some(zone) = self.0 else { return 0 };
        let instant = instant.clamp(DateTime::<Utc>::MIN_UTC.timestamp(), DateTime::<Utc>::MAX_UTC.timestamp());
        let Some(instant) = DateTime::from_timestamp(instant, 0) else { return 0 };
        zone.offset_from_utc_datetime(&instant.naive_utc()).fix().local_minus_utc().into()
    }

    /// The first change between two instants. The interval is at most 40 hours, and no time zone has had two
    /// changes in that time.
    fn change_between(&self, mut before: i64, mut after: i64) -> Option<Change> {
        let offset_before = self.offset(before);
        if self.0.is_none() || self.offset(after) == offset_before {
            return None;
        }
        while after - before > 1 {
            let middle = before + (after - before) / 2;
            if self.offset(middle) == offset_before { before = middle } else { after = middle }
        }
        Some(Change { at: after, offset_before, offset_after: self.offset(after) })
    }

    /// The change that may skip or repeat a local time.
    fn change_near(&self, local: i64) -> Option<Change> {
        self.change_between(local - FURTHEST, local + FURTHEST)
    }

    /// The change because of which the clock shows, at this instant, a time that it has shown before.
    fn repeat_at(&self, instant: i64) -> Option<Change> {
        let change = self.change_between(instant - LONGEST_REPEAT, instant)?;
        (instant + change.offset_after < change.end()).then_some(change)
    }

    /// The first instant at which the clock shows a local time, or has passed it.
    fn first_instant(&self, local: i64) -> i64 {
        match self.change_near(local) {
            None => local - self.offset(local - FURTHEST),
            Some(change) if local < change.end() => local - change.offset_before,
            Some(change) => (local - change.offset_after).max(change.at),
        }
    }
}
