-- Replacing jobs: the newest payload of a key wins, and two jobs with the key never run at the same time. A running job is
-- cancelled, and its successor waits until it has ended. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Adds a job in place of the job with this key. Replaces a waiting job as add_job does. Cancels a running job (see
-- _rs_cancel_jobs for `reason` and `force`), and also a job that had this key, was cancelled before and has not ended yet. The
-- new job waits until these jobs have ended. `outcome` is one of:
-- - 'added': no job with this key was waiting or running.
-- - 'replaced': one was waiting.
-- - 'stopping': one is running, and its worker was asked to stop it. The new job waits until it has ended.
-- - 'unstoppable': one is running in a worker that cannot stop it (see _rs_cancel_jobs). The new job waits until it has ended.
--
-- `waits_for` are the running jobs, `worker_id` is the worker of one of them. The `run_at` of the returned job is the time at which
-- it is due after they have ended.
--
-- Locks names, then the job with the key, then its row of _rs_successors. Does not lock a job that had the key before. Waits for a
-- moment if a worker has only locked the row of the job.
create or replace function :"schema"._rs_replace_job(
  identifier text,
  payload json default null,
  job_key text default null,
  queue_name text default null,
  run_at timestamptz default null,
  max_attempts int default null,
  priority int default null,
  flags text[] default null,
  reason text default null,
  force boolean default false,
  out job :"schema"._private_jobs,
  out outcome text,
  out waits_for bigint[],
  out worker_id text
) language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  problem text := _rs_job_problem(identifier, queue_name, max_attempts, job_key, priority, flags);
  wanted_at timestamptz := coalesce(run_at, now());
  of_task int;
  of_queue int;
  held _private_jobs;
  replaced record;
begin
  if row_security_active('_private_jobs'::regclass::oid) then
    if _rs_adds_as_owner() then
      select * into replaced from _rs_replace_job_as_owner(
        identifier, payload, job_key, queue_name, run_at, max_attempts, priority, flags, reason, force
      ) as as_owner;
      job := replaced.job;
      outcome := replaced.outcome;
      waits_for := replaced.waits_for;
      worker_id := replaced.worker_id;
      return;
    end if;
  end if;
  if problem is null and job_key is null then
    problem := 'GWBJK A job that replaces another needs a job key, found null.';
  end if;
  if problem is not null then
    raise exception using errcode = left(problem, 5), message = substr(problem, 7);
  end if;

  of_task := _rs_task_id(identifier);
  if exists (select from _rs_limits) or exists (select from _rs_lanes) then
    of_queue := _rs_lane(of_task, queue_name);
  end if;
  if of_queue is null then
    of_queue := _rs_job_queue_id(queue_name);
  else
    perform _rs_call_lanes(array[of_queue]);
  end if;

  for attempt in 1..1000 loop
    select jobs.* into held from _private_jobs as jobs where jobs.key = job_key for update;
    -- The row that we waited for is gone, or has lost its key. Meanwhile, a new row may have got the key.
    continue when not found and exists (select from _private_jobs as jobs where jobs.key = job_key);
    if held.locked_at is not null and not _rs_may_administer(held.locked_at) then
      perform _rs_cancel_jobs(array[held.id], reason, force);
    end if;
    if held.id is null then
      insert into _private_jobs (job_queue_id, task_id, payload, priority, run_at, max_attempts, key, flags)
      values (
        of_queue,
        of_task,
        coalesce(payload, '{}'),
        coalesce(priority, 0),
        wanted_at,
        coalesce(max_attempts, 25),
        job_key,
        case when flags is not null then _rs_flags_object(flags) end
      )
      on conflict (key) do nothing
      returning * into job;
    else
      job := _rs_put_keyed_job(
        _rs_next_job_id(), of_queue, of_task, payload, priority, wanted_at, max_attempts, job_key, flags, false, false
      );
    end if;
    -- Otherwise another session has added a job with this key, and a worker may have claimed it.
    exit when job.id is not null;
  end loop;
  if job.id is null then
    perform _rs_give_up('job with key ' || quote_literal(job_key));
  end if;

  -- The jobs that had the key until they were cancelled, by this call or before. Read only now, because a session that this one has
  -- waited for may have cancelled one. They are not locked: if one ends meanwhile, the next _rs_release_successors sees that.
  waits_for := array(
    select jobs.id from _rs_cancellations as cancellations
    join _private_jobs as jobs on jobs.id = cancellations.job_id
    where cancellations.key = job_key
      and _rs_is_removed(jobs.locked_at, jobs.run_at) and not _rs_may_administer(jobs.locked_at)
    order by jobs.id
  );
  if cardinality(waits_for) > 0 then
    insert into _rs_successors as successors (job_id, predecessor_ids, run_at) values (job.id, waits_for, wanted_at)
    on conflict on constraint _rs_successors_pkey
      do update set predecessor_ids = excluded.predecessor_ids, run_at = excluded.run_at;
    update _private_jobs as jobs set run_at = 'infinity' where jobs.id = job.id and jobs.run_at < 'infinity';
    if force then
      update _rs_cancellations as cancellations set force = true where cancellations.job_id = any (waits_for);
      perform pg_notify('jobs:cancel', (
        select nspname::text from pg_namespace, pg_class
        where pg_namespace.oid = relnamespace and pg_class.oid = '_private_jobs'::regclass
      ));
    end if;
    perform pg_notify('jobs:replace', (
      select nspname::text from pg_namespace, pg_class
      where pg_namespace.oid = relnamespace and pg_class.oid = '_private_jobs'::regclass
    ));
    -- The worker that cannot stop its job, if there is one.
    select case when _rs_can_cancel(jobs.locked_by) then 'stopping' else 'unstoppable' end, jobs.locked_by
    into outcome, worker_id
    from _private_jobs as jobs where jobs.id = any (waits_for)
    order by _rs_can_cancel(jobs.locked_by), jobs.id
    limit 1;
    outcome := coalesce(outcome, 'stopping');
  else
    outcome := case when held.is_available then 'replaced' else 'added' end;
    delete from _rs_successors as successors where successors.job_id = job.id;
    if found then
      -- What it waited for has just ended.
      update _private_jobs as jobs set run_at = wanted_at where jobs.id = job.id;
    end if;
    perform _rs_notify_jobs(1);
  end if;
  job.run_at := wanted_at;
