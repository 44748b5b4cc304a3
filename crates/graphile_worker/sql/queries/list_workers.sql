-- The visible workers: those that are registered, that hold a job or a queue, or that are connected under the
-- application name of ours. $1 is the number of seconds without a heartbeat after which a worker is stale; a silent
-- worker is late, but not that late. Locks nothing. Reads the table of jobs once for the locks. A worker's row is
-- read as JSON, because before a migration some of its columns do not exist.
with held as (
  select locked_by as worker_id, count(*) as jobs, min(locked_at) as since
  from :"schema"._private_jobs where locked_by is not null group by locked_by
), held_queues as (
  select locked_by as worker_id, count(*) as queues, min(locked_at) as since
  from :"schema"._private_job_queues where locked_by is not null group by locked_by
), connected as (
  -- A worker that registers, but not here, works in another schema.
  select distinct named.worker_id
  from pg_stat_activity, split_part(application_name, ' ', 2) as named (worker_id)
  where datname = current_database() and application_name like 'graphile\_worker %'
    and (
      named.worker_id not like 'rs-live-%'
      or exists (select from :"schema"._rs_workers as workers where workers.worker_id = named.worker_id)
    )
), ids as (
  select worker_id from :"schema"._rs_workers union select worker_id from held
  union select worker_id from held_queues union select worker_id from connected
)
select
  ids.worker_id, workers.version, workers.started_at, workers.last_heartbeat_at,
  case when isfinite(workers.last_heartbeat_at) then extract(epoch from now() - workers.last_heartbeat_at)::float8 end
    as heartbeat_seconds,
  about.row ->> 'host'::text as host, (about.row ->> 'pid'::text)::int as pid,
  (about.row ->> 'slots'::text)::int as slots,
  coalesce(held.jobs, 0) as jobs, coalesce(held_queues.queues, 0) as queues,
  least(held.since, held_queues.since) as holds_since,
  -- Null behind a pooler, where connections have no name.
  case
    when connected.worker_id is not null then true
    when about.row -> 'settings'::text -> 'pooled'::text = 'true'::jsonb then null
    else false
  end as is_connected,
  case when jsonb_typeof(about.row -> 'tasks'::text) = 'array' then
    array(select jsonb_array_elements_text(about.row -> 'tasks'::text))
  end as tasks,
  case
    when workers.last_heartbeat_at < now() - make_interval(secs => $1::float8) then 'stale'
    when workers.last_heartbeat_at < now() - greatest(
      1.25::float8 * coalesce(workers.heartbeat_interval, interval '30 seconds'),
      coalesce(workers.heartbeat_interval, interval '30 seconds') + interval '1 second'
    ) then 'silent'
    when workers.worker_id is not null then 'alive'
    -- Only a registered worker has such an id: its row was deleted.
    when ids.worker_id like 'rs-live-%' and (held.jobs > 0 or held_queues.queues > 0) then 'dead'
    when connected.worker_id is not null then 'alive'
    else 'unknown'
  end as state
from ids
left join :"schema"._rs_workers as workers using (worker_id)
left join lateral (select pg_catalog.to_jsonb(workers) as row) as about on true
left join held using (worker_id)
left join held_queues using (worker_id)
left join connected using (worker_id)
order by coalesce(workers.started_at, held.since, held_queues.since), ids.worker_id;
