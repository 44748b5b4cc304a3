-- Limits: setting and dropping them, pausing, putting jobs into lanes, and claiming from lanes. What a lane is: see
-- 183-limits.sql. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Returns what is wrong with the settings of a limit as 'CODE message', or null.
create or replace function :"schema"._rs_limit_problem(
  name text, concurrency int, rate int, per interval, burst int, weight float8, cost int, group_name text
) returns text language sql stable
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select case
    when name is null or name !~ '^(task|queue|group):.' then
      format('GWBLI Limit name is %L, expected task:NAME, queue:NAME, queue:PREFIX* or group:NAME.', name)
    when length(name) > 140 then format('GWBLI Limit name is too long (max length: 140), this one has %s.', length(name))
    when name ~ '^(task|group):.*\*$' then
      format('GWBLI Limit name is %L, but only queues can have a pattern. Put the tasks into a group instead.', name)
    when name ~ '^queue:.*\*.' then format('GWBLI Limit name is %L, but a pattern may only have a * at its end.', name)
    when concurrency < 1 then
      format('GWBLI Concurrency must be at least 1, got %s. To start no jobs at all, pause %s.', concurrency, name)
    when rate < 1 then format('GWBLI Rate must be at least 1, got %s.', rate)
    when rate is not null and per is null then format('GWBLI Rate %s needs a period, for example 1 minute.', rate)
    when rate is null and per is not null then format('GWBLI Period %s needs a rate: how many jobs may start in it.', per)
    when per <= '0' then format('GWBLI Period must be longer than 0, got %s.', per)
    when per > '366 days' then format('GWBLI Period must be at most 366 days, got %s.', per)
    when rate is null and burst is not null then format('GWBLI Burst %s needs a rate.', burst)
    when burst < 1 then format('GWBLI Burst must be at least 1, got %s.', burst)
    -- Claims add it to the time, which must not overflow.
    when extract(epoch from per)::float8 / rate * burst > 366 * 86400 * 10::float8 then
      format('GWBLI Burst %s is too large: at this rate, that number of starts would take more than 10 years.', burst)
    when not weight > 0 or weight > 1000000 then format('GWBLI Weight must be more than 0 and at most 1000000, got %s.', weight)
    when weight is not null and name not like 'queue:%' then format('GWBLI Only queues have a weight, and this is %s.', name)
    when cost < 1 then format('GWBLI Cost must be at least 1, got %s.', cost)
    when cost is not null and group_name is null then
      format('GWBLI Cost %s needs a group: it is how much a job takes of the group''s limit.', cost)
    when group_name is not null and name like 'group:%' then 'GWBLI A group cannot be in another group.'
    when concurrency is null and rate is null and group_name is null and weight is null then
      format('GWBLI Limit %s needs a concurrency, a rate, a group or a weight.', name)
  end
$$;

-- Lets workers read the limits again.
create or replace function :"schema"._rs_notify_limits()
returns void language sql
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select pg_notify('worker:limits', (select nspname from pg_namespace where oid = (select relnamespace from pg_class where oid = '_rs_limits'::regclass))::text)
$$;

-- The limit of a queue: that of its name, otherwise that of the longest pattern that it matches, otherwise null.
create or replace function :"schema"._rs_limit_of_queue(name text)
returns int language sql stable
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select limits.id
  from _rs_limits as limits
  where limits.name = 'queue:' || $1
    or limits.prefix is not null and left($1, length(limits.prefix)) = limits.prefix
  order by limits.prefix is not null, length(limits.prefix) desc
  limit 1
$$;

-- The lane of a queue; creates it if needed. The queue's row, if there is one, gets another name, so that no more jobs are
-- added to it. Its waiting jobs go into the lane. What is left of it comes first: see `_rs_drain_old_queue`.
create or replace function :"schema"._rs_lane_of_queue(name text)
returns int language plpgsql as $$
declare
  is_held boolean := _rs_hold_name('queue', name);
  lane int;
  queue int;
begin
  select id into lane from _rs_lanes where queue_name = name;
  if found then
    return lane;
  end if;
  insert into _rs_lanes (queue_name, limit_id) values (name, _rs_limit_of_queue(name))
  on conflict do nothing returning id into lane;
  if not found then
    select id into lane from _rs_lanes where queue_name = name;
    return lane;
  end if;
  update _private_job_queues set queue_name = left('replaced by lane ' || lane::text || ': ' || name, 128)
  where queue_name = name
  returning id into queue;
  if found then
    update _rs_lanes set old_queue_id = queue where id = lane;
    update _private_jobs set job_queue_id = lane where is_available = true and job_queue_id = queue;
  end if;
  insert into _rs_lane_calls (lane_id) values (lane);
  return lane;
end
$$;

-- The lane of a task's jobs without a queue; null if the task has no limit.
create or replace function :"schema"._rs_lane_of_task(task int)
returns int language plpgsql as $$
declare
  lane int;
begin
  if not exists (select from _rs_limits where task_id = task and not is_dropped) then
    return null;
  end if;
  select id into lane from _rs_lanes where task_id = task;
  if not found then
    insert into _rs_lanes (task_id) values (task) on conflict do nothing returning id into lane;
    if not found then
      select id into lane from _rs_lanes where task_id = task;
    end if;
  end if;
  return lane;
end
$$;

-- The lane that a new job belongs in; null if in none. Called only if there are limits or lanes. The caller holds the name
-- of the task.
create or replace function :"schema"._rs_lane(task int, name text)
returns int language plpgsql as $$
declare
  is_held boolean;
  lane int;
begin
  if name is null then
    return _rs_lane_of_task(task);
  end if;
  is_held := _rs_hold_name('queue', name);
  select id into lane from _rs_lanes where queue_name = name;
  if found then
    return lane;
  end if;
  if _rs_limit_of_queue(name) is not null or exists (select from _rs_limits where task_id = task and not is_dropped) then
    return _rs_lane_of_queue(name);
  end if;
  return null;
end
$$;

-- Calls these lanes: the next claim looks what has changed there. Ids of queues are ignored.
create or replace function :"schema"._rs_call_lanes(lanes int[])
returns void language sql
set search_path = pg_catalog, :"schema", pg_temp
as $$
  insert into _rs_lane_calls (lane_id) select distinct lane from unnest(lanes) as lane where lane < 0
$$;

