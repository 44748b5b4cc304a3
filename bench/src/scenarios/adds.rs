//! 32 callers in one process add single jobs; each waits until its job is committed.

use super::{Bench, bars, expect_jobs, figures, header, jobs_per_second, median};
use crate::Failure;
use crate::child::Run;
use crate::contestant::Contestant;
use crate::figures::{count, short, times};
use crate::report::{Goal, Section};

const CONTESTANTS: [Contestant; 4] =
    [Contestant::Ours, Contestant::NodeDefault, Contestant::NodeSql, Contestant::PortDefault];

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let results = bench
        .alternate("32 concurrent single adds", &CONTESTANTS, async |contestant| {
            let jobs = match contestant {
                Contestant::Ours => bench.size(50_000),
                _ => bench.size(10_000),
            };
            let (outcome, database) = bench.run(&Run::of(contestant, "adds", jobs), async |_| Ok(())).await?;
            expect_jobs(contestant, database.jobs_left().await?, jobs)?;
            let summary = format!("{} adds/s", count(jobs_per_second(&outcome)));
            Ok((outcome, summary))
        })
        .await?;
    let rows = results.iter().map(|(contestant, turns)| {
        vec![
            contestant.label().to_owned(),
            figures(turns, jobs_per_second).with_spread(count),
            short(figures(turns, |outcome| outcome.server * 1e6 / outcome.jobs.max(1) as f64).median()),
        ]
    });
    let speed = |contestant| median(&results, contestant, jobs_per_second);
    let node = speed(Contestant::NodeDefault).max(speed(Contestant::NodeSql));
    Ok(Section {
        title: "32 concurrent single adds".to_owned(),
        method: "32 callers in one process each add a job and wait until it is committed, again and again; then the \
                 rows are counted. Ours use one `WorkerUtils` with the worker's own pool, the others 32 \
                 connections."
            .to_owned(),
        header: header(&["", "adds/s", "PostgreSQL µs/add"]),
        rows: rows.collect(),
        plots: vec![bars("adds", "32 concurrent single adds", "adds per second", &results, jobs_per_second)],
        goals: vec![Goal::at_least("32 concurrent single adds: of Node", 10.0, speed(Contestant::Ours) / node, times)],
        ..Section::default()
    })
}
