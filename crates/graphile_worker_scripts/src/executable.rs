//! Runs an executable as a task: passes the job on standard input and in the environment, logs the output, and turns the
//! exit code into the result.
//!
//! A program may ignore its input, never exit, write endlessly, or leave child processes behind. None of this may harm the
//! worker. `scan` decides which files are executables.

use crate::output::LastLines;
use crate::process_group::{ProcessGroup, ProcessGroups, TERM_GRACE};
use chrono::SecondsFormat;
use graphile_worker::{
    DatabaseConfig, Job, JobDefinition, TaskError, TaskOptions, TaskOutcome, TaskResult, WorkerContext,
};
use rustix::io::Errno;
use std::io::{self, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::process::{ChildStdin, Command};
use tracing::warn;

/// Default timeout of a program: that of Node's worker.
const TIMEOUT: Duration = Duration::from_secs(4 * 3600);

/// How long child processes may keep the output open after the program has exited.
const OPEN_OUTPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long starting a program is retried if the system is out of processes, memory or file descriptors, or if the file is
/// still being written.
const START_TIMEOUT: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// The task that runs this file.
pub(crate) fn definition(
    identifier: &str,
    path: &Path,
    process_groups: &ProcessGroups,
    database: &DatabaseConfig,
) -> JobDefinition {
    let program =
        Arc::new(Program { path: path.to_owned(), process_groups: process_groups.clone(), database: database.clone() });
    let run = move |ctx: WorkerContext| {
        let program = program.clone();
        async move { program.run(ctx).await }
    };
    let options = TaskOptions::default().timeout(TIMEOUT);
    JobDefinition::external(identifier, options, TERM_GRACE + Duration::from_secs(2), run)
}

struct Program {
    path: PathBuf,
    process_groups: ProcessGroups,
    database: DatabaseConfig,
}

impl Program {
    async fn run(&self, ctx: WorkerContext) -> TaskResult {
        let mut started = match self.start(ctx.job()).await {
            Ok(started) => started,
            Err(error) => return Err(error).into(),
        };
        let mut feeding = std::pin::pin!(write_input(started.stdin(), ctx.job()));
        let mut fed = false;
        // Declared after its input, so it is dropped first: the program receives SIGTERM before its input is closed, and
        // does not take half a payload for the whole.
        let mut group = started;
        let mut is_cancelled = false;
        let exited = loop {
            tokio::select! {
                exited = group.exited() => break exited,
                () = ctx.cancelled(), if !is_cancelled => {
                    is_cancelled = true;
                    group.terminate();
                }
                () = ctx.timed_out() => return answer(Err(TaskError::new("stopped")), &group.stop().await),
                () = &mut feeding, if !fed => fed = true,
            }
        };
        let closed = tokio::select! {
            () = group.output_closed() => true,
            () = tokio::time::sleep(OPEN_OUTPUT_TIMEOUT) => false,
            () = ctx.timed_out() => false,
        };
        let last_lines = if closed {
            // Child processes that still run no longer belong to the job.
            group.release()
        } else {
            warn!("the program has exited, but its child processes keep its output open; stopping them");
            group.stop().await
        };
        answer(exited.map_err(TaskError::from).and_then(|status| ended(&status, &last_lines)), &last_lines)
    }

    /// Starts the program. Transient errors are retried.
    async fn start(&self, job: &Job) -> Result<ProcessGroup, TaskError> {
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut command = self.command(Command::new(&self.path), job);
        loop {
            let error = match ProcessGroup::start(&mut command, &self.process_groups) {
                Ok(group) => return Ok(group),
                Err(error) => error,
            };
            if is_errno(&error, &[Errno::NOEXEC]) && is_text(&self.path) {
                // A script without an interpreter line runs in the shell, as it would from a command line.
                let mut shell = Command::new("/bin/sh");
                shell.arg(&self.path);
                command = self.command(shell, job);
                continue;
            }
            if !is_errno(&error, TRANSIENT_ERRORS) || began.elapsed() >= START_TIMEOUT {
                return Err(TaskError::new(start_problem(&self.path, &error)));
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    fn command(&self, mut command: Command, job: &Job) -> Command {
        command
            .env("GRAPHILE_WORKER_PAYLOAD_FORMAT", "json")
            // `DATABASE_URL` is left unchanged: the program may use it for another database.
            .env("GRAPHILE_WORKER_DATABASE_URL", self.database.url())
            .env("GRAPHILE_WORKER_TASK_IDENTIFIER", &*job.task_identifier)
            .env("GRAPHILE_WORKER_JOB_ID", job.id.to_string())
            .env("GRAPHILE_WORKER_JOB_ATTEMPTS", job.attempts.to_string())
            .env("GRAPHILE_WORKER_JOB_MAX_ATTEMPTS", job.max_attempts.to_string())
            .env("GRAPHILE_WORKER_JOB_PRIORITY", job.priority.to_string())
            .env("GRAPHILE_WORKER_JOB_RUN_AT", job.run_at.to_rfc3339_opts(SecondsFormat::Millis, true))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        match &job.key {
            Some(key) => command.env("GRAPHILE_WORKER_JOB_KEY", key),
            // A job may have started this worker, with its own key in the environment.
            None => command.env_remove("GRAPHILE_WORKER_JOB_KEY"),
        };
        command
    }
}

/// Writes the payload to standard input. Errors are ignored: a program may close its input or exit without reading it.
async fn write_input(stdin: Option<ChildStdin>, job: &Job) {
    let Some(mut stdin) = stdin else { return };
    // On one line, for programs that read a single line. JSON strings contain no raw line breaks.
    let payload = job.payload.get().replace(['\n', '\r'], " ");
    let _ = stdin.write_all(format!("{{\"payload\":{payload}}}").as_bytes()).await;
}

fn answer(result: Result<TaskOutcome, TaskError>, last_lines: &LastLines) -> TaskResult {
    TaskResult::from(result).with_last_output(last_lines.text())
}

fn ended(status: &ExitStatus, last_lines: &LastLines) -> Result<TaskOutcome, TaskError> {
    if status.success() {
        return Ok(TaskOutcome::Done);
    }
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}{}", signal_name(signal)),
        (None, None) => "ended without an exit code or signal".to_owned(),
    };
    let last_lines = last_lines.text();
    if let Some(error) = status.code().filter(|code| *code == TEMPORARY_FAILURE).and_then(|_| rate_limited(&last_lines))
    {
        return Err(error);
    }
    Err(TaskError::new(if last_lines.is_empty() { how } else { format!("{how}:\n{last_lines}") }))
}

/// The delay and the limit of the last line such as `Retry-After: 30` or `Retry-After: 30 group:api`.
fn rate_limited(last_lines: &str) -> Option<TaskError> {
    let asked = last_lines.lines().rev().find_map(|line| line.trim().strip_prefix("Retry-After:"))?.trim();
    let (seconds, limit) = asked.split_once(' ').unwrap_or((asked, ""));
    let wait = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
    Some(match limit.trim() {
        "" => TaskError::rate_limited(wait),
        limit => TaskError::rate_limited_in(limit, wait),
    })
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        3 => " (SIGQUIT)",
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        13 => " (SIGPIPE)",
        14 => " (SIGALRM)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

/// The exit code of a program that asks to run again later (`EX_TEMPFAIL` of `sysexits.h`).
const TEMPORARY_FAILURE: i32 = 75;

/// Errors that may pass if the start is retried.
const TRANSIENT_ERRORS: &[Errno] = &[Errno::AGAIN, Errno::NOMEM, Errno::TXTBSY, Errno::MFILE, Errno::NFILE];

fn is_errno(error: &io::Error, wanted: &[Errno]) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| wanted.contains(&errno))
}

/// The error message for a program that could not be started.
fn start_problem(path: &Path, error: &io::Error) -> String {
    let shown = path.display();
    if is_errno(error, &[Errno::NOENT]) {
        return match first_line(path) {
            Err(_) => format!("could not start {shown}: the file is gone"),
            Ok(Some(line)) => {
                format!("could not start {shown}: its first line, {line:?}, names an interpreter that does not exist")
            }
            Ok(None) => format!("could not start {shown}: the loader or a library that it needs does not exist"),
        };
    }
    if is_errno(error, &[Errno::NOEXEC]) {
        return format!("could not start {shown}: it is neither a program for this machine nor a script");
    }
    if is_errno(error, TRANSIENT_ERRORS) {
        return format!("could not start {shown}, tried for {START_TIMEOUT:?}: {error}");
    }
    format!("could not start {shown}: {error}")
}

/// The problem with the interpreter that the file's first line names, if there is one.
pub(crate) fn interpreter_problem(path: &Path) -> Option<String> {
    let line = first_line(path).ok()??;
    let interpreter = line.trim_start_matches("#!").trim_start_matches([' ', '\t']).split([' ', '\t']).next()?;
    let is_missing = interpreter.starts_with('/') && !Path::new(interpreter).exists();
    is_missing.then(|| format!("its first line, {line:?}, names an interpreter that does not exist"))
}

/// The first line, if it names an interpreter.
fn first_line(path: &Path) -> io::Result<Option<String>> {
    let start = start_of(path)?;
    if !start.starts_with(b"#!") {
        return Ok(None);
    }
    let line = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(Some(String::from_utf8_lossy(line).into_owned()))
}

fn is_text(path: &Path) -> bool {
    start_of(path).is_ok_and(|start| !start.contains(&0))
}

/// The first 512 bytes of a file: more than the kernel reads to find the interpreter.
fn start_of(path: &Path) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    std::fs::File::open(path)?.take(512).read_to_end(&mut start)?;
    Ok(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_that_asks_for_a_break_counts() {
        let wait = Duration::from_secs(30);
        for (lines, error) in [
            ("Retry-After: 30", Some(TaskError::rate_limited(wait))),
            ("Retry-After: 1\n  Retry-After: 30 group:api \nbye", Some(TaskError::rate_limited_in("group:api", wait))),
            ("Retry-After: soon", None),
            ("Retry-After: -1", None),
            ("it said Retry-After: 30", None),
            ("", None),
        ] {
            assert_eq!(rate_limited(lines), error, "{lines:?}");
        }
    }
}
