-- All jobs that worker $1 holds: what to go on with after a connection was lost in the middle of an exchange.
-- Reads the whole table: nothing indexes locked_by.
select
  id, job_queue_id, task_id, payload::text as payload, priority, run_at, attempts,
  max_attempts, last_error, created_at, updated_at, key, locked_at, revision, flags
from :"schema"._private_jobs
where locked_by = $1;
