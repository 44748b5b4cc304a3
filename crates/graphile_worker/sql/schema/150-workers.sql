-- Who lives: workers whose recovery is on say so in `_rs_workers` again and again, and delete their row when they leave.
-- `version` is their release, `level` the last step of our ledger that it knows, `tasks` what they run.
-- `_rs_recoveries` counts how often a job's worker has died with it, and begins anew after a quiet day.
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
