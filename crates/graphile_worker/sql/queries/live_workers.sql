-- Who has registered, and was heard of as lately as its heartbeats come; one may be late, and the next on its way.
select worker_id
from :"schema"._rs_workers
where last_heartbeat_at > now() - 3 * coalesce(heartbeat_interval, interval '30 seconds')
order by worker_id;
