//! Tables, durations and times for people: never wider than the terminal, with colours only on a terminal, and without
//! control characters from the database.

use chrono::{DateTime, SecondsFormat, Utc};
use comfy_table::{Cell as Shown, CellAlignment, Color, ContentArrangement, Row, Table as Drawn, presets};
use std::io::IsTerminal;

/// A column gets at least this many characters (or its content's width, if that is less) before optional ones are
/// dropped.
const MIN_WIDTH: usize = 10;

/// Spaces between two columns.
const GAP: u16 = 2;

/// The screen that a table is drawn for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    /// Characters per line; `None` if the output is not a terminal.
    pub(crate) width: Option<usize>,
    pub(crate) colours: bool,
}

impl Screen {
    /// Standard output. The width is `COLUMNS`, or the terminal's. A terminal gets colours unless `NO_COLOR` is set.
    pub(crate) fn of_stdout() -> Screen {
        let is_terminal = std::io::stdout().is_terminal();
        let configured =
            std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|width| *width > 0);
        let detected = || terminal_size().map(|(width, _)| width);
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|no| !no.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Screen {
            width: configured.or_else(|| is_terminal.then(detected).flatten()),
            colours: is_terminal && !no_colour,
        }
    }
}

/// Width and height of the terminal on standard output. `crossterm::terminal::size` would ask the controlling terminal,
/// which may be another one. A terminal that does not know its size reports 0.
pub(crate) fn terminal_size() -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then(|| (size.ws_col.into(), size.ws_row.into()))
}

/// The colour of a cell, by its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Careful,
    Bad,
    Faint,
}

/// One cell of a table.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(crate) fn toned(text: impl Into<String>, tone: Tone) -> Cell {
        Cell { text: sanitize(&text.into()), tone }
    }

    /// A number; 0 is faint.
    pub(crate) fn count(number: i64, tone: Tone) -> Cell {
        Cell::toned(number.to_string(), if number == 0 { Tone::Faint } else { tone })
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::toned(text, Tone::Plain)
    }
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    title: &'static str,
    is_number: bool,
    is_optional: bool,
}

/// A column of text.
pub(crate) const fn text(title: &'static str) -> Column {
    Column { title, is_number: false, is_optional: false }
}

/// A column of numbers, aligned to the right.
pub(crate) const fn number(title: &'static str) -> Column {
    Column { title, is_number: true, is_optional: false }
}

impl Column {
    /// Omits the column if the screen is too narrow.
    pub(crate) const fn optional(self) -> Column {
        Column { is_optional: true, ..self }
    }
}

/// A table.
pub(crate) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
    has_titles: bool,
    max_lines: Option<usize>,
}

impl Table {
    pub(crate) fn new(columns: &[Column]) -> Table {
        Table { columns: columns.to_vec(), rows: Vec::new(), has_titles: true, max_lines: None }
    }

    /// A table of names and values, without titles.
    pub(crate) fn of_pairs() -> Table {
        Table { has_titles: false, ..Table::new(&[text(""), text("")]) }
    }

    /// Cuts off every row after this many lines.
    pub(crate) fn max_lines(mut self, lines: usize) -> Table {
        self.max_lines = Some(lines);
        self
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [Cell; N]) {
        self.rows.push(cells.to_vec());
    }

    pub(crate) fn pair(&mut self, name: &str, value: impl Into<Cell>) {
        self.row([Cell::toned(name, Tone::Faint), value.into()]);
    }

