//! How long a pause, a resume and a cancellation take until they are effective in all eight workers.

use super::super::Bench;
use super::Part;
use crate::Failure;
use crate::child::{Ran, RecordedRun, Run};
use crate::contestant::Contestant;
use crate::figures::{milliseconds, quantile, short};
use crate::progress::Progress;
use crate::protocol::unix_seconds;
use crate::report::Goal;
use crate::server::{Database, Jobs};
use graphile_worker::{CancelOptions, JobSpec, WorkerUtils};
use serde_json::json;
use sqlx::PgPool;
use std::time::Duration;

const PROCESSES: usize = 8;

/// A job of the stream takes this long. Each process has one slot, so all of them are busy.
const JOB_MS: u64 = 5;

const SAMPLES: usize = 100;
const QUICK_SAMPLES: usize = 10;

/// The time between two changes: much longer than what is measured.
const BETWEEN: Duration = Duration::from_millis(250);

/// When something was called, and when the next call followed.
#[derive(Debug, Clone, Copy)]
struct Call {
    at: f64,
    next: f64,
}

pub(super) async fn measure(bench: &Bench) -> Result<Part, Failure> {
    let samples = if bench.quick { QUICK_SAMPLES } else { SAMPLES };
    let progress = Progress::new("limits, changes", 2);
    progress.begin("pause and resume");
    let (pauses, resumes) = pause_and_resume(bench, samples).await?;
    progress.end(&format!("{} and {} ms", short(pauses[0]), short(resumes[0])));
    progress.begin("cancel");
    let cancels = cancel(bench, samples).await?;
    progress.end(&format!("{} ms", short(cancels[0])));
    let all = [("pause", pauses), ("resume", resumes), ("cancel", cancels)];
    Ok(Part {
        method: format!(
            "Changes: eight processes with one slot each, jobs of {JOB_MS} ms under a limit of 100, which leaves room for all; {samples} times. From the call until the \
             last process starts no more jobs (pause), has started one (resume), or has ended its running job (cancel)."
        ),
        rows: all
            .iter()
            .map(|(what, [p50, p99])| {
                vec![
                    format!("{what} until effective in 8 workers"),
                    format!("{} ms, p99 {} ms", short(*p50), short(*p99)),
                ]
            })
            .collect(),
        goals: all
            .iter()
            .map(|(what, [_, p99])| {
                Goal::at_most(&format!("limits: {what} until effective in 8 workers, p99 ms"), 50.0, *p99, short)
            })
            .collect(),
    })
}

fn p50_and_p99(seconds: &[f64]) -> [f64; 2] {
    [0.5, 0.99].map(|part| milliseconds(quantile(seconds, part)))
}

async fn pause_and_resume(bench: &Bench, samples: usize) -> Result<([f64; 2], [f64; 2]), Failure> {
    let contestant = Contestant::OursWith1;
    let database = bench.server.fresh_database(contestant).await?;
    let length = BETWEEN * u32::try_from(2 * samples + 4)?;
    let run = Run { processes: PROCESSES, at_most: length, ..Run::of(contestant, "recorded", JOB_MS) };
    let mut started = run.start(&database).await?;
    started.pause_when_idle(&bench.server).await?;
    let jobs = length.as_secs() * 1000 / JOB_MS * PROCESSES as u64;
    database.fill(&Jobs { task: "recorded", ..Jobs::ready(jobs) }).await?;
    database.run("select graphile_worker._rs_set_limit('task:recorded', concurrency => 100)").await?;
    super::put_under_limits(&database).await?;
    database.settle().await?;
    let calling = async {
        let utils = utils(&database);
        let mut calls = Vec::new();
        tokio::time::sleep(2 * BETWEEN).await;
        for _ in 0..samples {
            calls.push(unix_seconds());
            utils.pause("task:recorded").await?;
            tokio::time::sleep(BETWEEN).await;
            calls.push(unix_seconds());
            utils.resume("task:recorded").await?;
            tokio::time::sleep(BETWEEN).await;
        }
        calls.push(unix_seconds());
        Ok::<_, Failure>(calls)
    };
    let (outcome, calls) = tokio::try_join!(started.measure(&bench.server), calling)?;
    let calls: Vec<Call> = calls.windows(2).map(|pair| Call { at: pair[0], next: pair[1] }).collect();
    let (pauses, resumes): (Vec<_>, Vec<_>) = calls.iter().enumerate().partition(|(at, _)| at % 2 == 0);
    let pauses: Vec<f64> = pauses.into_iter().map(|(_, pause)| until_none_starts(&outcome.ran, *pause)).collect();
    let resumes: Vec<f64> = resumes.into_iter().map(|(_, resume)| until_all_start(&outcome.ran, *resume)).collect();
    Ok((p50_and_p99(&pauses), p50_and_p99(&resumes)))
}

