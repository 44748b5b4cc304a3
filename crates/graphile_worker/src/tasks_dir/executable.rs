//! An executable as a task's handler: the job goes in by standard input and environment, what it writes goes into the
//! log, and its exit code is the answer.
//!
//! It may do anything: never read, never end, write without end, leave processes behind. None of that is to hurt the
//! worker. Which files are executables is decided in `tasks_dir`.

use super::output::LastLines;
use super::process_group::{Leftovers, ProcessGroup, TIME_TO_END};
use crate::context::WorkerContext;
use crate::job::Job;
use crate::task::{Answer, Task, TaskError, TaskOptions, TaskOutcome};
use chrono::SecondsFormat;
use rustix::io::Errno;
use std::future::Future;
use std::io::{self, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::process::{ChildStdin, Command};
use tracing::warn;

/// A run that takes longer has failed, unless the task's options say otherwise: as long as Node's worker gives it.
const TIMEOUT: Duration = Duration::from_secs(4 * 3600);

/// How long the output of a program that has exited may stay open: somebody it has started holds it.
const OUTPUT_STAYS_OPEN: Duration = Duration::from_secs(5);

/// How long a program is tried to be started while the machine has no process, memory or file to spare, or somebody
/// is just writing it.
const TIME_TO_START: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// A task that runs the file.
pub(super) fn task(identifier: &str, path: &Path, leftovers: &Leftovers) -> Task {
    let program = Arc::new(Program { path: path.to_owned(), leftovers: leftovers.clone() });
    let run = move |ctx: WorkerContext| -> Pin<Box<dyn Future<Output = Answer> + Send>> {
        let program = program.clone();
        Box::pin(async move { program.run(ctx).await })
    };
    Task {
        identifier: identifier.into(),
        options: TaskOptions::default().timeout(TIMEOUT),
        run: Arc::new(run),
        time_to_notice: TIME_TO_END + Duration::from_secs(2),
    }
}

struct Program {
    path: PathBuf,
    leftovers: Leftovers,
}

impl Program {
    async fn run(&self, ctx: WorkerContext) -> Answer {
        let mut started = match self.start(ctx.job()).await {
            Ok(started) => started,
            Err(error) => return Err(error).into(),
        };
        let mut feeding = std::pin::pin!(feed(started.stdin(), ctx.job()));
        let mut fed = false;
        // Dropped before its input is: whoever reads is told to stop, and does not take half a payload for all of it.
        let mut group = started;
        let exited = loop {
            tokio::select! {
                exited = group.exited() => break exited,
                () = ctx.must_end() => return answer(Err(TaskError::new("told to stop")), &group.end().await),
                () = &mut feeding, if !fed => fed = true,
            }
        };
        let closed = tokio::select! {
            () = group.output_closed() => true,
            () = tokio::time::sleep(OUTPUT_STAYS_OPEN) => false,
            () = ctx.must_end() => false,
        };
        let last_lines = if closed {
            // Whatever it has left running has nothing to do with the job any more.
            group.release()
        } else {
            warn!("the program has exited, and what it has started keeps its output open: told to stop");
            group.end().await
        };
        answer(exited.map_err(TaskError::from).and_then(|status| ended(&status, &last_lines)), &last_lines)
    }

    /// Starts it; a while later where the machine cannot just now.
    async fn start(&self, job: &Job) -> Result<ProcessGroup, TaskError> {
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut command = self.command(Command::new(&self.path), job);
        loop {
            let error = match ProcessGroup::start(&mut command, &self.leftovers) {
                Ok(group) => return Ok(group),
                Err(error) => error,
            };
            if is_errno(&error, &[Errno::NOEXEC]) && is_text(&self.path) {
                // A script whose first line names no interpreter is the shell's, as if it were typed into one.
                let mut shell = Command::new("/bin/sh");
                shell.arg(&self.path);
                command = self.command(shell, job);
                continue;
            }
            if !is_errno(&error, PASSING) || began.elapsed() >= TIME_TO_START {
                return Err(TaskError::new(start_problem(&self.path, &error)));
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    fn command(&self, mut command: Command, job: &Job) -> Command {
        command
            .env("GRAPHILE_WORKER_PAYLOAD_FORMAT", "json")
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
            // The worker may itself have been started by a job.
            None => command.env_remove("GRAPHILE_WORKER_JOB_KEY"),
        };
        command
    }
}

/// Says what the job is. A program that does not want to know closes its input, or exits.
async fn feed(stdin: Option<ChildStdin>, job: &Job) {
    let Some(mut stdin) = stdin else { return };
    // In one line, for programs that read one: no string of JSON has a line break in it.
    let payload = job.payload.get().replace(['\n', '\r'], " ");
    let _ = stdin.write_all(format!("{{\"payload\":{payload}}}").as_bytes()).await;
}

fn answer(result: Result<TaskOutcome, TaskError>, last_lines: &LastLines) -> Answer {
    Answer { last_words: last_lines.text(), ..result.into() }
}

fn ended(status: &ExitStatus, last_lines: &LastLines) -> Result<TaskOutcome, TaskError> {
    if status.success() {
        return Ok(TaskOutcome::Done);
    }
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}{}", signal_name(signal)),
        (None, None) => "ended in an unknown way".to_owned(),
    };
    let last_lines = last_lines.text();
    Err(TaskError::new(if last_lines.is_empty() { how } else { format!("{how}:\n{last_lines}") }))
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

/// What keeps a program from being started for a moment only.
const PASSING: &[Errno] = &[Errno::AGAIN, Errno::NOMEM, Errno::TXTBSY, Errno::MFILE, Errno::NFILE];

fn is_errno(error: &io::Error, wanted: &[Errno]) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| wanted.contains(&errno))
}

/// Why it could not be started, and whose fault that is.
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
    if is_errno(error, PASSING) {
        return format!("could not start {shown}, tried for {TIME_TO_START:?}: {error}");
    }
    format!("could not start {shown}: {error}")
}

/// What is wrong with the interpreter that the file's first line names, if it can be seen.
pub(super) fn interpreter_problem(path: &Path) -> Option<String> {
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

/// As much as the kernel looks at, and more.
fn start_of(path: &Path) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    std::fs::File::open(path)?.take(512).read_to_end(&mut start)?;
    Ok(start)
}
