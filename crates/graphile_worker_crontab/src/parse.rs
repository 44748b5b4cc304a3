//! Reading: a crontab's text to its items, or to everything that is wrong with it.
//! How fields, options and payloads are read is in `field`, `options` and `payload`.

use crate::crontab::{Crontab, check_task, is_task_identifier};
use crate::error::{CrontabError, CrontabParseError, Problem, ScheduleError, is_space, shown};
use crate::field::{FIELDS, looks_like_field};
use crate::options::is_line_end;
use crate::schedule::Schedule;
use crate::{options, payload};
use std::collections::HashMap;
use std::str::FromStr;

/// Reads a crontab: one item a line; lines that are blank or begin with `#` are skipped.
///
/// The error tells everything that is wrong, not only the first.
pub fn parse_crontab(crontab: &str) -> Result<Vec<Crontab>, CrontabParseError> {
    let mut items = Vec::new();
    let mut errors = Vec::new();
    for (line, number) in crontab.split('\n').zip(1..) {
        match read_line(line) {
            Ok(Some(item)) => items.push(Found { item, line, number }),
            Ok(None) => {}
            Err(problems) => errors.extend(problems.into_iter().map(|problem| problem.in_line(line, number))),
        }
    }
    errors.extend(repeated_identifiers(&items));
    if errors.is_empty() {
        return Ok(items.into_iter().map(|found| found.item).collect());
    }
    errors.sort_by_key(|error| (error.line, error.column));
    Err(CrontabParseError { errors })
}

impl FromStr for Crontab {
    type Err = CrontabParseError;

    /// Reads a text that holds exactly one item.
    fn from_str(text: &str) -> Result<Crontab, CrontabParseError> {
        let mut items = parse_crontab(text)?;
        match items.pop() {
            Some(item) if items.is_empty() => Ok(item),
            found => {
                let problem = match found {
                    None => "the text has no item, expected one".to_owned(),
                    Some(_) => format!("the text has {} items, expected one", items.len() + 1),
                };
                Err(CrontabParseError {
                    errors: vec![Problem::at(0, 0, problem).in_line(text.lines().next().unwrap_or(""), 1)],
                })
            }
        }
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    /// Reads the fields alone: five of them, six with seconds, or a name like `@daily`.
    fn from_str(text: &str) -> Result<Schedule, ScheduleError> {
        let words: Vec<Word<'_>> = words(text).collect();
        let schedule = match words.len() {
            1 if words[0].text.starts_with('@') => read_shorthand(words[0]).map_err(|problem| vec![problem]),
            5 | 6 => read_fields(&words),
            found => Err(vec![Problem::at(
                0,
                0,
                format!("{} has {found} fields, expected 5, or 6 with seconds: {FIVE_FIELDS}", shown(text)),
            )]),
        };
        schedule.map_err(|problems| {
            let messages: Vec<String> = problems.into_iter().map(|problem| problem.message).collect();
            ScheduleError { message: messages.join("; ") }
        })
    }
}

const FIVE_FIELDS: &str = "minute, hour, day of the month, month and day of the week";

/// An item, and where it stands.
struct Found<'a> {
    item: Crontab,
    line: &'a str,
    number: usize,
}

/// A word of a line, and the byte at which it begins.
#[derive(Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    start: usize,
}

impl Word<'_> {
    fn end(&self) -> usize {
        self.start + self.text.len()
    }

    fn problem(&self, message: impl Into<String>) -> Problem {
        Problem::at(self.start, self.end(), message)
    }
}

fn words(text: &str) -> impl Iterator<Item = Word<'_>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + text[at..].find(|c| !is_space(c))?;
        at = text[start..].find(is_space).map_or(text.len(), |length| start + length);
        Some(Word { text: &text[start..at], start })
    })
}

