//! The part of the load that is under limits: adds jobs, and changes the limits all the time. What the limits are:
//! `crate::limits`.

use super::{Driver, Trouble, trouble};
use crate::Failure;
use crate::check::{AddedJob, Probe};
use crate::limits::{CAPPED, Change, LINED, Limited, METERED, Moment, State};
use crate::record::lock;
use crate::worker::Payload;
use graphile_worker::{Error, JobSpec, RawJobSpec};
use serde_json::json;
use sqlx::Connection;
use std::sync::Arc;
use std::time::Duration;

/// How many jobs of each task may wait: more would only prolong the drain.
const TASKS: [(&str, i64); 3] = [(CAPPED, 50), (METERED, 30), (LINED, 60)];

/// The queues that are always in use. Others are used now and then, so that lanes come and go.
const PAIRS: u8 = 4;
const ROWS: usize = 2;
const RARE_PAIRS: u8 = 60;

/// How long a test job takes: long enough for every worker to claim.
const PROBE_MS: u64 = 350;

/// How many times the test jobs fill each limit. A worker may claim more jobs than it can run at once. These take room while they
/// wait in it, so once is not enough.
const PROBE_ROUNDS: usize = 4;

impl Driver {
    /// Sets all limits, and retries until that has succeeded.
    pub(crate) async fn set_limits(&self) {
        for limited in Limited::ALL {
            self.change_until_done(limited, limited.base()).await;
        }
    }

