-- The registered workers. A worker is stale if its last heartbeat is more than $1 seconds old.
select
  worker_id, version, level, tasks, started_at, last_heartbeat_at, host, pid, slots,
  last_heartbeat_at < now() - make_interval(secs => $1::float8) as is_stale
from :"schema"._rs_workers
order by started_at, worker_id;
