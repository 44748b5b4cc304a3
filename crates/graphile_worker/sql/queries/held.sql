-- All jobs that worker $1 holds: what to go on with after a connection was lost in the middle of an exchange.
-- Reads the whole table: nothing indexes locked_by. A run_at of infinity becomes a date that programs can hold.
select
  id, job_queue_id, task_id, payload::text as payload, priority,
  greatest(least(run_at, '9999-12-31Z'), '0001-01-01Z') as run_at, attempts, max_attempts, last_error,
  created_at, updated_at, key, locked_at, revision, flags
from :"schema"._private_jobs
where locked_by = $1;
