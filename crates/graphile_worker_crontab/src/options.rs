//! The options of an item, each with its default and its check. The checks are the same for crontab lines and
//! for items built in code.

use crate::crontab::LONGEST_NAME;
use crate::error::{Problem, distance, shown};
use crate::query;
use chrono::TimeDelta;
use chrono_tz::{TZ_VARIANTS, Tz};
use std::fmt;

/// How to add the jobs of an item. The database chooses the default for every field that is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CrontabOptions {
    /// `id`: identifier of the item (default: the task).
    pub id: Option<String>,
    /// `fill`: how far back to add jobs that were missed while no worker ran (default: none).
    pub fill: Option<CrontabFill>,
    /// `fillLimit`: maximum number of backfilled jobs, newest first (default: all).
    pub fill_limit: Option<u32>,
    /// `max`: maximum number of attempts (default 25).
    pub max_attempts: Option<i16>,
    /// `queue`: named queue; its jobs run one at a time (default: none).
    pub queue: Option<String>,
    /// `priority`: lower numbers run first (default 0).
    pub priority: Option<i16>,
    /// `jobKey`: the new job replaces the waiting job with the same key (default: none).
    pub job_key: Option<String>,
    /// `jobKeyMode`: what to replace (default: [`Replace`](CrontabJobKeyMode::Replace)).
    pub job_key_mode: Option<CrontabJobKeyMode>,
    /// `tz`: time zone of the schedule (default: UTC).
    ///
    /// Times skipped by a DST change fire right after the gap, all of them together once. Times repeated by a
    /// DST change fire once; if the hour is `*` they fire both times, so that an hourly item does not pause.
    ///
    /// ```
    /// # use graphile_worker_crontab::Crontab;
    /// let item: Crontab = "30 2 * * * wake ?tz=Europe/Paris".parse()?;
    /// let eve = "2026-03-28T12:00:00Z".parse()?;
    /// // On 29 March the clock goes from 02:00 to 03:00, which is 01:00 in UTC.
    /// assert_eq!(item.next_after(eve), Some("2026-03-29T01:00:00Z".parse()?));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub tz: Option<Tz>,
}

/// What to replace of the waiting job with the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CrontabJobKeyMode {
    /// `replace`: everything.
    Replace,
    /// `preserve_run_at`: everything except `run_at`.
    PreserveRunAt,
}

impl CrontabJobKeyMode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            CrontabJobKeyMode::Replace => "replace",
            CrontabJobKeyMode::PreserveRunAt => "preserve_run_at",
        }
    }
}

/// How far back missed jobs are added.
///
/// ```
/// use graphile_worker_crontab::CrontabFill;
///
/// let fill = CrontabFill::new(4, 3, 2, 1, 0);
/// assert_eq!(fill.to_string(), "4w3d2h1m");
/// assert_eq!(fill.as_duration().num_minutes(), 44761);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CrontabFill {
    /// Weeks.
    pub w: u32,
    /// Days.
    pub d: u32,
    /// Hours.
    pub h: u32,
    /// Minutes.
    pub m: u32,
    /// Seconds.
    pub s: u32,
}

impl CrontabFill {
    /// Creates a period of weeks, days, hours, minutes and seconds.
    pub const fn new(w: u32, d: u32, h: u32, m: u32, s: u32) -> CrontabFill {
        CrontabFill { w, d, h, m, s }
    }

    /// Creates a period of `s` seconds.
    pub const fn seconds(s: u32) -> CrontabFill {
        CrontabFill::new(0, 0, 0, 0, s)
    }

    /// Creates a period of `m` minutes.
    pub const fn minutes(m: u32) -> CrontabFill {
        CrontabFill::new(0, 0, 0, m, 0)
    }

    /// Creates a period of `h` hours.
    pub const fn hours(h: u32) -> CrontabFill {
        CrontabFill::new(0, 0, h, 0, 0)
    }

    /// Creates a period of `d` days.
    pub const fn days(d: u32) -> CrontabFill {
        CrontabFill::new(0, d, 0, 0, 0)
    }

    /// Creates a period of `w` weeks.
    pub const fn weeks(w: u32) -> CrontabFill {
        CrontabFill::new(w, 0, 0, 0, 0)
    }

    /// The total duration. It may exceed the range of dates: use checked subtraction.
    pub fn as_duration(&self) -> TimeDelta {
        let parts = [(self.w, 604_800), (self.d, 86_400), (self.h, 3_600), (self.m, 60), (self.s, 1)];
        // At most 2.7 · 10¹⁵ seconds; a duration holds 9.2 · 10¹⁵.
        TimeDelta::seconds(parts.iter().map(|(quantity, seconds)| i64::from(*quantity) * seconds).sum())
    }

