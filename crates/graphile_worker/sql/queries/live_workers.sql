-- The registered workers whose last heartbeat is less than three intervals old: one may be late, and the next on its way.
select worker_id
from :"schema"._rs_workers
where last_heartbeat_at > now() - 3::float8 * coalesce(heartbeat_interval, interval '30 seconds')
order by worker_id;
