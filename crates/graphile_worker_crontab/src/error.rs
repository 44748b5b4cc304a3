//! What can be wrong with a crontab, in sentences that say where, what was found and what was expected.

use std::fmt;

/// Everything that is wrong with a crontab, from the first line to the last; its text tells the first hundred.
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

/// One thing that is wrong with a crontab; its text shows the line and underlines the part.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CrontabError {
    /// The line, from 1.
    pub line: usize,
    /// The character in the line, from 1.
    pub column: usize,
    /// What was found, and what was expected.
    pub message: String,
    /// The line as it is shown, cut where it is long, and what is underlined in it.
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

/// A schedule that cannot be: what was given, and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
#[non_exhaustive]
pub struct ScheduleError {
    /// What was found, and what was expected.
    pub message: String,
}

/// Why an item that was made by code cannot be an item of a crontab.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the crontab item of the task {}: {}", shown(task_identifier), joined(problems, "; "))]
#[non_exhaustive]
pub struct CrontabItemError {
    /// Its task.
    pub task_identifier: String,
    /// What was found and what was expected, for each thing that is wrong.
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

    /// With the line around it, whose number is given from 1.
    pub(crate) fn in_line(self, line: &str, number: usize) -> CrontabError {
        let start = line.floor_char_boundary(self.start);
        let end = line.floor_char_boundary(self.end).max(start);
        let column = line[..start].chars().count();
        let width = line[start..end].chars().count().max(1);
        let (excerpt, underline) = excerpt(line, column, width);
        CrontabError { line: number, column: column + 1, message: self.message, excerpt, underline }
    }
}

/// So many characters of a line are shown around what is wrong in it.
const SHOWN: usize = 100;

/// The line, or what is around the part that begins at `column` where it is long; and the underline of that part.
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

/// What takes one column of a terminal.
fn plain(c: char) -> char {
    match c {
        _ if is_space(c) => ' ',
        _ if c.is_control() => '\u{fffd}',
        _ => c,
    }
}

/// White space as JavaScript's `trim` and `\s` see it.
pub(crate) fn is_space(c: char) -> bool {
    c == '\u{feff}' || (c.is_whitespace() && c != '\u{85}')
}

/// A text in back quotes, cut where it is long.
pub(crate) fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        None => format!("`{text}`"),
        Some((end, _)) => format!("`{}…`", &text[..end]),
    }
}

/// So many errors are told before it is said how many more there are.
const TOLD: usize = 100;

fn beginning(errors: &[CrontabError]) -> String {
    match errors.split_at_checked(TOLD) {
        Some((told, rest)) if !rest.is_empty() => format!("{}\nand {} more", joined(told, "\n"), rest.len()),
        _ => joined(errors, "\n"),
    }
}

fn joined<T: ToString>(parts: &[T], separator: &str) -> String {
    parts.iter().map(T::to_string).collect::<Vec<_>>().join(separator)
}

/// How many characters must be added, removed or changed to make one text of the other, whatever their case.
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
