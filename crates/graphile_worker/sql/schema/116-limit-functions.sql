-- Limits: setting and dropping them, pausing, and putting jobs into lanes. Claiming from lanes: see
-- 117-limited-exchange-functions.sql. What a lane is: see 183-limits.sql. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Returns what is wrong with the settings of a limit as 'CODE message', or null.
create or replace function :"schema"._rs_limit_problem(
  name text, concurrency int, rate int, per interval, burst int, weight float8, cost int, group_name text, trip int, trip_for interval
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
    when trip < 1 then format('GWBLI Trip must be at least 1 failure, got %s.', trip)
    when trip is not null and trip_for is null then
      format('GWBLI Trip %s needs a pause: for how long no job starts after it, for example 1 minute.', trip)
    when trip is null and trip_for is not null then
      format('GWBLI Pause %s needs a trip: the number of failures in a row after which it begins.', trip_for)
    when trip_for <= '0' then format('GWBLI Pause after a trip must be longer than 0, got %s.', trip_for)
    when trip_for > '366 days' then format('GWBLI Pause after a trip must be at most 366 days, got %s.', trip_for)
    when concurrency is null and rate is null and group_name is null and weight is null and trip is null then
      format('GWBLI Limit %s needs a concurrency, a rate, a group, a weight or a breaker.', name)
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
  insert into _rs_lanes (queue_name, limit_id, is_new) values (name, _rs_limit_of_queue(name), true)
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
  group_name text default null,
  trip int default null,
  trip_for interval default null
) returns :"schema"._rs_limits language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
#variable_conflict use_variable
declare
  problem text := _rs_limit_problem(name, concurrency, rate, per, burst, weight, cost, group_name, trip, trip_for);
  of_task int;
  of_group int;
  in_group _rs_limits;
  member _rs_limits;
  is_held boolean;
  before _rs_limits;
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
  select * into before from _rs_limits as limits where limits.name = name for update;
  insert into _rs_limits as limits (name, task_id, prefix, concurrency, rate, per, burst, weight, cost, group_id, trip, trip_for)
  values (
    name, of_task, case when name ~ '^queue:.*\*$' then substr(name, 7, length(name) - 7) end,
    concurrency, rate, per, coalesce(burst, 1), coalesce(weight, 1), coalesce(cost, 1), of_group,
    trip, trip_for
  )
  on conflict on constraint _rs_limits_name_key do update set
    task_id = excluded.task_id, concurrency = excluded.concurrency, rate = excluded.rate, per = excluded.per,
    burst = excluded.burst, weight = excluded.weight, cost = excluded.cost, group_id = excluded.group_id,
    is_dropped = false,
    tat = case when (limits.rate, limits.per) is not distinct from (excluded.rate, excluded.per) then limits.tat end,
    trip = excluded.trip, trip_for = excluded.trip_for
  returning * into written;
  if (before.trip, before.trip_for) is distinct from (written.trip, written.trip_for) then
    -- A breaker with other settings starts from zero.
    perform _rs_open_limit(name, only_breakers => true);
    select * into written from _rs_limits as limits where limits.id = written.id;
  end if;
  perform _rs_apply_limit(written);
  return written;
end
$$;

-- The advisory lock that a transaction holds, shared, while it sets or drops the limit of a queue.
create or replace function :"schema"._rs_lock_of_queue_limits()
returns bigint language sql stable
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select hashtextextended('graphile_worker limits of queues ' || '_rs_lanes'::regclass::oid, 0)
$$;

