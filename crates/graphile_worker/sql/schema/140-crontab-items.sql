-- The definition of each crontab item, as the last worker registered it: with it, workers notice that they have
-- different items with the same identifier. The ticks are in the contract's _private_known_crontabs.
create table if not exists :"schema"._rs_crontab_items (
  identifier text primary key,
  item text not null,
  since timestamptz not null default now()
);
alter table :"schema"._rs_crontab_items enable row level security;
