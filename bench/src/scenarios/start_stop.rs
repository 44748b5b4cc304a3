//! How long a worker takes to start and stop if the schema is installed and no job is ready.

use super::{Bench, bars, figures, header, median};
use crate::Failure;
use crate::child::Run;
use crate::contestant::Contestant;
use crate::figures::{milliseconds, quantile, short};
use crate::report::{Goal, Section};

const CONTESTANTS: [Contestant; 3] = [Contestant::Ours, Contestant::NodeDefault, Contestant::PortDefault];

/// Enough for a median in every run.
const SAMPLES: u64 = 20;

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let results = bench
        .alternate("start and stop", &CONTESTANTS, async |contestant| {
            let (outcome, _) = bench.run(&Run::of(contestant, "start_stop", SAMPLES), async |_| Ok(())).await?;
            let seconds: Vec<f64> = outcome.ran.into_iter().flat_map(|ran| ran.seconds).collect();
            let median = milliseconds(quantile(&seconds, 0.5));
            Ok((median, format!("{} ms", short(median))))
        })
        .await?;
    let rows = results
        .iter()
        .map(|(contestant, turns)| vec![contestant.label().to_owned(), figures(turns, |ms| *ms).with_spread(short)]);
    let time = |contestant| median(&results, contestant, |ms| *ms);
    Ok(Section {
        title: "Start and stop".to_owned(),
        method: "20 times in one process: connect, check the schema (which is installed), find no job, disconnect. \
                 The start of the process is not included."
            .to_owned(),
        header: header(&["", "ms"]),
        rows: rows.collect(),
        plots: vec![bars("start-stop", "Start and stop on an empty queue", "milliseconds", &results, |ms| *ms)],
        goals: vec![Goal::at_most(
            "start and stop: of the Rust port's",
            1.0,
            time(Contestant::Ours) / time(Contestant::PortDefault),
            short,
        )],
        ..Section::default()
    })
}
