-- Recovery, step by step, as a worker runs it and as an operator can from psql: in one transaction, take the sweep
-- lock, find the dead workers, decide what to do with their jobs, release their queues, delete their rows.
-- `_rs_sweep_stale_workers` does all of it. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Takes the sweep lock until the transaction ends; false if another session has it.
create or replace function :"schema"._rs_sweep_lock()
returns boolean language sql
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select pg_try_advisory_xact_lock(hashtextextended('graphile_worker sweep ' || '_rs_workers'::regclass::oid, 0))
$$;

-- The dead workers: their last heartbeat is older than the threshold (times the multiplier, if they hold a job with
-- one of the flags) and than two of their own intervals, or they hold something and are no longer registered. Locks
-- the rows of the former, so that they cannot claim anything meanwhile; skips a worker that is just claiming. Only
-- ids that begin with `rs-live-` belong to workers that register: others (Node's, or ours without recovery) are never
-- declared dead.
create or replace function :"schema"._rs_dead_workers(threshold interval, multiplier int, resilient_flags text[])
returns setof text
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  return query
    select workers.worker_id
    from _rs_workers as workers
    where workers.last_heartbeat_at < now() - greatest(threshold, 2 * workers.heartbeat_interval)
      and (
        workers.last_heartbeat_at < now() - threshold * multiplier
        or not exists (
          select from _private_jobs as jobs, unnest(resilient_flags) as flag
          where jobs.locked_by = workers.worker_id
            and coalesce(jobs.flags -> flag not in ('false', 'null', '0', '""'), false)
        )
      )
    order by workers.worker_id
    for update of workers skip locked;
  return query
    select orphans.locked_by
    from (
      select jobs.locked_by from _private_jobs as jobs where jobs.locked_by like 'rs-live-%'
      union
      select queues.locked_by from _private_job_queues as queues where queues.locked_by like 'rs-live-%'
    ) as orphans
    where not exists (select from _rs_workers as workers where workers.worker_id = orphans.locked_by)
    order by orphans.locked_by;
end
$$;

-- Releases jobs of dead workers, each as decided:
-- - 'default' refunds the attempt and waits for the delay. From the second recovery on it adds a random delay, so
--   that a job that kills its worker is separated from the jobs beside it. After max_recoveries recoveries it acts
--   like 'fail'.
-- - 'fail' counts the attempt, and the job is retried after the usual back-off.
-- - 'reschedule' sets run_at and, if given, attempts.
--
-- A job that was removed or cancelled while it ran never runs again, whatever was decided. A job that was replaced by its key may
-- never have started: it gets its attempt back like any other. Returns the released jobs, and whether each was
-- quarantined.
create or replace function :"schema"._rs_recover_jobs(
  worker_ids text[], job_ids bigint[], decisions text[], run_ats timestamptz[], attempts int[],
  recovery_delay interval, max_recoveries int
) returns table (job_id bigint, quarantined boolean)
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  delete from _rs_recoveries as old where not exists (select from _private_jobs as jobs where jobs.id = old.job_id);
  return query
    with decided as (
      select *
      from unnest(job_ids, decisions, run_ats, $5) as decided (job_id, decision, run_at, attempts)
    ), counted as (
      insert into _rs_recoveries as counted (job_id, times)
      select decided.job_id, 1 from decided order by decided.job_id
      on conflict on constraint _rs_recoveries_pkey do update set
        times = case when counted.last_at < now() - interval '1 day' then 1 else counted.times + 1 end,
        last_at = now()
      returning counted.job_id, counted.times
    ), what as (
      select
        decided.*, counted.times,
        decided.decision = 'default' and counted.times >= max_recoveries as quarantined
      from decided join counted on counted.job_id = decided.job_id
    ), released as (
      update _private_jobs as jobs
      set
        locked_at = null,
        locked_by = null,
        updated_at = now(),
        attempts = case
          when _rs_is_removed(jobs.locked_at, jobs.run_at) then jobs.max_attempts
          when what.decision = 'reschedule' then coalesce(what.attempts, jobs.attempts)
          when what.decision = 'fail' or what.quarantined then jobs.attempts
          else greatest(jobs.attempts - 1, 0)
        end,
        run_at = case
          when _rs_is_removed(jobs.locked_at, jobs.run_at) then now()
          when what.decision = 'reschedule' then coalesce(what.run_at, jobs.run_at)
          when what.decision = 'fail' or what.quarantined then
            greatest(now(), jobs.run_at) + exp(least(jobs.attempts, 10)) * interval '1 second'
          else greatest(now(), jobs.run_at) + recovery_delay
            + case when what.times > 1 then random() * least(2 ^ what.times, 10) else 0 end * interval '1 second'
        end,
        last_error = case
          when _rs_is_cancelled(jobs.locked_at, jobs.run_at, jobs.last_error) then jobs.last_error
          when what.quarantined then format(
            'Its worker has died %s times while this job ran: the job itself may be what kills it, so this counts as a failed attempt.',
            what.times
          )
          when what.decision = 'fail' then 'WorkerCrashed'
          else 'Job recovered after worker interruption'
        end
      from what
      where jobs.id = what.job_id and jobs.locked_by = any (worker_ids)
      returning jobs.id, jobs.job_queue_id, what.quarantined
    ), called as (
      insert into _rs_lane_calls (lane_id) select distinct released.job_queue_id from released where released.job_queue_id < 0
    )
    select released.id, released.quarantined from released;
end
$$;

-- Releases the queues of dead workers and deletes their rows. A queue stays locked while one of its jobs is.
create or replace function :"schema"._rs_forget_workers(worker_ids text[])
returns void
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  -- One that a dead worker is just letting go of is left for the next sweep: waiting for it could be waiting crosswise.
  with freed as (
    select queues.id from _private_job_queues as queues
    where queues.locked_by = any (worker_ids)
      and not exists (
        select from _private_jobs as jobs where jobs.job_queue_id = queues.id and jobs.locked_by = any (worker_ids)
      )
    for update skip locked
  )
  update _private_job_queues as queues
  set locked_at = null, locked_by = null
  from freed where queues.id = freed.id;
  delete from _rs_workers as workers where workers.worker_id = any (worker_ids);
  perform _rs_notify_jobs(1);
end
$$;

-- All of it, for an operator. Returns each dead worker with the released jobs (none for a dry run). Returns nothing
-- if another session is sweeping.
create or replace function :"schema"._rs_sweep_stale_workers(
  sweep_threshold interval default '5 minutes',
  recovery_delay interval default '30 seconds',
  dry_run boolean default false,
  multiplier int default 3,
  resilient_flags text[] default '{infrastructure_resilient}',
  max_recoveries int default 5
) returns table (worker_id text, job_ids bigint[])
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  dead text[];
  ids bigint[];
  holders text[];
begin
  if not _rs_sweep_lock() then
    return;
  end if;
  dead := array(select _rs_dead_workers(sweep_threshold, multiplier, resilient_flags));
  if not dry_run and cardinality(dead) > 0 then
    select array_agg(held.id), array_agg(held.locked_by) into ids, holders
    from (
      select jobs.id, jobs.locked_by from _private_jobs as jobs
      where jobs.locked_by = any (dead) order by jobs.id for update skip locked
    ) as held;
    perform _rs_recover_jobs(
      dead, ids, array_fill('default'::text, array[coalesce(cardinality(ids), 0)]), '{}', '{}', recovery_delay,
      max_recoveries
    );
    perform _rs_forget_workers(dead);
  end if;
  return query
    select name, array(select id from unnest(ids, holders) as held (id, holder) where holder = name)
    from unnest(dead) as name;
end
$$;
