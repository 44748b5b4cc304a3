-- What each item of a crontab is, as the worker said that looked last: how two workers notice that they mean different
-- things by one identifier. The ticks themselves are kept in the contract's _private_known_crontabs.
create table if not exists :"schema"._rs_crontab_items (
  identifier text primary key,
  item text not null,
  since timestamptz not null default now()
);
alter table :"schema"._rs_crontab_items enable row level security;
