-- Worker $1, of release $2, lives.
insert into :"schema"._rs_workers (worker_id, version) values ($1, $2)
on conflict (worker_id) do update set last_heartbeat_at = now(), started_at = now(), version = excluded.version;
