-- A page of jobs without their payloads, in the order of ids. Null matches any: $1 states, $2 task, $3 queue, $4 key,
-- $5 a text in payload, last error or key, $6 the id after which to start. $7 newest first, $8 the maximum number.
--
-- Locks nothing. Planned for each call with known parameters, so that conditions that do not apply disappear: a page
-- then uses the primary key, one key its index. Rare jobs without an index require a scan of the table (0.2 s for a
-- million jobs).
--
-- The queue of a job under a limit is that of its lane, also while the lane waits for the end of the queue that it replaces.
--
-- If a job waits for the end of running jobs that it replaces, its `run_at` is the time at which it is due after that.
--
-- A worker that runs a job of a repeatable task may only have locked its row: `xmax` then names the open transaction of one of
-- its deferred lanes.
with lanes as materialized (
  select locks.transactionid, split_part(activity.application_name, ' ', 2) as worker_id
  from pg_locks as locks
  join pg_stat_activity as activity on activity.pid = locks.pid
  where locks.locktype = 'transactionid' and locks.mode = 'ExclusiveLock' and locks.granted
    and activity.application_name like 'graphile\_worker % deferred _'
)
select
  jobs.id, tasks.identifier as task_identifier, coalesce(
    lane.queue_name,
    case when job_queues.queue_name like 'replaced by lane %' then (
      select replaced.queue_name from :"schema"._rs_lanes as replaced where replaced.old_queue_id = jobs.job_queue_id
    ) end,
    job_queues.queue_name
  ) as queue_name,
  state.name as state, jobs.priority,
  coalesce(successors.run_at, jobs.run_at) as run_at, jobs.attempts, jobs.max_attempts, jobs.last_error,
  jobs.created_at, jobs.updated_at, jobs.key, jobs.locked_at,
  coalesce(jobs.locked_by, lanes.worker_id) as locked_by, jobs.revision,
  case when jsonb_typeof(jobs.flags) = 'object' then array(select jsonb_object_keys(jobs.flags)) else '{}' end
    as flags,
  coalesce(successors.predecessor_ids, '{}') as replaces
from :"schema"._private_jobs as jobs
join :"schema"._private_tasks as tasks on tasks.id = jobs.task_id
left join :"schema"._private_job_queues as job_queues on job_queues.id = jobs.job_queue_id
left join :"schema"._rs_lanes as lane on lane.id = jobs.job_queue_id
left join :"schema"._rs_successors as successors on successors.job_id = jobs.id
left join lanes on lanes.transactionid = jobs.xmax
cross join lateral (
  select case
    when jobs.locked_at is not null or lanes.worker_id is not null then 'running'
    when jobs.attempts >= jobs.max_attempts then
      case when jobs.last_error = 'Cancelled' or starts_with(jobs.last_error, 'Cancelled: '::text) then 'cancelled' else 'failed' end
    when jobs.run_at <= now() then 'ready'
    when jobs.attempts > 0 then 'retrying'
    else 'scheduled'
  end as name
) as state
where ($1::text[] is null or state.name = any ($1))
  and ($2::text is null or jobs.task_id = (select id from :"schema"._private_tasks where identifier = $2))
  and ($3::text is null or jobs.job_queue_id = any (array(
    select id from :"schema"._private_job_queues where queue_name = $3
    union all select lane_ids.id from :"schema"._rs_lanes as of_queue
    cross join lateral pg_catalog.unnest(array[of_queue.id, of_queue.old_queue_id]) as lane_ids (id)
    where of_queue.queue_name = $3
  )))
  and ($4::text is null or jobs.key = $4)
  and (
    $5::text is null
    or strpos(lower(jobs.payload::text), lower($5)) > 0
    or strpos(lower(jobs.last_error), lower($5)) > 0
    or strpos(lower(jobs.key), lower($5)) > 0
  )
  and ($6::bigint is null or case when $7::bool then jobs.id < $6 else jobs.id > $6 end)
order by case when $7 then jobs.id end desc, case when not $7 then jobs.id end
limit $8::bigint;
