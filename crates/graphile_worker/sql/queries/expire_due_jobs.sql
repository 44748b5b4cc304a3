-- Fails the jobs that have expired. Returns them. Waits for no row.
select
  jobs.id, jobs.job_queue_id, tasks.identifier as task_identifier, jobs.payload::text as payload, jobs.priority,
  jobs.run_at, jobs.attempts, jobs.max_attempts, jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key,
  jobs.locked_at, jobs.revision, jobs.flags
from :"schema"._rs_expire_due_jobs() as jobs
join :"schema"._private_tasks as tasks on tasks.id = jobs.task_id;
