//! Settling: turns the outcome of a job into what the database records. Pure; `exchange` writes it.

use crate::execute::Outcome;
use crate::job::Job;
use crate::task::{Retry, TaskOptions, TaskOutcome};
use chrono::{DateTime, Utc};
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// A longer error is cut in the middle: the end of a message often says most.
const LONGEST_ERROR: usize = 64 * 1024;

/// What is to be written about a job that is no longer in our hands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Settlement {
    /// Its row is deleted.
    Complete,
    /// Its row is gone already.
    Nothing,
    /// Its row stays, unlocked.
    GiveBack(GiveBack),
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct GiveBack {
    /// Why it failed; `None` keeps what is there.
    pub(crate) error: Option<String>,
    pub(crate) run_at: NextRun,
    pub(crate) attempts: Attempts,
    /// What is left of a batch.
    pub(crate) payload: Option<String>,
    /// Of a job that never began: its attempts before the claim. It regains them, and its old `run_at`, even if it was
    /// replaced by its key meanwhile; if it was removed, its row is deleted.
    pub(crate) unbegun: Option<i16>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum NextRun {
    /// exp(min(attempts, 10)) seconds from now, by the database's clock.
    #[default]
    Backoff,
    After(Duration),
    At(DateTime<Utc>),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Attempts {
    /// The attempt counts.
    #[default]
    Charge,
    /// It does not: the job did nothing wrong.
    Refund,
    /// All of them are used up.
    Exhaust,
}

pub(crate) fn settlement(job: &Job, outcome: Outcome, options: &TaskOptions) -> Settlement {
    match outcome {
        Outcome::Done => Settlement::Complete,
        Outcome::DoneByHandler => Settlement::Nothing,
        Outcome::Snoozed(snooze) => Settlement::GiveBack(GiveBack {
            run_at: match snooze {
                TaskOutcome::SnoozeUntil(time) => NextRun::At(time),
                TaskOutcome::Snooze(wait) => NextRun::After(wait),
                TaskOutcome::Done => NextRun::Backoff,
            },
            attempts: Attempts::Refund,
            ..GiveBack::default()
        }),
        Outcome::Failed { error, remaining } => Settlement::GiveBack(GiveBack {
            error: Some(storable(error.message)),
            run_at: match (error.retry, &options.backoff) {
                (Retry::After(wait), _) => NextRun::After(wait),
                (_, Some(backoff)) => {
                    // The application's own code: it may panic, and the job is to be settled all the same.
                    let wait = std::panic::catch_unwind(AssertUnwindSafe(|| backoff(job.attempts)));
                    wait.map_or(NextRun::Backoff, NextRun::After)
                }
                (_, None) => NextRun::Backoff,
            },
            attempts: if error.retry == Retry::Never { Attempts::Exhaust } else { Attempts::Charge },
            payload: remaining,
            unbegun: None,
        }),
    }
}

/// The job has not begun, and the worker is leaving or has no slot for it: it goes back as it came.
pub(crate) fn release(job: &Job) -> Settlement {
    Settlement::GiveBack(GiveBack { unbegun: Some(job.attempts.saturating_sub(1)), ..GiveBack::default() })
}

/// The worker had to leave in the middle of the job: somebody else may begin it again a little later.
pub(crate) fn interrupted(delay: Duration) -> Settlement {
    Settlement::GiveBack(GiveBack {
        error: Some("the worker was shut down before the job ended".to_owned()),
        run_at: NextRun::After(delay),
        attempts: Attempts::Refund,
        ..GiveBack::default()
    })
}

/// Whether this was the last attempt.
pub(crate) fn failed_for_good(job: &Job, settlement: &Settlement) -> bool {
    match settlement {
        Settlement::GiveBack(GiveBack { attempts: Attempts::Exhaust, .. }) => true,
        Settlement::GiveBack(GiveBack { attempts: Attempts::Charge, unbegun: None, .. }) => {
            job.attempts >= job.max_attempts
        }
        _ => false,
    }
}

/// PostgreSQL's text has no NUL, and a row should not hold megabytes of message.
fn storable(error: String) -> String {
    let error = if error.contains('\0') { error.replace('\0', "\u{fffd}") } else { error };
    if error.len() <= LONGEST_ERROR {
        return error;
    }
    let head = error.floor_char_boundary(LONGEST_ERROR / 2);
    let tail = error.ceil_char_boundary(error.len() - LONGEST_ERROR / 2);
    format!("{} … ({} bytes left out) … {}", &error[..head], tail - head, &error[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::TaskError;

    fn job(attempts: i16) -> Job {
        Job { attempts, max_attempts: 3, ..Job::example(1) }
    }

    fn failed(error: TaskError) -> Outcome {
        Outcome::Failed { error, remaining: None }
    }

    fn given_back(job: &Job, outcome: Outcome, options: &TaskOptions) -> GiveBack {
        match settlement(job, outcome, options) {
            Settlement::GiveBack(give_back) => give_back,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_failure_waits_for_the_standard_back_off() {
        let back = given_back(&job(1), failed(TaskError::new("oops")), &TaskOptions::default());
        assert_eq!(
            (back.error.as_deref(), back.run_at, back.attempts),
            (Some("oops"), NextRun::Backoff, Attempts::Charge)
        );
    }

    #[test]
    fn the_handlers_wish_wins_over_the_tasks_back_off() {
        let options = TaskOptions::default().backoff(|attempt| Duration::from_secs(attempt.unsigned_abs().into()));
        assert_eq!(
            given_back(&job(2), failed(TaskError::new("x")), &options).run_at,
            NextRun::After(Duration::from_secs(2))
        );
        let wish = TaskError::retry_after(Duration::from_secs(9), "x");
        assert_eq!(given_back(&job(2), failed(wish), &options).run_at, NextRun::After(Duration::from_secs(9)));
    }

    #[test]
    fn a_permanent_failure_uses_up_all_attempts() {
        let settlement = settlement(&job(1), failed(TaskError::permanent("x")), &TaskOptions::default());
        assert!(failed_for_good(&job(1), &settlement));
    }

    #[test]
    fn the_last_attempt_is_recognised() {
        let outcome = || failed(TaskError::new("x"));
        for (attempts, last) in [(1, false), (2, false), (3, true)] {
            let settlement = settlement(&job(attempts), outcome(), &TaskOptions::default());
            assert_eq!(failed_for_good(&job(attempts), &settlement), last);
        }
    }

    #[test]
    fn a_snoozed_or_released_job_gets_its_attempt_back() {
        let snooze = Outcome::Snoozed(TaskOutcome::Snooze(Duration::from_secs(5)));
        assert_eq!(given_back(&job(1), snooze, &TaskOptions::default()).attempts, Attempts::Refund);
        let Settlement::GiveBack(back) = release(&job(3)) else { panic!() };
        assert_eq!((back.unbegun, back.error), (Some(2), None));
    }

    #[test]
    fn an_error_is_made_fit_for_a_row() {
        assert_eq!(storable("a\0b".to_owned()), "a\u{fffd}b");
        let long = storable(format!("begin{}end", "é".repeat(5_000_000)));
        assert!(long.len() < LONGEST_ERROR + 100 && long.starts_with("begin") && long.ends_with("end"));
    }
}
