//! What a limit that never binds costs jobs that wait most of the time, as calls of a service do.

use super::super::{Bench, expect_jobs, figures, jobs_per_second, median};
use super::Part;
use crate::Failure;
use crate::child::{Outcome, Run};
use crate::contestant::Contestant;
use crate::figures::{count, short};
use crate::report::Goal;
use crate::server::Jobs;

/// A job takes this long. With 200 slots, no more than 1,000 jobs a second can run.
const MILLISECONDS: u64 = 200;
const JOBS: u64 = 10_000;

pub(super) async fn measure(bench: &Bench) -> Result<Part, Failure> {
    let label = |limited: bool| (if limited { "one limit of 1,000,000" } else { "no limit" }).to_owned();
    let results = bench
        .alternate_between("limits, slow jobs", &[false, true], label, async |limited| {
            let outcome = drain(bench, limited).await?;
            let summary = format!("{} jobs/s", count(jobs_per_second(&outcome)));
            Ok((outcome, summary))
        })
        .await?;
    let speed = |limited| median(&results, limited, jobs_per_second);
    let rows = results.iter().map(|(limited, turns)| {
        let speed = figures(turns, jobs_per_second).with_spread(count);
        vec![format!("jobs of {MILLISECONDS} ms, {}", label(*limited)), format!("{speed} jobs/s")]
    });
    let what = format!("limits: jobs of {MILLISECONDS} ms under a limit that never binds, of no limit");
    Ok(Part {
        method: format!(
            "Slow jobs: {} jobs that sleep for {MILLISECONDS} ms, by one process with 200 slots.",
            count(bench.size(JOBS) as f64)
        ),
        rows: rows.collect(),
        goals: vec![Goal::at_least(&what, 0.98, speed(true) / speed(false), short)],
    })
}

async fn drain(bench: &Bench, limited: bool) -> Result<Outcome, Failure> {
    let jobs = bench.size(JOBS);
    let contestant = Contestant::OursWith200;
    let database = bench.server.fresh_database(contestant).await?;
    let run = Run { until: jobs, ..Run::of(contestant, "recorded", MILLISECONDS) };
    let mut started = run.start(&database).await?;
    started.pause_when_idle(&bench.server).await?;
    database.fill(&Jobs { task: "recorded", ..Jobs::ready(jobs) }).await?;
    if limited {
        database.run("select graphile_worker._rs_set_limit('task:recorded', concurrency => 1000000)").await?;
        super::put_under_limits(&database).await?;
    }
    database.settle().await?;
    database.run("select pg_notify('jobs:insert', json_build_object('r', random(), 'count', 1000)::text)").await?;
    let outcome = started.measure(&bench.server).await?;
    expect_jobs(contestant, outcome.jobs, jobs)?;
    Ok(outcome)
}
