//! Logs the output of a process line by line, up to a rate limit, and keeps its last lines for an error message. Memory is
//! bounded for any output.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tracing::{info, warn};

/// Longer lines are truncated.
const LONGEST_LINE: usize = 8 * 1024;

/// Maximum number of lines per second that are logged for each stream. The rest are counted.
const LINES_PER_SECOND: usize = 1000;

/// How much of the end of the output is kept for an error message.
const LAST_LINES: usize = 50;
const LAST_BYTES: usize = 16 * 1024;

/// Size of the read buffer: the capacity of a pipe.
const READ_BUFFER: usize = 64 * 1024;

/// An output stream. It determines the log level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Stdout,
    Stderr,
}

/// Both output streams of a process. All methods are cancel safe: no output is lost.
pub(crate) struct Output {
    stdout: Reader<ChildStdout>,
    stderr: Reader<ChildStderr>,
}

impl Output {
    pub(crate) fn of(process: &mut Child) -> Output {
        Output {
            stdout: Reader::new(process.stdout.take(), Stream::Stdout),
            stderr: Reader::new(process.stderr.take(), Stream::Stderr),
        }
    }

    /// Logs all output, and returns when both streams are closed.
    pub(crate) async fn closed(&mut self) {
        tokio::join!(self.stdout.closed(), self.stderr.closed());
    }

    /// Logs all output until `work` is done.
    pub(crate) async fn logged_during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            done = &mut work => return done,
            () = self.closed() => {}
        }
        work.await
    }

    /// Stops reading, and returns the last lines of standard error.
    pub(crate) fn end(mut self) -> LastLines {
        self.stdout.end();
        self.stderr.end();
        self.stderr.last
    }
}

/// Logs one stream.
struct Reader<S> {
    /// `None` after the end of the stream.
    from: Option<S>,
    stream: Stream,
    buffer: Vec<u8>,
    lines: Lines,
    rate_limit: RateLimit,
    last: LastLines,
}

impl<S: AsyncRead + Unpin> Reader<S> {
    fn new(from: Option<S>, stream: Stream) -> Reader<S> {
        let (lines, rate_limit, last) = (Lines::default(), RateLimit::new(Instant::now()), LastLines::default());
        Reader { from, stream, buffer: vec![0; READ_BUFFER], lines, rate_limit, last }
    }

    async fn closed(&mut self) {
        while let Some(from) = &mut self.from {
            // A read error counts as the end of the stream.
            let Ok(length @ 1..) = from.read(&mut self.buffer).await else {
                self.end();
                return;
            };
            let now = Instant::now();
            let Reader { stream, lines, rate_limit, last, .. } = self;
            lines.split(&self.buffer[..length], |line| handle_line(line, *stream, last, rate_limit, now));
        }
    }

    fn end(&mut self) {
        if self.from.take().is_some() {
            let Reader { stream, lines, rate_limit, last, .. } = self;
            lines.end(|line| handle_line(line, *stream, last, rate_limit, Instant::now()));
            log_dropped(rate_limit.dropped);
        }
    }
}

fn handle_line(line: Line<'_>, stream: Stream, last: &mut LastLines, rate_limit: &mut RateLimit, now: Instant) {
    let is_logged = rate_limit.allows(now, log_dropped);
    let is_kept = stream == Stream::Stderr;
    if !is_logged && !is_kept {
        return;
    }
    let text = line.text();
    if is_logged && !text.is_empty() {
        // The line is the message, as if a handler had logged it.
        match stream {
            Stream::Stdout => info!("{text}"),
            Stream::Stderr => warn!("{text}"),
        }
    }
    if is_kept {
        last.push(&text);
    }
}

fn log_dropped(lines: usize) {
    if lines > 0 {
        warn!(lines, "the task exceeded the log's rate limit; lines dropped");
    }
}

/// Splits a stream of bytes into lines.
#[derive(Default)]
struct Lines {
    /// The beginning of an unfinished line.
    unfinished: Vec<u8>,
    cut: usize,
}

struct Line<'l> {
    bytes: &'l [u8],
    /// How many bytes were removed from its end.
    cut: usize,
}

impl Lines {
    fn split(&mut self, mut bytes: &[u8], mut each: impl FnMut(Line<'_>)) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let line = &bytes[..end];
            bytes = &bytes[end + 1..];
            if self.unfinished.is_empty() && line.len() <= LONGEST_LINE {
                each(Line { bytes: line, cut: 0 });
            } else {
                self.begin(line);
                each(Line { bytes: &self.unfinished, cut: self.cut });
                self.unfinished.clear();
                self.cut = 0;
            }
        }
        self.begin(bytes);
    }

