//! `top`: the queue at work, drawn anew every second; a single frame where nobody watches.
//!
//! A frame is read, then written as text; only `watch` knows of a terminal, and leaves it as it was however it ends.

use super::look::{queues_table, stats_table, workers_table};
use super::{Form, counted, print_json, utils};
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print;
use crate::table::{Cell, Screen, Table, Tone, cut, harmless, length, number, terminal_size, text};
use chrono::{DateTime, Utc};
use clap::Args;
use crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use crossterm::terminal::{Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{cursor, execute, queue};
use graphile_worker::{JobCounters, JobFilter, JobState, JobSummary, QueueSummary, Stats, WorkerSummary, WorkerUtils};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How many rows of each kind a frame has at most.
const MOST_ROWS: usize = 10;

/// The rates of a single frame are those of this time.
const SAMPLE: Duration = Duration::from_secs(1);

/// When a registered worker counts as stale: recovery's default.
const STALE_AFTER: Duration = Duration::from_secs(5 * 60);

/// Reading takes at most a fifth of the time: counting a million jobs every second would be a burden.
const REST: u32 = 4;

/// For `top`.
#[derive(Debug, Args)]
pub(crate) struct Top {
    /// How long to wait between two frames
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = crate::arguments::duration)]
    interval: Duration,
    /// Print one frame, then exit
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    form: Form,
}

/// What is seen at one moment.
#[derive(Serialize)]
struct Frame {
    at: DateTime<Utc>,
    /// How many jobs are added a second, and how many are done or removed; not known yet in the first frame.
    added_per_second: Option<f64>,
    removed_per_second: Option<f64>,
    stats: Stats,
    queues: Vec<QueueSummary>,
    workers: Vec<WorkerSummary>,
    /// The first of those that run, by their ids.
    running: Vec<JobSummary>,
    #[serde(skip)]
    counters: JobCounters,
}

pub(super) async fn top(asked: Top, database: &Database) -> Result<(), Failure> {
    let utils = utils(database).await?;
    let title = format!("graphile-worker: schema {} on {}", database.schema(), database.server());
    let is_watched = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if is_watched && !asked.once && !asked.form.json {
        return watch(&utils, &title, asked.interval).await;
    }
    let before = utils.job_counters().await?;
    tokio::time::sleep(SAMPLE).await;
    let frame = Frame::read(&utils, Some(before)).await?;
    if asked.form.json {
        return print_json(&frame);
    }
    print(&frame.draw(&title, Screen::of_stdout()))
}

impl Frame {
    async fn read(utils: &WorkerUtils, before: Option<JobCounters>) -> Result<Frame, Failure> {
        let running =
            JobFilter { states: vec![JobState::Running], limit: Some(MOST_ROWS as u32), ..JobFilter::default() };
        let counters = utils.job_counters().await?;
        let rate = |count: fn(&JobCounters) -> i64| {
            let before = before.as_ref()?;
            let seconds = (counters.at - before.at).as_seconds_f64();
            let difference = count(&counters) - count(before);
            // Somebody may have reset the statistics.
            (seconds > 0.0 && difference >= 0).then(|| difference as f64 / seconds)
        };
        Ok(Frame {
            at: counters.at,
            added_per_second: rate(|counters| counters.added),
            removed_per_second: rate(|counters| counters.removed),
            stats: utils.stats().await?,
            queues: utils.list_queues(MOST_ROWS as u32).await?,
            workers: utils.list_workers(STALE_AFTER).await?,
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
        let mut text: String = lines.iter().map(|line| cut(&harmless(line), width) + "\n").collect();
        let mut section = |table: Table| {
            text.push('\n');
            text.push_str(&table.most_lines(1).show(screen));
        };
        section(stats_table(&self.stats, MOST_ROWS));
        if self.stats.tasks.len() > MOST_ROWS {
            text.push_str(&format!("and {} more\n", self.stats.tasks.len() - MOST_ROWS));
        }
        let mut section = |table: Table| {
            text.push('\n');
            text.push_str(&table.most_lines(1).show(screen));
        };
        if !self.running.is_empty() {
            section(running_table(&self.running, self.at));
        }
        let busy: Vec<QueueSummary> =
            self.queues.iter().filter(|queue| queue.waiting > 0 || queue.locked_at.is_some()).cloned().collect();
        if !busy.is_empty() {
            section(queues_table(&busy, self.at));
        }
        let shown = &self.workers[..self.workers.len().min(MOST_ROWS)];
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
            job.locked_by.as_deref().unwrap_or_default().into(),
        ]);
    }
    table
}

/// Draws until somebody presses q. A database that is away for a while is told in the frame, and asked again.
async fn watch(utils: &WorkerUtils, title: &str, interval: Duration) -> Result<(), Failure> {
    let _terminal = Terminal::take()?;
    let mut keys = keys();
    let mut before = None;
    loop {
        let began = Instant::now();
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
        let pause = interval.max(began.elapsed() * REST);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = quit(&mut keys) => return Ok(()),
        }
    }
}

/// Writes over the frame before, line by line, so that nothing flickers.
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

/// What a terminal of this size shows of a frame: its last line says how to leave, and how much there was no room for.
fn fitted(text: &str, width: usize, height: usize) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let room = height.saturating_sub(2);
    let mut shown: Vec<String> = lines.iter().take(room).map(|line| (*line).to_owned()).collect();
    let last = match lines.len().saturating_sub(room) {
        0 => "q quits".to_owned(),
        more => format!("q quits; … no room for {}", counted(more as i64, "more line", "more lines")),
    };
    if height > 1 {
        shown.push(String::new());
    }
    shown.push(cut(&last, width));
    shown
}

/// The keys that are pressed, from now on.
fn keys() -> mpsc::UnboundedReceiver<KeyEvent> {
    let (sender, keys) = mpsc::unbounded_channel();
    // Reading a terminal blocks; the thread ends with the first key that nobody wants any more, or with the process.
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

/// Returns when somebody wants to leave: q, escape, or control and c, which is a key like others to this terminal.
async fn quit(keys: &mut mpsc::UnboundedReceiver<KeyEvent>) {
    loop {
        match keys.recv().await {
            Some(key) if is_goodbye(key) => return,
            Some(_) => {}
            None => std::future::pending().await,
        }
    }
}

fn is_goodbye(key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => true,
        KeyCode::Char('c') => key.modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    }
}

/// The terminal, while it is ours: another screen, no cursor, every key at once. Given back when dropped.
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
    fn the_last_line_says_how_to_leave_and_what_there_is_no_room_for() {
        assert_eq!(fitted("a\nb\n", 80, 4), ["a", "b", "", "q quits"]);
        assert_eq!(fitted("a\nb\nc\n", 80, 4), ["a", "b", "", "q quits; … no room for 1 more line"]);
        assert_eq!(fitted("a\nb\nc\n", 8, 3), ["a", "", "q quits…"]);
        assert_eq!(fitted("a", 80, 1), ["q quits; … no room for 1 more line"]);
    }
}
