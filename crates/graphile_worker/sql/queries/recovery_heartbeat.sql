-- The heartbeat of worker $1, with its tasks $3 and settings $4, null if unchanged. Returns whether a sweep is due,
-- because no worker has swept for $2 seconds. Returns no row if the worker was declared dead.
update :"schema"._rs_workers
set
  last_heartbeat_at = now(), tasks = coalesce($3::text[], tasks),
  settings = coalesce($4::text::jsonb, settings)
where worker_id = $1
returning not exists (
  select from :"schema"._rs_workers where swept_at > now() - make_interval(secs => $2::float8)
) as sweep_is_due;
