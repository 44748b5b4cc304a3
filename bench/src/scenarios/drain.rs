//! How fast one and two processes drain a backlog of trivial jobs, and how much CPU and memory that takes.

use super::{Bench, bars, expect_jobs, figures, header, jobs_per_second, median};
use crate::Failure;
use crate::child::{Outcome, Run};
use crate::contestant::Contestant;
use crate::figures::{count, megabytes, short, times};
use crate::report::{Goal, Section};
use crate::server::Jobs;

/// The limit over as many connections as our worker uses to claim and report.
const OURS_ON: Contestant = Contestant::LimitOn2;

const CONTESTANTS: [Contestant; 9] = [
    Contestant::Ours,
    Contestant::OursWith24,
    Contestant::OursRepeatable,
    Contestant::LimitOn1,
    Contestant::LimitOn2,
    Contestant::NodeTuned,
    Contestant::PortTuned,
    Contestant::NodeDefault,
    Contestant::PortDefault,
];

/// A small backlog, because there the planner errs most if the statistics say that no job is locked.
const ON_A_SMALL_BACKLOG: [Contestant; 3] = [Contestant::Ours, Contestant::OursRepeatable, Contestant::LimitOn1];

const JOBS: u64 = 200_000;
const JOBS_OF_A_SMALL_BACKLOG: u64 = 20_000;
const JOBS_AT_THE_PEERS_DEFAULTS: u64 = 10_000;

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let one = drain(bench, "drain, one process", &CONTESTANTS, 1, bench.size(JOBS)).await?;
    let two = drain(bench, "drain, two processes", &CONTESTANTS, 2, bench.size(JOBS)).await?;
    let small = drain(bench, "drain, small backlog", &ON_A_SMALL_BACKLOG, 1, JOBS_OF_A_SMALL_BACKLOG).await?;
    let mut rows = Vec::new();
    for (processes, results) in [("1", &one), ("2", &two), ("1", &small)] {
        rows.extend(results.iter().map(|(contestant, turns)| row(*contestant, processes, turns)));
    }
    let speed = |contestant| median(&one, contestant, jobs_per_second);
    let best_tuned = speed(Contestant::NodeTuned).max(speed(Contestant::PortTuned));
    let best_default = speed(Contestant::NodeDefault).max(speed(Contestant::PortDefault));
    let ours = speed(Contestant::Ours);
    let ours_with_24 = speed(Contestant::OursWith24);
    let mut goals = vec![Goal::at_least(
        "drain, nothing set: of the limit on the same connections",
        0.9,
        ours / speed(OURS_ON),
        short,
    )];
    let repeatable = speed(Contestant::OursRepeatable) / speed(OURS_ON);
    goals.push(Goal::at_least("drain, repeatable tasks: of the limit on the same connections", 1.5, repeatable, short));
    goals.extend([
        Goal::at_least("drain, concurrency 24: of the best peer tuned", 2.0, ours_with_24 / best_tuned, times),
        Goal::at_least(
            "drain, concurrency 24: of the best peer at its defaults",
            15.0,
            ours_with_24 / best_default,
            times,
        ),
    ]);
    Ok(Section {
        title: "Drain".to_owned(),
        method: "200,000 trivial jobs (10,000 for the peers' defaults), inserted before the clock starts; the clock \
                 stops at the end of the last one. The peers run 24 jobs at a time. The limit claims and deletes \
                 1,000 at a time with plain SQL on our schema. The CPU time of PostgreSQL includes all its \
                 processes, also vacuum."
            .to_owned(),
        header: header(&["", "processes", "jobs", "jobs/s", "PostgreSQL µs/job", "client µs/job", "peak MB/process"]),
        rows,
        plots: vec![
            bars("drain-1", "Drain, one process", "jobs per second", &one, jobs_per_second),
            bars("drain-2", "Drain, two processes", "jobs per second", &two, jobs_per_second),
        ],
        goals,
        ..Section::default()
    })
}

/// Lets each contestant drain the same number of ready jobs.
pub(super) async fn drain(
    bench: &Bench,
    title: &str,
    contestants: &[Contestant],
    processes: usize,
    jobs: u64,
) -> Result<Vec<(Contestant, Vec<Outcome>)>, Failure> {
    bench
        .alternate(title, contestants, async |contestant| {
            let jobs = match contestant {
                Contestant::NodeDefault | Contestant::PortDefault => bench.size(JOBS_AT_THE_PEERS_DEFAULTS),
                _ => jobs,
            };
            let run = Run { processes, until: jobs, ..Run::of(contestant, "drain", 0) };
            let (outcome, database) = bench.run(&run, async |database| database.fill(&Jobs::ready(jobs)).await).await?;
            expect_jobs(contestant, outcome.jobs, jobs)?;
            expect_jobs(contestant, database.jobs_left().await?, 0)?;
            let summary = format!("{} jobs/s", count(jobs_per_second(&outcome)));
            Ok((outcome, summary))
        })
        .await
}

/// The CPU time per job, of this many seconds.
pub(super) fn microseconds(seconds: f64, outcome: &Outcome) -> f64 {
    seconds * 1e6 / outcome.jobs.max(1) as f64
}

fn row(contestant: Contestant, processes: &str, turns: &[Outcome]) -> Vec<String> {
    vec![
        contestant.label().to_owned(),
        processes.to_owned(),
        count(figures(turns, |outcome| outcome.jobs as f64).median()),
        figures(turns, jobs_per_second).with_spread(count),
        short(figures(turns, |outcome| microseconds(outcome.server, outcome)).median()),
        short(figures(turns, |outcome| microseconds(outcome.client, outcome)).median()),
        short(figures(turns, |outcome| megabytes(outcome.memory as f64)).median()),
    ]
}
