//! What a process writes, line by line: into the log, as fast as a log can take it, and its last lines for an error
//! message. Memory stays bounded whatever comes.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tracing::{info, warn};

/// A longer line is cut.
const LONGEST_LINE: usize = 8 * 1024;

/// The log takes so many lines of a stream in a second; the others are counted.
const LINES_A_SECOND: usize = 1000;

/// So much of the end is kept for an error message.
const LAST_LINES: usize = 50;
const LAST_BYTES: usize = 16 * 1024;

/// So much is read at once: what a pipe holds.
const PIECE: usize = 64 * 1024;

/// Which stream it is, and so how the log shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Stdout,
    Stderr,
}

/// What a process writes to both of its streams. Waiting for any of it may be broken off and begun again: nothing is lost.
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

    /// Logs all that comes, and returns when nobody can write any more.
    pub(crate) async fn closed(&mut self) {
        tokio::join!(self.stdout.closed(), self.stderr.closed());
    }

    /// Logs all that comes while something else is done.
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

/// One stream, read into the log.
struct Reader<S> {
    /// Nothing once it has ended.
    from: Option<S>,
    stream: Stream,
    piece: Vec<u8>,
    lines: Lines,
    claim_size: ClaimSize,
    last: LastLines,
}

impl<S: AsyncRead + Unpin> Reader<S> {
    fn new(from: Option<S>, stream: Stream) -> Reader<S> {
        let (lines, claim_size, last) = (Lines::default(), ClaimSize::new(Instant::now()), LastLines::default());
        Reader { from, stream, piece: vec![0; PIECE], lines, claim_size, last }
    }

    async fn closed(&mut self) {
        while let Some(from) = &mut self.from {
            // An error of a pipe is its end.
            let Ok(length @ 1..) = from.read(&mut self.piece).await else {
                self.end();
                return;
            };
            let now = Instant::now();
            let Reader { stream, lines, claim_size, last, .. } = self;
            lines.split(&self.piece[..length], |line| take(line, *stream, last, claim_size, now));
        }
    }

    fn end(&mut self) {
        if self.from.take().is_some() {
            let Reader { stream, lines, claim_size, last, .. } = self;
            lines.end(|line| take(line, *stream, last, claim_size, Instant::now()));
            left_out(claim_size.left_out);
        }
    }
}

fn take(line: Line<'_>, stream: Stream, last: &mut LastLines, claim_size: &mut ClaimSize, now: Instant) {
    let is_logged = claim_size.allows(now, left_out);
    let is_kept = stream == Stream::Stderr;
    if !is_logged && !is_kept {
        return;
    }
    let text = line.text();
    if is_logged && !text.is_empty() {
        // The task's own words are the message, as they would be a handler's.
        match stream {
            Stream::Stdout => info!("{text}"),
            Stream::Stderr => warn!("{text}"),
        }
    }
    if is_kept {
        last.push(&text);
    }
}

fn left_out(lines: usize) {
    if lines > 0 {
        warn!(lines, "the task writes more than the log takes: lines left out");
    }
}

/// Bytes as they come, cut into lines.
#[derive(Default)]
struct Lines {
    /// The beginning of a line whose end has not come.
    begun: Vec<u8>,
    cut: usize,
}

struct Line<'l> {
    bytes: &'l [u8],
    /// How many bytes are missing at its end.
    cut: usize,
}

impl Lines {
    fn split(&mut self, mut bytes: &[u8], mut each: impl FnMut(Line<'_>)) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let line = &bytes[..end];
            bytes = &bytes[end + 1..];
            if self.begun.is_empty() && line.len() <= LONGEST_LINE {
                each(Line { bytes: line, cut: 0 });
            } else {
                self.begin(line);
                each(Line { bytes: &self.begun, cut: self.cut });
                self.begun.clear();
                self.cut = 0;
            }
        }
        self.begin(bytes);
    }

    /// The last line may have no end.
    fn end(&mut self, mut each: impl FnMut(Line<'_>)) {
        if !self.begun.is_empty() {
            each(Line { bytes: &self.begun, cut: self.cut });
        }
    }

    fn begin(&mut self, bytes: &[u8]) {
        let kept = bytes.len().min(LONGEST_LINE - self.begun.len());
        self.begun.extend_from_slice(&bytes[..kept]);
        self.cut += bytes.len() - kept;
    }
}

impl<'l> Line<'l> {
    fn text(&self) -> Cow<'l, str> {
        let text = String::from_utf8_lossy(self.bytes.strip_suffix(b"\r").unwrap_or(self.bytes));
        match self.cut {
            0 => text,
            cut => Cow::Owned(format!("{text} … ({cut} bytes left out)")),
        }
    }
}

/// How much of a stream has been logged in the current second.
struct ClaimSize {
    since: Instant,
    logged: usize,
    left_out: usize,
}

impl ClaimSize {
    fn new(now: Instant) -> ClaimSize {
        ClaimSize { since: now, logged: 0, left_out: 0 }
    }

    /// Whether one more line may be logged; `tell`s at the beginning of a second how many could not in the last.
    fn allows(&mut self, now: Instant, tell: impl FnOnce(usize)) -> bool {
        if now - self.since >= Duration::from_secs(1) {
            tell(self.left_out);
            *self = ClaimSize::new(now);
        }
        let allowed = self.logged < LINES_A_SECOND;
        if allowed {
            self.logged += 1;
        } else {
            self.left_out += 1;
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

    /// In their order, without empty ones around them.
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
    fn lines_are_found_however_they_come() {
        assert_eq!(lines(&[b"a\nb", b"c\r\n", b"\n", b"d"]), ["a", "bc", "", "d"]);
        assert_eq!(lines(&[b"\xff\n"]), ["\u{fffd}"]);
    }

    #[test]
    fn a_line_without_end_is_cut_and_takes_no_memory() {
        let mut lines = Lines::default();
        for _ in 0..10_000 {
            lines.split(&[b'x'; PIECE], |_| panic!("no line has ended"));
        }
        assert!(lines.begun.capacity() <= 2 * LONGEST_LINE);
        let mut ended = Vec::new();
        lines.split(b"\nnext\n", |line| ended.push(line.text().into_owned()));
        assert!(ended[0].ends_with(&format!("x … ({} bytes left out)", 10_000 * PIECE - LONGEST_LINE)), "{}", ended[0]);
        assert_eq!(ended[1], "next");
    }

    #[test]
    fn a_flood_is_counted_instead_of_logged() {
        let start = Instant::now();
        let mut claim_size = ClaimSize::new(start);
        let logged = (0..5 * LINES_A_SECOND).filter(|_| claim_size.allows(start, |_| panic!("too early"))).count();
        assert_eq!(logged, LINES_A_SECOND);
        let mut told = 0;
        assert!(claim_size.allows(start + Duration::from_secs(1), |left_out| told = left_out));
        assert_eq!(told, 4 * LINES_A_SECOND);
    }

    #[test]
    fn of_a_long_output_the_end_is_kept() {
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
