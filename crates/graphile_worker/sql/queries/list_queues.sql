-- The queues: locked ones first, then those with the most waiting jobs; at most $1. Locks nothing. Reads the waiting
-- jobs of queues by _rs_jobs_by_queue, and the table once for the running jobs.
with waiting as (
  select
    job_queue_id, count(*) as waiting, count(*) filter (where run_at <= now()) as ready,
    min(run_at) filter (where run_at <= now()) as oldest_due_at
  from :"schema"._private_jobs
  where is_available = true and job_queue_id is not null
  group by job_queue_id
), running as (
  select job_queue_id, min(id) as job_id
  from :"schema"._private_jobs
  where locked_at is not null and job_queue_id is not null
  group by job_queue_id
)
select
  job_queues.queue_name, coalesce(waiting.waiting, 0) as waiting, coalesce(waiting.ready, 0) as ready,
  waiting.oldest_due_at, job_queues.locked_at, job_queues.locked_by,
  running.job_id as running_job_id
from :"schema"._private_job_queues as job_queues
left join waiting on waiting.job_queue_id = job_queues.id
left join running on running.job_queue_id = job_queues.id
order by job_queues.locked_at is null, waiting desc, job_queues.queue_name
limit $1::bigint;
