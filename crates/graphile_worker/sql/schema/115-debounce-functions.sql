-- Debounce and throttle: calls with the same key become few jobs. Both add a job with a key, which other functions can replace
-- or remove as usual. For a role that may only add jobs they run as the owner, as add_job does. Runs in a transaction (by hand:
-- `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Adds a job that runs when there was no call with this key for the time `wait`, and at the latest `max_wait` after the first
-- call. Each call replaces the payload (two arrays are joined, as by add_job).
--
-- A job that is running, or waits for a retry, does not count: the call after it is the first one again. Calls with the same key
-- wait for each other, as keyed adds do.
create or replace function :"schema"._rs_debounce(
  identifier text, payload json, job_key text, wait interval, max_wait interval default null, queue_name text default null
) returns :"schema"._private_jobs language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  job _private_jobs;
  begins_again boolean;
begin
  if row_security_active('_private_jobs'::regclass::oid) then
    if _rs_adds_as_owner() then
      return _rs_debounce_as_owner(identifier, payload, job_key, wait, max_wait, queue_name);
    end if;
  end if;
  if job_key is null then
    raise exception using errcode = 'GWBJK', message = 'A debounced job needs a job key, found null.';
  end if;
  if wait is null or wait < interval '0' then
    raise exception using errcode = '22023', message = format('`wait` must be 0 or longer, found %s.', coalesce(wait::text, 'null'));
  end if;
  if max_wait < wait then
    raise exception using errcode = '22023', message = format('`max_wait` must be at least `wait` (%s), found %s.', wait, max_wait);
  end if;
  select attempts > 0 into begins_again from _private_jobs where key = job_key and is_available for update;
  job := add_job(identifier, payload, queue_name, clock_timestamp() + wait, job_key => job_key);
  if begins_again then
    update _private_jobs set created_at = clock_timestamp() where id = job.id returning * into job;
  end if;
  -- The row is ours until the transaction ends.
  if job.run_at = 'infinity' and exists (select from _rs_successors where job_id = job.id) then
    -- It waits for a running job that it replaces.
    update _rs_successors as successors set run_at = least(successors.run_at, job.created_at + max_wait)
    where successors.job_id = job.id;
  elsif job.run_at > job.created_at + max_wait then
    update _private_jobs set run_at = job.created_at + max_wait where id = job.id returning * into job;
  end if;
  return job;
end
$$;

-- Adds a job, at most one per key and `every`. The first call is due at once. The calls that follow within `every` become one job
-- with the last payload, which is due when that time is over; then it starts again. So no event is lost, and the times at which
-- jobs are due are at least `every` apart.
--
-- A job that is due and has not started yet takes the payload of later calls, and stays due. Retries do not count.
create or replace function :"schema"._rs_throttle(
  identifier text, payload json, job_key text, every interval, queue_name text default null
) returns :"schema"._private_jobs language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  job _private_jobs;
  last_start timestamptz;
  due_at timestamptz;
begin
  if row_security_active('_private_jobs'::regclass::oid) then
    if _rs_adds_as_owner() then
      return _rs_throttle_as_owner(identifier, payload, job_key, every, queue_name);
    end if;
  end if;
  if job_key is null then
    raise exception using errcode = 'GWBJK', message = 'A throttled job needs a job key, found null.';
  end if;
  if every is null or every <= interval '0' then
    raise exception using errcode = '22023', message = format('`every` must be longer than 0, found %s.', coalesce(every::text, 'null'));
  end if;
  delete from _rs_throttles as old where old.key = any (array(
    select throttles.key from _rs_throttles as throttles
    where throttles.ends_at < now() and throttles.key <> job_key
    order by throttles.ends_at limit 2
    for update skip locked
  ));
  -- Calls with the same key wait here for each other. The clock is read when it is their turn.
  insert into _rs_throttles as throttles (key, starts_at, ends_at) values (job_key, '-infinity', now())
  on conflict on constraint _rs_throttles_pkey do update set key = excluded.key
  returning throttles.starts_at into last_start;
  perform from _private_jobs where key = job_key and is_available and attempts = 0 for update;
  if not found then
    -- If the last job was to start later and is gone, nothing has started then.
    due_at := case
      when clock_timestamp() < last_start then last_start
      else greatest(clock_timestamp(), last_start + every)
    end;
    update _rs_throttles as throttles set starts_at = due_at, ends_at = due_at + every where throttles.key = job_key;
  end if;
  job := add_job(identifier, payload, queue_name, due_at, job_key => job_key, job_key_mode => 'preserve_run_at');
  return job;
end
$$;

-- The same as the owner. They return the payload that the caller passed: it may not read the stored one.
create or replace function :"schema"._rs_debounce_as_owner(
  identifier text, payload json, job_key text, wait interval, max_wait interval, queue_name text
) returns :"schema"._private_jobs language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  job _private_jobs;
begin
  job := _rs_debounce(identifier, payload, job_key, wait, max_wait, queue_name);
  job.payload := coalesce(payload, '{}');
  job.last_error := null;
  return job;
end
$$;

create or replace function :"schema"._rs_throttle_as_owner(
  identifier text, payload json, job_key text, every interval, queue_name text
) returns :"schema"._private_jobs language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  job _private_jobs;
begin
  job := _rs_throttle(identifier, payload, job_key, every, queue_name);
  job.payload := coalesce(payload, '{}');
  job.last_error := null;
  return job;
end
$$;

revoke execute on function
  :"schema"._rs_debounce_as_owner(text, json, text, interval, interval, text),
  :"schema"._rs_throttle_as_owner(text, json, text, interval, text)
from public;
