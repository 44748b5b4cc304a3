//! Why a job does not run. What decides it is read in one statement; the decision is pure.

use crate::db::{optional_time, time};
use crate::error::Doing;
use crate::inspect::{JobState, JobSummary, WorkerState, spoken, summary};
use crate::{Error, WorkerUtils};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::fmt;
use std::time::Duration;

/// Jobs that come first are counted up to here.
const MOST_AHEAD: i64 = 10_000;

/// What keeps a job from running.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Why {
    /// The id that was asked for.
    pub id: i64,
    /// The job, where there is one.
    pub job: Option<JobSummary>,
    /// What keeps it, the decisive first; never empty.
    pub reasons: Vec<Reason>,
}

/// One thing that keeps a job from running, or does not; [`Display`](fmt::Display) is a sentence.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// There is no such job.
    DoesNotExist,
    /// It runs.
    Running {
        /// The worker that runs it.
        worker_id: String,
        /// Whether that lives.
        worker_state: WorkerState,
        /// Since when.
        since: DateTime<Utc>,
        /// How long that is.
        seconds: f64,
    },
    /// It has failed for good.
    AttemptsUsedUp {
        /// How often it was tried.
        attempts: i16,
        /// How often it may be.
        max_attempts: i16,
        /// Why the last attempt failed.
        last_error: Option<String>,
    },
    /// Its time is yet to come.
    NotDue {
        /// When it is due.
        run_at: DateTime<Utc>,
        /// How long that is from now.
        seconds: f64,
        /// How often it has failed before.
        attempts: i16,
        /// Why the last attempt failed.
        last_error: Option<String>,
    },
    /// A worker holds its queue, which runs one job at a time.
    QueueLocked {
        /// The queue.
        queue_name: String,
        /// The worker.
        worker_id: Option<String>,
        /// Since when.
        since: DateTime<Utc>,
        /// How long that is.
        seconds: f64,
        /// The job of the queue that runs.
        job_id: Option<i64>,
    },
    /// Jobs of its queue come before it.
    BehindInQueue {
        /// The queue.
        queue_name: String,
        /// How many, counted up to 10,000.
        jobs: i64,
    },
    /// Other jobs without a queue come before it.
    BehindOthers {
        /// How many, counted up to 10,000.
        jobs: i64,
    },
    /// There is no worker to be seen.
    NobodyWorks {
        /// When one that had registered was last heard of.
        last_heartbeat_at: Option<DateTime<Utc>>,
    },
    /// All workers that can be seen say which tasks they know, and none knows this one.
    NoWorkerKnowsTask {
        /// The task.
        task_identifier: String,
        /// How many workers there are.
        workers: i64,
    },
    /// It has flags. Which of them workers have been told not to run is known to the workers alone.
    MayBeForbidden {
        /// Its flags.
        flags: Vec<String>,
    },
    /// Nothing that can be seen keeps it.
    ShouldRun {
        /// The task, which workers must know.
        task_identifier: String,
        /// How many workers there are, as far as can be seen.
        workers: i64,
        /// How many of them say that they know the task.
        knowing: i64,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::DoesNotExist => write!(f, "There is no such job: it is done, was removed, or never was."),
            Reason::Running { worker_id, worker_state, seconds, .. } => {
                write!(f, "Worker {worker_id} has been running it for {}", spoken(*seconds))?;
                match worker_state {
                    WorkerState::Stale => write!(f, ", and has not been heard of for some time: a sweep will free it."),
                    WorkerState::Dead => write!(f, ", and was declared dead: a sweep will free it."),
                    WorkerState::Unknown if *seconds > 4.0 * 3600.0 => {
                        write!(
                            f,
                            ". Such a lock is stale after 4 hours: the next worker that clears stale locks frees it."
                        )
                    }
                    _ => write!(f, "."),
                }
            }
            Reason::AttemptsUsedUp { attempts, max_attempts, last_error } => {
                write!(f, "It has used up its attempts ({attempts} of {max_attempts})")?;
                error(f, last_error)
            }
            Reason::NotDue { seconds, attempts: 0, .. } => {
                write!(f, "Its time is yet to come: it is due in {}.", spoken(*seconds))
            }
            Reason::NotDue { seconds, attempts, last_error, .. } => {
                let times = if *attempts == 1 { "once" } else { &format!("{attempts} times") };
                write!(f, "It was tried {times} and waits to be tried again in {}", spoken(*seconds))?;
                error(f, last_error)
            }
            Reason::QueueLocked { queue_name, worker_id, seconds, job_id, .. } => {
                let worker = worker_id.as_deref().unwrap_or("that is not named");
                write!(f, "Its queue {queue_name:?} has been held by worker {worker} for {}", spoken(*seconds))?;
                match job_id {
                    Some(id) => write!(f, ", which runs job {id}."),
                    None => write!(f, ", although no job of it runs."),
                }
            }
            Reason::BehindInQueue { queue_name, jobs } => {
                let (jobs, come) = counted(*jobs);
                write!(f, "{jobs} of its queue {queue_name:?} {come} before it.")
            }
            Reason::BehindOthers { jobs } => {
                let (jobs, come) = counted(*jobs);
                write!(f, "{jobs} {come} before it, by priority and time.")
            }
            Reason::NobodyWorks { last_heartbeat_at } => {
                write!(f, "No worker is to be seen: none has registered, holds a job, or listens")?;
                match last_heartbeat_at {
                    Some(time) => write!(f, "; the last one was heard of at {}.", time.format("%F %T UTC")),
                    None => write!(f, "."),
                }
            }
            Reason::NoWorkerKnowsTask { task_identifier, workers } => {
                let there = if *workers == 1 { "there is 1".to_owned() } else { format!("there are {workers}") };
                write!(f, "No worker that lives knows the task {task_identifier:?} ({there}).")
            }
            Reason::MayBeForbidden { flags } => write!(
                f,
                "It has the flags {flags:?}: workers that have been told not to run one of them leave it alone; which ones that are is not stored."
            ),
            Reason::ShouldRun { task_identifier, workers, knowing: 0 } => write!(
                f,
                "Nothing that can be seen keeps it: it should run now, if a worker knows the task {task_identifier:?} (workers that can be seen: {workers}; which tasks they know is not stored)."
            ),
            Reason::ShouldRun { knowing, task_identifier, .. } => {
                write!(
                    f,
                    "Nothing keeps it: it should run now (workers that know the task {task_identifier:?}: {knowing})."
                )
            }
        }
    }
}

