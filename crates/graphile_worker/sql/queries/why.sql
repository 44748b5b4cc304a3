-- What decides whether the job $1 runs, in one row; nulls where there is no such job. $2 is after how many seconds without
-- a heartbeat a worker counts as dead. Locks nothing. Counts at most 10,000 jobs that come first, by _rs_jobs_by_queue or
-- _rs_jobs_unqueued; reads the table once for the locks.
--
-- `tasks` is looked for in a worker's row as JSON: before a migration it is not there.
with job as (
  select jobs.*, tasks.identifier as task_identifier
  from :"schema"._private_jobs as jobs
  join :"schema"._private_tasks as tasks on tasks.id = jobs.task_id
  where jobs.id = $1::bigint
), live as (
  select workers.worker_id, to_jsonb(workers) -> 'tasks' as tasks
  from :"schema"._rs_workers as workers
  where workers.last_heartbeat_at >= now() - make_interval(secs => $2::float8)
), connected as (
  -- One that registers, but not here, works in another schema.
  select distinct named.worker_id
  from pg_stat_activity, split_part(application_name, ' ', 2) as named (worker_id)
  where datname = current_database() and application_name like 'graphile\_worker %'
    and (
      named.worker_id not like 'rs-live-%'
      or exists (select from :"schema"._rs_workers as workers where workers.worker_id = named.worker_id)
    )
), holding as (
  -- Ids that begin with rs-live- are of workers that register: if they have no row, they are dead.
  select distinct locked_by as worker_id
  from :"schema"._private_jobs
  where locked_at > now() - interval '4 hours' and locked_by not like 'rs-live-%'
)
select
  now() as now,
  job.id, job.task_identifier, job_queues.queue_name, job.priority,
  case
    when job.locked_at is not null then 'running'
    when job.attempts >= job.max_attempts then 'failed'
    when job.run_at <= now() then 'ready'
    when job.attempts > 0 then 'retrying'
    else 'scheduled'
  end as state,
  job.run_at, job.attempts, job.max_attempts, job.last_error,
  job.created_at, job.updated_at, job.key, job.locked_at, job.locked_by, job.revision,
  case when jsonb_typeof(job.flags) = 'object' then array(select jsonb_object_keys(job.flags)) else '{}' end
    as flags,
  case
    when job.locked_by is null then null
    when exists (select from live where live.worker_id = job.locked_by) then 'alive'
    when exists (select from :"schema"._rs_workers as workers where workers.worker_id = job.locked_by) then 'stale'
    when job.locked_by like 'rs-live-%' then 'dead'
    when exists (select from connected where connected.worker_id = job.locked_by) then 'alive'
    else 'unknown'
  end as worker_state,
  job_queues.locked_at as queue_locked_at, job_queues.locked_by as queue_locked_by,
  case when job_queues.locked_at is not null then (
    select min(running.id) from :"schema"._private_jobs as running
    where running.job_queue_id = job.job_queue_id and running.locked_at is not null
  ) end as queue_job_id,
  case
    when job.is_available and job.job_queue_id is not null then (
      select count(*) from (
        select from :"schema"._private_jobs as others
        where others.is_available = true and others.job_queue_id = job.job_queue_id and others.run_at <= now()
          and (others.priority, others.run_at, others.id) < (job.priority, job.run_at, job.id)
        limit 10000
      ) as first
    )
    when job.is_available then (
      select count(*) from (
        select from :"schema"._private_jobs as others
        where others.is_available = true and others.job_queue_id is null and others.run_at <= now()
          and (others.priority, others.run_at, others.id) < (job.priority, job.run_at, job.id)
        limit 10000
      ) as first
    )
    else 0
  end as ahead,
  (select count(*) from live) as live_workers,
  (select count(*) from live where jsonb_typeof(tasks) = 'array') as workers_with_tasks,
  (select count(*) from live where jsonb_typeof(tasks) = 'array' and tasks ? job.task_identifier) as workers_with_task,
  (
    select count(*)
    from (select worker_id from holding union select worker_id from connected) as seen
    where worker_id not in (select worker_id from live)
      -- A worker that registers and whose heart does not beat any more may still have its connection.
      and worker_id not in (select worker_id from :"schema"._rs_workers)
  ) as other_workers,
  -- Node's workers, and whoever else listens for jobs of this database.
  (
    select count(*) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid() and query ilike 'listen "jobs:insert"%'
  ) as listeners,
  (select max(workers.last_heartbeat_at) from :"schema"._rs_workers as workers) as last_heartbeat_at
from (select) as one
left join job on true
left join :"schema"._private_job_queues as job_queues on job_queues.id = job.job_queue_id;
