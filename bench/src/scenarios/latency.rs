//! Latency from before adding a job to the start of its handler, one job at a time on an idle worker. Jobs are added
//! through the API in the same process, and through SQL from another one.

use super::{Bench, bars, expect_jobs, figures, header, median};
use crate::Failure;
use crate::child::{Child, Message, Run};
use crate::contestant::Contestant;
use crate::figures::{milliseconds, quantile, short};
use crate::plot::Plot;
use crate::protocol::{pause, unix_seconds};
use crate::report::{Goal, Section};
use serde_json::json;
use std::time::Duration;

const PEERS: [Contestant; 4] =
    [Contestant::NodeDefault, Contestant::NodeTuned, Contestant::PortDefault, Contestant::PortTuned];

const CONTESTANTS: [Contestant; 5] = [Contestant::Ours, PEERS[0], PEERS[1], PEERS[2], PEERS[3]];

const SAMPLES: u64 = 300;

/// The latencies of one run, in milliseconds.
pub(super) struct Turn {
    pub(super) median: f64,
    pub(super) p99: f64,
}

pub(super) type Results = Vec<(Contestant, Vec<Turn>)>;

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let api = through_api(bench, "latency, through the API", &CONTESTANTS).await?;
    let sql = through_sql(bench, "latency, through SQL", &CONTESTANTS).await?;
    let mut rows = Vec::new();
    for (way, results) in [("API, same process", &api), ("SQL, another process", &sql)] {
        rows.extend(results.iter().map(|(contestant, turns)| {
            vec![
                contestant.label().to_owned(),
                way.to_owned(),
                figures(turns, |turn| turn.median).with_spread(short),
                figures(turns, |turn| turn.p99).with_spread(short),
            ]
        }));
    }
    Ok(Section {
        title: "Latency".to_owned(),
        method: "300 jobs, each added to an idle worker a few milliseconds after the previous one has started. The \
                 latency is the time from before the call that adds the job, commit included, to the first line of \
                 the handler, in milliseconds."
            .to_owned(),
        header: header(&["", "added through", "p50 ms", "p99 ms"]),
        rows,
        plots: vec![plot("latency-api", "through the API", &api), plot("latency-sql", "through SQL", &sql)],
        goals: [goals("API", &api), goals("SQL", &sql)].concat(),
        ..Section::default()
    })
}

pub(super) async fn through_api(bench: &Bench, title: &str, contestants: &[Contestant]) -> Result<Results, Failure> {
    let samples = bench.size(SAMPLES);
    bench
        .alternate(title, contestants, async |contestant| {
            let (outcome, _) = bench.run(&Run::of(contestant, "latency", samples), async |_| Ok(())).await?;
            let latencies: Vec<f64> = outcome.ran.into_iter().flat_map(|ran| ran.latencies).collect();
            turn(contestant, &latencies, samples)
        })
        .await
}

pub(super) async fn through_sql(bench: &Bench, title: &str, contestants: &[Contestant]) -> Result<Results, Failure> {
    let samples = bench.size(SAMPLES);
    bench
        .alternate(title, contestants, async |contestant| {
            turn(contestant, &latencies_through_sql(bench, contestant, samples).await?, samples)
        })
        .await
}

fn turn(contestant: Contestant, latencies: &[f64], samples: u64) -> Result<(Turn, String), Failure> {
    expect_jobs(contestant, latencies.len() as u64, samples)?;
    let milliseconds = |part| milliseconds(quantile(latencies, part));
    let turn = Turn { median: milliseconds(0.5), p99: milliseconds(0.99) };
    let summary = format!("p50 {} ms, p99 {} ms", short(turn.median), short(turn.p99));
    Ok((turn, summary))
}

async fn latencies_through_sql(bench: &Bench, contestant: Contestant, samples: u64) -> Result<Vec<f64>, Failure> {
    let database = bench.server.fresh_database(contestant).await?;
    database.settle().await?;
    let mut connection = database.connect().await?;
    let mut worker = Child::start(contestant, "latency_sql", &database.url, 0).await?;
    worker.send_line("go").await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    for sample in 0..samples {
        let payload = json!({ "at": unix_seconds() }).to_string();
        sqlx::query("select graphile_worker.add_job('timed', $1::text::json)")
            .bind(payload)
            .execute(&mut connection)
            .await?;
        while !matches!(worker.receive().await?, Message::At(jobs) if jobs > sample) {}
        tokio::time::sleep(pause(sample)).await;
    }
    worker.send_line("stop").await?;
    let ran = worker.figures().await?;
    worker.end().await?;
    Ok(ran.latencies)
}

fn plot(name: &str, way: &str, results: &Results) -> Plot {
    bars(name, &format!("Latency from add to start, {way}, median"), "milliseconds", results, |turn| turn.median)
}

/// Goals relative to the best peer: for each figure, the peer and the settings that are fastest.
fn goals(way: &str, results: &Results) -> Vec<Goal> {
    let of = |contestant, part: fn(&Turn) -> f64| median(results, contestant, part);
    let goal = |name: &str, wanted: f64, part: fn(&Turn) -> f64| {
        let best = PEERS.into_iter().map(|peer| of(peer, part)).fold(f64::INFINITY, f64::min);
        let what = format!("latency through {way}, {name}: of the best peer in any configuration");
        Goal::at_most(&what, wanted, of(Contestant::Ours, part) / best, short)
    };
    vec![goal("p50", 0.75, |turn| turn.median), goal("p99", 0.6, |turn| turn.p99)]
}