end
$$;

-- Like _rs_replace_job, but runs as the owner. Returns the payload that the caller passed: the caller may not read the stored one.
create or replace function :"schema"._rs_replace_job_as_owner(
  identifier text, payload json, job_key text, queue_name text, run_at timestamptz, max_attempts int, priority int, flags text[],
  reason text, force boolean, out job :"schema"._private_jobs, out outcome text, out waits_for bigint[], out worker_id text
) language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  replaced record;
begin
  select * into replaced from _rs_replace_job(
    identifier, payload, job_key, queue_name, run_at, max_attempts, priority, flags, reason, force
  ) as as_owner;
  job := replaced.job;
  job.payload := coalesce(payload, '{}');
  job.last_error := null;
  outcome := replaced.outcome;
  waits_for := replaced.waits_for;
  worker_id := replaced.worker_id;
end
$$;

revoke execute on function :"schema"._rs_replace_job_as_owner(
  text, json, text, text, timestamptz, int, int, text[], text, boolean
) from public;

-- Lets successors start if their predecessors have ended: their rows are gone or no longer locked. Returns how many successors it
-- has released, and whether others wait. Never waits: it leaves a successor that another session has locked to the next call.
--
-- Locks successors, then their jobs, both with `skip locked`. Then reads the predecessors once more, because a session that has
-- just replaced the job again may have added some.
create or replace function :"schema"._rs_release_successors(
  at_most int default 1000, out released bigint, out others_wait boolean
) language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  candidates bigint[];
begin
  released := 0;
  others_wait := false;
  if not exists (select from _rs_successors) then
    return;
  end if;
  candidates := array(
    select successors.job_id from _rs_successors as successors
    where not exists (
      select from _private_jobs as running
      where running.id = any (successors.predecessor_ids) and not _rs_may_administer(running.locked_at)
    )
    limit at_most
    for update skip locked
  );
  if cardinality(candidates) > 0 then
    with ready as materialized (
      select successors.job_id, successors.run_at from _rs_successors as successors
      where successors.job_id = any (candidates) and not exists (
        select from _private_jobs as running
        where running.id = any (successors.predecessor_ids) and not _rs_may_administer(running.locked_at)
      )
    ), found_jobs as materialized (
      select jobs.id from _private_jobs as jobs where jobs.id = any (array(select job_id from ready)) for update skip locked
    ), due as (
      -- A successor that was cancelled or has expired meanwhile does not run, but can be run again.
      update _private_jobs as jobs set run_at = ready.run_at
      from ready, found_jobs
      where jobs.id = found_jobs.id and ready.job_id = found_jobs.id and jobs.locked_at is null and jobs.run_at = 'infinity'
      returning jobs.job_queue_id
    ), called as (
      insert into _rs_lane_calls (lane_id) select distinct due.job_queue_id from due where due.job_queue_id < 0
    ), settled as (
      delete from _rs_successors as successors where successors.job_id = any (array(
        select ready.job_id from ready
        left join _private_jobs as jobs on jobs.id = ready.job_id
        left join found_jobs on found_jobs.id = ready.job_id
        where jobs.id is null or found_jobs.id is not null
      ))
    )
    select count(*) into released from due;
  end if;
  if released > 0 then
    perform _rs_notify_jobs(released);
  end if;
  others_wait := exists (select from _rs_successors);
end
$$;
