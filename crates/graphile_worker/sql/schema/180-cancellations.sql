-- Running jobs that were asked to stop. The row of the job says that it is cancelled, and why (`_rs_is_cancelled`); this
-- table only tells the worker that runs it, also if the notification is lost. `force` ends a job that ignores the request.
-- `key` is the key that the job had, so that a job that replaces it can wait until it has ended. The next cancellation deletes
-- the rows of jobs that have ended.
create table if not exists :"schema"._rs_cancellations (
  job_id bigint primary key,
  force boolean not null default false,
  requested_at timestamptz not null default now(),
  requested_by text not null default current_user,
  key text
);
create index if not exists _rs_cancellations_by_key on :"schema"._rs_cancellations (key) where key is not null;
alter table :"schema"._rs_cancellations enable row level security;