-- Sets a limit, or replaces it. Null for no limit of that kind. Jobs that wait are under it soon: `_rs_settle_lanes` moves
-- them. Running jobs continue.
create or replace function :"schema"._rs_set_limit(
  name text,
  concurrency int default null,
  rate int default null,
  per interval default null,
  burst int default null,
  weight float8 default null,
  cost int default null,
  group_name text default null
) returns :"schema"._rs_limits language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
#variable_conflict use_variable
declare
  problem text := _rs_limit_problem(name, concurrency, rate, per, burst, weight, cost, group_name);
  of_task int;
  of_group int;
  in_group _rs_limits;
  member _rs_limits;
  is_held boolean;
  written _rs_limits;
begin
  if problem is not null then
    raise exception using errcode = left(problem, 5), message = substr(problem, 7);
  end if;
  if name like 'task:%' then
    is_held := _rs_hold_name('task', substr(name, 6));
    select tasks.id into of_task from _private_tasks as tasks where tasks.identifier = substr(name, 6);
    if not found then
      raise exception using errcode = 'GWBLI', message = format('There is no task %L.', substr(name, 6)),
        hint = 'A task exists once a worker that runs it has started, or a job of it was added. Check the spelling.';
    end if;
  end if;
  if group_name is not null then
    select * into in_group from _rs_limits as limits
    where limits.name = case when group_name like 'group:%' then group_name else 'group:' || group_name end;
    if not found then
      raise exception using errcode = 'GWBLI', message = format('There is no group %L.', group_name),
        hint = 'Set the limit of the group first.';
    end if;
    of_group := in_group.id;
    if cost > in_group.concurrency then
      raise exception using errcode = 'GWBLI', message = format(
        'Cost %s is more than the concurrency %s of %s, so no job would start.', cost, in_group.concurrency, in_group.name
      );
    elsif in_group.rate is not null and cost > in_group.burst + 1 then
      raise exception using errcode = 'GWBLI', message = format(
        'Cost %s is more than %s ever allows at once, so no job would start. Set its burst to at least %s first.',
        cost, in_group.name, cost - 1
      );
    end if;
  end if;
  if name like 'group:%' then
    select members.* into member from _rs_limits as limits join _rs_limits as members on members.group_id = limits.id
    where limits.name = name
      and (members.cost > concurrency or rate is not null and members.cost > coalesce(burst, 1) + 1)
    order by members.cost desc limit 1;
    if found then
      raise exception using errcode = 'GWBLI', message = format(
        'A job of %s has cost %s, which is more than this allows at once. Set a lower cost for %s first, or a higher %s.',
        member.name, member.cost, member.name, case when member.cost > concurrency then 'concurrency' else 'burst' end
      );
    end if;
  end if;
  -- Adds of jobs in queues read all limits.
  if not exists (select from _rs_limits as limits where limits.name = name)
    and (select count(*) from _rs_limits as limits where not limits.is_dropped) >= 1000
  then
    raise exception using errcode = 'GWBLI', message = format('There are 1000 limits already, so %s was not set.', name),
      hint = 'Set one limit for a pattern of queues, such as queue:tenant:*, and drop the limits that you no longer need.';
  end if;
  insert into _rs_limits as limits (name, task_id, prefix, concurrency, rate, per, burst, weight, cost, group_id)
  values (
    name, of_task, case when name ~ '^queue:.*\*$' then substr(name, 7, length(name) - 7) end,
    concurrency, rate, per, coalesce(burst, 1), coalesce(weight, 1), coalesce(cost, 1), of_group
  )
  on conflict on constraint _rs_limits_name_key do update set
    task_id = excluded.task_id, concurrency = excluded.concurrency, rate = excluded.rate, per = excluded.per,
    burst = excluded.burst, weight = excluded.weight, cost = excluded.cost, group_id = excluded.group_id,
    is_dropped = false,
    tat = case when (limits.rate, limits.per) is not distinct from (excluded.rate, excluded.per) then limits.tat end
  returning * into written;
  perform _rs_apply_limit(written);
  return written;
end
$$;

-- Lets the lanes know a limit that was set, dropped, paused or resumed.
create or replace function :"schema"._rs_apply_limit(changed :"schema"._rs_limits)
returns void language plpgsql as $$
declare
  lane int;
  begins text := coalesce(changed.prefix, substr(changed.name, 7));
begin
  if changed.name like 'queue:%' then
    update _rs_lanes as lanes set limit_id = _rs_limit_of_queue(lanes.queue_name)
    where lanes.queue_name is not null
      and left(lanes.queue_name, length(begins)) = begins
      and lanes.limit_id is distinct from _rs_limit_of_queue(lanes.queue_name);
  elsif changed.task_id is not null and not changed.is_dropped then
    lane := _rs_lane_of_task(changed.task_id);
  end if;
  -- The lanes under it may have room again.
  insert into _rs_lane_calls (lane_id)
  select id from _rs_lanes
  where limit_id = changed.id
    or task_id = changed.task_id
    or waits_for = changed.id
    or left(queue_name, length(begins)) = begins and changed.name like 'queue:%';
  perform _rs_notify_limits();
  perform _rs_notify_jobs(1);
end
$$;

-- Drops a limit. The jobs in its lanes go back to where jobs without a limit are. False if there is no such limit.
create or replace function :"schema"._rs_drop_limit(name text)
returns boolean language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
#variable_conflict use_variable
declare
  dropped _rs_limits;
  users text;
begin
  select * into dropped from _rs_limits as limits where limits.name = name and not limits.is_dropped for update;
  if not found then
    return false;
  end if;
  select string_agg(limits.name, ', ' order by limits.name) into users from _rs_limits as limits where limits.group_id = dropped.id;
  if users is not null then
    raise exception using errcode = 'GWBLI', message = format('Limit %s is used by %s.', name, users),
      hint = 'Drop these first, or set them without the group.';
  end if;
  if dropped.task_id is null then
    delete from _rs_limits as limits where limits.id = dropped.id;
  else
    -- Its lane needs it until it is empty.
    update _rs_limits as limits set
      is_dropped = true, concurrency = null, rate = null, per = null, group_id = null,
      paused_until = null, paused_at = null, paused_by = null
    where limits.id = dropped.id;
  end if;
  dropped.is_dropped := true;
  perform _rs_apply_limit(dropped);
  return true;
end
$$;

