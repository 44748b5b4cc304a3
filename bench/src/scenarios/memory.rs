//! Peak resident memory of our worker while it drains a million jobs.

use super::{Bench, expect_jobs, figures, header, jobs_per_second};
use crate::Failure;
use crate::child::Run;
use crate::contestant::Contestant;
use crate::figures::{count, megabytes, short};
use crate::report::{Goal, Section};
use crate::server::Jobs;

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let jobs = bench.size(1_000_000);
    let results = bench
        .alternate("memory", &[Contestant::Ours, Contestant::OursWith24], async |contestant| {
            let run = Run::of(contestant, "drain", 0);
            let (outcome, _) = bench.run(&run, async |database| database.fill(&Jobs::ready(jobs)).await).await?;
            expect_jobs(contestant, outcome.jobs, jobs)?;
            let summary = format!("{} MB", short(megabytes(outcome.memory as f64)));
            Ok((outcome, summary))
        })
        .await?;
    let rows = results.iter().map(|(contestant, turns)| {
        vec![
            contestant.label().to_owned(),
            figures(turns, |outcome| megabytes(outcome.memory as f64)).with_spread(short),
            figures(turns, jobs_per_second).with_spread(count),
        ]
    });
    let most = results.iter().flat_map(|(_, turns)| turns).map(|outcome| outcome.memory).max().unwrap_or(0);
    Ok(Section {
        title: "Memory".to_owned(),
        method: "The peak of the resident set (VmHWM) of one process that drains 1,000,000 trivial jobs.".to_owned(),
        header: header(&["", "peak MB", "jobs/s"]),
        rows: rows.collect(),
        goals: vec![Goal::at_most("memory while draining 1M jobs, MB", 64.0, megabytes(most as f64), short)],
        ..Section::default()
    })
}
