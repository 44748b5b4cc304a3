-- Worker $1 still lives, and runs the tasks $3, if they are others than before; whether nobody has swept for $2 seconds. No
-- row where it was declared dead.
update :"schema"._rs_workers
set last_heartbeat_at = now(), tasks = coalesce($3::text[], tasks)
where worker_id = $1
returning not exists (
  select from :"schema"._rs_workers where swept_at > now() - make_interval(secs => $2::float8)
) as sweep_is_due;
