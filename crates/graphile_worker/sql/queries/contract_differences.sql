-- What our functions rely on and do not find: one sentence per row, none if the schema matches the contract.
-- Additional columns, tables or functions are ignored.
with schema as (
  select oid from pg_namespace where nspname = :'schema'
), expected_columns (relation, columns) as (
  values
    ('_private_tasks', '{id:int4, identifier:text}'::text[]),
    ('_private_job_queues', '{id:int4, queue_name:text, locked_at:timestamptz, locked_by:text, is_available:bool}'),
    ('_private_jobs', '{id:int8, job_queue_id:int4, task_id:int4, payload:json, priority:int2, run_at:timestamptz, attempts:int2, max_attempts:int2, last_error:text, created_at:timestamptz, updated_at:timestamptz, key:text, locked_at:timestamptz, locked_by:text, revision:int4, flags:jsonb, is_available:bool}'),
    ('job_spec', '{identifier:text, payload:json, queue_name:text, run_at:timestamptz, max_attempts:int2, job_key:text, priority:int2, flags:_text}')
), found_columns as (
  select relname as relation, attname::text || ':' || typname::text as column_and_type
  from pg_class
  join pg_attribute on attrelid = pg_class.oid and attnum > 0 and not attisdropped
  join pg_type on pg_type.oid = atttypid
  where relnamespace = (select oid from schema)
), expected_functions (name, arguments) as (
  values
    ('add_job', '{identifier:text, payload:json, queue_name:text, run_at:timestamptz, max_attempts:int4, job_key:text, priority:int4, flags:_text, job_key_mode:text}'::text[]),
    ('add_jobs', '{specs:_job_spec, job_key_preserve_run_at:bool}'),
    ('remove_job', '{job_key:text}'),
    ('complete_jobs', '{job_ids:_int8}'),
    ('permanently_fail_jobs', '{job_ids:_int8, error_message:text}'),
    ('reschedule_jobs', '{job_ids:_int8, run_at:timestamptz, priority:int4, attempts:int4, max_attempts:int4}'),
    ('force_unlock_workers', '{worker_ids:_text}')
), found_functions as (
  select
    proname as name,
    array(
      select proargnames[argument.position] || ':' || typname::text
      from pg_catalog.unnest(proargtypes) with ordinality as argument (type, position)
      join pg_type on pg_type.oid = argument.type
      order by argument.position
    ) as arguments
  from pg_proc
  where pronamespace = (select oid from schema)
)
select relation || ' has no column ' || wanted.column_and_type as difference
from expected_columns, pg_catalog.unnest(columns) as wanted (column_and_type)
where not exists (
  select from found_columns
  where found_columns.relation = expected_columns.relation
    and found_columns.column_and_type = wanted.column_and_type
)
union all
select 'function ' || name || ' takes ' || pg_catalog.array_to_string(found_functions.arguments, ', ')
from expected_functions
join found_functions using (name)
where not exists (
  select from found_functions as same
  where same.name = expected_functions.name and same.arguments operator(pg_catalog.=) expected_functions.arguments
)
order by 1;
