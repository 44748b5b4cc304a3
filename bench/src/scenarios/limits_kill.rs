//! Limits while workers are killed and limits change. The torture does and judges that, so this scenario runs the torture with
//! eight workers and reads its verdicts.

use super::{Bench, header};
use crate::Failure;
use crate::contestant::folder;
use crate::figures::count;
use crate::progress::Progress;
use crate::report::{Goal, Section};
use tokio::process::Command;

const SECONDS: u64 = 600;
const QUICK_SECONDS: u64 = 10;

/// The beginning of a verdict's name, and the name of its violations here.
const VERDICTS: [(&str, &str); 6] = [
    ("12a ", "moments above a limit"),
    ("12b ", "periods above a rate"),
    ("12c ", "claims in a pause"),
    ("12d ", "jobs outside their limit"),
    ("12e ", "leaked slots"),
    ("1 ", "stuck jobs"),
];

/// The goals are about these.
const WANTED: [&str; 3] = ["moments above a limit", "leaked slots", "stuck jobs"];

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let seconds = if bench.quick { QUICK_SECONDS } else { SECONDS };
    let progress = Progress::new("limits, kill", 1);
    progress.begin("torture");
    let output = torture(seconds).await?;
    let verdicts = verdicts(&output)?;
    progress.end("judged");
    let goals = verdicts.iter().filter(|(what, ..)| WANTED.contains(what));
    let faults = output.lines().find(|line| line.starts_with("faults: ")).unwrap_or_default();
    Ok(Section {
        title: "Limits, workers killed".to_owned(),
        method: format!(
            "`make torture` with eight workers for {seconds} seconds: a worker is killed about every second ({faults}), while the \
             limits change several times a second. torture/README.md says what is checked."
        ),
        header: header(&["", "violations", "checked"]),
        rows: verdicts
            .iter()
            .map(|(what, violations, checked)| vec![(*what).to_owned(), violations.to_string(), checked.clone()])
            .collect(),
        goals: goals
            .map(|(what, violations, _)| {
                Goal::at_most(&format!("limits: {what} while workers are killed"), 0.0, *violations as f64, count)
            })
            .collect(),
        ..Section::default()
    })
}

/// Runs the torture, and returns its output. Ignores the exit code, because it repeats the verdicts.
async fn torture(seconds: u64) -> Result<String, Failure> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut program = Command::new(cargo);
    program
        .args(["run", "--release", "--locked", "--quiet", "-p", "graphile_worker_torture", "--"])
        .args(["--workers", "8", "--seconds", &seconds.to_string(), "--faults", "kill,limits"])
        .args(["--without", "keyed,operator,cleanup"])
        .current_dir(folder())
        .kill_on_drop(true);
    let output = program.output().await?;
    Ok(String::from_utf8(output.stdout)?)
}

/// For each verdict, how often it is violated, and what was checked.
fn verdicts(output: &str) -> Result<Vec<(&'static str, u64, String)>, Failure> {
    let mut verdicts = Vec::new();
    for (name, what) in VERDICTS {
        let line = output.lines().map(str::trim).find(|line| line.starts_with(name));
        let line = line.ok_or_else(|| format!("the torture did not judge {name:?}:\n{output}"))?;
        // Name, result and what was checked are columns with two spaces or more between them.
        let mut columns = line.split("  ").map(str::trim).filter(|column| !column.is_empty()).skip(1);
        let result = columns.next().unwrap_or_default();
        let (violations, rest) = match result.strip_prefix("OK") {
            Some(rest) => (0, rest),
            None => (result.split(' ').next().unwrap_or_default().parse()?, ""),
        };
        let checked = columns.next().unwrap_or(rest).trim().to_owned();
        verdicts.push((what, violations, checked));
    }
    Ok(verdicts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_read_from_the_report() {
        let output = " 1 every acknowledged job ran   OK   12 jobs, 13 runs  \n \
             12a limits of concurrency hold             2 VIOLATED  436 runs\n \
             12b rates hold  OK  5 starts\n 12c nothing is claimed while it is paused  OK  3 pauses\n \
             12d waiting jobs come under a limit  OK  0 runs\n 12e no slot is lost  OK  a probe of 14 jobs at the end\n";
        let verdicts = verdicts(output).unwrap();
        assert_eq!(verdicts[0], ("moments above a limit", 2, "436 runs".to_owned()));
        assert_eq!(verdicts[5], ("stuck jobs", 0, "12 jobs, 13 runs".to_owned()));
        assert!(super::verdicts("").is_err());
    }
}
