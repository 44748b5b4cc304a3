-- The ledger that every release of Node's worker reads before it starts. It holds Node's ids and
-- nothing else; what is ours is numbered in `_rs_additions` (100).
create table :"schema".migrations (
  id int primary key,
  ts timestamptz not null default now(),
  breaking boolean not null default false
);
