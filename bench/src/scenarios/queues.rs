//! Many named queues at once, and what the two scenarios about queues share.

use super::{Bench, bars, expect_jobs, figures, header};
use crate::Failure;
use crate::child::{Outcome, Run};
use crate::contestant::Contestant;
use crate::figures::{count, short};
use crate::report::{Goal, Section};
use crate::server::Jobs;
use std::time::Duration;

const CONTESTANTS: [Contestant; 6] = [
    Contestant::Ours,
    Contestant::OursWith24,
    Contestant::NodeDefault,
    Contestant::NodeTuned,
    Contestant::PortDefault,
    Contestant::PortTuned,
];

/// A peer may need a quarter of an hour for all jobs, so it is stopped after this time.
const AT_MOST: Duration = Duration::from_secs(10);

/// The results of one run.
pub(super) struct Turn {
    pub(super) speed: f64,
    out_of_order: u64,
    at_once: i64,
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let queues = bench.size(500);
    let results = bench
        .alternate("many named queues", &CONTESTANTS, async |contestant| {
            turn(run_for_a_while(bench, contestant, &Jobs::queued(queues * 40, queues)).await?)
        })
        .await?;
    let rows = results.iter().map(|(contestant, turns)| {
        vec![contestant.label().to_owned(), figures(turns, |turn| turn.speed).with_spread(count), rules(turns)]
    });
    let broken = broken(&results, Contestant::Ours) + broken(&results, Contestant::OursWith24);
    Ok(Section {
        title: "500 named queues".to_owned(),
        method: "500 queues of 40 trivial jobs each, in turn, inserted before the clock starts, through `run`. A \
                 contestant that is not done after ten seconds is stopped, and the jobs that it has run count."
            .to_owned(),
        header: header(&["", "jobs/s", "rules of a queue"]),
        rows: rows.collect(),
        plots: vec![bars("queues", "500 named queues of 40 jobs", "jobs per second", &results, |turn| turn.speed)],
        goals: vec![Goal::at_most("500 named queues: out of order, or two at once", 0.0, broken, |value| {
            format!("{value:.0}")
        })],
        ..Section::default()
    })
}

/// Runs these jobs until they are done, or until the time limit.
pub(super) async fn run_for_a_while(bench: &Bench, contestant: Contestant, jobs: &Jobs) -> Result<Outcome, Failure> {
    let at_most = if bench.quick { AT_MOST / 5 } else { AT_MOST };
    let run = Run { until: jobs.count, at_most, ..Run::of(contestant, "queues", 0) };
    let (outcome, database) = bench.run(&run, async |database| database.fill(jobs).await).await?;
    if outcome.jobs >= jobs.count {
        expect_jobs(contestant, database.jobs_left().await?, 0)?;
    }
    Ok(outcome)
}

pub(super) fn turn(outcome: Outcome) -> Result<(Turn, String), Failure> {
    let turn = Turn {
        speed: super::jobs_per_second(&outcome),
        out_of_order: outcome.ran.iter().map(|ran| ran.out_of_order).sum(),
        at_once: outcome.ran.iter().map(|ran| ran.at_once).max().unwrap_or(0),
    };
    let summary = format!("{} jobs/s ({} jobs)", short(turn.speed), count(outcome.jobs as f64));
    Ok((turn, summary))
}

/// Whether the queues kept their order and ran one job at a time.
pub(super) fn rules(turns: &[Turn]) -> String {
    let out_of_order: u64 = turns.iter().map(|turn| turn.out_of_order).sum();
    let at_once = turns.iter().map(|turn| turn.at_once).max().unwrap_or(0);
    match (out_of_order, at_once) {
        (0, 0 | 1) => "kept".to_owned(),
        (out_of_order, at_once) => format!("{out_of_order} out of order, up to {at_once} at once"),
    }
}

/// The number of violations.
pub(super) fn broken(results: &[(Contestant, Vec<Turn>)], contestant: Contestant) -> f64 {
    let turns = results.iter().filter(|(who, _)| *who == contestant).flat_map(|(_, turns)| turns);
    turns.map(|turn| turn.out_of_order as f64 + (turn.at_once - 1).max(0) as f64).sum()
}
