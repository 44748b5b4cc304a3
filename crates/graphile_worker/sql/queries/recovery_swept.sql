-- Assigns a sweep to worker $1, if no worker has swept in the last $2 seconds. Returns one row if so, otherwise none.
update :"schema"._rs_workers as workers
set swept_at = now(), last_heartbeat_at = now()
where workers.worker_id = $1
  and not exists (
    select from :"schema"._rs_workers as others where others.swept_at > now() - make_interval(secs => $2::float8)
  )
returning workers.worker_id;
