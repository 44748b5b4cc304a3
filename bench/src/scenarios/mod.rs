//! The scenarios, one file each, and what they share: the server, turns, and common figures.

mod add_jobs_sql;
mod adds;
mod bulk_add;
mod churn;
mod crontab;
mod drain;
mod fleet;
mod growth;
mod heartbeats;
mod idle_fleet;
mod latency;
mod limits;
mod limits_churn;
mod limits_kill;
mod long_transaction;
mod memory;
mod payloads;
mod queue;
mod queues;
mod scripts;
mod start_stop;

use crate::Failure;
use crate::child::{Outcome, Run};
use crate::contestant::{Contestant, NODE, folder};
use crate::figures::Figures;
use crate::plot::{Bar, Plot, Shape};
use crate::progress::Progress;
use crate::report::Section;
use crate::server::{CONNECTIONS, Database, Server};
use clap::ValueEnum;
use std::fs;
use std::time::Duration;

/// The scenarios, in the order of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// Draining a backlog with one process and with two
    Drain,
    /// Adding 200,000 jobs at once through the API
    BulkAdd,
    /// Latency from adding a job to its start
    Latency,
    /// One named queue
    Queue,
    /// 500 named queues
    Queues,
    /// Duration of one claim, depending on what is in the table
    Growth,
    /// 32 concurrent single adds
    Adds,
    /// Adding jobs from SQL, compared with Node's functions
    AddJobsSql,
    /// Start and stop on an empty queue
    StartStop,
    /// Peak memory while draining a million jobs
    Memory,
    /// Memory with payloads of 100 kB and 1 MB
    Payloads,
    /// Reading a crontab, and when its items fire
    Crontab,
    /// CPU time of the server for recovery
    Heartbeats,
    /// Speed and table size under a stream of jobs, for minutes (runs only if named)
    Churn,
    /// JavaScript and Python files as tasks
    Scripts,
    /// Draining a backlog with 1 to 16 processes
    Fleet,
    /// One job, or a burst, for 64 idle workers
    IdleFleet,
    /// Jobs under limits: what they cost, and what they promise
    Limits,
    /// Size of the tables of limits under a stream of jobs, for minutes (runs only if named)
    LimitsChurn,
    /// Limits while workers are killed and limits change, for ten minutes (runs only if named)
    LimitsKill,
    /// Speed while a transaction elsewhere stays open for two minutes (runs only if named)
    LongTransaction,
}

impl Scenario {
    pub(crate) fn usual() -> Vec<Scenario> {
        let takes_minutes = |scenario| {
            matches!(
                scenario,
                Scenario::Churn | Scenario::LongTransaction | Scenario::LimitsChurn | Scenario::LimitsKill
            )
        };
        Scenario::value_variants().iter().copied().filter(|scenario| !takes_minutes(*scenario)).collect()
    }

    pub(crate) async fn measure(self, bench: &Bench) -> Result<Section, Failure> {
        let section = match self {
            Scenario::Drain => drain::measure(bench).await,
            Scenario::BulkAdd => bulk_add::measure(bench).await,
            Scenario::Latency => latency::measure(bench).await,
            Scenario::Queue => queue::measure(bench).await,
            Scenario::Queues => queues::measure(bench).await,
            Scenario::Growth => growth::measure(bench).await,
            Scenario::Adds => adds::measure(bench).await,
            Scenario::AddJobsSql => add_jobs_sql::measure(bench).await,
            Scenario::StartStop => start_stop::measure(bench).await,
            Scenario::Memory => memory::measure(bench).await,
            Scenario::Payloads => payloads::measure(bench).await,
            Scenario::Crontab => crontab::measure(bench).await,
            Scenario::Heartbeats => heartbeats::measure(bench).await,
            Scenario::Churn => churn::measure(bench).await,
            Scenario::Scripts => scripts::measure(bench).await,
            Scenario::Fleet => fleet::measure(bench).await,
            Scenario::IdleFleet => idle_fleet::measure(bench).await,
            Scenario::Limits => limits::measure(bench).await,
            Scenario::LimitsChurn => limits_churn::measure(bench).await,
            Scenario::LimitsKill => limits_kill::measure(bench).await,
            Scenario::LongTransaction => long_transaction::measure(bench).await,
        }?;
        Ok(Section { order: self as usize, ..section })
    }
}

/// The server, and the size of the measurements.
pub(crate) struct Bench {
    server: Server,
    rounds: usize,
    quick: bool,
    churn: Duration,
}

impl Bench {
    pub(crate) async fn start(rounds: usize, quick: bool, churn: Duration) -> Result<Bench, Failure> {
        let churn = if quick { churn / 10 } else { churn };
        Ok(Bench { server: Server::start().await?, rounds, quick, churn })
    }

    pub(crate) async fn finish(self) -> Result<(), Failure> {
        self.server.stop().await
    }