-- Starts no more jobs of a task, a queue, the queues of a pattern, or a group, until `until` or until it is resumed. 'all'
-- pauses these workers, but not Node's. Running jobs continue.
create or replace function :"schema"._rs_pause(name text default 'all', until timestamptz default 'infinity')
returns void language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
#variable_conflict use_variable
declare
  problem text := case when name is distinct from 'all' then _rs_limit_problem(name, 1, null, null, null, null, null, null) end;
  paused _rs_limits;
begin
  if problem is not null then
    raise exception using errcode = left(problem, 5), message = replace(substr(problem, 7), ' or group:NAME', ', group:NAME or all');
  end if;
  if until is null or until <= now() then
    raise exception using errcode = 'GWBLI', message = format('A pause must end in the future, got %s.', until);
  end if;
  perform from _rs_limits as limits where limits.name = name and not limits.is_dropped for update;
  if not found then
    if name = 'all' then
      insert into _rs_limits (name) values (name) on conflict do nothing;
    elsif name like 'group:%' then
      raise exception using errcode = 'GWBLI', message = format('There is no group %L.', substr(name, 7));
    elsif name like 'task:%' then
      -- Only a pause: without a limit of its own.
      perform _rs_set_limit(name, concurrency => 1);
      update _rs_limits as limits set concurrency = null where limits.name = name;
    else
      perform _rs_set_limit(name, weight => 1);
    end if;
  end if;
  update _rs_limits as limits
  set paused_at = coalesce(limits.paused_at, now()), paused_until = until, paused_by = session_user
  where limits.name = name
  returning * into paused;
  perform _rs_apply_limit(paused);
end
$$;

-- Ends a pause. False if nothing with that name is paused. What was only a pause, without a limit, is dropped.
create or replace function :"schema"._rs_resume(name text default 'all')
returns boolean language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
#variable_conflict use_variable
declare
  resumed _rs_limits;
  was_paused boolean;
begin
  select limits.paused_until > now() into was_paused from _rs_limits as limits
  where limits.name = name and limits.paused_until is not null
  for update;
  if not found then
    return false;
  end if;
  update _rs_limits as limits set paused_until = null, paused_at = null, paused_by = null
  where limits.name = name
  returning * into resumed;
  if (resumed.concurrency, resumed.rate, resumed.group_id) is not distinct from (null, null, null) and resumed.weight = 1
    and name not like 'group:%'
  then
    perform _rs_drop_limit(name);
  else
    perform _rs_apply_limit(resumed);
  end if;
  return was_paused;
end
$$;

-- Puts waiting jobs where the limits want them, about `at_most`: into lanes, and out of lanes that are no longer needed. Returns
-- how much it did; 0 if nothing is left to do. Workers call it every few seconds, and callers that set or drop a limit call it, too.
create or replace function :"schema"._rs_settle_lanes(at_most int default 10000)
returns bigint language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  moved bigint := 0;
  written bigint;
  limited record;
  lane record;
begin
  -- One session at a time: two would only wait for each other's rows.
  if not pg_try_advisory_xact_lock(hashtextextended('graphile_worker lanes ' || '_rs_lanes'::regclass::oid, 0)) then
    return 0;
  end if;
  -- What was only a pause, without a limit, needs no lanes once it is over.
  perform _rs_resume(limits.name) from _rs_limits as limits where limits.paused_until <= now();
  for limited in
    select limits.id, limits.task_id from _rs_limits as limits where limits.task_id is not null and not limits.is_dropped
  loop
    exit when moved >= at_most;
    -- Jobs that were added before the limit was set.
    update _private_jobs as jobs set job_queue_id = _rs_lane_of_task(limited.task_id)
    where jobs.id = any (array(
      select strays.id from _private_jobs as strays
      where strays.is_available = true and (strays.job_queue_id is null)::int = 1 and strays.task_id = limited.task_id
      limit at_most - moved
      for update skip locked
    ));
    get diagnostics written = row_count;
    if written > 0 then
      moved := moved + written;
      insert into _rs_lane_calls (lane_id) select id from _rs_lanes where task_id = limited.task_id;
    end if;
    -- Serial queues with jobs of the task.
    perform _rs_lane_of_queue(job_queues.queue_name)
    from (
      select distinct jobs.job_queue_id as id from _private_jobs as jobs
      where jobs.is_available = true and (jobs.job_queue_id > 0)::int = 1 and jobs.task_id = limited.task_id
    ) as used
    join _private_job_queues as job_queues on job_queues.id = used.id
    where job_queues.id not in (select old_queue_id from _rs_lanes where old_queue_id is not null)
    limit 1000;
    get diagnostics written = row_count;
    moved := moved + written;
  end loop;
  if moved < at_most and exists (select from _rs_limits where name like 'queue:%') then
    perform _rs_lane_of_queue(limited_queues.queue_name)
    from (
      select job_queues.queue_name from _private_job_queues as job_queues
      where _rs_limit_of_queue(job_queues.queue_name) is not null
        and job_queues.id not in (select old_queue_id from _rs_lanes where old_queue_id is not null)
      limit 1000
    ) as limited_queues;
    get diagnostics written = row_count;
    moved := moved + written;
  end if;
  for lane in select * from _rs_lanes where old_queue_id is not null limit 1000 for no key update skip locked loop
    if _rs_drain_old_queue(lane.id, lane.old_queue_id, lane.queue_name) then
      moved := moved + 1;
    end if;
  end loop;
  -- Lanes that no limit needs any more.
  for lane in
    select lanes.* from _rs_lanes as lanes
    where lanes.old_queue_id is null
      and case
        when lanes.task_id is not null then
          not exists (select from _rs_limits as limits where limits.task_id = lanes.task_id and not limits.is_dropped)
        else
          lanes.limit_id is null
          and not exists (select from _rs_limits as limits where limits.task_id is not null and not limits.is_dropped)
      end
    limit 1000 for update skip locked
  loop
    exit when moved >= at_most;
    moved := moved + _rs_dissolve_lane(lane.id, lane.task_id, lane.queue_name, at_most - moved);
  end loop;
  return moved;
end
$$;