fn error(f: &mut fmt::Formatter<'_>, last_error: &Option<String>) -> fmt::Result {
    match last_error {
        Some(error) => write!(f, ". The last error: {error}"),
        None => write!(f, "."),
    }
}

fn counted(jobs: i64) -> (String, &'static str) {
    match jobs {
        1 => ("One job".to_owned(), "comes"),
        MOST_AHEAD.. => (format!("At least {MOST_AHEAD} jobs"), "come"),
        _ => (format!("{jobs} jobs"), "come"),
    }
}

/// What decides.
#[derive(Debug, Clone)]
struct Facts {
    now: DateTime<Utc>,
    job: Option<JobSummary>,
    worker_state: WorkerState,
    queue_locked_at: Option<DateTime<Utc>>,
    queue_locked_by: Option<String>,
    queue_job_id: Option<i64>,
    ahead: i64,
    /// Registered, with a fresh heartbeat.
    live_workers: i64,
    /// Of these, those that say which tasks they know, and those that know this one.
    workers_with_tasks: i64,
    workers_with_task: i64,
    /// That do not register, but hold something or are connected.
    other_workers: i64,
    /// Sessions that listen for jobs.
    listeners: i64,
    last_heartbeat_at: Option<DateTime<Utc>>,
}

impl WorkerUtils {
    /// Explains why a job does not run; a worker counts as dead that has registered and not been heard of for 5 minutes.
    ///
    /// ```no_run
    /// # async fn example(utils: graphile_worker::WorkerUtils) -> Result<(), graphile_worker::Error> {
    /// println!("{}", utils.why(42).await?.reasons[0]);
    /// # Ok(()) }
    /// ```
    pub async fn why(&self, id: i64) -> Result<Why, Error> {
        let doing = || format!("look at job {id}");
        let dead_after = Duration::from_secs(5 * 60).as_secs_f64();
        let query = sqlx::query(self.statements()?.why.sql()).bind(id).bind(dead_after);
        let facts = query.fetch_one(self.pool()).await.and_then(|row| read(&row)).doing(doing)?;
        let reasons = decide(&facts);
        Ok(Why { id, job: facts.job, reasons })
    }
}

fn read(row: &PgRow) -> sqlx::Result<Facts> {
    let id: Option<i64> = row.try_get("id")?;
    let worker_state: Option<String> = row.try_get("worker_state")?;
    Ok(Facts {
        now: time(row, "now")?,
        job: if id.is_some() { Some(summary(row)?) } else { None },
        worker_state: WorkerState::named(worker_state.as_deref().unwrap_or_default()),
        queue_locked_at: optional_time(row, "queue_locked_at")?,
        queue_locked_by: row.try_get("queue_locked_by")?,
        queue_job_id: row.try_get("queue_job_id")?,
        ahead: row.try_get("ahead")?,
        live_workers: row.try_get("live_workers")?,
        workers_with_tasks: row.try_get("workers_with_tasks")?,
        workers_with_task: row.try_get("workers_with_task")?,
        other_workers: row.try_get("other_workers")?,
        listeners: row.try_get("listeners")?,
        last_heartbeat_at: optional_time(row, "last_heartbeat_at")?,
    })
}

