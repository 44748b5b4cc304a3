-- All jobs that worker $1 holds. The worker reconciles with them after it lost a connection in the middle of an
-- exchange. Reads the whole table, because no index covers locked_by.
select
  id, job_queue_id, task_id, payload::text as payload, priority, run_at, attempts,
  max_attempts, last_error, created_at, updated_at, key, locked_at, revision, flags
from :"schema"._private_jobs
where locked_by = $1;
