-- The queues: those with running jobs first, then those with the most waiting jobs; at most $1. Locks nothing. Reads the waiting
-- jobs of queues by _rs_jobs_by_queue, and the table once for the running jobs. A queue under a limit has a lane, and the
-- queue that the lane replaces belongs to it.
with waiting as (
  select
    coalesce(replaced.id, jobs.job_queue_id) as id, sum(jobs.waiting)::bigint as waiting, sum(jobs.ready)::bigint as ready,
    min(jobs.oldest_due_at) as oldest_due_at
  from (
    select
      job_queue_id, count(*) as waiting, count(*) filter (where run_at <= now()) as ready,
      min(run_at) filter (where run_at <= now()) as oldest_due_at
    from :"schema"._private_jobs
    where is_available = true and job_queue_id is not null
    group by job_queue_id
  ) as jobs
  left join :"schema"._rs_lanes as replaced on replaced.old_queue_id = jobs.job_queue_id
  group by 1
), running as (
  select coalesce(replaced.id, jobs.job_queue_id) as id, min(jobs.id) as job_id, count(*) as running
  from :"schema"._private_jobs as jobs
  left join :"schema"._rs_lanes as replaced on replaced.old_queue_id = jobs.job_queue_id
  where jobs.locked_at is not null and jobs.job_queue_id is not null
  group by 1
), queues as (
  select id, queue_name, locked_at, locked_by, null::int as limit_id, false as is_lane
  from :"schema"._private_job_queues
  where id not in (select old_queue_id from :"schema"._rs_lanes where old_queue_id is not null)
  union all
  select lanes.id, lanes.queue_name, job_queues.locked_at, job_queues.locked_by, lanes.limit_id, true
  from :"schema"._rs_lanes as lanes
  left join :"schema"._private_job_queues as job_queues on job_queues.id = lanes.old_queue_id
  where lanes.queue_name is not null
)
select
  queues.queue_name, coalesce(waiting.waiting, 0) as waiting, coalesce(waiting.ready, 0) as ready,
  waiting.oldest_due_at, queues.locked_at, queues.locked_by,
  running.job_id as running_job_id, coalesce(running.running, 0) as running,
  limits.name as limit_name, case when queues.is_lane then coalesce(limits.concurrency, 1) else 1 end as concurrency,
  coalesce(limits.paused_until > now(), false) as is_paused
from queues
left join waiting on waiting.id = queues.id
left join running on running.id = queues.id
left join :"schema"._rs_limits as limits on limits.id = queues.limit_id
order by queues.locked_at is null and running.job_id is null, waiting desc, queues.queue_name
limit $1::bigint;
