//! What people are shown: tables that are never wider than the terminal, colours only where they are seen, times as people
//! say them. Text from the database is shown without what would steer a terminal.

use chrono::{DateTime, SecondsFormat, Utc};
use comfy_table::{Cell as Shown, CellAlignment, Color, ContentArrangement, Row, Table as Drawn, presets};
use std::io::IsTerminal;

/// A column that has to be left out of a narrow terminal, or wrapped, is given this much room before.
const LEAST_WIDTH: usize = 10;

/// Between two columns.
const GAP: u16 = 2;

/// Where it is shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    /// How many characters fit into a line; no limit where nobody looks.
    pub(crate) width: Option<usize>,
    pub(crate) colours: bool,
}

impl Screen {
    /// Standard output: as wide as `COLUMNS` says, or the terminal. Colours on a terminal, unless `NO_COLOR` is set.
    pub(crate) fn of_stdout() -> Screen {
        let is_terminal = std::io::stdout().is_terminal();
        let said = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|width| *width > 0);
        let seen = || terminal_size().map(|(width, _)| width);
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|no| !no.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Screen { width: said.or_else(|| is_terminal.then(seen).flatten()), colours: is_terminal && !no_colour }
    }
}

/// Width and height of the terminal that standard output is. Not `crossterm::terminal::size`, which asks the controlling
/// terminal: that may be another one. A terminal that does not know its size says 0.
pub(crate) fn terminal_size() -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then(|| (size.ws_col.into(), size.ws_row.into()))
}

/// How something looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Careful,
    Bad,
    Faint,
}

/// What stands in a row, under a column.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(crate) fn toned(text: impl Into<String>, tone: Tone) -> Cell {
        Cell { text: harmless(&text.into()), tone }
    }

    /// A number, faint where it is nothing.
    pub(crate) fn count(number: i64, tone: Tone) -> Cell {
        Cell::toned(number.to_string(), if number == 0 { Tone::Faint } else { tone })
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::toned(text, Tone::Plain)
    }
}

/// A column: what stands above it, and whether it may be left out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    title: &'static str,
    is_number: bool,
    may_be_left_out: bool,
}

/// A column of text.
pub(crate) const fn text(title: &'static str) -> Column {
    Column { title, is_number: false, may_be_left_out: false }
}

/// A column of numbers, which stand at the right.
pub(crate) const fn number(title: &'static str) -> Column {
    Column { title, is_number: true, may_be_left_out: false }
}

impl Column {
    /// Left out where there is no room for it.
    pub(crate) const fn optional(self) -> Column {
        Column { may_be_left_out: true, ..self }
    }
}

/// A table.
pub(crate) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
    has_titles: bool,
    most_lines: Option<usize>,
}

impl Table {
    pub(crate) fn new(columns: &[Column]) -> Table {
        Table { columns: columns.to_vec(), rows: Vec::new(), has_titles: true, most_lines: None }
    }

    /// What something is, and the thing, line by line.
    pub(crate) fn of_pairs() -> Table {
        Table { has_titles: false, ..Table::new(&[text(""), text("")]) }
    }

    /// No row is higher than so many lines; what does not fit is cut off.
    pub(crate) fn most_lines(mut self, lines: usize) -> Table {
        self.most_lines = Some(lines);
        self
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [Cell; N]) {
        self.rows.push(cells.to_vec());
    }

    pub(crate) fn pair(&mut self, name: &str, value: impl Into<Cell>) {
        self.row([Cell::toned(name, Tone::Faint), value.into()]);
    }

    /// The lines, none of them wider than the screen; those columns are left out that it has no room for.
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
            if let Some(lines) = self.most_lines {
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
        let left_out = self.left_out(&columns);
        if !left_out.is_empty() {
            shown.push_str(&wrapped(&format!("… no room for: {}", left_out.join(", ")), screen.width));
            shown.push('\n');
        }
        shown
    }