    fn read(text: &str) -> Result<CrontabFill, String> {
        let mut fill = CrontabFill::default();
        let mut rest = text;
        while !rest.is_empty() {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let unit = match rest.as_bytes().get(digits) {
                Some(b'w') if digits > 0 => &mut fill.w,
                Some(b'd') if digits > 0 => &mut fill.d,
                Some(b'h') if digits > 0 => &mut fill.h,
                Some(b'm') if digits > 0 => &mut fill.m,
                Some(b's') if digits > 0 => &mut fill.s,
                _ => return Err(format!("fill is {}, expected a period like `4w3d2h1m` or `30s`", shown(text))),
            };
            let sum = rest[..digits].parse().ok().and_then(|quantity| unit.checked_add(quantity));
            *unit = sum.ok_or_else(|| format!("fill is {}, expected numbers up to {}", shown(text), u32::MAX))?;
            rest = &rest[digits + 1..];
        }
        match text {
            "" => Err("fill is empty, expected a period like `4w3d2h1m` or `30s`".to_owned()),
            _ => Ok(fill),
        }
    }
}

impl fmt::Display for CrontabFill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == CrontabFill::default() {
            return f.write_str("0s");
        }
        let parts = [(self.w, 'w'), (self.d, 'd'), (self.h, 'h'), (self.m, 'm'), (self.s, 's')];
        parts
            .iter()
            .filter(|(quantity, _)| *quantity > 0)
            .try_for_each(|(quantity, unit)| write!(f, "{quantity}{unit}"))
    }
}

const KEYS: [&str; 9] = ["id", "fill", "fillLimit", "max", "queue", "priority", "jobKey", "jobKeyMode", "tz"];
/// The maximum length of job keys in the database.
const LONGEST_JOB_KEY: usize = 512;

/// Parses the options of a line, which start (after the `?`) at byte `at` of it.
pub(crate) fn read(text: &str, at: usize) -> Result<CrontabOptions, Vec<Problem>> {
    let mut options = CrontabOptions::default();
    let mut problems = Vec::new();
    let mut seen: Vec<String> = Vec::new();
    for pair in query::pairs(text) {
        let (start, value_start, end) = (at + pair.start, at + pair.value_start, at + pair.end);
        if !KEYS.contains(&pair.key.as_str()) {
            let key_end = if value_start == end { end } else { value_start - 1 };
            problems.push(Problem::at(start, key_end, unknown(&pair.key)));
        } else if seen.contains(&pair.key) {
            problems.push(Problem::at(start, end, format!("option `{}` occurs twice", pair.key)));
        } else if let Err(message) = options.set(&pair.key, &pair.value) {
            let start = if value_start == end { start } else { value_start };
            problems.push(Problem::at(start, end, message));
        }
        seen.push(pair.key);
    }
    if options.fill_limit.is_some() && options.fill.is_none() && !seen.iter().any(|key| key == "fill") {
        problems.push(Problem::at(at, at + text.len(), LIMIT_WITHOUT_FILL));
    }
    if problems.is_empty() { Ok(options) } else { Err(problems) }
}

const LIMIT_WITHOUT_FILL: &str = "option `fillLimit` requires `fill`, which is not set";

impl CrontabOptions {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let owned = || Some(value.to_owned());
        match key {
            "id" => self.id = check_id(value).map(|()| owned())?,
            "fill" => self.fill = Some(CrontabFill::read(value)?),
            "fillLimit" => self.fill_limit = Some(number(key, value, 1, u32::MAX.into())? as u32),
            "max" => self.max_attempts = Some(number(key, value, 1, i16::MAX.into())? as i16),
            "queue" => self.queue = check_queue(value).map(|()| owned())?,
            "priority" => self.priority = Some(number(key, value, i16::MIN.into(), i16::MAX.into())? as i16),
            "jobKey" => self.job_key = check_job_key(value).map(|()| owned())?,
            "jobKeyMode" => self.job_key_mode = Some(read_job_key_mode(value)?),
            "tz" => self.tz = Some(read_zone(value)?),
            _ => return Err(unknown(key)),
        }
        Ok(())
    }

    /// What a crontab line cannot express.
    pub(crate) fn problems(&self) -> Vec<String> {
        let checks = [
            self.id.as_deref().map_or(Ok(()), check_id),
            self.queue.as_deref().map_or(Ok(()), check_queue),
            self.job_key.as_deref().map_or(Ok(()), check_job_key),
            match self.max_attempts {
                Some(max) if max < 1 => Err(format!("max is `{max}`, expected a number from 1 to {}", i16::MAX)),
                _ => Ok(()),
            },
            match self.fill_limit {
                Some(0) => Err(format!("fillLimit is `0`, expected a number from 1 to {}", u32::MAX)),
                Some(_) if self.fill.is_none() => Err(LIMIT_WITHOUT_FILL.to_owned()),
                _ => Ok(()),
            },
        ];
        checks.into_iter().filter_map(Result::err).collect()
    }
}

