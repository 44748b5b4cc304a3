//! Compares the worker with the limit of PostgreSQL and with its peers, which take turns on a private server.
//!
//! Each contestant is a process (`child`). The controller (`scenarios`) starts it, copies a database for it (`server`),
//! and measures its CPU time and memory from outside (`usage`). Our worker and the limit are this same program (`ours`,
//! `limit`); Node's worker is `bench/node/peer.cjs`, the Rust port is `bench/rust_port`.

mod child;
mod contestant;
mod figures;
mod limit;
mod ours;
mod plot;
mod progress;
mod protocol;
mod report;
mod scenarios;
mod server;
mod usage;

use clap::Parser;
use report::Report;
use scenarios::{Bench, Scenario};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Any error, printed with its sources.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Compares graphile_worker with the limit of PostgreSQL and with its peers.
#[derive(Parser)]
struct Arguments {
    /// What to measure [default: all but those that take minutes: `churn`, `limits-churn`, `limits-kill`, `long-transaction`]
    scenarios: Vec<Scenario>,
    /// Number of rounds; each contestant runs once per round
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Smoke test: a tenth of the sizes, one round, results in target/bench-quick
    #[arg(long)]
    quick: bool,
    /// Duration of each run of `churn` and `limits-churn`, in minutes
    #[arg(long, default_value_t = 3.0)]
    churn_minutes: f64,
    /// Output folder for RESULTS.md, results.json and plots/ [default: bench]
    #[arg(long)]
    results: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.split_first() {
        Some((first, rest)) if first == contestant::OWN_COMMAND => contest(rest).await,
        _ => measure(Arguments::parse()).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", with_sources(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Runs as a contestant.
async fn contest(arguments: &[String]) -> Result<(), Failure> {
    let task = protocol::Task::parse(arguments)?;
    match task.variant.strip_prefix("limit-") {
        Some(connections) => limit::run(&task, connections.parse()?).await,
        None => ours::run(&task).await,
    }
}

/// Runs as the controller.
async fn measure(arguments: Arguments) -> Result<(), Failure> {
    let chosen = match &arguments.scenarios[..] {
        [] => Scenario::usual(),
        chosen => chosen.to_vec(),
    };
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let results = match (arguments.results, arguments.quick) {
        (Some(folder), _) => folder,
        (None, false) => here.to_owned(),
        (None, true) => here.join("../target/bench-quick"),
    };
    let rounds = if arguments.quick { 1 } else { arguments.rounds.max(1) };
    let churn = Duration::try_from_secs_f64(arguments.churn_minutes * 60.0)?;
    let bench = Bench::start(rounds, arguments.quick, churn).await?;
    let measured = tokio::select! {
        measured = measure_all(&bench, &chosen, &results) => measured,
        _ = tokio::signal::ctrl_c() => Err("interrupted: the results of finished scenarios are saved".into()),
    };
    // Stop the server and delete its folder, whatever happened.
    bench.finish().await?;
    measured?.print();
    Ok(())
}

async fn measure_all(bench: &Bench, scenarios: &[Scenario], results: &Path) -> Result<Report, Failure> {
    let mut report = Report::open(results, bench.machine().await?)?;
    for scenario in scenarios {
        report.keep(scenario.measure(bench).await?)?;
    }
    Ok(report)
}

fn with_sources(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
