//! How exactly several processes keep one rate: the second in which most jobs start, and how many start in the long run.

use super::super::Bench;
use super::Part;
use crate::Failure;
use crate::child::Run;
use crate::contestant::Contestant;
use crate::figures::{count, short};
use crate::progress::Progress;
use crate::report::Goal;
use crate::server::Jobs;
use std::time::Duration;

const PROCESSES: usize = 8;

/// Jobs per second. The burst is the default, 1.
const RATE: f64 = 100.0;

const SECONDS: u64 = 60;
const QUICK_SECONDS: u64 = 6;

pub(super) async fn measure(bench: &Bench) -> Result<Part, Failure> {
    let seconds = if bench.quick { QUICK_SECONDS } else { SECONDS };
    let progress = Progress::new("limits, rate", 1);
    progress.begin("100 per second");
    let contestant = Contestant::Ours;
    let database = bench.server.fresh_database(contestant).await?;
    let at_most = Duration::from_secs(seconds);
    let run = Run { processes: PROCESSES, at_most, ..Run::of(contestant, "recorded", 0) };
    let mut started = run.start(&database).await?;
    started.pause_when_idle(&bench.server).await?;
    database.fill(&Jobs { task: "recorded", ..Jobs::ready(2 * seconds * 100) }).await?;
    database.run("select graphile_worker._rs_set_limit('task:recorded', rate => 100, per => '1 second')").await?;
    super::put_under_limits(&database).await?;
    database.settle().await?;
    let outcome = started.measure(&bench.server).await?;
    let runs = || outcome.ran.iter().flat_map(|ran| &ran.runs);
    let claims: Vec<f64> = runs().map(|run| run.claimed).collect();
    let begins: Vec<f64> = runs().map(|run| run.began).collect();
    let (by_claim, by_begin) = (fullest_second(&claims), fullest_second(&begins));
    let sustained = sustained(&claims);
    progress.end(&format!("{} jobs/s", short(sustained)));
    Ok(Part {
        method: format!(
            "Rate: 100 jobs per second with the default burst of 1, over {PROCESSES} processes, for {seconds} seconds. A start \
             counts when its job is claimed, by the database's clock; the handler begins a moment later."
        ),
        rows: vec![
            vec![
                format!("rate of 100/s, {PROCESSES} processes, the fullest second"),
                format!("{} jobs claimed, {} handlers called", count(by_claim as f64), count(by_begin as f64)),
            ],
            vec![format!("rate of 100/s, {PROCESSES} processes, sustained"), format!("{} jobs/s", short(sustained))],
        ],
        goals: vec![
            Goal::at_most("limits: rate of 100/s, jobs in the fullest second", RATE + 1.0, by_claim as f64, count),
            Goal::at_least("limits: rate of 100/s, sustained, of the rate", 0.99, sustained / RATE, short),
        ],
    })
}

/// How many of these times lie in one second, at most. The end of a second belongs to the next one, and a claim computes
/// with whole microseconds.
fn fullest_second(times: &[f64]) -> usize {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut from = 0;
    let mut most = 0;
    for (at, time) in sorted.iter().enumerate() {
        while sorted[from] <= time - 1.0 + 2e-6 {
            from += 1;
        }
        most = most.max(at - from + 1);
    }
    most
}

/// How many start per second, from the first to the last.
fn sustained(times: &[f64]) -> f64 {
    let first = times.iter().copied().fold(f64::INFINITY, f64::min);
    let last = times.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if times.len() < 2 { 0.0 } else { (times.len() - 1) as f64 / (last - first).max(1e-9) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_does_not_include_its_end() {
        assert_eq!(fullest_second(&[5.0, 0.0, 1.0, 1.5, 1.9]), 3);
        assert_eq!(fullest_second(&[0.0, 1.0, 2.0]), 1);
        assert_eq!(fullest_second(&[]), 0);
    }

    #[test]
    fn the_sustained_rate_counts_the_gaps() {
        assert_eq!(sustained(&[10.0, 10.5, 11.0]), 2.0);
        assert_eq!(sustained(&[10.0]), 0.0);
    }
}
