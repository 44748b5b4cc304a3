//! Parses a crontab into its items, or reports all its errors. `field`, `options` and `payload` parse the
//! parts.

use crate::crontab::{Crontab, check_task, is_task_identifier};
use crate::error::{CrontabError, CrontabParseError, Problem, ScheduleError, is_space, shown};
use crate::field::{FIELDS, looks_like_field};
use crate::options::is_line_end;
use crate::schedule::Schedule;
use crate::{options, payload};
use std::collections::HashMap;
use std::str::FromStr;

/// Parses a crontab: one item per line. Blank lines and lines that begin with `#` are skipped.
///
/// Reports all errors at once, with line and column.
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

/// Returns warnings about valid but suspicious items: steps that exceed their range (`*/90`), and items that
/// never fire (31 February). Invalid lines are skipped; [`parse_crontab`] reports them.
///
/// ```
/// let warnings = graphile_worker_crontab::crontab_warnings("0 0 31 2 * never");
/// assert_eq!(warnings[0].message, "it never fires: none of its months has such a day");
/// ```
pub fn crontab_warnings(crontab: &str) -> Vec<CrontabError> {
    let lines = crontab.split('\n').zip(1..);
    lines
        .flat_map(|(line, number)| line_warnings(line).into_iter().map(move |warning| warning.in_line(line, number)))
        .collect()
}

fn line_warnings(line: &str) -> Vec<Problem> {
    let Ok(Some(item)) = read_line(line) else { return Vec::new() };
    let words: Vec<Word<'_>> = words(line).take(8).collect();
    let Ok(count) = count_fields(&words) else { return Vec::new() };
    let fields = &words[..count];
    let mut warnings = Vec::new();
    // A name like `@daily` has no fields.
    for (field, word) in FIELDS.iter().skip(FIELDS.len().saturating_sub(count)).zip(fields).filter(|_| count > 1) {
        let mut start = word.start;
        for part in word.text.split(',') {
            let end = start + part.len();
            warnings.extend(field.useless_step(part).map(|message| Problem::at(start, end, message)));
            start = end + 1;
        }
    }
    if item.next_after(chrono::DateTime::UNIX_EPOCH).is_none() {
        let (start, end) = (words[0].start, fields.last().map_or(0, Word::end));
        warnings.push(Problem::at(start, end, "it never fires: none of its months has such a day"));
    }
    warnings
}

impl FromStr for Crontab {
    type Err = CrontabParseError;

    /// Parses a text with exactly one item.
    fn from_str(text: &str) -> Result<Crontab, CrontabParseError> {
        let mut items = parse_crontab(text)?;
        match items.pop() {
            Some(item) if items.is_empty() => Ok(item),
            found => {
                let problem = match found {
                    None => "expected one item, found none".to_owned(),
                    Some(_) => format!("expected one item, found {}", items.len() + 1),
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

    /// Parses the fields alone: five, six with seconds, or a name like `@daily`.
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

/// An item and its line.
struct Found<'a> {
    item: Crontab,
    line: &'a str,
    number: usize,
}

/// A word of a line, and the byte at which it starts.
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
    // One word more than the seconds, the five fields and the task.
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
            Err(vec![Problem::at(end, end, "the task is missing after the schedule")])
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
/// After five fields and a task, only options or a payload can follow. So if a word follows that may be a
/// task, the word before it is a field.
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
    // A field is wrong, or there are too few. Decide by where the options or the payload start.
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

/// Parses `task ?options {payload}`; the caller sets the schedule.
fn read_command(line: &str, task: Word<'_>) -> Result<Crontab, Vec<Problem>> {
    let line = line.trim_end_matches(is_space);
    if let Some((at, found)) = line.char_indices().skip_while(|(at, _)| *at < task.start).find(|(_, c)| is_line_end(*c))
    {
        let message = format!("unexpected line break `{}` after the task", found.escape_default());
        return Err(vec![Problem::at(at, at + found.len_utf8(), message)]);
    }
    let mut problems = Vec::new();
    if let Err(message) = check_task(task.text) {
        problems.push(match task.text.split_once('?') {
            Some((name, _)) if is_task_identifier(name) => {
                let at = task.start + name.len();
                Problem::at(at, at + 1, "missing space before `?`")
            }
            _ => task.problem(message),
        });
    }
    let mut item = Crontab::new(Schedule::every_minute(), task.text);
    let mut rest = after_spaces(line, task.end());
    if rest.text.starts_with('?') {
        let word = Word { text: rest.text.split(is_space).next().unwrap_or(""), ..rest };
        match options::read(&word.text[1..], word.start + 1) {
            _ if word.text == "?" => problems.push(word.problem("missing options after `?`")),
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
        Some('?') => Err(first.problem("options occur twice: join them with `&`")),
        Some('[' | '"' | '\'') => {
            Err(rest.problem(format!("payload is {}, expected an object like `{{key: 'value'}}`", shown(rest.text))))
        }
        Some(_) if first.text.contains('=') => {
            Err(first.problem(format!("options are {}, expected a `?` before them", shown(first.text))))
        }
        Some(_) => Err(first.problem(format!(
            "unexpected {}, expected `?options`, `{{payload}}` or the end of the line",
            shown(first.text)
        ))),
    }
}

/// The problem with a payload that does not end with `}`.
fn payload_end(rest: Word<'_>) -> Problem {
    let after = rest.text.rfind('}').map_or(rest.text.len(), |end| end + 1);
    let tail = rest.text[after..].trim_start_matches(is_space);
    let start = rest.end() - tail.len();
    match tail {
        "" => Problem::at(rest.start, rest.start + 1, "payload is not closed: missing `}` at the end of the line"),
        _ if tail.starts_with('?') => Problem::at(start, rest.end(), "options must come before the payload"),
        _ => Problem::at(start, rest.end(), format!("unexpected {} after the payload", shown(tail))),
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
            "identifier {} is already used in line {first}: give one of the items another with `?id=…`",
            shown(identifier)
        );
        // The id follows `id=`; the task is a word of its own.
        let start = match item.options.id {
            Some(_) => line.find("id=").map_or(0, |at| at + 3),
            None => words(line).find(|word| word.text == identifier).map_or(0, |word| word.start),
        };
        errors.push(Problem::at(start, start + identifier.len(), message).in_line(line, *number));
    }
    errors
}

impl Schedule {
    /// Sets a field by its position in a line.
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
