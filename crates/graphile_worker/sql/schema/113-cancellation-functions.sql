-- Cancelling jobs. A waiting job is cancelled at once. A running one is marked, so that it never runs again whatever
-- becomes of it, and its worker is asked to stop it. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Cancels jobs, and returns what became of each, in the order of their ids:
-- - 'cancelled': it was waiting, and will not run.
-- - 'stopping': it is running; its worker was asked to stop it. If it succeeds all the same, it counts as done.
-- - 'unstoppable': it is running in a worker that does not know cancellations: Node's, or an older release. It runs to its
--   end and is not retried.
-- - 'failed': it had failed permanently, or was cancelled, before. Nothing was changed.
-- - 'unknown': there is no such job, or no such job any more.
--
-- A cancelled job loses its key, so that adding a job with the key adds a new one.
--
-- With `force`, a worker ends a running job that has not stopped in time: it drops the handler of a task in Rust, and
-- kills a program.
--
-- Locks the jobs in the order of their ids. That waits for a moment if a worker has only locked the rows of its batch.
create or replace function :"schema"._rs_cancel_jobs(job_ids bigint[], reason text default null, force boolean default false)
returns table (job_id bigint, outcome text, worker_id text)
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  error text := 'Cancelled' || coalesce(': ' || nullif(btrim(reason), ''), '');
  found_jobs record;
begin
  -- `skip locked`: two sessions that clean up do not wait for each other.
  delete from _rs_cancellations as ended where ended.job_id = any (array(
    select cancellations.job_id from _rs_cancellations as cancellations
    where not exists (
      select from _private_jobs as jobs
      where jobs.id = cancellations.job_id and _rs_is_removed(jobs.locked_at, jobs.run_at)
    )
    for update skip locked
  ));
  return query
    with chosen as materialized (
      select
        jobs.id, jobs.locked_by, jobs.key,
        case
          when not _rs_may_administer(jobs.locked_at) then 'running'
          when jobs.locked_at is null and jobs.attempts >= jobs.max_attempts then 'failed'
          else 'waiting'
        end as state
      from _private_jobs as jobs
      where jobs.id = any (job_ids)
      order by jobs.id
      for update
    ), waiting as (
      update _private_jobs as jobs
      set
        attempts = jobs.max_attempts, last_error = error, key = null, locked_at = null, locked_by = null,
        updated_at = now()
      from chosen
      where jobs.id = chosen.id and chosen.state = 'waiting'
    ), running as (
      -- run_at and last_error are the mark of _rs_is_cancelled. A second request keeps the reason of the first.
      update _private_jobs as jobs
      set
        attempts = jobs.max_attempts, run_at = 'infinity', key = null, updated_at = now(),
        last_error = case
          when _rs_is_cancelled(jobs.locked_at, jobs.run_at, jobs.last_error) and nullif(btrim(reason), '') is null
            then jobs.last_error
          else error
        end
      from chosen
      where jobs.id = chosen.id and chosen.state = 'running'
    ), requested as (
      insert into _rs_cancellations as requests (job_id, force, key)
      select chosen.id, coalesce(_rs_cancel_jobs.force, false), chosen.key
      from chosen where chosen.state = 'running' order by chosen.id
      on conflict on constraint _rs_cancellations_pkey do update set
        force = requests.force or excluded.force, requested_at = now(), requested_by = current_user,
        key = coalesce(excluded.key, requests.key)
      returning requests.job_id
    ), told as (
      select pg_notify('jobs:cancel', (
        select nspname::text from pg_namespace, pg_class
        where pg_namespace.oid = relnamespace and pg_class.oid = '_private_jobs'::regclass
      ))
      from (select from requested limit 1) as any_job
    )
    select
      asked.id,
      case
        when chosen.state = 'waiting' then 'cancelled'
        when chosen.state = 'failed' then 'failed'
        when chosen.state is null then 'unknown'
        when _rs_can_cancel(chosen.locked_by) then 'stopping'
        else 'unstoppable'
      end,
      case when chosen.state = 'running' then chosen.locked_by end
    from (select distinct given.id from unnest(job_ids) as given (id) where given.id is not null) as asked
    left join chosen on chosen.id = asked.id
    left join told on true
    order by asked.id;
end
$$;

-- Whether a worker stops jobs when it is asked to. Only our workers do; those of older releases, which have registered with
-- a lower level, do not. A dead worker of ours counts: recovery ends its jobs.
create or replace function :"schema"._rs_can_cancel(worker_id text)
returns boolean language sql stable
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select worker_id like 'rs-%' and not exists (
    select from _rs_workers as workers where workers.worker_id = $1 and workers.level < 13
  )
$$;
