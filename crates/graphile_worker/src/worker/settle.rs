//! Settling: decides what the database records about a job, from its outcome. Pure: `execute` produces the outcome, and
//! `exchange` writes the settlement.

use crate::job::Job;
use crate::task::{Backoff, Retry, TaskOptions, TaskOutcome};
use crate::worker::execute::Outcome;
use chrono::{DateTime, SecondsFormat, Utc};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// The maximum length of a stored error, in bytes. A longer one is cut in the middle, because its end often says most.
const LONGEST_ERROR: usize = 64 * 1024;

/// What the database records about a job that has ended in this worker. Each case has a name, so that the row, the log
/// and the hooks agree on what happened.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Settlement {
    /// The job is done: its row is deleted.
    Complete,
    /// The handler has completed the job in its own transaction: the row is gone already.
    CompletedByHandler,
    /// The job failed and runs again.
    Retry { error: String, run_at: NextRun, remaining: Option<String> },
    /// The job failed and does not run again.
    GiveUp { error: String, run_at: NextRun, remaining: Option<String>, cause: GiveUpCause },
    /// The job was cancelled while it ran, and has not succeeded. The row says why, and does not run again.
    Cancel { remaining: Option<String> },
    /// The job has expired before it started, and does not run.
    Expire { error: String },
    /// The handler asked for a later run. The attempt does not count.
    Snooze { run_at: NextRun },
    /// A service rate limited the job: it runs again after the delay, and its limit is closed until then. The attempt does not
    /// count.
    RateLimited {
        error: String,
        wait: Duration,
        /// The limit to close; `None` for that of the job's queue or task.
        limit: Option<String>,
        remaining: Option<String>,
    },
    /// The worker stopped while the job was running. The attempt does not count.
    Interrupt { delay: Duration },
    /// The job never started, or ended through no fault of its own. It regains the attempts that it had before the
    /// claim, and its `run_at`, even if it was replaced by its key meanwhile. If it was removed, its row is deleted.
    Release { attempts: i16 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GiveUpCause {
    /// This was the last attempt.
    LastAttempt,
    /// The error is permanent: all attempts are used up.
    Permanent,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum NextRun {
    /// exp(min(attempts, 10)) seconds from now, by the database's clock.
    #[default]
    Backoff,
    After(Duration),
    At(DateTime<Utc>),
}

/// What to write into the row of a job that stays in the table, unlocked.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Unlock<'s> {
    /// Why the job failed; `None` keeps the last error.
    pub(crate) error: Option<&'s str>,
    pub(crate) run_at: NextRun,
    pub(crate) attempts: Attempts,
    /// The payload of the items of a batch that still have to run.
    pub(crate) payload: Option<&'s str>,
    /// The attempts that the job had before the claim, if it is released.
    pub(crate) released: Option<i16>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Attempts {
    /// The attempt counts.
    #[default]
    Charge,
    /// The attempt does not count.
    Refund,
    /// All attempts are used up.
    Exhaust,
}

impl Settlement {
    /// What to write into the row; `None` if the row does not stay.
    pub(crate) fn unlock(&self) -> Option<Unlock<'_>> {
        let unlock = Unlock::default();
        match self {
            Settlement::Complete | Settlement::CompletedByHandler => None,
            Settlement::Retry { error, run_at, remaining } => {
                Some(Unlock { error: Some(error), run_at: *run_at, payload: remaining.as_deref(), ..unlock })
            }
            Settlement::GiveUp { error, run_at, remaining, cause } => {
                let attempts = match cause {
                    GiveUpCause::LastAttempt => Attempts::Charge,
                    GiveUpCause::Permanent => Attempts::Exhaust,
                };
                Some(Unlock { error: Some(error), run_at: *run_at, attempts, payload: remaining.as_deref(), ..unlock })
            }
            Settlement::Expire { error } => Some(Unlock {
                error: Some(error),
                run_at: NextRun::After(Duration::ZERO),
                attempts: Attempts::Exhaust,
                ..unlock
            }),
            Settlement::Cancel { remaining } => Some(Unlock {
                run_at: NextRun::After(Duration::ZERO),
                attempts: Attempts::Exhaust,
                payload: remaining.as_deref(),
                ..unlock
            }),
            Settlement::Snooze { run_at } => Some(Unlock { run_at: *run_at, attempts: Attempts::Refund, ..unlock }),
            Settlement::RateLimited { error, wait, remaining, .. } => Some(Unlock {
                error: Some(error),
                run_at: NextRun::After(*wait),
                attempts: Attempts::Refund,
                payload: remaining.as_deref(),
                ..unlock
            }),
            Settlement::Interrupt { delay } => Some(Unlock {
                error: Some(INTERRUPTED),
                run_at: NextRun::After(*delay),
                attempts: Attempts::Refund,
                ..unlock
            }),
            Settlement::Release { attempts } => Some(Unlock { released: Some(*attempts), ..unlock }),
        }
    }

    pub(crate) fn keeps_row(&self) -> bool {
        !matches!(self, Settlement::Complete | Settlement::CompletedByHandler)
    }

    /// The settlement of a job that was cancelled while it ran: a success counts, anything else does not.
    pub(crate) fn cancelled(self) -> Settlement {
        match self {
            Settlement::Complete | Settlement::CompletedByHandler => self,
            Settlement::Retry { remaining, .. }
            | Settlement::GiveUp { remaining, .. }
            | Settlement::RateLimited { remaining, .. } => Settlement::Cancel { remaining },
            _ => Settlement::Cancel { remaining: None },
        }
    }

    /// Why the job failed, if it did.
    pub(crate) fn error(&self) -> Option<&str> {
        match self {
            Settlement::Retry { error, .. } | Settlement::GiveUp { error, .. } | Settlement::Expire { error } => {
                Some(error)
            }
            _ => None,
        }
    }

    /// Whether the handler failed.
    pub(crate) fn has_failed(&self) -> bool {
        matches!(self, Settlement::Retry { .. } | Settlement::GiveUp { .. })
    }

    /// How long the job closes a limit.
    pub(crate) fn closed_for(&self) -> Option<Duration> {
        match self {
            Settlement::RateLimited { wait, .. } => Some(*wait),
            _ => None,
        }
    }

    /// The limit that the job closes, if it named one.
    pub(crate) fn closes(&self) -> Option<&str> {
        match self {
            Settlement::RateLimited { limit, .. } => limit.as_deref(),
            _ => None,
        }
    }

    /// Whether the job ran to its end.
    pub(crate) fn has_run(&self) -> bool {
        !matches!(self, Settlement::Release { .. } | Settlement::Interrupt { .. } | Settlement::Expire { .. })
    }
}

/// The error of a job that the worker had to interrupt.
const INTERRUPTED: &str = "the worker was shut down before the job finished";

pub(crate) fn settlement(job: &Job, outcome: Outcome, options: &TaskOptions) -> Settlement {
    match outcome {
        Outcome::Done => Settlement::Complete,
        Outcome::CompletedByHandler => Settlement::CompletedByHandler,
        Outcome::Released => release(job),
        Outcome::Expired(at) => Settlement::Expire { error: expired(at) },
        Outcome::Snoozed(snooze) => Settlement::Snooze {
            run_at: match snooze {
                TaskOutcome::SnoozeUntil(time) => NextRun::At(time),
                TaskOutcome::Snooze(wait) => NextRun::After(wait),
                TaskOutcome::Done => NextRun::Backoff,
            },
        },
        Outcome::RateLimited { error, wait, remaining } => Settlement::RateLimited {
            error: storable(error.message),
            wait,
            limit: error.limit.map(|limit| limit.replace('\0', "")),
            remaining,
        },
        Outcome::Failed { error, remaining } => {
            let run_at = next_run(job, error.retry, options);
            let cause = match error.retry {
                Retry::Never => Some(GiveUpCause::Permanent),
                _ if job.attempts >= job.max_attempts => Some(GiveUpCause::LastAttempt),
                _ => None,
            };
            let error = storable(error.message);
            match cause {
                Some(cause) => Settlement::GiveUp { error, run_at, remaining, cause },
                None => Settlement::Retry { error, run_at, remaining },
            }
        }
    }
}

/// The same error as in `114-expiry-functions.sql`.
fn expired(at: DateTime<Utc>) -> String {
    format!("Expired: it had not started by {}", at.to_rfc3339_opts(SecondsFormat::Secs, true))
}

/// When a failed job runs again: by the delay in the handler's error, or else by the task's back-off, or else by the
/// standard one.
fn next_run(job: &Job, retry: Retry, options: &TaskOptions) -> NextRun {
    let own = || options.backoff.as_ref().and_then(|backoff| own_backoff(&**backoff, job));
    match retry {
        Retry::After(wait) | Retry::RateLimited(wait) => NextRun::After(wait),
        Retry::JitteredBackoff => {
            NextRun::After(jittered(own().unwrap_or_else(|| standard_backoff(job.attempts)), job))
        }
        Retry::Backoff | Retry::Never => own().map_or(NextRun::Backoff, NextRun::After),
    }
}

/// Calls the application's back-off function. If it panics, the standard back-off applies.
fn own_backoff(backoff: &Backoff, job: &Job) -> Option<Duration> {
    std::panic::catch_unwind(AssertUnwindSafe(|| backoff(job.attempts))).ok()
}

/// The same back-off as `NextRun::Backoff` in the database.
fn standard_backoff(attempts: i16) -> Duration {
    Duration::from_secs_f64(f64::from(attempts.clamp(0, 10)).exp())
}

/// Adds up to half of the delay, different for each job.
fn jittered(wait: Duration, job: &Job) -> Duration {
    let mut hasher = DefaultHasher::new();
    (job.id, job.attempts).hash(&mut hasher);
    let part = u32::try_from(hasher.finish() % 1000).unwrap_or_default();
    wait.saturating_add(wait / 2000 * part)
}

/// The job never started, or ended through no fault of its own.
pub(crate) fn release(job: &Job) -> Settlement {
    Settlement::Release { attempts: job.attempts.saturating_sub(1) }
}

/// Makes an error fit for a row: PostgreSQL's text cannot contain NUL, and a row should not hold a message of
/// megabytes.
fn storable(error: String) -> String {
    let error = if error.contains('\0') { error.replace('\0', "\u{fffd}") } else { error };
    if error.len() <= LONGEST_ERROR {
        return error;
    }
    let head = error.floor_char_boundary(LONGEST_ERROR / 2);
    let tail = error.ceil_char_boundary(error.len() - LONGEST_ERROR / 2);
    format!("{} … ({} bytes omitted) … {}", &error[..head], tail - head, &error[tail..])
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

    fn next_run_of(job: &Job, outcome: Outcome, options: &TaskOptions) -> NextRun {
        settlement(job, outcome, options).unlock().expect("the row stays").run_at
    }

    #[test]
    fn a_failure_waits_for_the_standard_back_off() {
        let settled = settlement(&job(1), failed(TaskError::new("oops")), &TaskOptions::default());
        assert_eq!(
            settled.unlock(),
            Some(Unlock { error: Some("oops"), run_at: NextRun::Backoff, ..Unlock::default() })
        );
    }

    #[test]
    fn the_delay_in_the_handlers_error_overrides_the_tasks_back_off() {
        let options = TaskOptions::default().backoff(|attempt| Duration::from_secs(attempt.unsigned_abs().into()));
        assert_eq!(next_run_of(&job(2), failed(TaskError::new("x")), &options), NextRun::After(Duration::from_secs(2)));
        let error = TaskError::retry_after(Duration::from_secs(9), "x");
        assert_eq!(next_run_of(&job(2), failed(error), &options), NextRun::After(Duration::from_secs(9)));
    }

    #[test]
    fn jobs_that_failed_together_do_not_retry_together() {
        let wait = |id: i64, options: &TaskOptions| {
            let job = Job { id, ..job(2) };
            match next_run_of(&job, failed(TaskError::jittered("x")), options) {
                NextRun::After(wait) => wait,
                other => panic!("{other:?}"),
            }
        };
        let standard = TaskOptions::default();
        let mut waits: Vec<Duration> = (1..=20).map(|id| wait(id, &standard)).collect();
        assert!(waits.iter().all(|wait| (7.38..11.09).contains(&wait.as_secs_f64())), "{waits:?}");
        waits.sort_unstable();
        waits.dedup();
        assert!(waits.len() > 15, "{waits:?}");
        assert_eq!(wait(1, &TaskOptions::default().backoff(|_| Duration::ZERO)), Duration::ZERO);
    }

    #[test]
    fn a_permanent_failure_uses_up_all_attempts() {
        let settled = settlement(&job(1), failed(TaskError::permanent("x")), &TaskOptions::default());
        assert!(matches!(settled, Settlement::GiveUp { cause: GiveUpCause::Permanent, .. }));
        assert_eq!(settled.unlock().expect("the row stays").attempts, Attempts::Exhaust);
    }

    #[test]
    fn the_last_attempt_is_recognised() {
        for (attempts, last) in [(1, false), (2, false), (3, true)] {
            let settled = settlement(&job(attempts), failed(TaskError::new("x")), &TaskOptions::default());
            assert_eq!(matches!(settled, Settlement::GiveUp { cause: GiveUpCause::LastAttempt, .. }), last);
            assert_eq!(settled.unlock().expect("the row stays").attempts, Attempts::Charge);
        }
    }

    #[test]
    fn a_snoozed_or_released_job_regains_its_attempt() {
        let snooze = Outcome::Snoozed(TaskOutcome::Snooze(Duration::from_secs(5)));
        let settled = settlement(&job(1), snooze, &TaskOptions::default());
        assert_eq!(settled.unlock().expect("the row stays").attempts, Attempts::Refund);
        let released = release(&job(3));
        assert_eq!(released.unlock(), Some(Unlock { released: Some(2), ..Unlock::default() }));
        assert!(!released.has_run() && released.keeps_row());
    }

    #[test]
    fn a_rate_limited_job_regains_its_attempt_and_says_how_long_its_limit_is_closed() {
        let wait = Duration::from_secs(30);
        let error = TaskError::rate_limited_in("group:api", wait);
        let outcome = Outcome::RateLimited { error, wait, remaining: None };
        let settled = settlement(&job(3), outcome, &TaskOptions::default());
        let unlock = settled.unlock().expect("the row stays");
        assert_eq!(unlock.error, Some("rate limited: runs again after 30s"));
        assert_eq!((unlock.run_at, unlock.attempts), (NextRun::After(wait), Attempts::Refund));
        assert_eq!((settled.closed_for(), settled.closes()), (Some(wait), Some("group:api")));
        assert!(!settled.has_failed() && settled.error().is_none());
    }

    #[test]
    fn a_cancelled_job_does_not_run_again_unless_it_has_succeeded() {
        let settled = |outcome| settlement(&job(1), outcome, &TaskOptions::default()).cancelled();
        assert_eq!(settled(Outcome::Done), Settlement::Complete);
        let snooze = Outcome::Snoozed(TaskOutcome::Snooze(Duration::from_secs(5)));
        for outcome in [failed(TaskError::new("stopped")), snooze, Outcome::Released] {
            let settled = settled(outcome);
            assert_eq!(settled, Settlement::Cancel { remaining: None });
            let unlock = settled.unlock().expect("the row stays");
            // The row has the reason already.
            assert_eq!((unlock.error, unlock.attempts), (None, Attempts::Exhaust));
        }
    }

    #[test]
    fn errors_are_stored_without_nul_and_cut_to_a_maximum_length() {
        assert_eq!(storable("a\0b".to_owned()), "a\u{fffd}b");
        let long = storable(format!("begin{}end", "é".repeat(5_000_000)));
        assert!(long.len() < LONGEST_ERROR + 100 && long.starts_with("begin") && long.ends_with("end"));
    }
}
