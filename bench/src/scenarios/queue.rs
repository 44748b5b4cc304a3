//! One named queue: how fast its jobs run, in order and one at a time.

use super::queues::{Turn, broken, rules, run_for_a_while, turn};
use super::{Bench, bars, figures, header, median};
use crate::Failure;
use crate::contestant::Contestant;
use crate::figures::short;
use crate::report::{Goal, Section};
use crate::server::Jobs;

const CONTESTANTS: [Contestant; 5] =
    [Contestant::Ours, Contestant::NodeDefault, Contestant::NodeTuned, Contestant::PortDefault, Contestant::PortTuned];

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let jobs = bench.size(2_000);
    let queued = bench
        .alternate("one named queue", &CONTESTANTS, async |contestant| {
            turn(run_for_a_while(bench, contestant, &Jobs::queued(jobs, 1)).await?)
        })
        .await?;
    let unqueued = bench
        .alternate("the same jobs, unqueued", &[Contestant::OursWith1], async |contestant| {
            turn(run_for_a_while(bench, contestant, &Jobs::ready(jobs)).await?)
        })
        .await?;
    let row = |(contestant, turns): &(Contestant, Vec<Turn>), what: &str| {
        vec![
            contestant.label().to_owned(),
            what.to_owned(),
            figures(turns, |turn| turn.speed).with_spread(short),
            rules(turns),
        ]
    };
    let mut rows: Vec<Vec<String>> = queued.iter().map(|result| row(result, "one queue")).collect();
    rows.extend(unqueued.iter().map(|result| row(result, "no queue")));
    let ours = median(&queued, Contestant::Ours, |turn| turn.speed);
    let alone = median(&unqueued, Contestant::OursWith1, |turn| turn.speed);
    Ok(Section {
        title: "One named queue".to_owned(),
        method: "2,000 trivial jobs of one queue, inserted before the clock starts, through `run`. A contestant \
                 that is not done after ten seconds is stopped, and the jobs that it has run count."
            .to_owned(),
        header: header(&["", "jobs in", "jobs/s", "rules of a queue"]),
        rows,
        plots: vec![bars("queue", "One named queue", "jobs per second", &queued, |turn| turn.speed)],
        goals: vec![
            Goal::at_least("one named queue: of our own unqueued drain with concurrency 1", 0.5, ours / alone, short),
            Goal::at_most(
                "one named queue: out of order, or two at once",
                0.0,
                broken(&queued, Contestant::Ours),
                |value| format!("{value:.0}"),
            ),
        ],
        ..Section::default()
    })
}