/// From the call until the last start before the next call.
fn until_none_starts(ran: &[Ran], call: Call) -> f64 {
    let runs = ran.iter().flat_map(|ran| &ran.runs);
    let within = runs.filter(|run| run.began > call.at && run.began < call.next);
    within.map(|run| run.began - call.at).fold(0.0, f64::max)
}

/// From the call until every process has started a job; the time until the next call if one has not.
fn until_all_start(ran: &[Ran], call: Call) -> f64 {
    let first = |runs: &[RecordedRun]| {
        let after = runs.iter().map(|run| run.began).filter(|began| *began > call.at);
        after.fold(call.next, f64::min) - call.at
    };
    ran.iter().map(|ran| first(&ran.runs)).fold(0.0, f64::max)
}

async fn cancel(bench: &Bench, samples: usize) -> Result<[f64; 2], Failure> {
    let contestant = Contestant::OursWith1;
    let database = bench.server.fresh_database(contestant).await?;
    let length = BETWEEN * u32::try_from(2 * samples + 4)?;
    let run = Run { processes: PROCESSES, at_most: length, ..Run::of(contestant, "recorded", 0) };
    let started = run.start(&database).await?;
    let calling = async {
        let utils = utils(&database);
        let mut calls = Vec::new();
        tokio::time::sleep(2 * BETWEEN).await;
        for _ in 0..samples {
            let mut ids = Vec::new();
            for _ in 0..PROCESSES {
                ids.push(utils.add_raw_job("recorded", json!({ "ms": 60_000 }), JobSpec::default()).await?.id);
            }
            tokio::time::sleep(BETWEEN).await;
            calls.push(unix_seconds());
            utils.cancel_jobs(&ids, CancelOptions::default()).await?;
            tokio::time::sleep(BETWEEN).await;
        }
        calls.push(unix_seconds());
        Ok::<_, Failure>(calls)
    };
    let (outcome, calls) = tokio::try_join!(started.measure(&bench.server), calling)?;
    let runs: Vec<RecordedRun> = outcome.ran.into_iter().flat_map(|ran| ran.runs).collect();
    let mut seconds = Vec::new();
    for pair in calls.windows(2) {
        let cancelled = runs.iter().filter(|run| run.began < pair[0] && run.ended > pair[0]);
        let each: Vec<f64> = cancelled.map(|run| run.ended - pair[0]).collect();
        // If the machine is too busy to start all of them, this sample tells nothing.
        if each.len() == PROCESSES {
            seconds.push(each.into_iter().fold(0.0, f64::max));
        }
    }
    if seconds.len() < samples / 2 {
        return Err(format!("all {PROCESSES} jobs were running in {} of {samples} samples only", seconds.len()).into());
    }
    Ok(p50_and_p99(&seconds))
}

fn utils(database: &Database) -> WorkerUtils {
    WorkerUtils::new(PgPool::connect_lazy_with(database.options.clone()), "graphile_worker")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(begins: &[f64]) -> Ran {
        let run = |began: &f64| RecordedRun { began: *began, ..RecordedRun::default() };
        Ran { runs: begins.iter().map(run).collect(), ..Ran::default() }
    }

    #[test]
    fn a_pause_is_effective_after_the_last_start_before_the_next_call() {
        let ran = [ran(&[1.0, 10.5, 21.0]), ran(&[10.25])];
        assert_eq!(until_none_starts(&ran, Call { at: 10.0, next: 20.0 }), 0.5);
        assert_eq!(until_none_starts(&ran, Call { at: 11.0, next: 20.0 }), 0.0);
    }

    #[test]
    fn a_resume_is_effective_when_every_process_has_started_a_job() {
        let both = [ran(&[1.0, 10.5, 11.0]), ran(&[12.0])];
        assert_eq!(until_all_start(&both, Call { at: 10.0, next: 20.0 }), 2.0);
        assert_eq!(until_all_start(&[ran(&[1.0])], Call { at: 10.0, next: 20.0 }), 10.0);
    }
}
