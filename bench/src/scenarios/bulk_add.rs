//! Adding many jobs at once through the API, compared with COPY into the same table.

use super::{Bench, bars, expect_jobs, figures, header, jobs_per_second, median};
use crate::Failure;
use crate::child::Run;
use crate::contestant::Contestant;
use crate::figures::{count, megabytes, short, times};
use crate::report::{Goal, Section};

const CONTESTANTS: [Contestant; 4] =
    [Contestant::Ours, Contestant::Copy, Contestant::NodeDefault, Contestant::PortDefault];

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let jobs = bench.size(200_000);
    let results = bench
        .alternate("bulk add", &CONTESTANTS, async |contestant| {
            let (outcome, database) = bench.run(&Run::of(contestant, "bulk_add", jobs), async |_| Ok(())).await?;
            expect_jobs(contestant, database.jobs_left().await?, jobs)?;
            let summary = format!("{} jobs/s", count(jobs_per_second(&outcome)));
            Ok((outcome, summary))
        })
        .await?;
    let rows = results.iter().map(|(contestant, turns)| {
        vec![
            contestant.label().to_owned(),
            figures(turns, jobs_per_second).with_spread(count),
            short(figures(turns, |outcome| outcome.server * 1e6 / jobs as f64).median()),
            short(figures(turns, |outcome| outcome.client * 1e6 / jobs as f64).median()),
            short(figures(turns, |outcome| megabytes(outcome.memory as f64)).median()),
        ]
    });
    let speed = |contestant| median(&results, contestant, jobs_per_second);
    let ours = speed(Contestant::Ours);
    Ok(Section {
        title: "Bulk add".to_owned(),
        method: "200,000 jobs without key or queue, in memory before the clock starts; the clock stops when all are \
                 committed. Our worker and the Rust port add them in one call of `add_raw_jobs`, Node in calls of \
                 `addJobs` with 10,000 each. The limit is COPY of the same rows into the table."
            .to_owned(),
        header: header(&["", "jobs/s", "PostgreSQL µs/job", "client µs/job", "peak MB"]),
        rows: rows.collect(),
        plots: vec![bars("bulk-add", "Bulk add", "jobs per second", &results, jobs_per_second)],
        goals: vec![
            Goal::at_least("bulk add: of COPY", 0.7, ours / speed(Contestant::Copy), short),
            Goal::at_least("bulk add: of Node", 1.6, ours / speed(Contestant::NodeDefault), times),
        ],
        ..Section::default()
    })
}
