-- What is there, in one row, without touching anything that might be missing. Locks nothing.
select
  current_setting('server_version_num')::int as server_version,
  current_user::text as role,
  exists (select from pg_namespace where nspname = :'schema') as schema_exists,
  coalesce(bool_or(relname = 'migrations'), false) as ledger_exists,
  coalesce(bool_or(relname = '_rs_additions'), false) as additions_exist,
  coalesce(bool_or(relname = '_private_jobs'), false) as tables_exist,
  coalesce(bool_or(relname = 'jobs'), false) as old_tables_exist,
  coalesce(bool_or(relname = 'tasks'), false) as old_tables_have_task_ids,
  to_regclass(format('%I.jobs', :'schema')) is not null as view_or_table_jobs_exists,
  exists (
    select from pg_attribute
    where attrelid = to_regclass(format('%I.migrations', :'schema')) and attname = 'breaking' and not attisdropped
  ) as ledger_has_breaking,
  coalesce(has_table_privilege(to_regclass(format('%I.migrations', :'schema')), 'update'), false)
    as ledger_can_be_locked
from pg_class
where relnamespace = (select oid from pg_namespace where nspname = :'schema') and relkind in ('r', 'p');
