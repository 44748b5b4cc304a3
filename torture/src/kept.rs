//! The seeds that ever failed (`seeds.txt`), and which of them CI runs.

use crate::{Arguments, Failure};
use clap::Parser;

const SEEDS: &str = include_str!("../seeds.txt");

/// The run with Node's workers that CI adds to the kept seeds.
const CI_WITH_NODE: &str = "--seed 5 --seconds 13 --node";

/// All kept runs. A run that found several defects is listed once.
pub(crate) fn all() -> Result<Vec<Arguments>, Failure> {
    runs(SEEDS, |run| Some(run.options.to_owned()))
}

/// Those that the file chooses for CI, as short as it says, and one with Node's workers.
pub(crate) fn ci() -> Result<Vec<Arguments>, Failure> {
    let mut runs = runs(SEEDS, |run| {
        let seconds: u64 = run.ci.parse().ok()?;
        let others = run.options.split_once("--seconds").map_or("", |(_, rest)| rest);
        let others = others.trim_start().trim_start_matches(|digit: char| digit.is_ascii_digit());
        Some(format!("--seconds {seconds}{others}"))
    })?;
    runs.push(parse(CI_WITH_NODE)?);
    Ok(runs)
}

/// A line of the file.
struct Kept<'l> {
    /// For how many seconds CI runs it, if it does.
    ci: &'l str,
    options: &'l str,
}

/// The runs that a file lists, with the options that `choose` returns.
fn runs(file: &str, choose: impl Fn(&Kept<'_>) -> Option<String>) -> Result<Vec<Arguments>, Failure> {
    let (mut texts, mut runs) = (Vec::new(), Vec::new());
    for (index, line) in file.lines().enumerate() {
        let columns: Vec<&str> = line.split("  ").map(str::trim).filter(|column| !column.is_empty()).collect();
        if columns.is_empty() || line.starts_with('#') {
            continue;
        }
        let [seed, ci, options, _invariants, _cause] = columns[..] else {
            return Err(format!("seeds.txt line {}: expected 5 columns, found {}", index + 1, columns.len()).into());
        };
        let Some(options) = choose(&Kept { ci, options }) else { continue };
        let text = format!("--seed {seed} {options}");
        if !texts.contains(&text) {
            runs.push(parse(&text).map_err(|error| format!("seeds.txt line {}: {error}", index + 1))?);
            texts.push(text);
        }
    }
    Ok(runs)
}

fn parse(options: &str) -> Result<Arguments, Failure> {
    Ok(Arguments::try_parse_from(["torture"].into_iter().chain(options.split_whitespace()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kept_seed_can_be_run() {
        let all = all().unwrap();
        assert!(all.len() >= 7);
        assert!(all.iter().all(|run| run.seed.is_some() && run.seconds.is_some()));
    }

    #[test]
    fn ci_runs_kept_seeds_for_a_short_time_and_one_with_node() {
        let ci = ci().unwrap();
        assert!(ci.len() >= 3 && ci.iter().filter(|run| run.node).count() == 1);
        let seconds: u64 = ci.iter().filter_map(|run| run.seconds).sum();
        assert!(seconds <= 50, "CI has about 100 seconds, and each run takes 15 more: {seconds}");
        let all = all().unwrap();
        for run in ci.iter().filter(|run| !run.node) {
            let same = |kept: &&Arguments| kept.seed == run.seed && kept.faults == run.faults;
            assert!(all.iter().find(same).is_some(), "{run:?} keeps its other options");
        }
    }

    #[test]
    fn a_run_that_found_two_defects_is_run_once() {
        let file = "# seed\n  7  -  --seconds 15  2b  cause\n  7  10  --seconds 15  9b  another\n";
        assert_eq!(runs(file, |run| Some(run.options.to_owned())).unwrap().len(), 1);
        let error = runs("\n  7  --seconds 15\n", |run| Some(run.options.to_owned())).unwrap_err();
        assert_eq!(error.to_string(), "seeds.txt line 2: expected 5 columns, found 2");
    }
}
