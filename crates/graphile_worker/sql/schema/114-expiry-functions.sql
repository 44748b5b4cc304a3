-- Expiry: a job that has not started by a given time fails. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Sets when jobs expire; a null time removes their expiry. Ids that do not exist, or belong to jobs that have begun, are left
-- out. Returns how many jobs it has changed. In the transaction that adds the jobs, no worker can start them before.
create or replace function :"schema"._rs_expire_jobs(job_ids bigint[], times timestamptz[])
returns bigint language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  changed bigint;
begin
  if cardinality(job_ids) <> cardinality(times) then
    raise exception using errcode = '22023', message = format(
      'Expected as many times as job ids, found %s times for %s ids.', cardinality(times), cardinality(job_ids)
    );
  end if;
  if row_security_active('_private_jobs'::regclass::oid) then
    if _rs_adds_as_owner() then
      return _rs_expire_own_jobs(job_ids, times);
    end if;
  end if;
  with given as (
    select given.id, max(given.at) as at
    from unnest(job_ids, times) as given (id, at)
    join _private_jobs as jobs on jobs.id = given.id and jobs.attempts = 0
    group by given.id
  ), removed as (
    delete from _rs_expiries as expiries using given where expiries.job_id = given.id and given.at is null returning 1
  ), written as (
    insert into _rs_expiries as expiries (job_id, expires_at, check_at)
    select given.id, given.at, given.at from given where given.at is not null order by given.id
    on conflict on constraint _rs_expiries_pkey
      do update set expires_at = excluded.expires_at, check_at = excluded.check_at
    returning 1
  )
  select (select count(*) from removed) + (select count(*) from written) into changed;
  if changed > 0 then
    perform pg_notify('jobs:expire', (
      select nspname::text from pg_namespace, pg_class
      where pg_namespace.oid = relnamespace and pg_class.oid = '_private_jobs'::regclass
    ));
  end if;
  return changed;
end
$$;

-- The same for a role that may only add jobs: as the owner, and only for jobs that this transaction has added or replaced.
create or replace function :"schema"._rs_expire_own_jobs(job_ids bigint[], times timestamptz[])
returns bigint language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  return (
    select _rs_expire_jobs(array_agg(given.id), array_agg(given.at))
    from unnest(job_ids, times) as given (id, at)
    join _private_jobs as jobs on jobs.id = given.id and jobs.updated_at = now()
  );
end
$$;

revoke execute on function :"schema"._rs_expire_own_jobs(bigint[], timestamptz[]) from public;

-- Sets when one job expires; null removes its expiry. Returns false if there is no such job, or it has begun.
create or replace function :"schema"._rs_expire_job(job_id bigint, expires_at timestamptz)
returns boolean language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  return _rs_expire_jobs(array[job_id], array[expires_at]) > 0;
end
$$;

-- Fails the jobs that have expired, and returns them. Never waits: skips rows that another session has locked, and looks at
-- them again a second later. A job that a worker holds is looked at again, too, because its worker may release it before it
-- starts: less and less often, because it has probably begun. A job has begun if an attempt counts, so a job that was
-- snoozed in its first attempt can still expire.
create or replace function :"schema"._rs_expire_due_jobs(at_most int default 1000)
returns setof :"schema"._private_jobs language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  return query
    with due as materialized (
      select expiries.job_id, expiries.expires_at
      from _rs_expiries as expiries
      where expiries.check_at <= now()
      order by expiries.check_at
      limit at_most
      for update skip locked
    ), found_jobs as materialized (
      select jobs.id, jobs.locked_at is not null as is_held, jobs.locked_at is null and jobs.attempts = 0 as has_expired
      from _private_jobs as jobs
      where jobs.id = any (array(select job_id from due))
      for update skip locked
    ), later as (
      update _rs_expiries as expiries
      set check_at = now() + least(greatest(now() - due.expires_at, interval '1 second'), interval '1 minute')
      from due
      join _private_jobs as jobs on jobs.id = due.job_id
      left join found_jobs on found_jobs.id = due.job_id
      where expiries.job_id = due.job_id and coalesce(found_jobs.is_held, true)
      returning expiries.job_id
    ), settled as (
      delete from _rs_expiries as expiries
      where expiries.job_id = any (array(
        select due.job_id from due
        left join _private_jobs as jobs on jobs.id = due.job_id
        left join found_jobs on found_jobs.id = due.job_id
        where jobs.id is null or found_jobs.is_held is false
      ))
    )
    update _private_jobs as jobs
    set
      attempts = jobs.max_attempts,
      last_error = 'Expired: it had not started by ' || to_char(due.expires_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'),
      updated_at = now()
    from found_jobs
    join due on due.job_id = found_jobs.id
    where jobs.id = found_jobs.id and found_jobs.has_expired
    returning jobs.*;
end
$$;
