//! The controller's side of a run: processes that are all prepared before any may begin, and what they and the server
//! used meanwhile.
//!
//! ```text
//! contestant: ready          it has connected and prepared what it needs
//! controller: go
//! contestant: at 4711        so many jobs have run; only from those that run until they are told
//! controller: stop           to those
//! contestant: {"jobs": …}    the figures, on one line
//! controller: end of input   everything outside has been read, the process may end
//! ```

use crate::Failure;
use crate::contestant::Contestant;
use crate::protocol::unix_seconds;
use crate::server::{Database, Server};
use crate::usage;
use serde::Deserialize;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child as Process, ChildStdin, ChildStdout};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// No run takes that long unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(900);

/// What a contestant says at the end; which of it depends on the command.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Ran {
    pub(crate) jobs: u64,
    /// When the last job ended, in seconds since 1970.
    pub(crate) last: f64,
    /// From add to start, in seconds.
    pub(crate) latencies: Vec<f64>,
    /// Of each start and stop.
    pub(crate) seconds: Vec<f64>,
    pub(crate) out_of_order: u64,
    /// The most jobs of one queue that ran at once.
    pub(crate) at_once: i64,
}

/// What is to be done, by whom.
pub(crate) struct Run<'a> {
    pub(crate) contestant: Contestant,
    pub(crate) command: &'a str,
    pub(crate) number: u64,
    pub(crate) processes: usize,
    /// After so many jobs those that run until they are told are told.
    pub(crate) until: u64,
    /// And after so long at the latest.
    pub(crate) at_most: Duration,
}

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// From `go` to the end of the last job, or to when it was told to stop.
    pub(crate) seconds: f64,
    pub(crate) jobs: u64,
    /// Processor seconds of the server, and of the contestant's processes.
    pub(crate) server: f64,
    pub(crate) client: f64,
    /// The most memory that any of the processes had, in bytes.
    pub(crate) memory: u64,
    pub(crate) ran: Vec<Ran>,
}

impl<'a> Run<'a> {
    /// One process that comes to an end by itself.
    pub(crate) fn of(contestant: Contestant, command: &'a str, number: u64) -> Run<'a> {
        Run { contestant, command, number, processes: 1, until: u64::MAX, at_most: PATIENCE }
    }

    pub(crate) async fn on(&self, server: &Server, database: &Database) -> Result<Outcome, Failure> {
        let mut children = Vec::new();
        for _ in 0..self.processes {
            children.push(Child::start(self.contestant, self.command, &database.url, self.number).await?);
        }
        let server_before = server.processor_seconds()?;
        let client_before = sum(&children, Child::processor_seconds)?;
        let began = unix_seconds();
        for child in &mut children {
            child.say("go").await?;
        }
        let ran = self.listen(&mut children).await?;
        let jobs = ran.iter().map(|ran| ran.jobs).sum();
        let seconds = match self.until {
            // It was stopped before it was done: all the time it had counts.
            until if until != u64::MAX && jobs < until => self.at_most.as_secs_f64(),
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

    /// Until all of them have said their figures.
    async fn listen(&self, children: &mut [Child]) -> Result<Vec<Ran>, Failure> {
        let (say, mut said) = mpsc::unbounded_channel();
        for (number, child) in children.iter_mut().enumerate() {
            let mut lines = child.lines.take().ok_or("nobody else listens")?;
            let say = say.clone();
            tokio::spawn(async move {
                // The end is passed on too: a contestant stays until it is let go.
                while let Ok(line) = lines.next_line().await {
                    let ended = line.is_none();
                    if say.send((number, line)).is_err() || ended {
                        break;
                    }
                }
            });
        }
        drop(say);
        let mut at = vec![0; children.len()];
        let mut ran = Vec::new();
        let mut told = false;
        let told_by = Instant::now() + self.at_most;
        let patience = Instant::now() + PATIENCE;
        while ran.len() < children.len() {
            let next = tokio::time::timeout_at(if told { patience } else { told_by }, said.recv()).await;
            match next {
                Ok(Some((number, Some(line)))) => match Said::parse(&line)? {
                    Said::At(jobs) => at[number] = jobs,
                    Said::Figures(figures) => ran.push(*figures),
                },
                Ok(Some((_, None)) | None) => return Err(self.failure("ended without figures")),
                Err(_) if told => return Err(self.failure("was told to stop and does not")),
                Err(_) => {}
            }
            if !told && (at.iter().sum::<u64>() >= self.until || Instant::now() >= told_by) {
                told = true;
                for child in &mut *children {
                    child.say("stop").await?;
                }
            }
        }
        Ok(ran)
    }

    fn failure(&self, what: &str) -> Failure {
        format!("{}, {}: {what}", self.contestant.label(), self.command).into()
    }
}

fn sum(children: &[Child], of: impl Fn(&Child) -> Result<f64, Failure>) -> Result<f64, Failure> {
    children.iter().map(of).sum()
}

/// A line of a contestant after `go`.
pub(crate) enum Said {
    At(u64),
    Figures(Box<Ran>),
}

impl Said {
    fn parse(line: &str) -> Result<Said, Failure> {
        match line.strip_prefix("at ") {
            Some(jobs) => Ok(Said::At(jobs.parse()?)),
            None => Ok(Said::Figures(Box::new(serde_json::from_str(line)?))),
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
        // A contestant's database must come from its arguments, and its output is ours.
        program.env_remove("DATABASE_URL").stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = program.spawn().map_err(|error| {
            format!("{} does not start ({error}): `make bench` installs and builds what is needed", contestant.label())
        })?;
        let input = process.stdin.take().ok_or("a child has an input")?;
        let output = process.stdout.take().ok_or("a child has an output")?;
        let pid = process.id().ok_or("a child has a number")?;
        let mut lines = BufReader::new(output).lines();
        match tokio::time::timeout(PATIENCE, lines.next_line()).await?? {
            Some(line) if line == "ready" => Ok(Child { process, pid, input, lines: Some(lines) }),
            found => Err(format!("{}, {command}: said {found:?}, expected `ready`", contestant.label()).into()),
        }
    }

    pub(crate) async fn say(&mut self, line: &str) -> Result<(), Failure> {
        self.input.write_all(format!("{line}\n").as_bytes()).await?;
        Ok(self.input.flush().await?)
    }

    /// What it says next.
    pub(crate) async fn hear(&mut self) -> Result<Said, Failure> {
        let lines = self.lines.as_mut().ok_or("nobody else listens")?;
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await??;
        Said::parse(&line.ok_or("a contestant ended without figures")?)
    }

    pub(crate) async fn figures(&mut self) -> Result<Ran, Failure> {
        loop {
            if let Said::Figures(ran) = self.hear().await? {
                return Ok(*ran);
            }
        }
    }

    pub(crate) async fn end(self) -> Result<(), Failure> {
        let Child { mut process, input, .. } = self;
        drop(input);
        let status = tokio::time::timeout(PATIENCE, process.wait()).await??;
        if status.success() { Ok(()) } else { Err(format!("a contestant ended with {status}").into()) }
    }

    /// Of the process and of those that it has started.
    fn processor_seconds(&self) -> Result<f64, Failure> {
        usage::of_family(self.pid)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    fn peak_memory(&self) -> Result<u64, Failure> {
        usage::peak_memory(self.pid)
    }
}
