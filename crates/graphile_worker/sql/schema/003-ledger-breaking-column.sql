-- Ledgers created before level 16 lack the flag that keeps old workers from starting.
alter table :"schema".migrations add column breaking boolean not null default false;