    /// The titles of columns that are not among these although there is something in them.
    fn left_out(&self, shown: &[usize]) -> Vec<&'static str> {
        let says_something = |at: &usize| self.rows.iter().any(|row| !["", "0"].contains(&row[*at].text.as_str()));
        let left_out = (0..self.columns.len()).filter(|at| !shown.contains(at)).filter(says_something);
        left_out.map(|at| self.columns[at].title).collect()
    }

    /// The columns that there is room for, by their positions.
    fn columns_for(&self, width: Option<usize>) -> Vec<usize> {
        let mut columns: Vec<usize> = (0..self.columns.len()).collect();
        let Some(width) = width else { return columns };
        let needs = |at: usize| {
            let title = self.columns[at].title.chars().count();
            let widest = self.rows.iter().flat_map(|row| row[at].text.lines()).map(|line| line.chars().count()).max();
            title.max(widest.unwrap_or(0)).min(LEAST_WIDTH.max(title))
        };
        while columns.iter().map(|&at| needs(at) + usize::from(GAP)).sum::<usize>() > width + usize::from(GAP) {
            let Some(position) = columns.iter().rposition(|&at| self.columns[at].may_be_left_out) else { break };
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

/// Without characters that steer a terminal; lines stay lines.
pub(crate) fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

/// In lines that are no longer than the screen is wide, as far as words are not.
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

/// The first so many characters of a text, in one line.
pub(crate) fn in_short(text: &str, most: usize) -> String {
    cut(&harmless(text).split_whitespace().collect::<Vec<_>>().join(" "), most)
}

/// The first so many characters of a line.
pub(crate) fn cut(line: &str, most: usize) -> String {
    if line.chars().count() <= most {
        return line.to_owned();
    }
    line.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// A length of time, by its two largest units, as the library writes it in its explanations.
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

/// How far away a time is.
pub(crate) fn away(time: DateTime<Utc>, now: DateTime<Utc>) -> String {
    let seconds = (time - now).as_seconds_f64();
    if seconds.abs() < 0.5 {
        "now".to_owned()
    } else if seconds < 0.0 {
        format!("{} ago", length(seconds))
    } else {
        format!("in {}", length(seconds))
    }
}

/// A time, with how far away it is.
pub(crate) fn instant(time: DateTime<Utc>, now: DateTime<Utc>) -> String {
    format!("{} ({})", time.to_rfc3339_opts(SecondsFormat::Secs, true), away(time, now))
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
    fn what_is_optional_goes_first() {
        assert!(shown(Some(60))[0].ends_with("key"));
        let narrow = shown(Some(28));
        assert!(!narrow[0].contains("key"));
        assert_eq!(narrow.last().map(String::as_str), Some("… no room for: key"));
    }

    #[test]
    fn a_column_that_says_nothing_is_left_out_without_a_word() {
        let mut table = Table::new(&[text("task"), number("retrying").optional(), number("failed").optional()]);
        table.row(["send_email".into(), Cell::count(0, Tone::Plain), Cell::count(3, Tone::Bad)]);
        let shown = table.show(Screen { width: Some(15), colours: false });
        assert_eq!(shown, "task\nsend_email\n… no room for:\nfailed\n");
    }

    #[test]
    fn a_long_line_is_wrapped_between_words() {
        assert_eq!(wrapped("one two three", Some(8)), "one two\nthree");
        assert_eq!(wrapped("one two three", None), "one two three");
        assert_eq!(wrapped("unbreakable one", Some(5)), "unbreakable\none");
    }

    #[test]
    fn colours_are_only_where_they_are_wanted() {
        let escape = |colours| example().show(Screen { width: None, colours }).contains('\u{1b}');
        assert!(escape(true) && !escape(false));
    }

    #[test]
    fn a_length_of_time_is_short() {
        assert_eq!((length(0.2), length(61.0), length(90_061.0)), ("0s".into(), "1m 1s".into(), "1d 1h".into()));
    }

    #[test]
    fn a_long_text_is_cut_and_put_in_one_line() {
        assert_eq!(in_short("one\n  two", 20), "one two");
        assert_eq!(in_short("abcdef", 4), "abc…");
    }
}
