-- Ledgers made before level 16 lack the flag that tells old workers to stay away.
alter table :"schema".migrations add column breaking boolean not null default false;