-- Gives new lanes the limits that they should have, when no running transaction that sets or drops a limit can have missed them.
-- Later transactions see the lanes. Until then, each claim looks up the limit itself. Waits for no other session. Call it last,
-- because sessions that set limits of queues wait until the transaction ends.
create or replace function :"schema"._rs_check_new_lanes()
returns void language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  if not exists (select from _rs_lanes where is_new) or not pg_try_advisory_xact_lock(_rs_lock_of_queue_limits()) then
    return;
  end if;
  with unchecked as materialized (
    select lanes.id, lanes.limit_id, _rs_limit_of_queue(lanes.queue_name) as expected_id
    from _rs_lanes as lanes where lanes.is_new limit 1000 for no key update skip locked
  ), checked as (
    update _rs_lanes as lanes set limit_id = unchecked.expected_id, is_new = false
    from unchecked where lanes.id = unchecked.id
  )
  insert into _rs_lane_calls (lane_id) select id from unchecked where limit_id is distinct from expected_id;
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
    -- A lane that another transaction is creating is not visible here. `_rs_check_new_lanes` checks it when both have ended.
    perform pg_advisory_xact_lock_shared(_rs_lock_of_queue_limits());
    update _rs_lanes as lanes set
      limit_id = _rs_limit_of_queue(lanes.queue_name), failures = 0, tripped_at = null, counted_from = now(),
      closed_until = case when lanes.tripped_at is null then lanes.closed_until end
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
      paused_until = null, paused_at = null, paused_by = null,
      trip = null, trip_for = null, closed_until = null, failures = 0, tripped_at = null
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
  problem text := case when name is distinct from 'all' then _rs_limit_problem(name, 1, null, null, null, null, null, null, null, null) end;
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

-- Lets jobs start again: ends a pause, reopens a closed limit, and resets a tripped breaker. False if there is none with that name.
-- Drops a row that was only a pause, without a limit.
create or replace function :"schema"._rs_resume(name text default 'all')
returns boolean language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  was_closed boolean := _rs_open_limit(name);
  was_paused boolean := _rs_end_pause(name);
begin
  return was_closed or was_paused;
end
$$;

-- Reopens a closed limit and its closed queues, and resets their breakers; with `only_breakers`, only those whose breakers have
-- counted failures. False if there are none.
create or replace function :"schema"._rs_open_limit(name text, only_breakers boolean default false)
returns boolean language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
#variable_conflict use_variable
declare
  opened_lanes int[];
  is_opened boolean;
begin
  update _rs_limits as limits set closed_until = null, failures = 0, tripped_at = null, counted_from = now()
  where limits.name = name and not limits.is_dropped
    and (limits.tripped_at is not null or limits.failures > 0 or not only_breakers and limits.closed_until > now());
  is_opened := found;
  if name like 'queue:%' then
    with opened as (
      update _rs_lanes as lanes set closed_until = null, failures = 0, tripped_at = null, counted_from = now()
      where (
          lanes.queue_name = substr(name, 7)
          or lanes.limit_id = (select limits.id from _rs_limits as limits where limits.name = name)
        )
        and (lanes.tripped_at is not null or lanes.failures > 0 or not only_breakers and lanes.closed_until > now())
      returning lanes.id
    )
    select array_agg(opened.id) into opened_lanes from opened;
    perform _rs_call_lanes(opened_lanes);
    is_opened := is_opened or opened_lanes is not null;
  end if;
  if is_opened then
    perform _rs_notify_limits();
    perform _rs_notify_jobs(1);
  end if;
  return is_opened;
end
$$;

-- Ends a pause. False if nothing with that name is paused. Drops a row that was only a pause, without a limit.
create or replace function :"schema"._rs_end_pause(name text)
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
  if (resumed.concurrency, resumed.rate, resumed.group_id, resumed.trip) is not distinct from (null, null, null, null)
    and resumed.weight = 1 and name not like 'group:%'
  then
    perform _rs_drop_limit(name);
  else
    perform _rs_apply_limit(resumed);
  end if;
  return was_paused;
end
$$;