-- Lets a lane begin once the queue that it replaces is empty. Jobs that were claimed from that queue and are available again
-- go into the lane. The caller has locked the lane.
create or replace function :"schema"._rs_drain_old_queue(lane int, queue int, name text)
returns boolean language plpgsql as $$
begin
  update _private_jobs as jobs set job_queue_id = lane where jobs.is_available = true and jobs.job_queue_id = queue;
  if exists (select from _private_job_queues where id = queue and locked_at is not null)
    -- A session that has read the old row may still add a job.
    or not pg_try_advisory_xact_lock('_private_jobs'::regclass::oid::int, _rs_name_bucket('queue', name))
    or exists (select from _private_jobs as jobs where jobs.is_available = true and jobs.job_queue_id = queue)
  then
    return false;
  end if;
  -- Failed jobs may be retried later.
  update _private_jobs as jobs set job_queue_id = lane where jobs.job_queue_id = queue;
  perform set_config('graphile_worker.names_are_unused', 'on', true);
  delete from _private_job_queues where id = queue;
  perform set_config('graphile_worker.names_are_unused', '', true);
  update _rs_lanes set old_queue_id = null where id = lane;
  insert into _rs_lane_calls (lane_id) values (lane);
  perform _rs_notify_jobs(1);
  return true;
end
$$;

-- Moves the jobs of a lane back to where jobs without a limit are, and deletes it once it is empty. Returns how much it did. The
-- caller has locked the lane.
create or replace function :"schema"._rs_dissolve_lane(lane int, task int, name text, at_most bigint)
returns bigint language plpgsql as $$
declare
  queue int;
  moved bigint := 0;
begin
  -- A session that has read the lane may still add a job.
  if not pg_try_advisory_xact_lock(
    '_private_jobs'::regclass::oid::int,
    case
      when task is null then _rs_name_bucket('queue', name)
      else _rs_name_bucket('task', (select identifier from _private_tasks where id = task))
    end
  ) then
    return 0;
  end if;
  if name is not null then
    -- The queue is serial again: it begins when nothing of the lane runs.
    if exists (
      select from _private_jobs as jobs where jobs.locked_at is not null and jobs.job_queue_id < 0 and jobs.job_queue_id = lane
    ) then
      return 0;
    end if;
    insert into _private_job_queues (queue_name) values (name) on conflict do nothing;
    select id into queue from _private_job_queues where queue_name = name;
    at_most := null;
  end if;
  update _private_jobs as jobs set job_queue_id = queue
  where jobs.id = any (array(
    select waiting.id from _private_jobs as waiting
    where waiting.is_available = true and waiting.job_queue_id = lane
    order by waiting.priority, waiting.run_at, waiting.id
    limit at_most
  ));
  get diagnostics moved = row_count;
  if not exists (select from _private_jobs as jobs where jobs.is_available = true and jobs.job_queue_id = lane)
    and not exists (
      select from _private_jobs as jobs where jobs.locked_at is not null and jobs.job_queue_id < 0 and jobs.job_queue_id = lane
    )
  then
    -- Failed jobs may be retried later.
    update _private_jobs as jobs set job_queue_id = queue where jobs.job_queue_id = lane;
    delete from _rs_lane_calls where lane_id = lane;
    delete from _rs_lanes where id = lane;
    delete from _rs_limits where task_id = task and is_dropped;
    moved := moved + 1;
    perform _rs_notify_limits();
  end if;
  if moved > 0 then
    perform _rs_notify_jobs(moved);
  end if;
  return moved;
end
$$;


-- How many more jobs a limit allows now, and if none, when that changes with time.
create or replace function :"schema"._rs_room(
  concurrency int, in_use bigint, rate int, per interval, burst int, tat timestamptz, paused_until timestamptz
) returns table (n int, next_at timestamptz) language sql stable rows 1 as $$
  select
    least(room.slots, room.tokens, case when room.is_paused then 0::float8 else 2147483647::float8 end)::int,
    case
      when room.is_paused then nullif(room.paused_until, 'infinity'::timestamptz)
      when room.tokens = 0::float8 then room.tat - room.tolerance
    end
  from (
    select
      $7 > now() as is_paused,
      $7 as paused_until,
      $6 as tat,
      rates.tolerance,
      case when $1 is not null then greatest($1::float8 - coalesce($2, 0)::float8, 0::float8) end as slots,
      case
        when rates.step is not null then greatest(
          floor(
            extract(epoch from now() + rates.tolerance - greatest($6, now()))::float8 / extract(epoch from rates.step)::float8
          ) + 1::float8,
          0::float8
        )
      end as tokens
    from (
      select $4 / $3::float8 as step, ($4 / $3::float8) * $5::float8 as tolerance
    ) as rates
  ) as room
$$;

-- Reports the jobs of lanes that have ended: the same rules as in exchange.sql, which explains them. Returns the lanes in which
-- jobs have ended, the jobs that other transactions have locked, and those that the worker no longer holds.
create or replace function :"schema"._rs_report_of_lanes(
  worker text, done_ids bigint[], done_at timestamptz[],
  back_ids bigint[], back_at timestamptz[], errors text[], seconds float8[], run_ats timestamptz[], attempts_by int[],
  payloads text[], keys text[], attempts_before_claim int[], local_time timestamptz
) returns table (ended_lanes int[], blocked_jobs bigint[], rejected_jobs bigint[]) language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  done_now bigint[];
  back_now bigint[];
