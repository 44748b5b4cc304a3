-- Adds the jobs of ticks of crontab items. Skips ticks that another worker has added: the item's last_execution is not
-- before them. Locks the items in the order of the crontab. Node's worker uses the same order, so the two cannot
-- deadlock.
--
-- $1 identifiers  $2 ticks  $3 tasks  $4 payloads  $5 queues  $6 maximum attempts  $7 keys  $8 priorities  $9 key modes
-- $10 flags, as JSON  $11 run_at  $12 positions of the items in the crontab.
-- Returns for each tick, in the order of the arrays, whether its item is registered, and the job, if this statement
-- added it.
with ticks as (
  select *
  from unnest(
    $1::text[], $2::timestamptz[], $3::text[], $4::text[], $5::text[], $6::int2[], $7::text[], $8::int2[], $9::text[],
    $10::text[], $11::timestamptz[], $12::int[]
  ) with ordinality
    as tick (identifier, at, task, payload, queue, max_attempts, key, priority, key_mode, flags, run_at, place, nth)
), items as (
  select known.identifier, known.last_execution
  from (select identifier, min(place) as place from ticks group by identifier) as wanted
  join :"schema"._private_known_crontabs as known on known.identifier = wanted.identifier
  order by wanted.place
  for update of known
), new_ticks as (
  select ticks.*
  from ticks join items on items.identifier = ticks.identifier
  where items.last_execution is null or items.last_execution < ticks.at
  order by ticks.nth
), added as (
  select
    nth,
    (:"schema".add_job(
      task, payload::json, queue, run_at, max_attempts, key, priority,
      case when flags is not null then array(select json_array_elements_text(flags::json)) end, key_mode
    )).id as job_id
  from new_ticks
), moved as (
  update :"schema"._private_known_crontabs as known
  set last_execution = newest.at
  from (select identifier, max(at) as at from new_ticks group by identifier) as newest
  where known.identifier = newest.identifier
)
select ticks.nth, items.identifier is not null as is_known, added.job_id
from ticks
left join items on items.identifier = ticks.identifier
left join added on added.nth = ticks.nth
order by ticks.nth;
