-- Whether this role may use the schema, which of its functions it may not call, and which functions run with other
-- rights than they were installed with: as their owner (`security definer`) or not. Reads only the catalogue.
with functions as (
  select
    proc.oid, proc.proname::text as name, proc.prosecdef as runs_as_owner,
    proc.proname in (
      '_rs_next_job_id', '_rs_next_job_ids', '_rs_verify_name', '_rs_keep_used_task', '_rs_keep_used_queue',
      '_rs_add_job_as_owner', '_rs_add_jobs_as_owner', '_rs_expire_own_jobs', '_rs_debounce_as_owner',
      '_rs_throttle_as_owner', '_rs_replace_job_as_owner'
    ) as should_run_as_owner,
    proc.proname in (
      '_rs_add_job_as_owner', '_rs_add_jobs_as_owner', '_rs_expire_own_jobs', '_rs_debounce_as_owner', '_rs_throttle_as_owner',
      '_rs_replace_job_as_owner'
    ) as is_for_adding,
    exists (
      select from pg_catalog.unnest(proc.proconfig) as setting where setting like 'search\_path=%'
    ) as has_search_path,
    exists (
      select from aclexplode(coalesce(proc.proacl, acldefault('f'::"char", proc.proowner))) as acl
      where acl.grantee = 0::oid and acl.privilege_type = 'EXECUTE'
    ) as is_for_all
  from pg_proc as proc
  join pg_namespace as namespace on namespace.oid = proc.pronamespace
  where namespace.nspname = :'schema'
)
select
  coalesce((select has_schema_privilege(oid, 'usage') from pg_namespace where nspname = :'schema'), false) as may_use,
  coalesce(pg_catalog.array_agg(distinct name order by name)
    filter (where not is_for_adding and not has_function_privilege(oid, 'execute')), '{}') as forbidden_functions,
  coalesce(bool_and(has_function_privilege(oid, 'execute')) filter (where is_for_adding), false) as may_add_as_owner,
  coalesce(pg_catalog.array_agg(distinct name order by name) filter (where runs_as_owner and not should_run_as_owner), '{}')
    as became_definers,
  coalesce(pg_catalog.array_agg(distinct name order by name) filter (where should_run_as_owner and not runs_as_owner), '{}')
    as lost_definers,
  coalesce(pg_catalog.array_agg(distinct name order by name) filter (where runs_as_owner and not has_search_path), '{}')
    as without_search_path,
  coalesce(pg_catalog.array_agg(distinct name order by name) filter (where is_for_adding and is_for_all), '{}') as for_all
from functions;