fn decide(facts: &Facts) -> Vec<Reason> {
    let Some(job) = &facts.job else {
        return vec![Reason::DoesNotExist];
    };
    let since = |time: DateTime<Utc>| (facts.now - time).as_seconds_f64();
    if let Some(locked_at) = job.locked_at {
        return vec![Reason::Running {
            worker_id: job.locked_by.clone().unwrap_or_default(),
            worker_state: facts.worker_state,
            since: locked_at,
            seconds: since(locked_at),
        }];
    }
    let (attempts, last_error) = (job.attempts, job.last_error.clone());
    if job.state == JobState::Failed {
        return vec![Reason::AttemptsUsedUp { attempts, max_attempts: job.max_attempts, last_error }];
    }
    let mut reasons = Vec::new();
    if job.state != JobState::Ready {
        reasons.push(Reason::NotDue { run_at: job.run_at, seconds: -since(job.run_at), attempts, last_error });
    }
    reasons.extend(nobody_to_run_it(facts, job));
    if job.state == JobState::Ready {
        reasons.extend(not_its_turn(facts, job));
        if !job.flags.is_empty() {
            reasons.push(Reason::MayBeForbidden { flags: job.flags.clone() });
        }
    }
    if reasons.iter().all(|reason| matches!(reason, Reason::MayBeForbidden { .. })) {
        reasons.push(Reason::ShouldRun {
            task_identifier: job.task_identifier.clone(),
            // A worker of ours that does not register is connected and listens: it counts once.
            workers: facts.live_workers + facts.other_workers.max(facts.listeners - facts.live_workers),
            knowing: facts.workers_with_task,
        });
    }
    reasons
}

fn nobody_to_run_it(facts: &Facts, job: &JobSummary) -> Option<Reason> {
    let Facts { live_workers, other_workers, listeners, last_heartbeat_at, .. } = *facts;
    if live_workers + other_workers + listeners == 0 {
        return Some(Reason::NobodyWorks { last_heartbeat_at });
    }
    // Whoever does not register may know any task; so may a listener that is none of those.
    let all_say_it = facts.workers_with_tasks == live_workers && other_workers == 0 && listeners <= live_workers;
    (all_say_it && facts.workers_with_task == 0)
        .then(|| Reason::NoWorkerKnowsTask { task_identifier: job.task_identifier.clone(), workers: live_workers })
}