    /// The number of jobs, or a tenth of it for `--quick`.
    fn size(&self, jobs: u64) -> u64 {
        if self.quick { jobs / 10 } else { jobs }
    }

    /// The machine and the versions on which the results were measured.
    pub(crate) async fn machine(&self) -> Result<String, Failure> {
        let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let model = model.map_or("unknown processor", |(_, model)| model.trim()).to_owned();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let node = std::process::Command::new(&*NODE).arg("--version").output();
        let node =
            node.map_or_else(|_| "?".to_owned(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        let package = fs::read_to_string(folder().join("../interop/node_modules/graphile-worker/package.json"));
        let package: serde_json::Value = serde_json::from_str(&package.unwrap_or_default()).unwrap_or_default();
        Ok(format!(
            "{date}; {cores} cores ({model}), server and clients on the same; PostgreSQL {postgres} with its defaults \
             and {CONNECTIONS} connections, TCP on loopback; Node {node}, graphile-worker {package}; Rust port {port}; {rounds}",
            date = chrono::Utc::now().format("%Y-%m-%d"),
            postgres = self.server.version().await?,
            package = package["version"].as_str().unwrap_or("?"),
            port = port_version(&fs::read_to_string(folder().join("rust_port/Cargo.lock")).unwrap_or_default()),
            rounds = if self.quick { "quick: a tenth, once".to_owned() } else { format!("{} rounds", self.rounds) },
        ))
    }

    /// Runs each contestant once per round.
    async fn alternate<T>(
        &self,
        title: &str,
        contestants: &[Contestant],
        turn: impl AsyncFnMut(Contestant) -> Result<(T, String), Failure>,
    ) -> Result<Vec<(Contestant, Vec<T>)>, Failure> {
        self.alternate_between(title, contestants, |contestant| contestant.label().to_owned(), turn).await
    }

    /// Measures each case once per round.
    async fn alternate_between<C: Copy, T>(
        &self,
        title: &str,
        cases: &[C],
        label: impl Fn(C) -> String,
        mut turn: impl AsyncFnMut(C) -> Result<(T, String), Failure>,
    ) -> Result<Vec<(C, Vec<T>)>, Failure> {
        let progress = Progress::new(title, cases.len() * self.rounds);
        let mut results: Vec<(C, Vec<T>)> = cases.iter().map(|case| (*case, Vec::new())).collect();
        for _ in 0..self.rounds {
            for (case, turns) in &mut results {
                progress.begin(&label(*case));
                let (result, summary) = turn(*case).await?;
                progress.end(&summary);
                turns.push(result);
            }
        }
        Ok(results)
    }

    /// Runs a contestant in a fresh database, after `prepare` has filled it and the server has settled.
    async fn run(
        &self,
        run: &Run<'_>,
        prepare: impl AsyncFnOnce(&Database) -> Result<(), Failure>,
    ) -> Result<(Outcome, Database), Failure> {
        let database = self.server.fresh_database(run.contestant).await?;
        prepare(&database).await?;
        database.settle().await?;
        Ok((run.on(&self.server, &database).await?, database))
    }
}

fn port_version(lock: &str) -> &str {
    let after = lock.split_once("name = \"graphile_worker\"\nversion = \"").map_or("?", |(_, after)| after);
    after.split('"').next().unwrap_or("?")
}

/// One figure of all runs.
fn figures<T>(turns: &[T], of: impl Fn(&T) -> f64) -> Figures {
    let mut figures = Figures::default();
    for turn in turns {
        figures.add(of(turn));
    }
    figures
}

/// The median of the figure of a contestant, or of another case; 0 if it did not run.
fn median<C: PartialEq, T>(results: &[(C, Vec<T>)], case: C, of: impl Fn(&T) -> f64) -> f64 {
    let turns = results.iter().find(|(which, _)| *which == case).map(|(_, turns)| turns);
    turns.map_or(0.0, |turns| figures(turns, of).median())
}

fn jobs_per_second(outcome: &Outcome) -> f64 {
    outcome.jobs as f64 / outcome.seconds.max(1e-9)
}

fn bars<T>(name: &str, title: &str, unit: &str, results: &[(Contestant, Vec<T>)], of: impl Fn(&T) -> f64) -> Plot {
    let bar = |(contestant, turns): &(Contestant, Vec<T>)| Bar {
        label: contestant.label().to_owned(),
        value: figures(turns, &of).median(),
        ours: contestant.is_ours(),
    };
    Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        unit: unit.to_owned(),
        shape: Shape::Bars(results.iter().map(bar).collect()),
    }
}

fn header(titles: &[&str]) -> Vec<String> {
    titles.iter().map(|title| (*title).to_owned()).collect()
}

/// Fails if the run did not process the expected number of jobs.
fn expect_jobs(contestant: Contestant, found: u64, expected: u64) -> Result<(), Failure> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{}: {found} jobs, expected {expected}", contestant.label()).into())
}
