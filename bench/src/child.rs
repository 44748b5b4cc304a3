//! The controller's side of a run: starts the contestant's processes, lets them begin together, and measures the CPU
//! time and memory that they and the server use. The contestants' side is `protocol`.
//!
//! ```text
//! contestant: ready          it has connected and prepared everything
//! controller: go
//! contestant: at 4711        the number of jobs so far; only for commands that run until `stop`
//! controller: stop           only for those commands
//! contestant: {"jobs": …}    the results, on one line
//! controller: end of input   the controller has read the CPU time and memory; the process may exit
//! ```

use crate::Failure;
use crate::contestant::Contestant;
use crate::protocol::unix_seconds;
use crate::server::{Database, Server};
use crate::usage;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child as Process, ChildStdin, ChildStdout};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// A run that takes longer than this has failed.
const TIMEOUT: Duration = Duration::from_secs(900);

/// Processes count as idle if they and the server use at most this share of a core for this long. Those that connect
/// use all cores. Processes of the tuned Rust port never become idle, and start anyway after the longest wait.
const IDLE_WINDOW: Duration = Duration::from_millis(200);
const IDLE_SHARE: f64 = 0.25;
const IDLE_AT_MOST: Duration = Duration::from_secs(4);

/// The results that a contestant reports at the end. Which fields are set depends on the command.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Ran {
    pub(crate) jobs: u64,
    /// When the last job ended, in seconds since 1970.
    pub(crate) last: f64,
    /// From adding a job to its start, in seconds.
    pub(crate) latencies: Vec<f64>,
    /// Duration of each start and stop.
    pub(crate) seconds: Vec<f64>,
    pub(crate) out_of_order: u64,
    /// Maximum number of jobs of one queue that ran at the same time.
    pub(crate) at_once: i64,
    /// Each run of the task `recorded`.
    pub(crate) runs: Vec<RecordedRun>,
    /// Claims that found no jobs between `go` and `stop`, if the contestant counts them.
    pub(crate) empty_claims: Option<u64>,
}

/// A run of the task `recorded`: the times are in seconds since 1970.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(crate) struct RecordedRun {
    /// When its job was claimed, by the database's clock.
    pub(crate) claimed: f64,
    pub(crate) began: f64,
    pub(crate) ended: f64,
    /// The number of its queue.
    pub(crate) queue: i64,
}

/// A run: a contestant, its command, and when to stop it.
pub(crate) struct Run<'a> {
    pub(crate) contestant: Contestant,
    pub(crate) command: &'a str,
    pub(crate) number: u64,
    pub(crate) processes: usize,
    /// Number of jobs after which to send `stop`, for commands that run until then.
    pub(crate) until: u64,
    /// Time after which to send `stop` at the latest.
    pub(crate) at_most: Duration,
}

/// The measurements of a run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// From `go` to the end of the last job, or to `stop`.
    pub(crate) seconds: f64,
    pub(crate) jobs: u64,
    /// CPU seconds of the server, and of the contestant's processes.
    pub(crate) server: f64,
    pub(crate) client: f64,
    /// Peak memory of the largest process, in bytes.
    pub(crate) memory: u64,
    pub(crate) ran: Vec<Ran>,
}

