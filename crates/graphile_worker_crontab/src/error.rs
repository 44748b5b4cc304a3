//! Errors of crontabs: where, what was found, and what was expected.

use std::fmt;

/// All errors of a crontab, in order. Displays the first 100.
///
/// ```
/// let error = graphile_worker_crontab::parse_crontab("61 4 * * 1 send_weekly_email").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "crontab line 1, column 1: minute is `61`, expected 0–59\n\
///     \x20 61 4 * * 1 send_weekly_email\n\
///     \x20 ^^"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", beginning(errors))]
#[non_exhaustive]
pub struct CrontabParseError {
    /// At least one.
    pub errors: Vec<CrontabError>,
}

/// One error of a crontab. Displays the line and underlines the wrong part.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CrontabError {
    /// The line, from 1.
    pub line: usize,
    /// The character in the line, from 1.
    pub column: usize,
    /// What was found, and what was expected.
    pub message: String,
    /// The displayed part of the line, and its underline.
    excerpt: String,
    underline: String,
}

impl fmt::Display for CrontabError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CrontabError { line, column, message, excerpt, underline } = self;
        write!(f, "crontab line {line}, column {column}: {message}\n  {excerpt}\n  {underline}")
    }
}

impl std::error::Error for CrontabError {}

/// An invalid schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
#[non_exhaustive]
pub struct ScheduleError {
    /// What was found, and what was expected.
    pub message: String,
}

/// Why an item built in code is not a valid crontab item.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("crontab item of the task {}: {}", shown(task_identifier), joined(problems, "; "))]
#[non_exhaustive]
pub struct CrontabItemError {
    /// Its task.
    pub task_identifier: String,
    /// The problems: what was found, and what was expected.
    pub problems: Vec<String>,
}

/// A part of a line, in bytes, and what is wrong with it.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) message: String,
}

impl Problem {
    pub(crate) fn at(start: usize, end: usize, message: impl Into<String>) -> Problem {
        Problem { start, end, message: message.into() }
    }

    /// Adds the line, whose number starts at 1.
    pub(crate) fn in_line(self, line: &str, number: usize) -> CrontabError {
        let start = line.floor_char_boundary(self.start);
        let end = line.floor_char_boundary(self.end).max(start);
        let column = line[..start].chars().count();
        let width = line[start..end].chars().count().max(1);
        let (excerpt, underline) = excerpt(line, column, width);
        CrontabError { line: number, column: column + 1, message: self.message, excerpt, underline }
    }
}

/// How many characters of a long line are displayed around the error.
const SHOWN: usize = 100;

/// The line, or the part around `column` if it is long, and the underline.
fn excerpt(line: &str, column: usize, width: usize) -> (String, String) {
    let indent = line.chars().take(column).take_while(|c| is_space(*c)).count();
    let from = if column - indent < SHOWN { indent } else { column - SHOWN / 2 };
    let mut characters = line.chars().skip(from).map(plain);
    let mut text: String = characters.by_ref().take(SHOWN).collect();
    text.truncate(text.trim_end().len());
    let mut before = column - from;
    if from > indent {
        text.insert(0, '…');
        before += 1;
    }
    if characters.any(|c| !is_space(c)) {
        text.push('…');
    }
    let width = width.min(text.chars().count().saturating_sub(before)).max(1);
    (text, " ".repeat(before) + &"^".repeat(width))
}

/// A replacement that takes one column in a terminal.
fn plain(c: char) -> char {
    match c {
        _ if is_space(c) => ' ',
        _ if c.is_control() => '\u{fffd}',
        _ => c,
    }
}

/// White space as in JavaScript's `trim` and `\s`.
pub(crate) fn is_space(c: char) -> bool {
    c == '\u{feff}' || (c.is_whitespace() && c != '\u{85}')
}

/// A text in backquotes, shortened if it is long.
pub(crate) fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        None => format!("`{text}`"),
        Some((end, _)) => format!("`{}…`", &text[..end]),
    }
}

/// How many errors are displayed before the rest is counted.
const MAX_SHOWN_ERRORS: usize = 100;

fn beginning(errors: &[CrontabError]) -> String {
    match errors.split_at_checked(MAX_SHOWN_ERRORS) {
        Some((first, rest)) if !rest.is_empty() => format!("{}\nand {} more", joined(first, "\n"), rest.len()),
        _ => joined(errors, "\n"),
    }
}

fn joined<T: ToString>(parts: &[T], separator: &str) -> String {
    parts.iter().map(T::to_string).collect::<Vec<_>>().join(separator)
}

/// The edit distance of two texts, ignoring case.
pub(crate) fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.to_lowercase().chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.to_lowercase().chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let changed = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}
