//! `top`: the state of the queue, redrawn every second on a terminal, or printed once elsewhere.
//!
//! `Frame` reads the data and formats it as text. Only `watch` uses the terminal, and `Terminal` restores it on every
//! exit. The tables are in `inspect`.

use super::inspect::{queues_table, stats_table, workers_table};
use super::{OutputFormat, counted, print_json, utils};
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print;
use crate::table::{Cell, Screen, Table, Tone, cut, length, number, sanitize, terminal_size, text};
use chrono::{DateTime, Utc};
use clap::Args;
use crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use crossterm::terminal::{Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{cursor, execute, queue};
use graphile_worker::{
    JobCounters, JobFilter, JobState, JobSummary, QueueStats, QueueSummary, WorkerSummary, WorkerUtils, short_worker_id,
};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Maximum number of rows in each table of a frame.
const MAX_ROWS: usize = 10;

/// The time over which a single frame measures its rates.
const SAMPLE: Duration = Duration::from_secs(1);

/// How long after its last heartbeat a worker counts as stale: recovery's default.
const DEFAULT_STALE_AFTER: Duration = Duration::from_secs(5 * 60);

/// The pause is at least this many times as long as reading the frame took, so that reading takes at most a fifth of
/// the time. Counting a million jobs every second would load the server.
const PAUSE_PER_READ: u32 = 4;

/// Options of `top`.
#[derive(Debug, Args)]
pub(crate) struct Top {
    /// Delay between two frames
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = crate::arguments::duration)]
    interval: Duration,
    /// Print one frame and exit
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    output: OutputFormat,
}

/// The state of the queue at one moment.
#[derive(Serialize)]
struct Frame {
    at: DateTime<Utc>,
    /// Jobs added per second, and jobs completed or removed per second. `None` in the first frame of `watch`.
    added_per_second: Option<f64>,
    removed_per_second: Option<f64>,
    stats: QueueStats,
    queues: Vec<QueueSummary>,
    workers: Vec<WorkerSummary>,
    /// The first running jobs, by id.
    running: Vec<JobSummary>,
    #[serde(skip)]
    counters: JobCounters,
}

pub(super) async fn top(args: Top, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let title = format!("graphile-worker: schema {} on {}", database.schema(), database.server());
    let is_watched = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if is_watched && !args.once && !args.output.json {
        return watch(&utils, &title, args.interval).await;
    }
    let before = utils.job_counters().await?;
    tokio::time::sleep(SAMPLE).await;
    let frame = Frame::read(&utils, Some(before)).await?;
    if args.output.json {
        return print_json(&frame);
    }
    print(&frame.draw(&title, Screen::of_stdout()))
}

impl Frame {
    async fn read(utils: &WorkerUtils, before: Option<JobCounters>) -> Result<Frame, Failure> {
        let running = JobFilter::default().states([JobState::Running]).limit(MAX_ROWS as u32);
        let counters = utils.job_counters().await?;
        let rate = |count: fn(&JobCounters) -> i64| {
            let before = before.as_ref()?;
            let seconds = (counters.at - before.at).as_seconds_f64();
            let difference = count(&counters) - count(before);
            // The difference is negative if the server's statistics were reset.
            (seconds > 0.0 && difference >= 0).then(|| difference as f64 / seconds)
        };
        Ok(Frame {
            at: counters.at,
            added_per_second: rate(|counters| counters.added),
            removed_per_second: rate(|counters| counters.removed),
            stats: utils.stats().await?,
            queues: utils.list_queues(MAX_ROWS as u32).await?,
            workers: utils.list_workers(DEFAULT_STALE_AFTER).await?,
            running: utils.list_jobs(&running).await?,
            counters,
        })
    }

    fn draw(&self, title: &str, screen: Screen) -> String {
        let width = screen.width.unwrap_or(usize::MAX);
        let per_second = |rate: Option<f64>| rate.map_or("?".to_owned(), |rate| format!("{rate:.1}"));
        let lag = self.stats.lag_seconds.map_or("none".to_owned(), length);
        let lines = [
            format!("{title}, {}", self.at.format("%T UTC")),
            format!(
                "added/s {}  done/s {}  lag {lag}  ready {}  running {}",
                per_second(self.added_per_second),
                per_second(self.removed_per_second),
                self.stats.ready,
                self.stats.running
            ),
        ];
        let mut text: String = lines.iter().map(|line| cut(&sanitize(line), width) + "\n").collect();
        let mut section = |table: Table| {
            text.push('\n');
            text.push_str(&table.max_lines(1).show(screen));
        };
        section(stats_table(&self.stats, MAX_ROWS));
        if self.stats.tasks.len() > MAX_ROWS {
            text.push_str(&format!("and {} more\n", self.stats.tasks.len() - MAX_ROWS));
        }
        let mut section = |table: Table| {
            text.push('\n');
            text.push_str(&table.max_lines(1).show(screen));
        };
        if !self.running.is_empty() {
            section(running_table(&self.running, self.at));
        }
        let busy: Vec<QueueSummary> =
            self.queues.iter().filter(|queue| queue.waiting > 0 || queue.locked_at.is_some()).cloned().collect();
        if !busy.is_empty() {
            section(queues_table(&busy, self.at));
        }
        let shown = &self.workers[..self.workers.len().min(MAX_ROWS)];
        if !shown.is_empty() {
            section(workers_table(shown, self.at));
        }
        if shown.len() < self.workers.len() {
            text.push_str(&format!("and {} more\n", self.workers.len() - shown.len()));
        }
        text
    }
}

