-- The limits that due jobs wait for, for the hook `LimitReached`: shared limits that lanes wait for, and queues whose own limit
-- has no room. Leaves out limits that are paused or closed. Locks nothing; looks up the first due job of each lane that is not open.
with in_use as materialized (
  select job_queue_id as lane_id, count(*) as jobs
  from :"schema"._private_jobs where locked_at is not null and job_queue_id < 0 group by job_queue_id
), waiting as materialized (
  select lanes.*
  from :"schema"._rs_lanes as lanes
  where lanes.ready_at > '-infinity' and lanes.old_queue_id is null
    and exists (
      select from :"schema"._private_jobs as jobs
      where jobs.is_available = true and jobs.job_queue_id = lanes.id and jobs.run_at <= now()
    )
)
select reached.name, reached.next_at
from (
  select distinct limits.name, room.next_at
  from waiting
  join :"schema"._rs_limits as limits on limits.id = waiting.waits_for
  cross join lateral :"schema"._rs_room(
    null, 0, limits.rate, limits.per, limits.burst, limits.tat, null
  ) as room
  where not coalesce(greatest(limits.paused_until, limits.closed_until) > now(), false)
  union all
  select 'queue:' || waiting.queue_name, room.next_at
  from waiting
  join :"schema"._rs_limits as limits on limits.id = waiting.limit_id
  left join in_use on in_use.lane_id = waiting.id
  cross join lateral :"schema"._rs_room(
    coalesce(limits.concurrency, 1), in_use.jobs, limits.rate, limits.per, limits.burst, waiting.tat, null
  ) as room
  where waiting.waits_for is null and waiting.queue_name is not null and room.n <= 0
    and not coalesce(greatest(limits.paused_until, waiting.closed_until) > now(), false)
) as reached
order by reached.name
limit 1000;
