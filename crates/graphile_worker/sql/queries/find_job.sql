-- The job $1 with all details: payload, the lock of its queue, its limits, how often it was recovered. Locks nothing; by
-- primary keys.
select
  jobs.id, tasks.identifier as task_identifier,
  coalesce(lane.queue_name, replaced.queue_name, job_queues.queue_name) as queue_name, jobs.priority,
  case
    when jobs.locked_at is not null then 'running'
    when jobs.attempts >= jobs.max_attempts then
      case when jobs.last_error = 'Cancelled' or starts_with(jobs.last_error, 'Cancelled: '::text) then 'cancelled' else 'failed' end
    when jobs.run_at <= now() then 'ready'
    when jobs.attempts > 0 then 'retrying'
    else 'scheduled'
  end as state,
  coalesce(successors.run_at, jobs.run_at) as run_at, jobs.attempts, jobs.max_attempts, jobs.last_error,
  jobs.created_at, jobs.updated_at, jobs.key, jobs.locked_at, jobs.locked_by, jobs.revision,
  case when jsonb_typeof(jobs.flags) = 'object' then array(select jsonb_object_keys(jobs.flags)) else '{}' end
    as flags,
  coalesce(successors.predecessor_ids, '{}') as replaces,
  jobs.payload::text as payload, job_queues.locked_at as queue_locked_at, job_queues.locked_by as queue_locked_by,
  coalesce(jobs.job_queue_id < 0, false) as is_in_lane,
  array(
    select limits.name from :"schema"._rs_limits as limits
    where not limits.is_dropped
      and (limits.task_id = jobs.task_id or limits.id = coalesce(lane.limit_id, replaced.limit_id))
    order by limits.name
  ) as limits,
  coalesce(recoveries.times, 0) as recoveries, recoveries.last_at as last_recovered_at
from :"schema"._private_jobs as jobs
join :"schema"._private_tasks as tasks on tasks.id = jobs.task_id
left join :"schema"._private_job_queues as job_queues on job_queues.id = jobs.job_queue_id
left join :"schema"._rs_lanes as lane on lane.id = jobs.job_queue_id
left join :"schema"._rs_lanes as replaced on replaced.old_queue_id = jobs.job_queue_id
left join :"schema"._rs_successors as successors on successors.job_id = jobs.id
left join :"schema"._rs_recoveries as recoveries on recoveries.job_id = jobs.id
where jobs.id = $1::bigint;
