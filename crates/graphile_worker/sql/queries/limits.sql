-- What a worker has to know of limits: whether there are any, whether everything is paused, and which tasks and queues are
-- paused. Jobs of those do not start, even if the worker has claimed them.
select
  exists (select from :"schema"._rs_limits) or exists (select from :"schema"._rs_lanes) as any_exist,
  exists (select from :"schema"._rs_limits where name = 'all' and paused_until > now()) as all_paused,
  array(
    select lanes.id
    from :"schema"._rs_limits as limits
    join :"schema"._rs_lanes as lanes on lanes.limit_id = limits.id or lanes.task_id = limits.task_id
    where limits.paused_until > now()
    union
    select lanes.id
    from :"schema"._rs_limits as limits
    join :"schema"._rs_limits as members on members.group_id = limits.id
    join :"schema"._rs_lanes as lanes on lanes.limit_id = members.id or lanes.task_id = members.task_id
    where limits.paused_until > now()
  ) as paused_queues,
  array(
    select task_id from :"schema"._rs_limits where task_id is not null and not is_dropped
  ) as limited_tasks,
  -- Changes whenever a limit does.
  pg_catalog.md5((
    select string_agg(
      pg_catalog.concat_ws(' ', id, concurrency, rate, per, burst, weight, cost, group_id, is_dropped), ',' order by id
    ) from :"schema"._rs_limits
  )) as settings,
  (
    select extract(epoch from min(paused_until) - now())::float8 from :"schema"._rs_limits
    where paused_until > now() and paused_until < 'infinity' and name = 'all'
  ) as seconds;
