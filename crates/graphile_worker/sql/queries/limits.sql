-- What a worker has to know of limits: whether there are any, whether everything is paused, and which tasks and queues are
-- paused or closed. Jobs under those do not start, even if the worker has claimed them. $1: whether to return the state of each
-- limit, for hooks. Locks nothing.
with stopped as materialized (
  select limits.* from :"schema"._rs_limits as limits
  where greatest(limits.paused_until, limits.closed_until) > now() and not limits.is_dropped
), of_members as (
  select stopped.id, stopped.task_id from stopped
  union
  select members.id, members.task_id from stopped
  join :"schema"._rs_limits as members on members.group_id = stopped.id
), states as (
  select
    limits.name, 'paused' as state, nullif(limits.paused_until, 'infinity') as until, limits.paused_by as by_role, null::int as failures
  from :"schema"._rs_limits as limits where $1::boolean and limits.paused_until > now()
  union all
  select
    limits.name, case when limits.tripped_at is null then 'rate_limited' else 'tripped' end, limits.closed_until, null, limits.failures
  from :"schema"._rs_limits as limits where $1::boolean and (limits.closed_until > now() or limits.tripped_at is not null)
  union all
  select
    'queue:' || lanes.queue_name, case when lanes.tripped_at is null then 'rate_limited' else 'tripped' end, lanes.closed_until,
    null, lanes.failures
  from :"schema"._rs_lanes as lanes
  where $1::boolean and lanes.closed_until is not null and (lanes.closed_until > now() or lanes.tripped_at is not null)
)
select
  exists (select from :"schema"._rs_limits) or exists (select from :"schema"._rs_lanes) as any_exist,
  exists (select from stopped where name = 'all') as all_paused,
  exists (select from :"schema"._rs_limits where trip is not null) as have_breakers,
  array(
    select lanes.id
    from of_members join :"schema"._rs_lanes as lanes on lanes.limit_id = of_members.id or lanes.task_id = of_members.task_id
    union
    select lanes.id from :"schema"._rs_lanes as lanes where lanes.closed_until > now()
  ) as paused_queues,
  array(
    select tasks.identifier from of_members join :"schema"._private_tasks as tasks on tasks.id = of_members.task_id
  ) as paused_tasks,
  array(
    select task_id from :"schema"._rs_limits where task_id is not null and not is_dropped
  ) as limited_tasks,
  -- Changes if any limit changes.
  pg_catalog.md5((
    select string_agg(
      pg_catalog.concat_ws(' ', id, concurrency, rate, per, burst, weight, cost, group_id, is_dropped), ',' order by id
    ) from :"schema"._rs_limits
  )) as settings,
  (
    select extract(epoch from min(paused_until) - now())::float8 from :"schema"._rs_limits
    where paused_until > now() and paused_until < 'infinity' and name = 'all'
  ) as seconds,
  (
    select coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
      'name', states.name, 'state', states.state, 'until', states.until, 'by', states.by_role, 'failures', states.failures
    )), '[]')::text
    from states
  ) as states,
  (select extract(epoch from min(states.until) - now())::float8 from states where states.until > now()) as next_change;