begin
  if cardinality(done_ids) + cardinality(back_ids) = 0 then
    return query select '{}'::int[], '{}'::bigint[], '{}'::bigint[];
    return;
  end if;
  with done as materialized (
    select jobs.id, jobs.job_queue_id
    from unnest(done_ids, done_at) as outcome (id, locked_at)
    join _private_jobs as jobs on jobs.id = any (array[outcome.id])
    where jobs.locked_by = worker and _rs_is_same_claim(jobs.locked_at, outcome.locked_at)
    for update of jobs skip locked
  ), finished as (
    delete from _private_jobs as jobs where jobs.id = any (array(select id from done))
  )
  select array_agg(id), coalesce(array_agg(distinct job_queue_id), '{}') into done_now, ended_lanes from done;
  if cardinality(back_ids) > 0 then
    with back as materialized (
      select
        jobs.id, outcome.error, outcome.seconds, outcome.run_at, outcome.attempts, outcome.payload, outcome.key,
        outcome.attempts_before, jobs.job_queue_id, _rs_is_removed(jobs.locked_at, jobs.run_at) as is_removed,
        _rs_is_cancelled(jobs.locked_at, jobs.run_at, jobs.last_error) as is_cancelled
      from unnest(
        back_ids, back_at, errors, seconds, run_ats, attempts_by, payloads, keys, attempts_before_claim
      ) as outcome (id, locked_at, error, seconds, run_at, attempts, payload, key, attempts_before)
      join _private_jobs as jobs on jobs.id = any (array[outcome.id])
      where jobs.locked_by = worker and _rs_is_same_claim(jobs.locked_at, outcome.locked_at)
      for update of jobs skip locked
    ), withdrawn as (
      delete from _private_jobs as jobs
      using back
      where jobs.id = any (array[back.id]) and back.is_removed and not back.is_cancelled and back.attempts_before is not null
    ), unlocked as (
      update _private_jobs as jobs
      set
        locked_at = null,
        locked_by = null,
        last_error = case when back.is_cancelled then jobs.last_error else coalesce(back.error, jobs.last_error) end,
        run_at = case
          when back.is_cancelled then coalesce(local_time, now())
          when back.attempts_before is not null then jobs.run_at
          else coalesce(
            back.run_at,
            greatest(coalesce(local_time, now()), case when not back.is_removed then jobs.run_at end)
              + coalesce(back.seconds, exp(least(jobs.attempts, 10)::float8)) * interval '1 second'
          )
        end,
        attempts = case
          when back.is_cancelled then jobs.max_attempts
          when back.attempts_before is not null then back.attempts_before
          when back.attempts = -1 and not back.is_removed and jobs.key is not distinct from back.key
            then greatest(jobs.attempts - 1, 0)
          when back.attempts = 1 then jobs.max_attempts
          else jobs.attempts
        end,
        payload = coalesce(back.payload::json, jobs.payload),
        updated_at = now()
      from back
      where jobs.id = any (array[back.id]) and (back.is_cancelled or not (back.is_removed and back.attempts_before is not null))
    )
    select array_agg(id), ended_lanes || coalesce(array_agg(distinct job_queue_id), '{}') into back_now, ended_lanes from back;
  end if;
  blocked_jobs := '{}';
  rejected_jobs := '{}';
  if coalesce(cardinality(done_now), 0) + coalesce(cardinality(back_now), 0) < cardinality(done_ids) + cardinality(back_ids) then
    select
      coalesce(array_agg(outcome.id) filter (where jobs.id is not null), '{}'),
      coalesce(array_agg(outcome.id) filter (where jobs.id is null), '{}')
    into blocked_jobs, rejected_jobs
    from unnest(done_ids || back_ids, done_at || back_at) as outcome (id, locked_at)
    left join _private_jobs as jobs
      on jobs.id = any (array[outcome.id]) and jobs.locked_by = worker and _rs_is_same_claim(jobs.locked_at, outcome.locked_at)
    where outcome.id <> all (coalesce(done_now, '{}')) and outcome.id <> all (coalesce(back_now, '{}'));
  end if;
  return next;
end
$$;

-- Whether a lock is that of a claim: its time, or whole hours later, as `keep_locks_fresh.sql` leaves it.
create or replace function :"schema"._rs_is_same_claim(locked_at timestamptz, claimed_at timestamptz)
returns boolean language sql immutable as $$
  select locked_at = claimed_at or case
    when isfinite(locked_at) then extract(epoch from locked_at - claimed_at)::numeric % 3600::numeric = 0::numeric
  end
$$;

-- Claims jobs from lanes, after the report of the same exchange. The statements of this function have a snapshot each, and that
-- is why the limits are exact: the row of a lane, and that of each limit that several lanes share, is locked first, and only then
-- the claimed jobs are counted. Every other claim under these limits has either committed, and is counted, or not begun.
-- What it counts can only become less meanwhile. Nothing is stored that could drift.
--
-- Locks: rows of `_rs_lanes`, then of `_rs_limits`, then of jobs, all with `skip locked`: it waits for no other session. A lane or a limit
-- that another claim has locked is left out (`contended`).
--
-- Which lanes: those in which jobs have ended, those that were called, those whose time has come, those that wait for a limit
-- that has room again, and the open ones in the order of their turns. No lane that is full, paused, empty or out of tokens is
-- read. Between lanes, the jobs are taken by turn: each advances its lane's turn by the mean time of a job of the lane, divided by its
-- weight, so lanes share the time of the workers. A lane that wakes up begins at the turn of the others.
--
-- `task_rooms` is how many more jobs of each task the worker may take, null for any number. `run_lanes` and `run_ms` say how
-- long the reported jobs took. Returns the claimed jobs, and one last row without an id: the time of the claim, whether it was
-- contended, and when it has to be repeated although nothing happens.
create or replace function :"schema"._rs_claim_from_lanes(
  worker text, ended_lanes int[], run_lanes int[], run_ms float8[], task_ids int[], task_rooms int[], wanted int,
  forbidden text[], accepted text[], allowed jsonb, local_time timestamptz, freshness float8, max_bytes int
) returns table (
  id bigint, job_queue_id int, task_id int, payload text, priority smallint, run_at timestamptz, attempts smallint,
  max_attempts smallint, last_error text, created_at timestamptz, updated_at timestamptz, key text,
  locked_at timestamptz, revision int, flags jsonb, clock timestamptz, contended boolean, next_at timestamptz
) language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
-- The rows of one lane are joined with those of another CTE: a thousand lanes by a thousand. Without statistics, the planner
-- takes that for one by one. (Rows of tables are found by `id = any (array[…])`, as in exchange.sql.)
set enable_hashjoin = on
set enable_nestloop = off
as $$
#variable_conflict use_column
declare
  at_time timestamptz := coalesce(local_time, now());
  tried int[];
  won int[] := '{}';
  needed int[];
  shared int[];
  waited_at timestamptz;
  share int;
