-- Worker $1, of release $2, which knows our ledger up to $3, lives, says so every $4 seconds, and runs the tasks $5.
insert into :"schema"._rs_workers (worker_id, version, level, heartbeat_interval, tasks)
values ($1, $2, $3, make_interval(secs => $4::float8), $5)
on conflict (worker_id) do update set
  last_heartbeat_at = now(), started_at = now(), version = excluded.version, level = excluded.level,
  heartbeat_interval = excluded.heartbeat_interval, tasks = excluded.tasks;
