-- Jobs that fail if they have not started by a given time. `check_at` is when to look at the job next: at first when it expires,
-- and later again while a worker holds it, because the worker may release it before it starts.
create table if not exists :"schema"._rs_expiries (
  job_id bigint primary key,
  expires_at timestamptz not null,
  check_at timestamptz not null
);
create index if not exists _rs_expiries_by_time on :"schema"._rs_expiries (check_at);
alter table :"schema"._rs_expiries enable row level security;