    /// Draws the table, no wider than the screen. Optional columns that do not fit are omitted, and named at the end.
    pub(crate) fn show(&self, screen: Screen) -> String {
        let columns = self.columns_for(screen.width);
        let mut drawn = Drawn::new();
        drawn.load_style(presets::NOTHING);
        match screen.width {
            Some(width) => {
                drawn.set_content_arrangement(ContentArrangement::Dynamic);
                drawn.set_width(u16::try_from(width).unwrap_or(u16::MAX));
            }
            None => _ = drawn.set_content_arrangement(ContentArrangement::Disabled),
        }
        if screen.colours {
            drawn.enforce_styling();
        } else {
            drawn.force_no_tty();
        }
        if self.has_titles {
            let titles = columns.iter().map(|&at| painted(self.columns[at].title, Tone::Faint, screen));
            drawn.set_header(Row::from(titles.collect::<Vec<_>>()));
        }
        for cells in &self.rows {
            let shown = columns.iter().map(|&at| painted(&cells[at].text, cells[at].tone, screen));
            let mut row = Row::from(shown.collect::<Vec<_>>());
            if let Some(lines) = self.max_lines {
                row.max_height(lines);
            }
            drawn.add_row(row);
        }
        let last = columns.len().saturating_sub(1);
        for (position, &at) in columns.iter().enumerate() {
            let Some(column) = drawn.column_mut(position) else { continue };
            column.set_padding((0, if position == last { 0 } else { GAP }));
            if self.columns[at].is_number {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let lines: Vec<String> = drawn.lines().map(|line| line.trim_end().to_owned()).collect();
        let mut shown = lines.join("\n") + "\n";
        let omitted = self.omitted(&columns);
        if !omitted.is_empty() {
            shown.push_str(&wrapped(&format!("… columns omitted: {}", omitted.join(", ")), screen.width));
            shown.push('\n');
        }
        shown
    }

    /// The titles of the columns that are not shown, except those that are empty or 0 in every row.
    fn omitted(&self, shown: &[usize]) -> Vec<&'static str> {
        let has_content = |at: &usize| self.rows.iter().any(|row| !["", "0"].contains(&row[*at].text.as_str()));
        let omitted = (0..self.columns.len()).filter(|at| !shown.contains(at)).filter(has_content);
        omitted.map(|at| self.columns[at].title).collect()
    }

    /// The positions of the columns that fit.
    fn columns_for(&self, width: Option<usize>) -> Vec<usize> {
        let mut columns: Vec<usize> = (0..self.columns.len()).collect();
        let Some(width) = width else { return columns };
        let needs = |at: usize| {
            let title = self.columns[at].title.chars().count();
            let widest = self.rows.iter().flat_map(|row| row[at].text.lines()).map(|line| line.chars().count()).max();
            title.max(widest.unwrap_or(0)).min(MIN_WIDTH.max(title))
        };
        while columns.iter().map(|&at| needs(at) + usize::from(GAP)).sum::<usize>() > width + usize::from(GAP) {
            let Some(position) = columns.iter().rposition(|&at| self.columns[at].is_optional) else { break };
            columns.remove(position);
        }
        columns
    }
}

fn painted(text: &str, tone: Tone, screen: Screen) -> Shown {
    let cell = Shown::new(text);
    if !screen.colours {
        return cell;
    }
    match tone {
        Tone::Plain => cell,
        Tone::Good => cell.fg(Color::Green),
        Tone::Careful => cell.fg(Color::Yellow),
        Tone::Bad => cell.fg(Color::Red),
        Tone::Faint => cell.fg(Color::DarkGrey),
    }
}

/// Replaces control characters, except line breaks, with spaces.
pub(crate) fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

/// Wraps the text at spaces. A word that is longer than the line stays whole.
pub(crate) fn wrapped(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_owned() };
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let fits = |line: &String| line.is_empty() || line.chars().count() + 1 + word.chars().count() <= width;
        match lines.last_mut().filter(|line| fits(line)) {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

/// Puts the text on one line and cuts it after `max` characters.
pub(crate) fn truncate_to_line(text: &str, max: usize) -> String {
    cut(&sanitize(text).split_whitespace().collect::<Vec<_>>().join(" "), max)
}

/// Cuts the line after `max` characters.
pub(crate) fn cut(line: &str, max: usize) -> String {
    if line.chars().count() <= max {
        return line.to_owned();
    }
    line.chars().take(max.saturating_sub(1)).chain(['…']).collect()
}

/// Formats a duration with its two largest units, as the library does in its explanations.
pub(crate) fn length(seconds: f64) -> String {
    let whole = seconds.abs().round().min(1e11) as u64;
    let units = [(86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")];
    let Some(first) = units.iter().position(|(length, _)| whole >= *length) else { return "0s".to_owned() };
    let (length, name) = units[first];
    match units.get(first + 1).map(|(smaller, name)| (whole % length / smaller, name)) {
        Some((rest @ 1.., smaller)) => format!("{}{name} {rest}{smaller}", whole / length),
        _ => format!("{}{name}", whole / length),
    }
}

/// Formats a time relative to now: `in 5m`, `2h ago`.
pub(crate) fn relative_time(time: DateTime<Utc>, now: DateTime<Utc>) -> String {
    let seconds = (time - now).as_seconds_f64();
    if seconds.abs() < 0.5 {
        "now".to_owned()
    } else if seconds < 0.0 {
        format!("{} ago", length(seconds))
    } else {
        format!("in {}", length(seconds))
    }
}

/// Formats a time in UTC, followed by how far away it is.
pub(crate) fn timestamp(time: DateTime<Utc>, now: DateTime<Utc>) -> String {
    format!("{} ({})", time.to_rfc3339_opts(SecondsFormat::Secs, true), relative_time(time, now))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Table {
        let mut table = Table::new(&[number("id"), text("task"), text("error"), text("key").optional()]);
        table.row(["1".into(), "send_email".into(), "a sentence that is rather long".into(), "k".into()]);
        table.row(["22".into(), Cell::toned("t", Tone::Bad), "\u{1b}[31mred\u{7}".into(), "".into()]);
        table
    }

    fn shown(width: Option<usize>) -> Vec<String> {
        example().show(Screen { width, colours: false }).lines().map(str::to_owned).collect()
    }

    #[test]
    fn no_line_is_wider_than_the_screen() {
        for width in 15..100 {
            for line in shown(Some(width)) {
                assert!(line.chars().count() <= width, "{width}: {line:?}");
            }
        }
    }

    #[test]
    fn without_a_screen_each_row_is_a_line() {
        assert_eq!(
            shown(None),
            [
                "id  task        error                           key",
                " 1  send_email  a sentence that is rather long  k",
                "22  t            [31mred"
            ]
        );
    }

    #[test]
    fn optional_columns_are_omitted_first() {
        assert!(shown(Some(60))[0].ends_with("key"));
        let narrow = shown(Some(28));
        assert!(!narrow[0].contains("key"));
        assert_eq!(narrow.last().map(String::as_str), Some("… columns omitted: key"));
    }

    #[test]
    fn omitted_columns_without_content_are_not_named() {
        let mut table = Table::new(&[text("task"), number("retrying").optional(), number("failed").optional()]);
        table.row(["send_email".into(), Cell::count(0, Tone::Plain), Cell::count(3, Tone::Bad)]);
        let shown = table.show(Screen { width: Some(15), colours: false });
        assert_eq!(shown, "task\nsend_email\n… columns\nomitted: failed\n");
    }

    #[test]
    fn a_long_line_is_wrapped_between_words() {
        assert_eq!(wrapped("one two three", Some(8)), "one two\nthree");
        assert_eq!(wrapped("one two three", None), "one two three");
        assert_eq!(wrapped("unbreakable one", Some(5)), "unbreakable\none");
    }

    #[test]
    fn colours_appear_only_on_a_screen_with_colours() {
        let escape = |colours| example().show(Screen { width: None, colours }).contains('\u{1b}');
        assert!(escape(true) && !escape(false));
    }

    #[test]
    fn durations_have_at_most_two_units() {
        assert_eq!((length(0.2), length(61.0), length(90_061.0)), ("0s".into(), "1m 1s".into(), "1d 1h".into()));
    }

    #[test]
    fn long_text_is_put_on_one_line_and_cut() {
        assert_eq!(truncate_to_line("one\n  two", 20), "one two");
        assert_eq!(truncate_to_line("abcdef", 4), "abc…");
    }
}
