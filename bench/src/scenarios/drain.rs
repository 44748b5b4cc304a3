//! Jobs per second of an existing backlog of trivial jobs, with one process and with two, and what they cost.

use super::{Bench, bars, expect_jobs, figures, header, jobs_per_second, median};
use crate::Failure;
use crate::child::{Outcome, Run};
use crate::contestant::Contestant;
use crate::figures::{count, megabytes, short, times};
use crate::report::{Goal, Section};
use crate::server::Jobs;

/// Over how many connections one worker of ours claims and reports: its limit has as many.
const OURS_ON: Contestant = Contestant::LimitOn1;

const CONTESTANTS: [Contestant; 8] = [
    Contestant::Ours,
    Contestant::OursWith24,
    Contestant::LimitOn1,
    Contestant::LimitOn2,
    Contestant::NodeTuned,
    Contestant::PortTuned,
    Contestant::NodeDefault,
    Contestant::PortDefault,
];

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let one = drain(bench, "drain, one process", 1).await?;
    let two = drain(bench, "drain, two processes", 2).await?;
    let mut rows = Vec::new();
    for (processes, results) in [("1", &one), ("2", &two)] {
        rows.extend(results.iter().map(|(contestant, turns)| row(*contestant, processes, turns)));
    }
    let speed = |contestant| median(&one, contestant, jobs_per_second);
    let best_tuned = speed(Contestant::NodeTuned).max(speed(Contestant::PortTuned));
    let best_default = speed(Contestant::NodeDefault).max(speed(Contestant::PortDefault));
    let ours = speed(Contestant::Ours);
    let ours_with_24 = speed(Contestant::OursWith24);
    Ok(Section {
        title: "Drain".to_owned(),
        method:
            "200,000 trivial jobs (10,000 for the peers' defaults) that are there before the clock starts; until the \
                 end of the last one. The peers run 24 jobs at a time. The limit claims and deletes 500 at a time with \
                 plain SQL on our schema. CPU of PostgreSQL counts all its processes, vacuum included."
                .to_owned(),
        header: header(&["", "processes", "jobs/s", "PostgreSQL µs/job", "client µs/job", "peak MB/process"]),
        rows,
        plots: vec![
            bars("drain-1", "Drain, one process", "jobs per second", &one, jobs_per_second),
            bars("drain-2", "Drain, two processes", "jobs per second", &two, jobs_per_second),
        ],
        goals: vec![
            Goal::at_least(
                "drain, nothing set: of the limit on the same connections",
                0.85,
                ours / speed(OURS_ON),
                short,
            ),
            Goal::at_least("drain, concurrency 24: of the best peer tuned", 2.0, ours_with_24 / best_tuned, times),
            Goal::at_least(
                "drain, concurrency 24: of the best peer at its defaults",
                15.0,
                ours_with_24 / best_default,
                times,
            ),
        ],
        ..Section::default()
    })
}

async fn drain(bench: &Bench, title: &str, processes: usize) -> Result<Vec<(Contestant, Vec<Outcome>)>, Failure> {
    bench
        .alternate(title, &CONTESTANTS, async |contestant| {
            let jobs = match contestant {
                Contestant::NodeDefault | Contestant::PortDefault => bench.size(10_000),
                _ => bench.size(200_000),
            };
            let run = Run { processes, until: jobs, ..Run::of(contestant, "drain", 0) };
            let (outcome, database) = bench.run(&run, async |database| database.fill(&Jobs::ready(jobs)).await).await?;
            expect_jobs(contestant, outcome.jobs, jobs)?;
            expect_jobs(contestant, database.jobs_left().await?, 0)?;
            let said = format!("{} jobs/s", count(jobs_per_second(&outcome)));
            Ok((outcome, said))
        })
        .await
}

fn row(contestant: Contestant, processes: &str, turns: &[Outcome]) -> Vec<String> {
    let microseconds = |seconds: f64, outcome: &Outcome| seconds * 1e6 / outcome.jobs.max(1) as f64;
    vec![
        contestant.label().to_owned(),
        processes.to_owned(),
        figures(turns, jobs_per_second).with_spread(count),
        short(figures(turns, |outcome| microseconds(outcome.server, outcome)).median()),
        short(figures(turns, |outcome| microseconds(outcome.client, outcome)).median()),
        short(figures(turns, |outcome| megabytes(outcome.memory as f64)).median()),
    ]
}