fn running_table(jobs: &[JobSummary], now: DateTime<Utc>) -> Table {
    let mut table = Table::new(&[
        number("job"),
        text("task"),
        text("for"),
        text("queue").optional(),
        number("tries").optional(),
        text("worker").optional(),
    ]);
    for job in jobs {
        let since = job.locked_at.map(|since| length((now - since).as_seconds_f64().max(0.0)));
        table.row([
            job.id.to_string().into(),
            job.task_identifier.as_str().into(),
            Cell::toned(since.unwrap_or_default(), Tone::Good),
            job.queue_name.as_deref().unwrap_or_default().into(),
            format!("{}/{}", job.attempts, job.max_attempts).into(),
            job.locked_by.as_deref().map(short_worker_id).unwrap_or_default().into(),
        ]);
    }
    table
}

/// Draws frames until the user presses q. If the database does not answer, the frame shows the error, and the next
/// frame tries again.
async fn watch(utils: &WorkerUtils, title: &str, interval: Duration) -> Result<(), Failure> {
    let _terminal = Terminal::take()?;
    let mut keys = keys();
    let mut before = None;
    loop {
        let started = Instant::now();
        let reading = Frame::read(utils, before);
        let text = tokio::select! {
            frame = reading => match frame {
                Ok(frame) => {
                    before = Some(frame.counters);
                    frame.draw(title, Screen::of_stdout())
                }
                Err(Failure::Failed(error)) => format!("{title}\n\n{}\n", crate::failure::explain(error.as_ref())),
                Err(failure) => return Err(failure),
            },
            () = quit(&mut keys) => return Ok(()),
        };
        paint(&text)?;
        let pause = interval.max(started.elapsed() * PAUSE_PER_READ);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = quit(&mut keys) => return Ok(()),
        }
    }
}

/// Overwrites the previous frame line by line, so that the screen does not flicker.
fn paint(text: &str) -> Result<(), Failure> {
    let (width, height) = terminal_size().unwrap_or((80, 24));
    let mut out = std::io::stdout().lock();
    queue!(out, cursor::MoveTo(0, 0))?;
    for (position, line) in fitted(text, width, height).iter().enumerate() {
        if position > 0 {
            write!(out, "\r\n")?;
        }
        write!(out, "{line}")?;
        queue!(out, Clear(ClearType::UntilNewLine))?;
    }
    queue!(out, Clear(ClearType::FromCursorDown))?;
    out.flush()?;
    Ok(())
}

/// The lines of a frame that fit a terminal of this size. The last line says how to quit, and how many lines are
/// hidden.
fn fitted(text: &str, width: usize, height: usize) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let room = height.saturating_sub(2);
    let mut shown: Vec<String> = lines.iter().take(room).map(|line| (*line).to_owned()).collect();
    let last = match lines.len().saturating_sub(room) {
        0 => "q quits".to_owned(),
        more => format!("q quits; {} hidden", counted(more as i64, "line", "lines")),
    };
    if height > 1 {
        shown.push(String::new());
    }
    shown.push(cut(&last, width));
    shown
}

/// Reads key presses from now on.
fn keys() -> mpsc::UnboundedReceiver<KeyEvent> {
    let (sender, keys) = mpsc::unbounded_channel();
    // Reading a terminal blocks. The thread ends at the first key after the receiver is dropped, or with the process.
    std::thread::spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            if let Event::Key(key) = event
                && sender.send(key).is_err()
            {
                return;
            }
        }
    });
    keys
}

/// Waits for q, Escape or Ctrl-C, which sends no signal in raw mode.
async fn quit(keys: &mut mpsc::UnboundedReceiver<KeyEvent>) {
    loop {
        match keys.recv().await {
            Some(key) if is_quit_key(key) => return,
            Some(_) => {}
            None => std::future::pending().await,
        }
    }
}

fn is_quit_key(key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => true,
        KeyCode::Char('c') => key.modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    }
}

/// The terminal in raw mode, on the alternate screen, without a cursor. Restored on drop.
struct Terminal;

impl Terminal {
    fn take() -> Result<Terminal, Failure> {
        crossterm::terminal::enable_raw_mode()?;
        let terminal = Terminal;
        execute!(std::io::stdout(), EnterAlternateScreen, cursor::Hide)?;
        Ok(terminal)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = execute!(std::io::stdout(), cursor::Show, LeaveAlternateScreen);
        let _ = crossterm::terminal::disable_raw_mode();
    }
}

#[cfg(test)]
mod tests {
    use super::fitted;

    #[test]
    fn last_line_says_how_to_quit_and_how_many_lines_are_hidden() {
        assert_eq!(fitted("a\nb\n", 80, 4), ["a", "b", "", "q quits"]);
        assert_eq!(fitted("a\nb\nc\n", 80, 4), ["a", "b", "", "q quits; 1 line hidden"]);
        assert_eq!(fitted("a\nb\nc\n", 8, 3), ["a", "", "q quits…"]);
        assert_eq!(fitted("a", 80, 1), ["q quits; 1 line hidden"]);
    }
}
