//! How fast jobs run while a transaction elsewhere stays open for two minutes, compared with the minute before it: its
//! snapshot keeps vacuum from removing dead rows. `churn` measures what happens afterwards.

use super::churn::{hold_vacuum_back, jobs_until};
use super::{Bench, figures, header, median};
use crate::Failure;
use crate::child::Child;
use crate::contestant::Contestant;
use crate::figures::{count, short};
use crate::plot::{Line, Plot, Shape};
use crate::report::{Goal, Section};
use sqlx::Connection;
use std::time::Duration;
use tokio::time::Instant;

const CONTESTANTS: [Contestant; 2] = [Contestant::Ours, Contestant::OursRepeatable];

const INTERVALS: usize = 12;

/// The interval in which the other transaction begins. It stays open until the end.
const OPEN_FROM: usize = 4;

const INTERVAL: Duration = Duration::from_secs(15);
const QUICK_INTERVAL: Duration = Duration::from_millis(1250);

/// The jobs per second in each interval.
type Turn = Vec<f64>;

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let interval = if bench.quick { QUICK_INTERVAL } else { INTERVAL };
    let results = bench
        .alternate("long transaction", &CONTESTANTS, async |contestant| {
            let turn = run(bench, contestant, interval).await?;
            let summary = format!("{} of undisturbed", short(part_of_undisturbed(&turn)));
            Ok((turn, summary))
        })
        .await?;
    let rows = results.iter().map(|(contestant, turns)| {
        vec![
            contestant.label().to_owned(),
            figures(turns, undisturbed).with_spread(count),
            figures(turns, while_open).with_spread(count),
            figures(turns, |turn| turn[INTERVALS - 1]).with_spread(count),
            figures(turns, part_of_undisturbed).with_spread(short),
        ]
    });
    let line = |(contestant, turns): &(Contestant, Vec<Turn>)| Line {
        label: contestant.label().to_owned(),
        points: (0..INTERVALS)
            .map(|at| (interval.as_secs_f64() * (at + 1) as f64, figures(turns, |turn| turn[at]).median()))
            .collect(),
    };
    let goal = |contestant: Contestant| {
        let what = format!("long transaction, {}: of undisturbed", contestant.label());
        Goal::at_least(&what, 0.5, median(&results, contestant, part_of_undisturbed), short)
    };
    Ok(Section {
        title: "Long transaction".to_owned(),
        method: format!(
            "A worker runs trivial jobs; the same process adds 500 jobs at a time while fewer than 5,000 wait. After {} \
             seconds, another session opens a `repeatable read` transaction, reads, and keeps it open for {} seconds. \
             Autovacuum runs as by default.",
            short((interval * OPEN_FROM as u32).as_secs_f64()),
            short((interval * (INTERVALS - OPEN_FROM) as u32).as_secs_f64()),
        ),
        header: header(&["", "before, jobs/s", "while it is open, jobs/s", "at the end, jobs/s", "of before"]),
        rows: rows.collect(),
        plots: vec![Plot {
            name: "long-transaction".to_owned(),
            title: "Speed before and while a transaction elsewhere is open".to_owned(),
            unit: "jobs/s".to_owned(),
            shape: Shape::Lines { x_unit: "seconds".to_owned(), lines: results.iter().map(line).collect() },
        }],
        goals: results.iter().map(|(contestant, _)| goal(*contestant)).collect(),
        ..Section::default()
    })
}

async fn run(bench: &Bench, contestant: Contestant, interval: Duration) -> Result<Turn, Failure> {
    let database = bench.server.fresh_database(contestant).await?;
    database.settle().await?;
    let mut elsewhere = database.connect().await?;
    let mut worker = Child::start(contestant, "churn", &database.url, 0).await?;
    worker.send_line("go").await?;
    let began = Instant::now();
    let mut before = (0, began);
    let mut speeds = Vec::new();
    for number in 0..INTERVALS {
        if number == OPEN_FROM {
            hold_vacuum_back(&mut elsewhere).await?;
        }
        let jobs = jobs_until(&mut worker, began + interval * (number as u32 + 1), before.0).await?;
        let now = Instant::now();
        speeds.push((jobs - before.0) as f64 / (now - before.1).as_secs_f64());
        before = (jobs, now);
    }
    worker.send_line("stop").await?;
    worker.figures().await?;
    worker.end().await?;
    elsewhere.close().await?;
    Ok(speeds)
}

fn undisturbed(turn: &Turn) -> f64 {
    mean(&turn[..OPEN_FROM])
}

fn while_open(turn: &Turn) -> f64 {
    mean(&turn[OPEN_FROM..])
}

fn part_of_undisturbed(turn: &Turn) -> f64 {
    while_open(turn) / undisturbed(turn).max(1e-9)
}

fn mean(speeds: &[f64]) -> f64 {
    speeds.iter().sum::<f64>() / speeds.len() as f64
}