fn check_id(id: &str) -> Result<(), String> {
    let well_formed = id.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    if well_formed {
        return Ok(());
    }
    Err(format!("id is {}, expected a letter or `_`, then letters, digits, `_` or `-`", shown(id)))
}

fn check_queue(queue: &str) -> Result<(), String> {
    if queue.is_empty() || !queue.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-:".contains(&byte)) {
        return Err(format!("queue is {}, expected letters, digits, `_`, `-` or `:`", shown(queue)));
    }
    if queue.len() > LONGEST_NAME {
        return Err(format!("queue has {} characters, expected at most {LONGEST_NAME}", queue.len()));
    }
    Ok(())
}

fn check_job_key(key: &str) -> Result<(), String> {
    let length = key.chars().count();
    if length == 0 || length > LONGEST_JOB_KEY {
        return Err(format!("jobKey has {length} characters, expected 1–{LONGEST_JOB_KEY}"));
    }
    match key.chars().find(|c| *c == '\0' || is_line_end(*c)) {
        Some('\0') => Err("jobKey contains a NUL character, which the database does not accept".to_owned()),
        Some(_) => Err(format!("jobKey is {}: line breaks are not allowed", shown(key).escape_debug())),
        None => Ok(()),
    }
}

/// Line terminators of JavaScript.
pub(crate) fn is_line_end(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\u{2028}' | '\u{2029}')
}

fn number(key: &str, text: &str, min: i64, max: i64) -> Result<i64, String> {
    let digits = if min < 0 { text.strip_prefix('-').unwrap_or(text) } else { text };
    let all_digits = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let value = if all_digits { text.parse().ok() } else { None };
    value
        .filter(|value| (min..=max).contains(value))
        .ok_or_else(|| format!("{key} is {}, expected a number from {min} to {max}", shown(text)))
}

fn read_job_key_mode(text: &str) -> Result<CrontabJobKeyMode, String> {
    [CrontabJobKeyMode::Replace, CrontabJobKeyMode::PreserveRunAt]
        .into_iter()
        .find(|mode| mode.as_str() == text)
        .ok_or_else(|| format!("jobKeyMode is {}, expected `replace` or `preserve_run_at`", shown(text)))
}

fn read_zone(text: &str) -> Result<Tz, String> {
    // `Etc/GMT+5` in a query string is `Etc/GMT 5`; no time zone has a space in its name.
    let name = text.replace(' ', "+");
    name.parse().map_err(|_| {
        let near = near_zones(&name);
        let expected = if near.is_empty() { "expected an IANA time zone like `Europe/Paris`".to_owned() } else { near };
        format!("tz is {}, which is not a known time zone: {expected}", shown(text))
    })
}

/// "did you mean `Europe/Paris`?", with up to three zones.
fn near_zones(name: &str) -> String {
    // A text that is longer than any name is not similar to one.
    if name.len() > 64 {
        return String::new();
    }
    let furthest = name.chars().count() / 3;
    let likeness = |zone: &Tz| {
        let zone = zone.name();
        let city = zone.rsplit('/').next().unwrap_or_default();
        // A larger difference in length means a larger distance.
        let near = [zone, city].into_iter().filter(|text| text.len().abs_diff(name.len()) <= furthest);
        let far = near.map(|text| distance(name, text)).min()?;
        (far <= furthest).then_some((far, zone))
    };
    let mut near: Vec<(usize, &str)> = TZ_VARIANTS.iter().filter_map(likeness).collect();
    near.sort();
    let best = near.first().map_or(0, |(far, _)| *far);
    let names: Vec<String> =
        near.iter().take_while(|(far, _)| *far <= best).take(3).map(|(_, zone)| format!("`{zone}`")).collect();
    if names.is_empty() { String::new() } else { format!("did you mean {}?", names.join(" or ")) }
}

fn unknown(key: &str) -> String {
    match meant(key) {
        Some(known) => format!("unknown option {}, did you mean `{known}`?", shown(key)),
        None => format!("unknown option {}, expected one of {}", shown(key), KEYS.join(", ")),
    }
}

/// The option that was probably meant.
fn meant(key: &str) -> Option<&'static str> {
    if key.len() > 40 {
        return None;
    }
    let plain: String = key.chars().filter(|c| c.is_alphanumeric()).collect::<String>().to_lowercase();
    if plain == "timezone" || plain == "zone" {
        return Some("tz");
    }
    let nearest = KEYS.iter().map(|known| (distance(&plain, known), *known)).min()?;
    if nearest.0 <= 2 && nearest.0 < plain.chars().count().min(nearest.1.len()) {
        return Some(nearest.1);
    }
    // `maxAttempts`, `queueName`, `backfill`.
    KEYS.into_iter()
        .filter(|known| known.len() > 2 && plain.contains(&known.to_lowercase()))
        .max_by_key(|known| known.len())
}
