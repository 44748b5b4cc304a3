-- Adds one job, like add_job.sql, that expires at $10.
select
  jobs.id, jobs.job_queue_id, $1::pg_catalog.text as task_identifier, jobs.payload::pg_catalog.text as payload, jobs.priority,
  jobs.run_at, jobs.attempts, jobs.max_attempts, jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key,
  jobs.locked_at, jobs.revision, jobs.flags
from :"schema".add_job($1, $2::pg_catalog.text::pg_catalog.json, $3, $4, $5, $6, $7, $8, $9) as jobs
cross join lateral :"schema"._rs_expire_job(jobs.id, $10) as is_set;