fn not_its_turn(facts: &Facts, job: &JobSummary) -> Vec<Reason> {
    let mut reasons = Vec::new();
    let Some(queue_name) = &job.queue_name else {
        if facts.ahead > 0 {
            reasons.push(Reason::BehindOthers { jobs: facts.ahead });
        }
        return reasons;
    };
    if let Some(since) = facts.queue_locked_at {
        reasons.push(Reason::QueueLocked {
            queue_name: queue_name.clone(),
            worker_id: facts.queue_locked_by.clone(),
            since,
            seconds: (facts.now - since).as_seconds_f64(),
            job_id: facts.queue_job_id,
        });
    }
    if facts.ahead > 0 {
        reasons.push(Reason::BehindInQueue { queue_name: queue_name.clone(), jobs: facts.ahead });
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeDelta;

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_000_000, 0).expect("a time")
    }

    /// A job that is due, and one worker.
    fn facts() -> Facts {
        Facts {
            now: now(),
            job: Some(JobSummary {
                id: 7,
                task_identifier: "t".to_owned(),
                queue_name: None,
                state: JobState::Ready,
                priority: 0,
                run_at: now(),
                attempts: 0,
                max_attempts: 25,
                last_error: None,
                created_at: now(),
                updated_at: now(),
                key: None,
                locked_at: None,
                locked_by: None,
                revision: 0,
                flags: Vec::new(),
            }),
            worker_state: WorkerState::Unknown,
            queue_locked_at: None,
            queue_locked_by: None,
            queue_job_id: None,
            ahead: 0,
            live_workers: 1,
            workers_with_tasks: 0,
            workers_with_task: 0,
            other_workers: 0,
            listeners: 1,
            last_heartbeat_at: None,
        }
    }

    fn said(change: impl FnOnce(&mut Facts, &mut JobSummary)) -> Vec<String> {
        let mut facts = facts();
        let mut job = facts.job.take().expect("a job");
        change(&mut facts, &mut job);
        facts.job = Some(job);
        decide(&facts).iter().map(Reason::to_string).collect()
    }

    #[test]
    fn a_job_that_is_not_there() {
        let facts = Facts { job: None, ..facts() };
        assert_eq!(decide(&facts), [Reason::DoesNotExist]);
    }

    #[test]
    fn a_job_that_nothing_keeps() {
        assert_eq!(
            said(|_, _| ()),
            [
                "Nothing that can be seen keeps it: it should run now, if a worker knows the task \"t\" (workers that can be seen: 1; which tasks they know is not stored)."
            ]
        );
        assert_eq!(
            said(|facts, _| (facts.workers_with_tasks, facts.workers_with_task) = (1, 1)),
            ["Nothing keeps it: it should run now (workers that know the task \"t\": 1)."]
        );
    }

    #[test]
    fn a_job_that_runs_with_a_worker_that_lives_or_not() {
        let said = |state| {
            said(|facts, job| {
                facts.worker_state = state;
                job.locked_at = Some(now() - TimeDelta::hours(5));
                job.locked_by = Some("w".to_owned());
                job.state = JobState::Running;
            })
        };
        assert_eq!(said(WorkerState::Alive), ["Worker w has been running it for 5h."]);
        for (state, word) in
            [(WorkerState::Stale, "heard of"), (WorkerState::Dead, "dead"), (WorkerState::Unknown, "4 hours")]
        {
            assert!(said(state)[0].contains(word), "{:?}", said(state));
        }
    }

    #[test]
    fn a_job_that_has_failed_for_good() {
        let said = said(|facts, job| {
            facts.live_workers = 0;
            job.state = JobState::Failed;
            (job.attempts, job.max_attempts, job.last_error) = (3, 3, Some("boom".to_owned()));
        });
        assert_eq!(said, ["It has used up its attempts (3 of 3). The last error: boom"]);
    }

    #[test]
    fn a_job_of_the_future_that_nobody_would_run_either() {
        let said = said(|facts, job| {
            (facts.live_workers, facts.listeners, facts.last_heartbeat_at) = (0, 0, Some(now()));
            job.state = JobState::Scheduled;
            job.run_at = now() + TimeDelta::minutes(90);
        });
        assert_eq!(
            said,
            [
                "Its time is yet to come: it is due in 1h 30m.",
                "No worker is to be seen: none has registered, holds a job, or listens; the last one was heard of at 1970-01-12 13:46:40 UTC."
            ]
        );
    }

    #[test]
    fn a_job_that_waits_for_its_next_attempt() {
        let said = said(|_, job| {
            job.state = JobState::Retrying;
            job.run_at = now() + TimeDelta::seconds(20);
            (job.attempts, job.last_error) = (2, Some("boom".to_owned()));
        });
        assert_eq!(said, ["It was tried 2 times and waits to be tried again in 20s. The last error: boom"]);
    }

    #[test]
    fn a_job_behind_others_in_a_queue_that_is_held() {
        let said = said(|facts, job| {
            job.queue_name = Some("q".to_owned());
            facts.queue_locked_at = Some(now() - TimeDelta::seconds(9));
            facts.queue_locked_by = Some("w".to_owned());
            (facts.queue_job_id, facts.ahead) = (Some(3), MOST_AHEAD);
        });
        assert_eq!(
            said,
            [
                "Its queue \"q\" has been held by worker w for 9s, which runs job 3.",
                "At least 10000 jobs of its queue \"q\" come before it."
            ]
        );
    }

    #[test]
    fn a_job_with_flags_and_jobs_before_it() {
        let said = said(|facts, job| {
            facts.ahead = 1;
            job.flags = vec!["eu".to_owned()];
        });
        assert_eq!(said[0], "One job comes before it, by priority and time.");
        assert!(said[1].starts_with("It has the flags [\"eu\"]"), "{said:?}");
    }

    #[test]
    fn a_job_with_flags_that_nothing_else_keeps() {
        let said = said(|_, job| job.flags = vec!["eu".to_owned()]);
        assert!(said[0].starts_with("It has the flags") && said[1].starts_with("Nothing that can be seen"), "{said:?}");
    }

    #[test]
    fn a_task_that_no_worker_knows_where_all_say_what_they_know() {
        let unknown = ["No worker that lives knows the task \"t\" (there are 2)."];
        let two = |facts: &mut Facts| (facts.live_workers, facts.workers_with_tasks, facts.listeners) = (2, 2, 2);
        assert_eq!(said(|facts, _| two(facts)), unknown);
        // One that does not say so may know it.
        for doubt in [
            |facts: &mut Facts| facts.workers_with_tasks = 1,
            |facts: &mut Facts| facts.other_workers = 1,
            |facts: &mut Facts| facts.listeners = 3,
        ] {
            assert_ne!(
                said(|facts, _| {
                    two(facts);
                    doubt(facts);
                }),
                unknown
            );
        }
    }
}
