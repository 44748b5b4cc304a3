-- The jobs that the dead workers $1 hold, each with its worker. Locks them with `skip locked`: the next sweep handles
-- jobs that another transaction is changing. Reads the whole table, because no index covers locked_by.
select
  jobs.id, jobs.job_queue_id, jobs.payload::text as payload, jobs.priority,
  jobs.run_at, jobs.attempts, jobs.max_attempts,
  jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key, jobs.locked_at, jobs.revision, jobs.flags,
  jobs.locked_by, tasks.identifier as task_identifier
from :"schema"._private_jobs as jobs
join :"schema"._private_tasks as tasks on tasks.id = jobs.task_id
where jobs.locked_by = any ($1::text[])
order by jobs.id
for update of jobs skip locked;
