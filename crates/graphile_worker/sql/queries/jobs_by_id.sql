-- The jobs $1, for hooks. Locks nothing; by primary keys.
select
  jobs.id, jobs.job_queue_id, tasks.identifier as task_identifier, jobs.payload::pg_catalog.text as payload, jobs.priority,
  jobs.run_at, jobs.attempts, jobs.max_attempts, jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key,
  jobs.locked_at, jobs.revision, jobs.flags
from :"schema"._private_jobs as jobs
join :"schema"._private_tasks as tasks on tasks.id operator(pg_catalog.=) jobs.task_id
where jobs.id operator(pg_catalog.=) any ($1);
