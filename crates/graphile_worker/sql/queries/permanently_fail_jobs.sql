-- Fails those of the jobs $1 that are not running, permanently, with the error $2.
select
  jobs.id, jobs.job_queue_id, tasks.identifier as task_identifier, jobs.payload::pg_catalog.text as payload, jobs.priority,
  jobs.run_at, jobs.attempts, jobs.max_attempts, jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key,
  jobs.locked_at, jobs.revision, jobs.flags
from :"schema".permanently_fail_jobs($1, $2) as jobs
join :"schema"._private_tasks as tasks on tasks.id operator(pg_catalog.=) jobs.task_id;
