//! The most memory a worker that runs one job at a time has resident while it drains jobs with large payloads.

use super::{Bench, expect_jobs, figures, header, jobs_per_second, median};
use crate::Failure;
use crate::child::Run;
use crate::contestant::Contestant;
use crate::figures::{count, megabytes, short};
use crate::report::{Goal, Section};
use crate::server::Jobs;

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let (mut rows, mut goals) = (Vec::new(), Vec::new());
    for (name, jobs, bytes) in [("10,000 of 100 kB", 10_000, 100_000), ("1,000 of 1 MB", 1_000, 1_000_000)] {
        let jobs = bench.size(jobs);
        let results = bench
            .alternate(
                &format!("payloads: {name}"),
                &[Contestant::OursWith1, Contestant::NodeWith1],
                async |contestant| {
                    let run = Run::of(contestant, "drain", 0);
                    // Small jobs come first: a worker claims many of those at once.
                    let small = bench.size(5_000);
                    let fill = async |database: &crate::server::Database| {
                        database.fill(&Jobs { priority: -1, ..Jobs::ready(small) }).await?;
                        database.fill(&Jobs { bytes, ..Jobs::ready(jobs) }).await
                    };
                    let (outcome, _) = bench.run(&run, fill).await?;
                    expect_jobs(contestant, outcome.jobs, small + jobs)?;
                    let said = format!("{} MB", short(megabytes(outcome.memory as f64)));
                    Ok((outcome, said))
                },
            )
            .await?;
        rows.extend(results.iter().map(|(contestant, turns)| {
            vec![
                name.to_owned(),
                contestant.label().to_owned(),
                figures(turns, |outcome| megabytes(outcome.memory as f64)).with_spread(short),
                figures(turns, jobs_per_second).with_spread(count),
            ]
        }));
        let memory = |contestant| median(&results, contestant, |outcome| megabytes(outcome.memory as f64));
        let ours = memory(Contestant::OursWith1);
        goals.push(Goal::at_most(&format!("memory with payloads, {name}, MB"), 128.0, ours, short));
    }
    Ok(Section {
        title: "Large payloads".to_owned(),
        method: "The peak of the resident set (VmHWM) of one process that runs one job at a time, and drains jobs with \
                 large payloads behind 5,000 small ones. PostgreSQL stores the payloads compressed, in about a hundredth."
            .to_owned(),
        header: header(&["payloads", "", "peak MB", "jobs/s"]),
        rows,
        goals,
        ..Section::default()
    })
}