impl<'a> Run<'a> {
    /// A run of one process that ends by itself.
    pub(crate) fn of(contestant: Contestant, command: &'a str, number: u64) -> Run<'a> {
        Run { contestant, command, number, processes: 1, until: u64::MAX, at_most: TIMEOUT }
    }

    pub(crate) async fn on(&self, server: &Server, database: &Database) -> Result<Outcome, Failure> {
        self.start(database).await?.measure(server).await
    }

    /// Starts the processes, and returns when all are ready.
    pub(crate) async fn start(&'a self, database: &Database) -> Result<Started<'a>, Failure> {
        let children = Child::start_all(self.contestant, self.command, database, self.number, self.processes).await?;
        Ok(Started { run: self, children, is_paused: false })
    }

    /// Waits until all processes have reported their results.
    async fn listen(&self, children: &mut [Child]) -> Result<Vec<Ran>, Failure> {
        let (send_line, mut messages) = mpsc::unbounded_channel();
        for (number, child) in children.iter_mut().enumerate() {
            let mut lines = child.lines.take().ok_or("the output is read only once")?;
            let send_line = send_line.clone();
            tokio::spawn(async move {
                // Forward the end of the output too: a contestant must not exit before the controller lets it.
                while let Ok(line) = lines.next_line().await {
                    let ended = line.is_none();
                    if send_line.send((number, line)).is_err() || ended {
                        break;
                    }
                }
            });
        }
        drop(send_line);
        let mut at = vec![0; children.len()];
        let mut ran = Vec::new();
        let mut stop_sent = false;
        let stopped_by = Instant::now() + self.at_most;
        let deadline = Instant::now() + TIMEOUT;
        while ran.len() < children.len() {
            let next = tokio::time::timeout_at(if stop_sent { deadline } else { stopped_by }, messages.recv()).await;
            match next {
                Ok(Some((number, Some(line)))) => match Message::parse(&line)? {
                    Message::At(jobs) => at[number] = jobs,
                    Message::Figures(figures) => ran.push(*figures),
                },
                Ok(Some((_, None)) | None) => return Err(self.failure("exited without results")),
                Err(_) if stop_sent => return Err(self.failure("does not stop after `stop`")),
                Err(_) => {}
            }
            if !stop_sent && (at.iter().sum::<u64>() >= self.until || Instant::now() >= stopped_by) {
                stop_sent = true;
                for child in &mut *children {
                    child.send_line("stop").await?;
                }
            }
        }
        Ok(ran)
    }

    fn failure(&self, what: &str) -> Failure {
        format!("{}, {}: {what}", self.contestant.label(), self.command).into()
    }
}

/// The processes of a run, all ready.
pub(crate) struct Started<'a> {
    run: &'a Run<'a>,
    children: Vec<Child>,
    is_paused: bool,
}

impl Started<'_> {
    /// Waits until the processes have connected and are idle, then pauses them until the clock starts, so that they do
    /// not see what happens in the database meanwhile.
    pub(crate) async fn pause_when_idle(&mut self, server: &Server) -> Result<(), Failure> {
        let used = || Ok::<f64, Failure>(server.processor_seconds()? + sum(&self.children, Child::processor_seconds)?);
        let deadline = Instant::now() + IDLE_AT_MOST;
        let mut before = used()?;
        while Instant::now() < deadline {
            tokio::time::sleep(IDLE_WINDOW).await;
            let now = used()?;
            if now - before <= IDLE_WINDOW.as_secs_f64() * IDLE_SHARE {
                break;
            }
            before = now;
        }
        self.is_paused = true;
        self.children.iter().try_for_each(|child| child.signal(Signal::STOP))
    }

    /// Lets the processes begin together, and waits for their results.
    pub(crate) async fn measure(self, server: &Server) -> Result<Outcome, Failure> {
        let Started { run, mut children, is_paused } = self;
        let server_before = server.processor_seconds()?;
        let client_before = sum(&children, Child::processor_seconds)?;
        let began = unix_seconds();
        if is_paused {
            children.iter().try_for_each(|child| child.signal(Signal::CONT))?;
        }
        for child in &mut children {
            child.send_line("go").await?;
        }
        let ran = run.listen(&mut children).await?;
        let jobs = ran.iter().map(|ran| ran.jobs).sum();
        let seconds = match run.until {
            // If it was stopped before it was done, its whole time counts.
            until if until != u64::MAX && jobs < until => run.at_most.as_secs_f64(),
            _ => ran.iter().map(|ran| ran.last).fold(began, f64::max) - began,
        };
        let outcome = Outcome {
            seconds,
            jobs,
            server: server.processor_seconds()? - server_before,
            client: sum(&children, Child::processor_seconds)? - client_before,
            memory: children
                .iter()
                .map(Child::peak_memory)
                .collect::<Result<Vec<_>, _>>()?
                .into_iter()
                .max()
                .unwrap_or(0),
            ran,
        };
        for child in children {
            child.end().await?;
        }
        Ok(outcome)
    }
}