    /// Adds jobs under limits. Waits while many of them are in the table.
    pub(super) async fn add_limited(self: Arc<Self>, mut random: fastrand::Rng) {
        let mut next = [0; ROWS];
        while !self.is_over() {
            let waiting = "select tasks.identifier, count(*) from graphile_worker._private_jobs as jobs
                join graphile_worker._private_tasks as tasks on tasks.id = jobs.task_id
                where tasks.identifier = any ($1) and jobs.attempts < jobs.max_attempts group by 1";
            let waiting: Result<Vec<(String, i64)>, _> =
                sqlx::query_as(waiting).bind(&TASKS.map(|(task, _)| task)[..]).fetch_all(&self.pool).await;
            let Ok(waiting) = waiting else {
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            };
            for (task, most) in TASKS {
                let found = waiting.iter().find(|(found, _)| found == task).map_or(0, |(_, count)| *count);
                if found < most {
                    self.add_some(task, &mut next, &mut random).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(random.u64(20..150))).await;
        }
    }

    async fn add_some(&self, task: &'static str, next: &mut [u64; ROWS], random: &mut fastrand::Rng) {
        let row = (task == LINED && random.u8(..3) == 0).then(|| random.usize(..ROWS));
        let count = random.usize(1..=if row.is_some() { self.strict_batch } else { 12 });
        let jobs: Vec<RawJobSpec> = (0..count)
            .map(|_| match (task, row) {
                (LINED, Some(row)) => {
                    next[row] += 1;
                    row_job(row, next[row], random)
                }
                (LINED, None) => pair_job(random),
                _ => {
                    let fail_first = (random.u8(..25) == 0).then_some(1);
                    let work_ms = Some(if task == CAPPED { random.u64(5..150) } else { random.u64(..30) });
                    let payload = Payload { work_ms, fail_first, ..Payload::default() };
                    limited_job(task, &payload, None)
                }
            })
            .collect();
        let added = self.utils.add_raw_jobs(&jobs).await;
        for (job, added) in jobs.iter().zip(self.called("add_jobs, limited", added).await.unwrap_or_default()) {
            let strict = job.spec.queue_name.clone().zip(job.payload["seq"].as_u64());
            lock(&self.load).jobs.push(AddedJob { id: added.id, task, strict });
        }
    }

    /// Changes one limit after the other: raises, lowers, drops and sets it again, pauses and resumes it. Leaves all limits as
    /// they were.
    pub(super) async fn change_limits(self: Arc<Self>, mut random: fastrand::Rng) {
        while !self.is_over() {
            tokio::time::sleep(Duration::from_millis(random.u64(20..300))).await;
            let _changing = self.changing.lock().await;
            if random.u8(..8) == 0 {
                self.drop_all(&mut random).await;
                continue;
            }
            let Some(limited) = random.choice(Limited::ALL) else { break };
            for _ in 0..random.u8(1..4) {
                let state = self.another_state(limited, &mut random);
                self.change_until_done(limited, state).await;
                tokio::time::sleep(Duration::from_millis(random.u64(30..1000))).await;
            }
            self.change_until_done(limited, limited.base()).await;
        }
    }

    /// Drops all limits and sets them again. Limited queues become ordinary ones only if no task has a limit either.
    async fn drop_all(&self, random: &mut fastrand::Rng) {
        let mut all = Limited::ALL.to_vec();
        all.retain(|limited| *limited != Limited::Group);
        random.shuffle(&mut all);
        for limited in &all {
            self.change_until_done(*limited, State::DROPPED).await;
        }
        tokio::time::sleep(Duration::from_millis(random.u64(100..2000))).await;
        for limited in all {
            self.change_until_done(limited, limited.base()).await;
        }
    }

    /// Either holds a change of a limit in an open transaction, then commits or rolls back, while another transaction adds jobs
    /// of a new queue and may have read the limit as it was before. Or pauses all workers for a while.
    pub(crate) async fn hold_limit(&self, random: &mut fastrand::Rng, length: Duration) -> Result<(), Failure> {
        let _changing = self.changing.lock().await;
        if random.u8(..3) == 0 {
            self.pause_all(length).await;
            return Ok(());
        }
        let Some(limited) = random.choice([Limited::Capped, Limited::Pairs, Limited::Group]) else { return Ok(()) };
        let states: Vec<State> = limited.others().into_iter().filter(|state| state.is_set).collect();
        let Some(state) = random.choice(states) else {
            return Ok(());
        };
        let mut connection = self.connect().await?;
        let mut transaction = connection.begin().await?;
        sqlx::query("select graphile_worker._rs_set_limit($1, concurrency => $2, group_name => $3)")
            .bind(limited.name())
            .bind(state.concurrency.map(i32::try_from).transpose()?)
            .bind(limited.is_in_group().then_some("shared"))
            .execute(&mut *transaction)
            .await?;
        let mut adding_connection = self.connect().await?;
        let mut adding = adding_connection.begin().await?;
        let job = pair_job(random);
        let added = self.utils.within(&mut adding).add_raw_job(LINED, &job.payload, job.spec).await;
        let added = self.called("add_job in a transaction, limited", added).await;
        tokio::time::sleep(length).await;
        if random.u8(..3) == 0 {
            transaction.rollback().await?;
        } else {
            let called = Moment::now();
            let committed = self.called("commit a limit", transaction.commit().await).await;
            let acknowledged = committed.map(|()| Moment::now());
            self.remember_change(Change { limited, state, called, acknowledged });
        }
        if self.called("commit", adding.commit().await).await.is_some()
            && let Some(job) = added
        {
            lock(&self.load).jobs.push(AddedJob { id: job.id, task: LINED, strict: None });
        }
        self.change_until_done(limited, limited.base()).await;
        Ok(())
    }

    async fn pause_all(&self, length: Duration) {
        if self.called("pause all", self.utils.pause("all").await).await.is_some() {
            tokio::time::sleep(length).await;
        }
        // Also if the answer was lost. If the error persists, the checks report it, and the fleet does not drain.
        for _ in 0..500 {
            if self.called("resume all", self.utils.resume("all").await).await.is_some() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn another_state(&self, limited: Limited, random: &mut fastrand::Rng) -> State {
        let before =
            lock(&self.load).changes.0.iter().rev().find(|change| change.limited == limited).map(|change| change.state);
        let before = before.unwrap_or(limited.base());
        if before.is_set && random.u8(..4) == 0 {
            return State { is_paused: !before.is_paused, ..before };
        }
        let other = random.choice(limited.others()).unwrap_or(limited.base());
        // Setting a limit keeps its pause; dropping the limit ends the pause.
        State { is_paused: before.is_paused && other.is_set, ..other }
    }

    /// Changes the limit, and repeats this until an answer arrives.
    async fn change_until_done(&self, limited: Limited, state: State) {
        loop {
            let called = Moment::now();
            let result = self.change_limit(limited, &state).await;
            if matches!(&result, Err(error) if error.to_string().contains("There is no task")) {
                // The task was cleaned up while it had no limit and no job.
                let added = self.utils.add_raw_job(limited.task(), json!({ "work_ms": 0 }), JobSpec::default()).await;
                self.called("add_job, limited", added).await;
                continue;
            }
            let is_wrong = matches!(&result, Err(error) if matches!(trouble(error), Trouble::Other(_)));
            let acknowledged = self.called("change a limit", result).await.map(|()| Moment::now());
            self.remember_change(Change { limited, state, called, acknowledged });
            if acknowledged.is_some() || is_wrong {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn remember_change(&self, change: Change) {
        lock(&self.load).changes.0.push(change);
    }

    async fn change_limit(&self, limited: Limited, state: &State) -> Result<(), Error> {
        let name = limited.name();
        if !state.is_set {
            self.utils.drop_limit(name).await?;
            return Ok(());
        }
        self.utils.set_limit(&limited.limit(state)).await?;
        if state.is_paused { self.utils.pause(name).await } else { self.utils.resume(name).await.map(drop) }
    }

    /// After all other jobs have ended, adds jobs that fill every limit, and waits until they have ended.
    pub(crate) async fn probe_limits(&self) -> Result<Probe, Failure> {
        let work_ms = Some(PROBE_MS);
        let capped = limited_job(CAPPED, &Payload { work_ms, ..Payload::default() }, None);
        let mut jobs = vec![capped; 3 * PROBE_ROUNDS];
        for queue in 0..PAIRS {
            let name = format!("pair-{queue}");
            let payload = Payload { work_ms, queue: Some(name.clone()), ..Payload::default() };
            jobs.extend(vec![limited_job(LINED, &payload, Some(&name)); PROBE_ROUNDS]);
        }
        let added = self.utils.add_raw_jobs(&jobs).await?;
        let ids: Vec<i64> = added.iter().map(|job| job.id).collect();
        let end = tokio::time::Instant::now() + Duration::from_secs(20);
        while tokio::time::Instant::now() < end {
            let left = "select count(*) from graphile_worker._private_jobs where id = any ($1)";
            if sqlx::query_scalar::<_, i64>(left).bind(&ids).fetch_one(&self.pool).await? == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(Probe { jobs: ids.into_iter().collect() })
    }
}

fn limited_job(task: &str, payload: &Payload, queue: Option<&str>) -> RawJobSpec {
    let spec = JobSpec { queue_name: queue.map(str::to_owned), ..JobSpec::default() };
    RawJobSpec { identifier: task.to_owned(), payload: json!(payload), spec }
}

fn pair_job(random: &mut fastrand::Rng) -> RawJobSpec {
    let rare = random.u8(..10) == 0;
    let name =
        if rare { format!("pair-rare-{}", random.u8(..RARE_PAIRS)) } else { format!("pair-{}", random.u8(..PAIRS)) };
    let payload = Payload { work_ms: Some(random.u64(..80)), queue: Some(name.clone()), ..Payload::default() };
    limited_job(LINED, &payload, Some(&name))
}

/// Rows are strict queues, too: they have one producer each, and their jobs never fail.
fn row_job(row: usize, seq: u64, random: &mut fastrand::Rng) -> RawJobSpec {
    let name = format!("row-{row}");
    let payload =
        Payload { work_ms: Some(random.u64(..15)), queue: Some(name.clone()), seq: Some(seq), ..Payload::default() };
    limited_job(LINED, &payload, Some(&name))
}
