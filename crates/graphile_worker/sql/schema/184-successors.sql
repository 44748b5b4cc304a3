-- Jobs that replace running jobs, and wait until those have ended. Until then, the `run_at` of the job is `infinity`, and its real
-- `run_at` is here. Empty unless a running job is being replaced.
create table if not exists :"schema"._rs_successors (
  job_id bigint primary key,
  predecessor_ids bigint[] not null,
  run_at timestamptz not null
);
alter table :"schema"._rs_successors enable row level security;