begin
  if wanted <= 0 then
    if cardinality(ended_lanes) > 0 then
      perform _rs_call_lanes(ended_lanes);
      perform _rs_notify_jobs(1);
    end if;
    return query select
      null::bigint, null::int, null::int, null::text, null::smallint, null::timestamptz, null::smallint, null::smallint, null::text,
      null::timestamptz, null::timestamptz, null::text, null::timestamptz, null::int, null::jsonb, at_time, false, null::timestamptz;
    return;
  end if;
  -- The limits for which lanes wait: those that have room again.
  with recursive waited as (
    (select waits_for from _rs_lanes where waits_for is not null order by waits_for limit 1)
    union all
    select (
      select lanes.waits_for from _rs_lanes as lanes
      where lanes.waits_for > known.waits_for order by lanes.waits_for limit 1
    )
    from waited as known where known.waits_for is not null
  ), in_use as materialized (
    select lane_id, task_id, jobs from (
      select job_queue_id as lane_id, task_id, count(*) as jobs
      from _private_jobs where locked_at is not null and job_queue_id < 0 group by job_queue_id, task_id
    ) as counted
    where exists (select from waited where waits_for is not null)
  ), groups_in_use as (
    select limits.group_id, sum(limits.cost * in_use.jobs) as jobs
    from in_use
    left join _rs_lanes as lanes on lanes.id = any (array[in_use.lane_id])
    join _rs_limits as limits on limits.id = any (array[lanes.limit_id]) or limits.task_id = any (array[in_use.task_id])
    where limits.group_id is not null
    group by limits.group_id
  ), rooms as materialized (
    select limits.id, room.n, room.next_at
    from waited
    join _rs_limits as limits on limits.id = any (array[waited.waits_for])
    cross join lateral _rs_room(
      limits.concurrency,
      case
        when limits.task_id is not null then (select sum(jobs) from in_use where in_use.task_id = limits.task_id)
        else (select jobs from groups_in_use where groups_in_use.group_id = limits.id)
      end::bigint,
      limits.rate, limits.per, limits.burst, limits.tat, limits.paused_until
    ) as room
  ), called as (
    (select lane_id, 1 as n from _rs_lane_calls order by lane_id limit 1)
    union all
    select (
      select calls.lane_id from _rs_lane_calls as calls
      where calls.lane_id > known.lane_id order by calls.lane_id limit 1
    ), known.n + 1
    from called as known where known.lane_id is not null and known.n < 100 + wanted
  )
  select
    array(
      select lane_id from unnest(ended_lanes) as lane_id
      union
      select lane_id from called where lane_id is not null
      union
      select id from (
        select lanes.id from _rs_lanes as lanes
        where lanes.ready_at > '-infinity' and lanes.ready_at < 'infinity' and lanes.ready_at <= at_time
        order by lanes.ready_at limit 100 + wanted
      ) as due
      union
      select waiting.id from rooms, lateral (
        select lanes.id from _rs_lanes as lanes where lanes.waits_for = rooms.id order by lanes.turn
        limit least(rooms.n, 100 + wanted)
      ) as waiting
    ) || array(
      select lanes.id from _rs_lanes as lanes
      where lanes.ready_at = '-infinity' and (lanes.task_id is null or lanes.task_id = any (task_ids))
      order by lanes.turn limit 100 + 2 * wanted
    ),
    (select min(rooms.next_at) from rooms)
  into tried, waited_at;

  if cardinality(tried) > 0 then
    -- Only the session that has locked the row of a lane claims from it. What the next statements read is therefore current.
    won := array(
      select lanes.id from unnest(tried) as lane_id join _rs_lanes as lanes on lanes.id = any (array[lane_id])
      limit 20 + greatest(wanted, cardinality(ended_lanes))
      for no key update of lanes skip locked
    );
  end if;
  if not ended_lanes <@ won then
    -- Another claim has locked it, and may not see that jobs have ended.
    perform _rs_call_lanes(array(select lane_id from unnest(ended_lanes) as lane_id where lane_id <> all (won)));
  end if;
  if cardinality(won) > 0 then
    delete from _rs_lane_calls where lane_id = any (won);
    -- How many jobs it reads of each lane. If the others have fewer, it claims again.
    share := least(wanted, greatest(20, 2 * wanted / cardinality(won)));
    -- The limits that several lanes share.
    select array_agg(distinct limits.id) into needed
    from (
      select lanes.task_id, lanes.limit_id from _rs_lanes as lanes where lanes.id = any (won)
      union
      select jobs.task_id, null
      from _rs_lanes as lanes, lateral (
        select jobs.task_id from _private_jobs as jobs
        where jobs.is_available = true and jobs.job_queue_id = lanes.id
        order by jobs.priority, jobs.run_at, jobs.id limit least(wanted, 20)
      ) as jobs
      where lanes.id = any (won) and lanes.task_id is null and exists (select from _rs_limits where task_id is not null)
    ) as needs
    join _rs_limits as own on own.task_id = needs.task_id or own.id = needs.limit_id
    cross join lateral (
      select own.id where own.task_id is not null union all select own.group_id where own.group_id is not null
    ) as limits;
    shared := array(
      select limits.id from _rs_limits as limits where limits.id = any (needed) order by limits.id
      for no key update skip locked
    );
    return query
      with recursive in_use as materialized (
        select job_queue_id as lane_id, task_id, count(*) as jobs
        from _private_jobs where locked_at is not null and job_queue_id < 0 group by job_queue_id, task_id
      ), lanes_in_use as materialized (
        select lane_id, sum(jobs)::bigint as jobs from in_use group by lane_id
      ), groups_in_use as materialized (
        select limits.group_id, sum(limits.cost * in_use.jobs)::bigint as jobs
        from in_use
        left join _rs_lanes as lanes on lanes.id = any (array[in_use.lane_id])
        join _rs_limits as limits on limits.id = any (array[lanes.limit_id]) or limits.task_id = any (array[in_use.task_id])
        where limits.group_id is not null and exists (select from _rs_limits as any_limit where any_limit.group_id is not null)
        group by limits.group_id
      ), shared_rooms as materialized (
        select limits.id, limits.task_id, limits.group_id, limits.cost, limits.rate, limits.per, limits.burst, limits.tat, room.n, room.next_at
        from _rs_limits as limits
        cross join lateral _rs_room(
          limits.concurrency,
          case
            when limits.task_id is not null then (select sum(jobs) from in_use where in_use.task_id = limits.task_id)
            else (select jobs from groups_in_use where groups_in_use.group_id = limits.id)
          end::bigint,
          limits.rate, limits.per, limits.burst, limits.tat, limits.paused_until
        ) as room
        where limits.id = any (shared)
      ), base as (
        select coalesce((select turn from _rs_lanes where ready_at = '-infinity' order by turn limit 1), 0) as turn
      ), own as materialized (
        select
          lanes.id, lanes.task_id, lanes.tat, lanes.ready_at, lanes.waits_for,
          coalesce(0.8 * lanes.mean_ms + 0.2 * runs.ms, lanes.mean_ms) as mean_ms, greatest(lanes.turn, base.turn) as turn,
          limits.group_id, limits.cost, limits.rate, limits.per, limits.burst, coalesce(limits.weight, 1) as weight,
          case when lanes.old_queue_id is not null then 0 else least(room.n, share, shared_rooms.n) end as n,
          case when lanes.old_queue_id is not null then at_time + interval '100 milliseconds' else room.next_at end as next_at
        from base cross join _rs_lanes as lanes
        left join _rs_limits as limits on limits.id = any (array[lanes.limit_id])
        left join shared_rooms on shared_rooms.task_id = lanes.task_id
        left join lanes_in_use on lanes_in_use.lane_id = lanes.id
        left join (
          select run.lane_id, avg(run.ms) as ms from unnest(run_lanes, run_ms) as run (lane_id, ms) group by run.lane_id
        ) as runs on runs.lane_id = lanes.id
        cross join lateral _rs_room(
          case when lanes.task_id is null then coalesce(limits.concurrency, 1) end, coalesce(lanes_in_use.jobs, 0),
          limits.rate, limits.per, limits.burst, lanes.tat, limits.paused_until
        ) as room
        -- The second condition always holds, and the planner takes it for one that few rows meet. With the product of many
        -- unknown numbers, it would expect billions of rows, and prepare each join by hash for that.
        where lanes.id = any (won) and nullif(lanes.id, lanes.id) is null
      ), priorities as (
        select own.id as lane_id, own.n, first.priority, first.run_at
        from own, lateral (
          select jobs.priority, jobs.run_at from _private_jobs as jobs
          where jobs.is_available = true and jobs.job_queue_id = own.id
          order by jobs.priority, jobs.run_at, jobs.id limit 1
        ) as first
        union all
        select known.lane_id, known.n, next.priority, next.run_at
        from priorities as known, lateral (
          select jobs.priority, jobs.run_at from _private_jobs as jobs
          where jobs.is_available = true and jobs.job_queue_id = known.lane_id and jobs.priority > known.priority
          order by jobs.priority, jobs.run_at, jobs.id limit 1
        ) as next
      ), waiting as materialized (
        select
          known.lane_id, bool_or(known.run_at <= at_time) as is_due,
          min(case when known.run_at > at_time then known.run_at else later.run_at end) as next_run_at
        from priorities as known
        left join lateral (
          select jobs.run_at from _private_jobs as jobs
          where known.run_at <= at_time
            and jobs.is_available = true and jobs.job_queue_id = known.lane_id and jobs.priority = known.priority
            and jobs.run_at > at_time
          order by jobs.run_at, jobs.id limit 1
        ) as later on true
        group by known.lane_id
      ), due as materialized (
        select
          known.lane_id, known.n, jobs.*,
          row_number() over (partition by known.lane_id order by jobs.priority, jobs.run_at, jobs.id) as nth
        from priorities as known, lateral (
          select jobs.id, jobs.task_id, jobs.priority, jobs.run_at
          from _private_jobs as jobs
          where jobs.is_available = true
            and jobs.job_queue_id = known.lane_id
            and jobs.priority = known.priority
            and jobs.run_at <= at_time
            and jobs.task_id = any (task_ids)
            and (forbidden is null or (jobs.flags ?| forbidden) is not true)
            and case when accepted is not null then jobs.flags ?| accepted else true end
            and case when allowed is not null then (jobs.flags <@ allowed) is not false else true end
          order by jobs.run_at, jobs.id
          limit case when known.n > 0 then known.n + 1 else 0 end
        ) as jobs
        where nullif(known.lane_id, known.lane_id) is null
      ), candidates as materialized (
        select
          due.id, due.lane_id, due.priority, due.run_at, due.nth, due.task_id,
          own.turn + (due.nth - 1) * own.mean_ms / own.weight as turn,
          task_limits.id as task_limit, case when task_limits.id is not null then coalesce(task_rooms.n, 0) end as task_room,
          own.group_id as queue_group, case when own.group_id is not null then coalesce(queue_groups.n, 0) end as queue_group_room,
          coalesce(own.cost, 0) + case when task_limits.group_id = own.group_id then task_limits.cost else 0 end as queue_cost,
          nullif(task_limits.group_id, own.group_id) as task_group,
          case when nullif(task_limits.group_id, own.group_id) is not null then coalesce(task_groups.n, 0) end as task_group_room,
          task_limits.cost as task_cost
        from due
        join own on own.id = due.lane_id
        left join _rs_limits as task_limits on task_limits.task_id = any (array[due.task_id])
        left join shared_rooms as task_rooms on task_rooms.id = task_limits.id
        left join shared_rooms as queue_groups on queue_groups.id = own.group_id
        left join shared_rooms as task_groups on task_groups.id = task_limits.group_id
        where due.nth <= due.n
      ), within_tasks as (
        select *, row_number() over (partition by task_limit, task_id order by turn, priority, run_at, id) as nth_of_task
        from candidates
      ), within_queue_groups as (
        select *, sum(queue_cost) over (partition by queue_group order by turn, priority, run_at, id rows unbounded preceding) as queue_group_use
        from within_tasks
        where (task_limit is null or nth_of_task <= task_room)
          and nth_of_task <= coalesce(task_rooms[pg_catalog.array_position(task_ids, task_id)], 2147483647)
      ), within_task_groups as (
        select *, sum(task_cost) over (partition by task_group order by turn, priority, run_at, id rows unbounded preceding) as task_group_use
        from within_queue_groups
        where queue_group is null or queue_group_use <= queue_group_room
      ), allowed_jobs as materialized (
        select * from within_task_groups
        where task_group is null or task_group_use <= task_group_room
        order by turn, priority, run_at, id limit wanted
      ), sized as (
        select allowed_jobs.id, allowed_jobs.lane_id, size.size,
          sum(size.size) over (order by allowed_jobs.turn, allowed_jobs.priority, allowed_jobs.run_at, allowed_jobs.id rows unbounded preceding) as stored
        from allowed_jobs cross join lateral (
          select case
            when pg_catalog.pg_column_size(jobs.payload) < 400 then pg_catalog.pg_column_size(jobs.payload)
            else octet_length(jobs.payload::text)
          end as size
          from _private_jobs as jobs where jobs.id = allowed_jobs.id
          for update skip locked
        ) as size
      ), alive as (
        select workers.worker_id from _rs_workers as workers
        where workers.worker_id = worker and workers.last_heartbeat_at > now() - make_interval(secs => freshness)
        for key share skip locked
      ), chosen as materialized (
        select id, lane_id from sized
        where stored - size < max_bytes and (freshness is null or exists (select from alive))
      ), claimed as (
        update _private_jobs as jobs
        set locked_at = now(), locked_by = worker, attempts = jobs.attempts + 1
        where jobs.id = any (array(select id from chosen))
        returning
          jobs.id, jobs.job_queue_id, jobs.task_id, jobs.payload::text as payload, jobs.priority, jobs.run_at, jobs.attempts, jobs.max_attempts,
          jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key, jobs.locked_at, jobs.revision, jobs.flags
      ), due_counts as materialized (
        select lane_id, count(*) as jobs from due group by lane_id
      ), taken as materialized (
        select lane_id, count(*)::int as jobs from chosen group by lane_id
      ),
      -- Why the first job of a lane that could not be taken has to wait.
      stopped as materialized (
        select distinct on (c.lane_id)
          c.lane_id,
          case
            when c.task_limit is not null and t.nth_of_task > c.task_room then c.task_limit
            when c.queue_group is not null and not exists (select from within_task_groups as w where w.id = c.id) then c.queue_group
            when c.task_group is not null then c.task_group
          end as limit_id
        from candidates as c join within_tasks as t on t.id = c.id
        where not exists (select from allowed_jobs as a where a.id = c.id)
        order by c.lane_id, c.nth
      ), states as materialized (
        select
          own.id,
          case when taken.jobs > 0 and own.rate is not null and own.task_id is null
            then greatest(own.tat, now()) + taken.jobs * (own.per / own.rate) else own.tat end as tat,
          own.turn + coalesce(taken.jobs, 0) * own.mean_ms / own.weight as turn,
          own.mean_ms,
          case
            when own.task_id is not null and own.n <= 0 and not exists (select from shared_rooms where shared_rooms.task_id = own.task_id) then '-infinity'
            when own.task_id is not null and own.n <= 0 then 'infinity'
            when own.n <= 0 then coalesce(own.next_at, 'infinity')
            when coalesce(taken.jobs, 0) >= own.n and own.n < share and own.task_id is not null then 'infinity'
            when coalesce(taken.jobs, 0) >= own.n and own.n < share then
              case when own.rate is not null and own.task_id is null
                then greatest(own.tat, now()) + (taken.jobs - own.burst) * (own.per / own.rate) else 'infinity' end
            when coalesce(taken.jobs, 0) < coalesce(due_counts.jobs, 0) then
              case when stopped.limit_id = any (shared) then 'infinity' else '-infinity' end::timestamptz
            when waiting.is_due and coalesce(taken.jobs, 0) = 0 then '-infinity'
            else coalesce(waiting.next_run_at, 'infinity')
          end as ready_at,
          case
            when own.task_id is not null and (own.n <= 0 or coalesce(taken.jobs, 0) >= own.n and own.n < share) then
              (select shared_rooms.id from shared_rooms where shared_rooms.task_id = own.task_id)
            when own.n > 0 and coalesce(taken.jobs, 0) < coalesce(due_counts.jobs, 0) and stopped.limit_id = any (shared) then stopped.limit_id
          end as waits_for
        from own
        left join taken on taken.lane_id = own.id
        left join due_counts on due_counts.lane_id = own.id
        left join waiting on waiting.lane_id = own.id
        left join stopped on stopped.lane_id = own.id
      ), written as (
        update _rs_lanes as lanes
        set tat = states.tat, turn = states.turn, mean_ms = states.mean_ms, ready_at = states.ready_at, waits_for = states.waits_for
        from states where lanes.id = any (array[states.id])
          and (lanes.tat, lanes.turn, lanes.ready_at, lanes.waits_for) is distinct from (states.tat, states.turn, states.ready_at, states.waits_for)
      ), used as (
        select limit_id, sum(cost) as cost from (
          select c.task_limit as limit_id, 1 as cost from chosen join candidates as c on c.id = chosen.id
          union all select c.queue_group, c.queue_cost from chosen join candidates as c on c.id = chosen.id
          union all select c.task_group, c.task_cost from chosen join candidates as c on c.id = chosen.id
        ) as costs where limit_id is not null group by limit_id
      ), rated as (
        update _rs_limits as limits
        set tat = greatest(limits.tat, now()) + used.cost * (limits.per / limits.rate)
        from used where limits.id = any (array[used.limit_id]) and limits.rate is not null
      ),
      -- Lanes that have become open and that this worker leaves to others: jobs of tasks that it does not run.
      for_others as (
        select from states
        join own on own.id = states.id
        left join taken on taken.lane_id = states.id
        where states.ready_at = '-infinity' and own.ready_at <> '-infinity' and taken.lane_id is null
        limit 1
      )
      select claimed.*, null::timestamptz, null::boolean, null::timestamptz from claimed
      union all
      select
        null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, at_time,
        cardinality(won) < cardinality(tried) or cardinality(shared) < coalesce(cardinality(needed), 0)
          or (select count(*) from chosen) < (select count(*) from allowed_jobs),
        least(
          waited_at,
          case when (select count(*) from chosen) between 1 and wanted - 1 then (select at_time from states where states.ready_at = '-infinity' limit 1) end,
          (select min(states.ready_at) from states where states.ready_at > '-infinity' and states.ready_at < 'infinity'),
          (select min(shared_rooms.next_at) from shared_rooms),
          (
            select lanes.ready_at from _rs_lanes as lanes
            where lanes.ready_at > '-infinity' and lanes.ready_at < 'infinity' and lanes.id <> all (won)
            order by lanes.ready_at limit 1
          )
        )
      from (values (1)) as one (n)
      left join lateral (select _rs_notify_jobs(1) from (select n from for_others) as any_lane) as notified on true;
  else
    return query select
      null::bigint, null::int, null::int, null::text, null::smallint, null::timestamptz, null::smallint, null::smallint, null::text,
      null::timestamptz, null::timestamptz, null::text, null::timestamptz, null::int, null::jsonb, at_time,
      cardinality(tried) > 0,
      least(waited_at, (
        select lanes.ready_at from _rs_lanes as lanes
        where lanes.ready_at > '-infinity' and lanes.ready_at < 'infinity' order by lanes.ready_at limit 1
      ));
  end if;
end
$$;