fn read_line(line: &str) -> Result<Option<Crontab>, Vec<Problem>> {
    // A word more than the seconds, the five fields and the task.
    let words: Vec<Word<'_>> = words(line).take(8).collect();
    match words.first() {
        None => return Ok(None),
        Some(first) if first.text.starts_with('#') => return Ok(None),
        Some(_) => {}
    }
    let (fields, command) = words.split_at(count_fields(&words)?);
    let schedule = match fields {
        [shorthand] => read_shorthand(*shorthand).map_err(|problem| vec![problem]),
        fields => read_fields(fields),
    };
    let item = match command.first() {
        Some(task) => read_command(line, *task),
        None => {
            let end = fields.last().map_or(0, Word::end);
            Err(vec![Problem::at(end, end, "there is no task after the schedule")])
        }
    };
    match (schedule, item) {
        (Ok(schedule), Ok(item)) => Ok(Some(Crontab { schedule, ..item })),
        (Err(mut problems), Err(others)) => {
            problems.extend(others);
            Err(problems)
        }
        (Err(problems), Ok(_)) | (Ok(_), Err(problems)) => Err(problems),
    }
}

/// How many words of a line are its schedule: 5, 6 with seconds, or 1 that begins with `@`.
///
/// In five fields and a task, the task can be followed by options or a payload only; so where a word follows that could
/// be a task, the one before it is a field.
fn count_fields(words: &[Word<'_>]) -> Result<usize, Vec<Problem>> {
    if words[0].text.starts_with('@') {
        return Ok(1);
    }
    let text = |nth: usize| words.get(nth).map_or("", |word| word.text);
    match words.iter().take_while(|word| looks_like_field(word.text)).count() {
        6.. if is_task_identifier(text(6)) || !is_task_identifier(text(5)) => return Ok(6),
        5.. => return Ok(5),
        _ => {}
    }
    // One of the fields is wrong, or there are too few: tell by where the options or the payload begin.
    let is_tail = |word: &Word<'_>| word.text.starts_with(['?', '{']);
    let tail = words.iter().position(is_tail).unwrap_or(words.len());
    match tail {
        0..=5 => Err(vec![too_few_fields(&words[..tail.max(1)])]),
        _ => Ok(5),
    }
}

fn too_few_fields(words: &[Word<'_>]) -> Problem {
    let fields = words.iter().take_while(|word| looks_like_field(word.text)).count();
    let noun = if fields == 1 { "field" } else { "fields" };
    let found = match words.get(fields) {
        Some(word) => format!("{fields} schedule {noun} before {}", shown(word.text)),
        None => format!("{fields} schedule {noun}"),
    };
    let Word { start, text } = words.get(fields).or(words.last()).copied().unwrap_or(Word { text: "", start: 0 });
    Problem::at(start, start + text.len(), format!("{found}, expected 5 ({FIVE_FIELDS}) and then the task"))
}

fn read_fields(words: &[Word<'_>]) -> Result<Schedule, Vec<Problem>> {
    let mut schedule = Schedule::every_minute();
    let mut problems = Vec::new();
    let skipped = FIELDS.len() - words.len();
    for (nth, (field, word)) in FIELDS.iter().skip(skipped).zip(words).enumerate() {
        match field.read(word.text, word.start) {
            Ok(values) => schedule.set(nth + skipped, values),
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() { Ok(schedule) } else { Err(problems) }
}

const SHORTHANDS: [(&str, &str); 7] = [
    ("@hourly", "0 * * * *"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@weekly", "0 0 * * 0"),
    ("@monthly", "0 0 1 * *"),
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
];

fn read_shorthand(word: Word<'_>) -> Result<Schedule, Problem> {
    let found = SHORTHANDS.iter().find(|(name, _)| name.eq_ignore_ascii_case(word.text));
    let fields = found.and_then(|(_, fields)| read_fields(&words(fields).collect::<Vec<_>>()).ok());
    fields.ok_or_else(|| {
        let names = SHORTHANDS.map(|(name, _)| name).join(", ");
        word.problem(format!("schedule is {}, expected one of {names}", shown(word.text)))
    })
}

/// Reads `task ?options {payload}`; the schedule is left to the caller.
fn read_command(line: &str, task: Word<'_>) -> Result<Crontab, Vec<Problem>> {
    let line = line.trim_end_matches(is_space);
    if let Some((at, found)) = line.char_indices().skip_while(|(at, _)| *at < task.start).find(|(_, c)| is_line_end(*c))
    {
        let message =
            format!("a `{}` stands in the line, expected no line break after the task", found.escape_default());
        return Err(vec![Problem::at(at, at + found.len_utf8(), message)]);
    }
    let mut problems = Vec::new();
    if let Err(message) = check_task(task.text) {
        problems.push(match task.text.split_once('?') {
            Some((name, _)) if is_task_identifier(name) => {
                let at = task.start + name.len();
                Problem::at(at, at + 1, "there is no space before `?`, expected one after the task")
            }
            _ => task.problem(message),
        });
    }
    let mut item = Crontab::new(Schedule::every_minute(), task.text);
    let mut rest = after_spaces(line, task.end());
    if rest.text.starts_with('?') {
        let word = Word { text: rest.text.split(is_space).next().unwrap_or(""), ..rest };
        match options::read(&word.text[1..], word.start + 1) {
            _ if word.text == "?" => problems.push(word.problem("there are no options after `?`")),
            Ok(options) => item.options = options,
            Err(others) => problems.extend(others),
        }
        rest = after_spaces(line, word.end());
    }
    match read_payload(rest) {
        Ok(payload) => item.payload = payload,
        Err(problem) => problems.push(problem),
    }
    if problems.is_empty() { Ok(item) } else { Err(problems) }
}

fn after_spaces(line: &str, from: usize) -> Word<'_> {
    let text = line[from..].trim_start_matches(is_space);
    Word { text, start: line.len() - text.len() }
}

fn read_payload(rest: Word<'_>) -> Result<Option<serde_json::Map<String, serde_json::Value>>, Problem> {
    let first = Word { text: rest.text.split(is_space).next().unwrap_or(""), ..rest };
    match rest.text.chars().next() {
        None => Ok(None),
        Some('{') if rest.text.ends_with('}') => payload::read(rest.text, rest.start).map(Some),
        Some('{') => Err(payload_end(rest)),
        Some('?') => Err(first.problem("there are options twice, expected them once: join them with `&`")),
        Some('[' | '"' | '\'') => {
            Err(rest.problem(format!("payload is {}, expected an object like `{{key: 'value'}}`", shown(rest.text))))
        }
        Some(_) if first.text.contains('=') => {
            Err(first.problem(format!("options are {}, expected a `?` before them", shown(first.text))))
        }
        Some(_) => {
            Err(first.problem(format!("{} follows, expected `?options`, `{{payload}}` or nothing", shown(first.text))))
        }
    }
}

/// What is wrong with a payload that does not end with `}`.
fn payload_end(rest: Word<'_>) -> Problem {
    let after = rest.text.rfind('}').map_or(rest.text.len(), |end| end + 1);
    let tail = rest.text[after..].trim_start_matches(is_space);
    let start = rest.end() - tail.len();
    match tail {
        "" => Problem::at(rest.start, rest.start + 1, "payload does not end, expected a `}` at the end of the line"),
        _ if tail.starts_with('?') => {
            Problem::at(start, rest.end(), "options follow the payload, expected them before it")
        }
        _ => Problem::at(
            start,
            rest.end(),
            format!("payload is followed by {}, expected a `}}` at the end of the line", shown(tail)),
        ),
    }
}

fn repeated_identifiers(items: &[Found<'_>]) -> Vec<CrontabError> {
    let mut first_lines: HashMap<&str, usize> = HashMap::with_capacity(items.len());
    let mut errors = Vec::new();
    for Found { item, line, number } in items {
        let identifier = item.identifier();
        let first = *first_lines.entry(identifier).or_insert(*number);
        if first == *number {
            continue;
        }
        let message = format!(
            "identifier {} is also that of line {first}, expected each item to have its own: give one of them another with `?id=…`",
            shown(identifier)
        );
        // The id, or else the task, is a word of its own or follows `id=`.
        let start = match item.options.id {
            Some(_) => line.find("id=").map_or(0, |at| at + 3),
            None => words(line).find(|word| word.text == identifier).map_or(0, |word| word.start),
        };
        errors.push(Problem::at(start, start + identifier.len(), message).in_line(line, *number));
    }
    errors
}

impl Schedule {
    /// Sets a field by its place in a line.
    fn set(&mut self, field: usize, values: u64) {
        match field {
            0 => self.seconds = Some(values),
            1 => self.minutes = values,
            2 => self.hours = values,
            3 => self.days = values,
            4 => self.months = values,
            _ => self.weekdays = values,
        }
    }
}
