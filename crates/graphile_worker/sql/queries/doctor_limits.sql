-- What `doctor` needs to know about limits and replaced jobs, in one row: the limits that no job and no worker uses, the pauses
-- without end that are older than a day, the tripped breakers (at most 100 of queues), and the sessions that listen for jobs but do
-- not have one of our names: Node's idle workers. A worker that does not publish its tasks may run any. Successors still wait for
-- jobs that have ended only if no worker of this release checks for that. Locks nothing; looks up a job of each limited task.
with workers as materialized (
  select workers.worker_id, pg_catalog.to_jsonb(workers) -> 'tasks'::text as tasks from :"schema"._rs_workers as workers
)
select
  array(
    select limits.name from :"schema"._rs_limits as limits
    where not limits.is_dropped and limits.name <> 'all' and limits.paused_until is null
      and case
        when limits.task_id is not null then
          not exists (select from :"schema"._private_jobs as jobs where jobs.task_id = limits.task_id)
          and not exists (
            select from workers
            where coalesce(jsonb_typeof(workers.tasks) <> 'array', true)
              or workers.tasks ? substr(limits.name, 6)
          )
        when limits.name like 'group:%' then
          not exists (select from :"schema"._rs_limits as members where members.group_id = limits.id)
        else
          not exists (select from :"schema"._rs_lanes as lanes where lanes.limit_id = limits.id)
          and not exists (
            select from :"schema"._private_job_queues as job_queues
            where job_queues.queue_name = substr(limits.name, 7)
              or limits.prefix is not null and left(job_queues.queue_name, length(limits.prefix)) = limits.prefix
          )
      end
    order by limits.name
  ) as unused,
  array(
    select limits.name from :"schema"._rs_limits as limits
    where limits.paused_until = 'infinity' and limits.paused_at < now() - interval '1 day'
    order by limits.name
  ) as long_paused,
  array(
    select limits.name from :"schema"._rs_limits as limits where limits.tripped_at is not null
    union all
    (
      select 'queue:' || lanes.queue_name from :"schema"._rs_lanes as lanes
      where lanes.closed_until is not null and lanes.tripped_at is not null limit 100
    )
    order by 1
  ) as tripped,
  array(select limits.name from :"schema"._rs_limits as limits where not limits.is_dropped order by limits.name) as names,
  (
    select count(*) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid() and query ilike 'listen "jobs:insert"%'
      and application_name not like 'graphile\_worker%'
  ) as listeners,
  (
    select count(*) from :"schema"._rs_successors as successors
    where not exists (
      select from :"schema"._private_jobs as running
      where running.id = any (successors.predecessor_ids) and running.locked_at is not null
    )
  ) as unnoticed;