-- Puts waiting jobs where the limits want them, about `at_most`: into lanes, and out of lanes that are no longer needed. Returns
-- how much it did; 0 if nothing is left to do, null if another session is doing it. Workers call it every few seconds; callers that
-- set or drop a limit call it, too. Deletes lanes that have had no jobs for the time `idle`.
create or replace function :"schema"._rs_settle_lanes(at_most int default 10000, idle interval default '1 hour')
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
    return null;
  end if;
  -- What was only a pause, without a limit, needs no lanes once it is over.
  perform _rs_end_pause(limits.name) from _rs_limits as limits where limits.paused_until <= now();
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
  perform _rs_check_new_lanes();
  -- Outcomes that claims have left because another session had locked the lane or the limit, and those of lanes
  -- or limits that no longer exist.
  perform _rs_apply_outcomes();
  delete from _rs_limit_outcomes as outcomes
  where not exists (select from _rs_lanes as lanes where lanes.id = outcomes.lane_id)
    and not exists (select from _rs_limits as limits where limits.id = outcomes.limit_id);
  if moved < at_most then
    moved := moved + _rs_delete_idle_lanes(idle, least(at_most - moved, 1000)::int);
  end if;
  -- Slots of workers that no longer have a job in the lane. At the end, so that no worker waits for these rows.
  delete from _rs_slots as held where (held.lane_id, held.worker_id) = any (array(
    select (unused.lane_id, unused.worker_id) from _rs_slots as unused
    where not exists (
      select from _private_jobs as jobs
      where jobs.locked_at is not null and jobs.job_queue_id < 0
        and jobs.job_queue_id = unused.lane_id and jobs.locked_by = unused.worker_id
    )
    for update skip locked
  ));
  return moved;
end
$$;

-- Deletes lanes of queues that have had no jobs for a long time, so that a pattern over millions of names does not leave a row for
-- each. The next job of such a queue creates a lane again, which begins at the same turn as a lane that wakes up. A lane stays if its
-- rate still counts a start, or if it has failed jobs, which may be run again. Checks `at_most` lanes and returns how many it has
-- deleted. The caller makes sure that only one session does this at a time.
create or replace function :"schema"._rs_delete_idle_lanes(idle interval, at_most int)
returns bigint language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  deleted bigint := 0;
  lane record;
begin
  for lane in
    select lanes.id, lanes.queue_name, lanes.old_queue_id, lanes.tat from _rs_lanes as lanes
    where lanes.idle_since < now() - idle and lanes.queue_name is not null
    order by lanes.idle_since limit at_most
    for update skip locked
  loop
    -- A session that has read the lane may still add a job: it holds the name. Each check below has a later snapshot.
    continue when not pg_try_advisory_xact_lock('_private_jobs'::regclass::oid::int, _rs_name_bucket('queue', lane.queue_name));
    if lane.tat > now()
      or lane.old_queue_id is not null
      or exists (select from _rs_lane_calls as calls where calls.lane_id = lane.id)
      or exists (select from _private_jobs as jobs where jobs.is_available = true and jobs.job_queue_id = lane.id)
      or exists (
        select from _private_jobs as jobs where jobs.locked_at is not null and jobs.job_queue_id < 0 and jobs.job_queue_id = lane.id
      )
      or exists (
        select from _private_jobs as jobs
        where jobs.is_available = false and jobs.locked_at is null and jobs.job_queue_id < 0 and jobs.job_queue_id = lane.id
      )
    then
      update _rs_lanes as lanes set idle_since = greatest(lanes.tat, now()) where lanes.id = lane.id;
    else
      delete from _rs_lanes as lanes where lanes.id = lane.id;
      deleted := deleted + 1;
    end if;
  end loop;
  return deleted;
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
    -- Failed jobs may be run again later. Only those are left, and they have an index.
    update _private_jobs as jobs set job_queue_id = queue
    where jobs.is_available = false and jobs.locked_at is null and jobs.job_queue_id < 0 and jobs.job_queue_id = lane;
    delete from _rs_lane_calls where lane_id = lane;
    delete from _rs_slots where lane_id = lane;
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
