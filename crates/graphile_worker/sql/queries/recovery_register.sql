-- Registers worker $1: its release $2, the latest step of our ledger that the release supports $3, the heartbeat
-- interval in seconds $4, tasks $5, host $6, process id $7, number of slots $8, and settings as JSON $9.
insert into :"schema"._rs_workers
  (worker_id, version, level, heartbeat_interval, tasks, host, pid, slots, settings)
values ($1, $2, $3, make_interval(secs => $4::float8), $5, $6, $7, $8, $9::text::jsonb)
on conflict (worker_id) do update set
  last_heartbeat_at = now(), started_at = now(), version = excluded.version, level = excluded.level,
  heartbeat_interval = excluded.heartbeat_interval, tasks = excluded.tasks, host = excluded.host, pid = excluded.pid,
  slots = excluded.slots, settings = excluded.settings;
