-- Live workers: workers with recovery update their row in `_rs_workers` with every heartbeat, and delete it when they
-- stop. `version` is their release, `level` the last step of our ledger that it supports, `tasks` the tasks they run.
-- `_rs_recoveries` counts how often a job's worker has died, and starts again after a day without a recovery.
create table if not exists :"schema"._rs_workers (
  worker_id text primary key,
  version text,
  level int,
  tasks text[],
  heartbeat_interval interval,
  started_at timestamptz not null default now(),
  last_heartbeat_at timestamptz not null default now(),
  swept_at timestamptz
);
create table if not exists :"schema"._rs_recoveries (
  job_id bigint primary key,
  times int not null,
  last_at timestamptz not null default now()
);
alter table :"schema"._rs_workers enable row level security;
alter table :"schema"._rs_recoveries enable row level security;
