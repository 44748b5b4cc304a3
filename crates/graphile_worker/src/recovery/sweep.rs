//! One sweep: finds dead workers, asks the hooks what becomes of each job, and releases the jobs, in one transaction.

use super::{MAX_DURATION, SweepStaleWorkersOptions, SweepStaleWorkersResult, WorkerRecoveryConfig};
use crate::db::{Statements, rows, session};
use crate::error::{Context, Error};
use crate::hooks::{
    FailureReason, HookRegistry, JobEventContext, JobFailed, JobInterrupted, JobInterruptedContext, JobQuarantined,
    JobRecoveryContext, JobRecoveryResult, WorkerRecovered, WorkerRecoveredContext, catch_panic,
};
use crate::job::Job;
use chrono::{DateTime, Utc};
use sqlx::{Postgres, Transaction};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info, warn};

/// Time limit of the `JobRecovery` hook per job.
const HOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// A sweep by the worker `worker_id`.
pub(crate) struct Sweep<'s> {
    pub(crate) statements: &'s Statements,
    pub(crate) hooks: &'s HookRegistry,
    pub(crate) worker_id: Arc<str>,
    pub(crate) config: &'s WorkerRecoveryConfig,
    pub(crate) options: SweepStaleWorkersOptions,
}

/// The decisions on the jobs of dead workers, as columns.
#[derive(Default)]
struct Decisions {
    ids: Vec<i64>,
    decisions: Vec<&'static str>,
    run_ats: Vec<Option<DateTime<Utc>>>,
    attempts: Vec<Option<i32>>,
}

impl Decisions {
    fn push(&mut self, id: i64, decision: JobRecoveryResult) {
        let (name, run_at, attempts) = match decision {
            JobRecoveryResult::Skip => return,
            JobRecoveryResult::Default => ("default", None, None),
            JobRecoveryResult::FailWithBackoff => ("fail", None, None),
            JobRecoveryResult::Reschedule { run_at, attempts } => {
                let (first, last) = (DateTime::<Utc>::UNIX_EPOCH, DateTime::<Utc>::UNIX_EPOCH + MAX_DURATION * 8000);
                ("reschedule", Some(run_at.clamp(first, last)), attempts.map(i32::from))
            }
        };
        self.ids.push(id);
        self.decisions.push(name);
        self.run_ats.push(run_at);
        self.attempts.push(attempts);
    }
}