    /// Ends the last line, which may have no line break.
    fn end(&mut self, mut each: impl FnMut(Line<'_>)) {
        if !self.unfinished.is_empty() {
            each(Line { bytes: &self.unfinished, cut: self.cut });
        }
    }

    fn begin(&mut self, bytes: &[u8]) {
        let kept = bytes.len().min(LONGEST_LINE - self.unfinished.len());
        self.unfinished.extend_from_slice(&bytes[..kept]);
        self.cut += bytes.len() - kept;
    }
}

impl<'l> Line<'l> {
    fn text(&self) -> Cow<'l, str> {
        let text = String::from_utf8_lossy(self.bytes.strip_suffix(b"\r").unwrap_or(self.bytes));
        match self.cut {
            0 => text,
            cut => Cow::Owned(format!("{text} … ({cut} bytes dropped)")),
        }
    }
}

/// Limits how many lines of a stream are logged per second.
struct RateLimit {
    since: Instant,
    logged: usize,
    dropped: usize,
}

impl RateLimit {
    fn new(now: Instant) -> RateLimit {
        RateLimit { since: now, logged: 0, dropped: 0 }
    }

    /// Whether one more line may be logged. At the beginning of a second, calls `report` with the number of lines that were
    /// dropped in the previous one.
    fn allows(&mut self, now: Instant, report: impl FnOnce(usize)) -> bool {
        if now - self.since >= Duration::from_secs(1) {
            report(self.dropped);
            *self = RateLimit::new(now);
        }
        let allowed = self.logged < LINES_PER_SECOND;
        if allowed {
            self.logged += 1;
        } else {
            self.dropped += 1;
        }
        allowed
    }
}

/// The last lines of a stream.
#[derive(Debug, Default)]
pub(crate) struct LastLines {
    lines: VecDeque<String>,
    bytes: usize,
}

impl LastLines {
    pub(crate) fn push(&mut self, line: &str) {
        self.bytes += line.len() + 1;
        self.lines.push_back(line.to_owned());
        while self.lines.len() > LAST_LINES || (self.bytes > LAST_BYTES && self.lines.len() > 1) {
            self.bytes -= self.lines.pop_front().map_or(0, |line| line.len() + 1);
        }
    }

    /// The lines in order, without leading and trailing empty lines.
    pub(crate) fn text(&self) -> String {
        let lines: Vec<&str> = self.lines.iter().map(String::as_str).collect();
        lines.join("\n").trim_matches('\n').trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<String> {
        let mut lines = Lines::default();
        let mut texts = Vec::new();
        for piece in pieces {
            lines.split(piece, |line| texts.push(line.text().into_owned()));
        }
        lines.end(|line| texts.push(line.text().into_owned()));
        texts
    }

    #[test]
    fn lines_are_split_across_reads() {
        assert_eq!(lines(&[b"a\nb", b"c\r\n", b"\n", b"d"]), ["a", "bc", "", "d"]);
        assert_eq!(lines(&[b"\xff\n"]), ["\u{fffd}"]);
    }

    #[test]
    fn an_endless_line_is_truncated_and_memory_stays_bounded() {
        let mut lines = Lines::default();
        for _ in 0..10_000 {
            lines.split(&[b'x'; READ_BUFFER], |_| panic!("no line has ended"));
        }
        assert!(lines.unfinished.capacity() <= 2 * LONGEST_LINE);
        let mut ended = Vec::new();
        lines.split(b"\nnext\n", |line| ended.push(line.text().into_owned()));
        assert!(
            ended[0].ends_with(&format!("x … ({} bytes dropped)", 10_000 * READ_BUFFER - LONGEST_LINE)),
            "{}",
            ended[0]
        );
        assert_eq!(ended[1], "next");
    }

    #[test]
    fn lines_above_the_rate_limit_are_counted_instead_of_logged() {
        let start = Instant::now();
        let mut rate_limit = RateLimit::new(start);
        let logged = (0..5 * LINES_PER_SECOND).filter(|_| rate_limit.allows(start, |_| panic!("too early"))).count();
        assert_eq!(logged, LINES_PER_SECOND);
        let mut reported = 0;
        assert!(rate_limit.allows(start + Duration::from_secs(1), |dropped| reported = dropped));
        assert_eq!(reported, 4 * LINES_PER_SECOND);
    }

    #[test]
    fn the_last_lines_of_a_long_output_are_kept() {
        let mut last = LastLines::default();
        for n in 0..1000 {
            last.push(&n.to_string());
        }
        assert!(last.text().starts_with("950\n951\n") && last.text().ends_with("\n999"), "{}", last.text());
        for _ in 0..LAST_LINES {
            last.push(&"x".repeat(LONGEST_LINE));
        }
        assert!(last.text().len() <= LAST_BYTES);
    }
}
