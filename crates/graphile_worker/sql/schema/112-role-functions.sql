-- Adding jobs for roles that may do nothing else. `add_job` and `add_jobs` run as their caller, as Node's do; if row
-- security hides the tables from the caller, they call the functions below, which run as the owner of the schema.
-- Only roles that were granted them (`graphile-worker grant ROLE --add`) may execute these. Runs in a transaction (by
-- hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Whether this role adds jobs through the functions below. Only called if row security applies to it. False if a
-- policy allows the role to insert. Fails, with advice, for a role that may not add jobs at all.
create or replace function :"schema"._rs_adds_as_owner()
returns boolean language plpgsql stable
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  definer regprocedure := '_rs_add_job_as_owner(text, json, text, timestamptz, int, text, int, text[], text)';
begin
  -- The owner itself, whose tables have `force row level security`: there is nobody else to run as.
  if exists (select from pg_proc where oid = definer and pg_get_userbyid(proowner) = current_user) then
    return false;
  end if;
  if has_function_privilege(definer::oid, 'execute') then
    return true;
  end if;
  if has_table_privilege('_private_jobs', 'insert') and exists (
    select from pg_policy
    where polrelid = '_private_jobs'::regclass and polcmd in ('*', 'a')
      and exists (select from unnest(polroles) as allowed where allowed = 0 or pg_has_role(allowed, 'usage'))
  ) then
    return false;
  end if;
  raise exception using
    errcode = '42501',
    message = format('The role %I may not add jobs.', current_user),
    hint = format('Have the owner of the schema run: graphile-worker grant %I --add --apply', current_user);
end
$$;

-- Adds a job as the owner. Returns the payload that the caller passed, and no last error: if the job existed, the
-- caller may not read its stored values.
create or replace function :"schema"._rs_add_job_as_owner(
  identifier text, payload json, queue_name text, run_at timestamptz, max_attempts int, job_key text, priority int,
  flags text[], job_key_mode text
) returns :"schema"._private_jobs language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  job _private_jobs;
begin
  job := add_job(identifier, payload, queue_name, run_at, max_attempts, job_key, priority, flags, job_key_mode);
  job.payload := coalesce(payload, '{}');
  job.last_error := null;
  return job;
end
$$;

-- The same for many jobs.
create or replace function :"schema"._rs_add_jobs_as_owner(specs :"schema".job_spec[], job_key_preserve_run_at boolean)
returns setof :"schema"._private_jobs language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  job _private_jobs;
  place int := array_lower(specs, 1);
begin
  for job in select * from add_jobs(specs, job_key_preserve_run_at) loop
    job.payload := coalesce((specs[place]).payload, '{}');
    job.last_error := null;
    place := place + 1;
    return next job;
  end loop;
end
$$;

revoke execute on function
  :"schema"._rs_add_job_as_owner(text, json, text, timestamptz, int, text, int, text[], text),
  :"schema"._rs_add_jobs_as_owner(:"schema".job_spec[], boolean)
from public;
