-- The state of all jobs in one row: the oldest due job, locks of more than 4 hours, which Node's worker and ours
-- treat as those of dead workers, and permanently failed jobs. Reads the table of jobs once (0.2 s for a million);
-- locks nothing.
select
  count(*) as jobs,
  count(*) filter (where is_available and run_at <= now()) as ready,
  coalesce(
    extract(epoch from now() - min(greatest(run_at, '0001-01-01Z')) filter (where is_available and run_at <= now())), 0
  )::float8 as lag_seconds,
  count(*) filter (where locked_at < now() - interval '4 hours') as stale_jobs,
  (select count(*) from :"schema"._private_job_queues where locked_at < now() - interval '4 hours') as stale_queues,
  count(*) filter (where locked_at is null and attempts >= max_attempts) as failed
from :"schema"._private_jobs;