fn sum(children: &[Child], of: impl Fn(&Child) -> Result<f64, Failure>) -> Result<f64, Failure> {
    children.iter().map(of).sum()
}

/// A line that a contestant sends after `go`.
pub(crate) enum Message {
    At(u64),
    Figures(Box<Ran>),
}

impl Message {
    fn parse(line: &str) -> Result<Message, Failure> {
        match line.strip_prefix("at ") {
            Some(jobs) => Ok(Message::At(jobs.parse()?)),
            None => Ok(Message::Figures(Box::new(serde_json::from_str(line)?))),
        }
    }
}

/// A process that is ready.
pub(crate) struct Child {
    process: Process,
    pid: u32,
    input: ChildStdin,
    lines: Option<Lines<BufReader<ChildStdout>>>,
}

impl Child {
    pub(crate) async fn start(contestant: Contestant, command: &str, url: &str, number: u64) -> Result<Child, Failure> {
        let mut program = contestant.program()?;
        program.args([command, url, &number.to_string()]);
        // A contestant gets its database from its arguments, and we read its output.
        program.env_remove("DATABASE_URL").stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = program.spawn().map_err(|error| {
            format!(
                "could not start {} ({error}): run `make bench`, which installs and builds what it needs",
                contestant.label()
            )
        })?;
        let input = process.stdin.take().ok_or("a child has an input")?;
        let output = process.stdout.take().ok_or("a child has an output")?;
        let pid = process.id().ok_or("a child has a process id")?;
        let mut lines = BufReader::new(output).lines();
        match tokio::time::timeout(TIMEOUT, lines.next_line()).await?? {
            Some(line) if line == "ready" => Ok(Child { process, pid, input, lines: Some(lines) }),
            found => Err(format!("{}, {command}: sent {found:?}, expected `ready`", contestant.label()).into()),
        }
    }

    /// Starts that many at the same time.
    pub(crate) async fn start_all(
        contestant: Contestant,
        command: &str,
        database: &Database,
        number: u64,
        processes: usize,
    ) -> Result<Vec<Child>, Failure> {
        let mut starting = JoinSet::new();
        for _ in 0..processes {
            let (command, url) = (command.to_owned(), database.url.clone());
            starting.spawn(async move { Child::start(contestant, &command, &url, number).await });
        }
        starting.join_all().await.into_iter().collect()
    }

    pub(crate) async fn send_line(&mut self, line: &str) -> Result<(), Failure> {
        self.input.write_all(format!("{line}\n").as_bytes()).await?;
        Ok(self.input.flush().await?)
    }

    /// Waits for its next message.
    pub(crate) async fn receive(&mut self) -> Result<Message, Failure> {
        let lines = self.lines.as_mut().ok_or("the output is read only once")?;
        let line = tokio::time::timeout(TIMEOUT, lines.next_line()).await??;
        Message::parse(&line.ok_or("a contestant exited without results")?)
    }

    pub(crate) async fn figures(&mut self) -> Result<Ran, Failure> {
        loop {
            if let Message::Figures(ran) = self.receive().await? {
                return Ok(*ran);
            }
        }
    }

    pub(crate) async fn end(self) -> Result<(), Failure> {
        let Child { mut process, input, .. } = self;
        drop(input);
        let status = tokio::time::timeout(TIMEOUT, process.wait()).await??;
        if status.success() { Ok(()) } else { Err(format!("a contestant exited with {status}").into()) }
    }

    /// CPU seconds of the process and of its children.
    fn processor_seconds(&self) -> Result<f64, Failure> {
        usage::of_family(self.pid)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).ok_or("a child has a process id")?;
        Ok(kill_process(pid, signal)?)
    }

    fn peak_memory(&self) -> Result<u64, Failure> {
        usage::peak_memory(self.pid)
    }
}
