//! Measures the worker beside the limit of PostgreSQL and its peers, in one alternating run on a private server.
//!
//! Each contestant is a process of its own (`child`), started by the controller (`scenarios`), which copies a database
//! for it (`server`) and reads from outside what it used (`usage`). Ours and the limit are this program again
//! (`ours`, `limit`); Node's is `bench/node/peer.cjs`, the Rust port's is `bench/rust_port`.

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

/// Whatever went wrong, as a sentence with its sources.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Measures graphile_worker beside the limit of PostgreSQL and its peers.
#[derive(Parser)]
struct Arguments {
    /// What to measure [default: all but `churn`]
    scenarios: Vec<Scenario>,
    /// How often each contestant has its turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// A tenth of the sizes, one round, results into target/bench-quick: checks that everything works
    #[arg(long)]
    quick: bool,
    /// How long each of the two runs of `churn` takes
    #[arg(long, default_value_t = 3.0)]
    churn_minutes: f64,
    /// The folder that gets RESULTS.md, results.json and plots/
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

/// As a contestant.
async fn contest(arguments: &[String]) -> Result<(), Failure> {
    let task = protocol::Task::parse(arguments)?;
    match task.variant.strip_prefix("limit-") {
        Some(connections) => limit::run(&task, connections.parse()?).await,
        None => ours::run(&task).await,
    }
}

/// As the controller.
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
        _ = tokio::signal::ctrl_c() => Err("interrupted: what was complete is written".into()),
    };
    // Whatever happened, the server and its folder go.
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