impl Sweep<'_> {
    /// Releases the jobs and queues of dead workers, in this transaction. Does nothing if another sweep is in progress.
    pub(crate) async fn sweep(
        &self,
        mut transaction: Transaction<'_, Postgres>,
    ) -> Result<SweepStaleWorkersResult, Error> {
        let context = || "recover jobs of dead workers".to_owned();
        let statements = self.statements;
        let is_ours: bool =
            statements.recovery_lock.query_scalar().fetch_one(&mut *transaction).await.context(context)?;
        if !is_ours {
            session::rollback(transaction).await.context(context)?;
            return Ok(SweepStaleWorkersResult { already_sweeping: true, ..Default::default() });
        }
        let threshold = self.options.sweep_threshold.unwrap_or(self.config.sweep_threshold);
        let worker_ids: Vec<String> = statements
            .recovery_dead_workers
            .query_scalar()
            .bind(threshold.as_secs_f64())
            .bind(i32::try_from(self.config.resilient_sweep_threshold_multiplier).unwrap_or(i32::MAX))
            .bind(&self.config.resilient_job_flags)
            .fetch_all(&mut *transaction)
            .await
            .context(context)?;
        if worker_ids.is_empty() || self.options.dry_run {
            session::rollback(transaction).await.context(context)?;
            return Ok(SweepStaleWorkersResult { worker_ids, ..Default::default() });
        }
        let query = statements.recovery_jobs.query().bind(&worker_ids);
        let rows = query.fetch_all(&mut *transaction).await.context(context)?;
        let held: Vec<(Arc<Job>, Arc<str>)> = rows
            .iter()
            .map(|row| Ok((Arc::new(rows::job(row)?), rows::text(row, "locked_by")?.into())))
            .collect::<sqlx::Result<_>>()
            .context(context)?;
        let mut decisions = Decisions::default();
        for (job, previous) in &held {
            decisions.push(job.id, self.decide(job, previous).await);
        }
        let delay = self.options.recovery_delay.unwrap_or(self.config.recovery_delay);
        let recovered: HashMap<i64, bool> = statements
            .recovery_recover
            .query_as()
            .bind(&worker_ids)
            .bind(decisions.ids)
            .bind(decisions.decisions)
            .bind(decisions.run_ats)
            .bind(decisions.attempts)
            .bind(delay.as_secs_f64())
            .bind(i32::try_from(self.config.max_recoveries).unwrap_or(i32::MAX))
            .fetch_all(&mut *transaction)
            .await
            .context(context)?
            .into_iter()
            .collect();
        let query = statements.recovery_forget.query().bind(&worker_ids);
        query.execute(&mut *transaction).await.context(context)?;
        session::commit(transaction).await.context(context)?;
        self.emit_recovered(&worker_ids, held, &recovered).await;
        let recovered_count = recovered.len() as u64;
        Ok(SweepStaleWorkersResult { worker_ids, recovered_count, already_sweeping: false })
    }

    /// Asks the hooks what to do with the job. The first hook that does not return the default decides.
    async fn decide(&self, job: &Arc<Job>, previous: &Arc<str>) -> JobRecoveryResult {
        let context = || JobRecoveryContext {
            worker_id: self.worker_id.clone(),
            previous_worker_id: previous.clone(),
            job: job.clone(),
            reason: FailureReason::WorkerCrashed,
        };
        let asking = tokio::time::timeout(HOOK_TIMEOUT, catch_panic("JobRecovery", self.hooks.recover(context))).await;
        asking.ok().flatten().unwrap_or_else(|| {
            warn!(label = "recovery", job_id = job.id, "the JobRecovery hook panicked or timed out: using the default");
            JobRecoveryResult::Default
        })
    }

    /// Logs what the sweep did, and emits its hooks.
    async fn emit_recovered(
        &self,
        worker_ids: &[String],
        held: Vec<(Arc<Job>, Arc<str>)>,
        recovered: &HashMap<i64, bool>,
    ) {
        for (job, previous) in held {
            let Some(quarantined) = recovered.get(&job.id) else { continue };
            let context = || JobInterruptedContext {
                worker_id: self.worker_id.clone(),
                previous_worker_id: previous.clone(),
                job: job.clone(),
                reason: FailureReason::WorkerCrashed,
            };
            let (job_id, task_identifier) = (job.id, &*job.task_identifier);
            if *quarantined {
                error!(
                    label = "recovery",
                    job_id,
                    task_identifier,
                    from = &*previous,
                    "job quarantined: its workers keep dying"
                );
                catch_panic("JobQuarantined", self.hooks.emit(JobQuarantined, context)).await;
                if job.attempts >= job.max_attempts {
                    let event = || JobEventContext {
                        worker_id: self.worker_id.clone(),
                        job: job.clone(),
                        error: Some("quarantined: the workers that run this job keep dying".to_owned()),
                        duration: Duration::ZERO,
                        will_retry: false,
                    };
                    catch_panic("JobFailed", self.hooks.emit(JobFailed, event)).await;
                }
            } else {
                warn!(
                    label = "recovery",
                    job_id,
                    task_identifier,
                    from = &*previous,
                    "job recovered from a dead worker"
                );
            }
            catch_panic("JobInterrupted", self.hooks.emit(JobInterrupted, context)).await;
        }
        info!(label = "recovery", ?worker_ids, recovered = recovered.len(), "dead workers swept");
        let context = || WorkerRecoveredContext {
            worker_id: self.worker_id.clone(),
            worker_ids: worker_ids.to_vec(),
            recovered_count: recovered.len() as u64,
        };
        catch_panic("WorkerRecovered", self.hooks.emit(WorkerRecovered, context)).await;
    }
}
