//! The fields of a schedule: parses text into a bit mask, and prints it. Bit `n` stands for the value `n`.

use crate::error::{Problem, shown};
use std::fmt;

/// The definition of a field.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) min: u32,
    pub(crate) max: u32,
    /// The names of its values, starting with `min`.
    names: &'static [&'static str],
    /// Another number for the first value: 7 is also Sunday.
    also_first: Option<u32>,
    expected: &'static str,
}

const MONTHS: [&str; 12] = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const WEEKDAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

pub(crate) const SECOND: Field = Field::numbers("second", 0, 59, "0–59");
pub(crate) const MINUTE: Field = Field::numbers("minute", 0, 59, "0–59");
pub(crate) const HOUR: Field = Field::numbers("hour", 0, 23, "0–23");
pub(crate) const DAY: Field = Field::numbers("day of the month", 1, 31, "1–31");
pub(crate) const MONTH: Field = Field { names: &MONTHS, ..Field::numbers("month", 1, 12, "1–12 or jan–dec") };
pub(crate) const WEEKDAY: Field =
    Field { names: &WEEKDAYS, also_first: Some(7), ..Field::numbers("day of the week", 0, 6, "0–7 or sun–sat") };

/// In the order of a crontab line.
pub(crate) const FIELDS: [&Field; 6] = [&SECOND, &MINUTE, &HOUR, &DAY, &MONTH, &WEEKDAY];

impl Field {
    const fn numbers(name: &'static str, min: u32, max: u32, expected: &'static str) -> Field {
        Field { name, min, max, names: &[], also_first: None, expected }
    }

    /// All its values.
    pub(crate) const fn all(&self) -> u64 {
        (1 << (self.max + 1)) - (1 << self.min)
    }

    /// Parses the field, which starts at byte `at` of its line.
    pub(crate) fn read(&self, text: &str, at: usize) -> Result<u64, Problem> {
        let mut values = 0;
        let mut start = at;
        for part in text.split(',') {
            let end = start + part.len();
            values |= self.read_part(part).map_err(|message| Problem::at(start, end, message))?;
            start = end + 1;
        }
        Ok(values)
    }

    fn read_part(&self, part: &str) -> Result<u64, String> {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => (range, Some(self.read_step(step)?)),
            None => (part, None),
        };
        let (first, last) = match range.split_once('-') {
            _ if range == "*" => (self.min, self.max),
            Some((first, last)) => self.read_range(part, first, last)?,
            None if step.is_some() => {
                return Err(format!(
                    "{} is {}, expected `*` or a range before the step, as in `*/5` or `10-30/5`",
                    self.name,
                    shown(part)
                ));
            }
            None => {
                let value = self.read_value(range, part)?;
                (value, value)
            }
        };
        let values = (first..=last).step_by(step.unwrap_or(1) as usize);
        Ok(values.fold(0, |mask, value| mask | 1 << if self.also_first == Some(value) { self.min } else { value }))
    }

    /// A warning about a step that exceeds its range, as in `*/90`: only the first value remains.
    pub(crate) fn useless_step(&self, part: &str) -> Option<String> {
        let (range, step) = part.split_once('/')?;
        let step = self.read_step(step).ok()?;
        let (first, last) = match range.split_once('-') {
            Some((first, last)) => self.read_range(part, first, last).ok()?,
            None => (self.min, self.max),
        };
        (step > last - first).then(|| {
            format!(
                "step {step} exceeds the range {first}–{last} of the {}: it only fires at {first}, not every {step}",
                self.name
            )
        })
    }

    fn read_step(&self, step: &str) -> Result<u32, String> {
        number(step)
            .filter(|step| *step > 0)
            .ok_or_else(|| format!("step of the {} is {}, expected at least 1", self.name, shown(step)))
    }

    fn read_range(&self, part: &str, first: &str, last: &str) -> Result<(u32, u32), String> {
        let start = self.read_value(first, part)?;
        let mut end = self.read_value(last, part)?;
        // `fri-sun` ends a week that starts on Monday.
        if self.also_first.is_some() && end == self.min && start != self.min && number(last).is_none() {
            end = self.max + 1;
        }
        if start < end {
            return Ok((start, end));
        }
        Err(format!("{} range is {}: its end must be greater than its start", self.name, shown(part)))
    }

    fn read_value(&self, text: &str, part: &str) -> Result<u32, String> {
        let value = number(text).or_else(|| {
            let index = self.names.iter().position(|name| name.eq_ignore_ascii_case(text))?;
            Some(self.min + index as u32)
        });
        let Field { name, expected, .. } = self;
        match value {
            Some(value) if value >= self.min && value <= self.also_first.unwrap_or(self.max) => Ok(value),
            Some(_) if text == part => Err(format!("{name} is {}, expected {expected}", shown(part))),
            Some(_) => Err(format!("{name} is {} in {}, expected {expected}", shown(text), shown(part))),
            None if part.is_empty() => Err(format!("{name} has an empty list element, expected {expected}")),
            None => Err(format!(
                "{name} is {}, expected {expected}, `*`, `*/n`, a range `a-b`, or a comma-separated list of these",
                shown(part)
            )),
        }
    }

    /// Prints the values in the shortest of the usual ways.
    pub(crate) fn print(&self, values: u64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if values == self.all() {
            return f.write_str("*");
        }
        let stepped = |step: &u32| {
            let mask = (self.min..=self.max).step_by(*step as usize).fold(0, |mask, value| mask | 1 << value);
            mask == values && values.count_ones() > 1
        };
        if let Some(step) = (2..=self.max).find(stepped) {
            return write!(f, "*/{step}");
        }
        let mut rest = values;
        let mut comma = "";
        while rest != 0 {
            let start = rest.trailing_zeros();
            // A run of two is as long as a list of two.
            let run = Some((rest >> start).trailing_ones()).filter(|run| *run > 2).unwrap_or(1);
            match run {
                1 => write!(f, "{comma}{start}")?,
                _ => write!(f, "{comma}{start}-{}", start + run - 1)?,
            }
            rest &= !(((1 << run) - 1) << start);
            comma = ",";
        }
        Ok(())
    }
}

/// Parses digits. A number that is too large for a `u32` stays too large for any field.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u32::MAX))
}

/// Whether a word may be a field: digits, `*`, names, and separators.
pub(crate) fn looks_like_field(word: &str) -> bool {
    word.split([',', '-', '/']).all(|piece| {
        piece.bytes().all(|byte| byte.is_ascii_digit() || byte == b'*')
            || MONTHS.iter().chain(&WEEKDAYS).any(|name| name.eq_ignore_ascii_case(piece))
    })
}
