-- Adds a job of the task $1 with the payload $2 and the key $3 that runs when no call follows for $4 seconds, and at the latest
-- after $5 seconds. Its task is not looked up: if this statement creates the task, it
-- cannot see it.
select
  jobs.id, jobs.job_queue_id, $1::pg_catalog.text as task_identifier, jobs.payload::pg_catalog.text as payload, jobs.priority,
  jobs.run_at, jobs.attempts, jobs.max_attempts, jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key,
  jobs.locked_at, jobs.revision, jobs.flags
from :"schema"._rs_debounce($1, $2::pg_catalog.text::pg_catalog.json, $3, pg_catalog.make_interval(secs => $4), pg_catalog.make_interval(secs => $5), $6) as jobs;
