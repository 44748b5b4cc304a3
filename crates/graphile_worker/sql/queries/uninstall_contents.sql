-- The contents of the schema, and what would be dropped with it elsewhere: views, foreign keys and triggers that
-- depend on it. Reads only the catalogue; returns one row.
with schema as (
  select oid from pg_namespace where nspname = :'schema'
), relations as (
  select oid, relname::text as name, relkind from pg_class
  where relnamespace = (select oid from schema) and relkind in ('r', 'p', 'v', 'm', 'f')
)
select
  exists (select from relations where name = 'migrations')
    and exists (select from relations where name = '_private_jobs' or name = 'jobs')
    -- Other applications have tables with these names, too.
    and exists (
      select from pg_proc
      where pronamespace = (select oid from schema) and proname = 'add_job' and proargnames[1] = 'identifier'
    ) as is_ours,
  array(select name from relations where relkind in ('r', 'p', 'f') order by name) as tables,
  array(
    select name from relations
    where name not in ('migrations', 'jobs', 'job_queues', 'tasks', 'known_crontabs')
      and name !~ '^_(private|rs|old)_'
    order by name
  ) as strangers,
  (select count(*) from pg_proc where pronamespace = (select oid from schema)) as functions,
  array(
    select 'view ' || views.oid::regclass::text
    from pg_depend
    join pg_rewrite as rules on rules.oid = pg_depend.objid
    join pg_class as views on views.oid = rules.ev_class
    where pg_depend.classid = 'pg_rewrite'::regclass::oid
      and pg_depend.refobjid in (select oid from relations)
      and views.relnamespace <> (select oid from schema)
    union
    select 'foreign key ' || conname::text || ' of ' || conrelid::regclass::text
    from pg_constraint
    where contype = 'f' and confrelid in (select oid from relations)
      and conrelid not in (select oid from relations)
    union
    select 'trigger ' || tgname::text || ' of ' || tgrelid::regclass::text
    from pg_trigger
    join pg_proc on pg_proc.oid = tgfoid
    where pronamespace = (select oid from schema) and tgrelid not in (select oid from relations) and not tgisinternal
    order by 1
  ) as dependents;
