-- Creates the tasks named $1 that do not exist. Reads before it inserts, so that an existing name uses up no id.
insert into :"schema"._private_tasks (identifier)
select name from pg_catalog.unnest($1::text[]) as name
where not exists (select from :"schema"._private_tasks where identifier = name)
order by name
on conflict do nothing;
