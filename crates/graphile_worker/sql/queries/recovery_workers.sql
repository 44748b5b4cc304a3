-- The workers that have registered; stale is who has not been heard of for $1 seconds.
select
  worker_id, version, level, tasks, started_at, last_heartbeat_at,
  last_heartbeat_at < now() - make_interval(secs => $1::float8) as is_stale
from :"schema"._rs_workers
order by started_at, worker_id;
