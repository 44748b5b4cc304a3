-- The ledger that every release of Node's worker reads before it starts. It contains Node's ids and nothing else; our
-- own steps are numbered in `_rs_additions` (100).
create table :"schema".migrations (
  id int primary key,
  ts timestamptz not null default now(),
  breaking boolean not null default false
);
