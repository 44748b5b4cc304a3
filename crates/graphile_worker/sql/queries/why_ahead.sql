-- Number of due jobs that come before the job $1: of its queue, or of those without a queue. Counts at most 10,000,
-- by _rs_jobs_by_queue or _rs_jobs_unqueued, and only jobs of the tasks $2, if given: others do not delay it. Locks
-- nothing.
select case
  when job.job_queue_id is not null then (
    select count(*) from (
      select from :"schema"._private_jobs as others
      where others.is_available = true and others.job_queue_id = job.job_queue_id and others.run_at <= now()
        and (others.priority, others.run_at, others.id) < (job.priority, job.run_at, job.id)
        and ($2::text[] is null or others.task_id = any (array(
          select id from :"schema"._private_tasks where identifier = any ($2)
        )))
      limit 10000
    ) as first
  )
  else (
    select count(*) from (
      select from :"schema"._private_jobs as others
      where others.is_available = true and others.job_queue_id is null and others.run_at <= now()
        and (others.priority, others.run_at, others.id) < (job.priority, job.run_at, job.id)
        and ($2::text[] is null or others.task_id = any (array(
          select id from :"schema"._private_tasks where identifier = any ($2)
        )))
      limit 10000
    ) as first
  )
end as ahead
from :"schema"._private_jobs as job
where job.id = $1::bigint;
