-- Makes the tasks named $1 where they are new. Looks before it inserts: a name that exists uses up no id.
insert into :"schema"._private_tasks (identifier)
select name from unnest($1::text[]) as name
where not exists (select from :"schema"._private_tasks where identifier = name)
order by name
on conflict do nothing;
