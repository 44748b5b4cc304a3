-- Whether a sweep is due that nobody has made in the last $2 seconds; if so, worker $1 makes it.
update :"schema"._rs_workers as workers
set swept_at = now(), last_heartbeat_at = now()
where workers.worker_id = $1
  and not exists (
    select from :"schema"._rs_workers as others where others.swept_at > now() - make_interval(secs => $2::float8)
  );
