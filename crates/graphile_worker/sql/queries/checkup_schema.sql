-- Whether this role may use the schema, and which of its functions it may not call. Reads the catalogue only.
select
  coalesce(bool_and(has_schema_privilege(namespace.oid, 'usage')), false) as may_use,
  coalesce(array_agg(distinct functions.proname::text order by functions.proname::text)
    filter (where not has_function_privilege(functions.oid, 'execute')), '{}') as forbidden_functions
from pg_namespace as namespace
left join pg_proc as functions on functions.pronamespace = namespace.oid
where namespace.nspname = :'schema';
