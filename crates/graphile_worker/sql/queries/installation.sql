-- What is installed, in one row, without reading anything that may be missing. Locks nothing.
select
  current_setting('server_version_num')::int as server_version,
  current_user::text as role,
  current_database()::text as database,
  pg_is_in_recovery() as is_standby,
  -- Where it was set, if transactions are read-only.
  case when current_setting('transaction_read_only')::bool then (
    select source from pg_settings where name = 'default_transaction_read_only'
  ) end as read_only_by,
  exists (select from pg_namespace where nspname = :'schema') as schema_exists,
  coalesce(bool_or(relname = 'migrations'), false) as ledger_exists,
  coalesce(bool_or(relname = '_rs_additions'), false) as additions_exist,
  coalesce(bool_or(relname = '_private_jobs'), false) as tables_exist,
  coalesce(bool_or(relname = 'jobs'), false) as old_tables_exist,
  coalesce(bool_or(relname = 'tasks'), false) as old_tables_have_task_ids,
  to_regclass(pg_catalog.format('%I.jobs', :'schema')) is not null as view_or_table_jobs_exists,
  coalesce(bool_or(relname = '_private_workers'), false)
    and to_regprocedure(pg_catalog.format('%I.list_orphan_locked_workers(interval)', :'schema')) is not null as is_of_rust_port,
  coalesce(bool_and(has_table_privilege(oid, 'select')) filter (
    where relname in ('_private_workers', '_private_jobs', '_private_tasks')
  ), false) as can_read_rust_port,
  exists (
    select from pg_attribute
    where attrelid = to_regclass(pg_catalog.format('%I.migrations', :'schema'))::oid and attname = 'breaking' and not attisdropped
  ) as ledger_has_breaking,
  coalesce(has_table_privilege(to_regclass(pg_catalog.format('%I.migrations', :'schema'))::oid, 'update'), false)
    as ledger_can_be_locked
from pg_class
where relnamespace = (select oid from pg_namespace where nspname = :'schema') and relkind in ('r', 'p');
