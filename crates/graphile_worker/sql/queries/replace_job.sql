-- Adds a job of the task $1 with the payload $2 in place of the job with the key $6, even if that is running. $9 is the reason for
-- the cancellation, $10 whether to stop the running job by force, $11 the expiry or null. The statement does not look up the
-- task: if it creates the task, it cannot see it.
select
  (replaced.job).id, (replaced.job).job_queue_id, $1::pg_catalog.text as task_identifier,
  (replaced.job).payload::pg_catalog.text as payload, (replaced.job).priority, (replaced.job).run_at, (replaced.job).attempts,
  (replaced.job).max_attempts, (replaced.job).last_error, (replaced.job).created_at, (replaced.job).updated_at,
  (replaced.job).key, (replaced.job).locked_at, (replaced.job).revision, (replaced.job).flags,
  replaced.outcome, replaced.waits_for, replaced.worker_id, expiry.is_set
from :"schema"._rs_replace_job(
  $1, $2::pg_catalog.text::pg_catalog.json, job_key => $6, queue_name => $3, run_at => $4, max_attempts => $5, priority => $7,
  flags => $8, reason => $9, force => $10
) as replaced
left join lateral (
  select :"schema"._rs_expire_job((replaced.job).id, $11) as is_set where $11 is not null
) as expiry on true;
