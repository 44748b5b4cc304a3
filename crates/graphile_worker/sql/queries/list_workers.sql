-- Who works here, as far as it can be seen: workers that have registered, that hold a job or a queue, or that are
-- connected under the name that ours give their connections. $1 is after how many seconds without a heartbeat one is stale.
-- Locks nothing. Reads the table of jobs once for the locks. `tasks` is read as JSON: before a migration it is not there.
with held as (
  select locked_by as worker_id, count(*) as jobs, min(locked_at) as since
  from :"schema"._private_jobs where locked_by is not null group by locked_by
), held_queues as (
  select locked_by as worker_id, count(*) as queues, min(locked_at) as since
  from :"schema"._private_job_queues where locked_by is not null group by locked_by
), connected as (
  -- One that registers, but not here, works in another schema.
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
  coalesce(held.jobs, 0) as jobs, coalesce(held_queues.queues, 0) as queues,
  least(held.since, held_queues.since) as holds_since,
  connected.worker_id is not null as is_connected,
  case when jsonb_typeof(to_jsonb(workers) -> 'tasks') = 'array' then
    array(select jsonb_array_elements_text(to_jsonb(workers) -> 'tasks'))
  end as tasks,
  case
    when workers.last_heartbeat_at < now() - make_interval(secs => $1::float8) then 'stale'
    when workers.worker_id is not null then 'alive'
    -- Only who registers has such an id: its row was deleted.
    when ids.worker_id like 'rs-live-%' and (held.jobs > 0 or held_queues.queues > 0) then 'dead'
    when connected.worker_id is not null then 'alive'
    else 'unknown'
  end as state
from ids
left join :"schema"._rs_workers as workers using (worker_id)
left join held using (worker_id)
left join held_queues using (worker_id)
left join connected using (worker_id)
order by coalesce(workers.started_at, held.since, held_queues.since), ids.worker_id;
