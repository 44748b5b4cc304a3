-- When the last job of each throttled key starts, and until when the next one has to wait. A row is useless after `ends_at`; each
-- call deletes some of those.
create table if not exists :"schema"._rs_throttles (
  key text primary key,
  starts_at timestamptz not null,
  ends_at timestamptz not null
);
create index if not exists _rs_throttles_by_end on :"schema"._rs_throttles (ends_at);
alter table :"schema"._rs_throttles enable row level security;
