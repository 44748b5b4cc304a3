-- How the outcomes of jobs change their limits: a rate-limited job closes a limit for a while, and failures in a row trip its
-- breaker. Reports note outcomes (`_rs_note_outcomes`); a session that has locked the lane or the limit applies them
-- (`_rs_apply_outcomes`). For claims, see 117-limited-exchange-functions.sql. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- The limits that a job of a task in a lane is under: that of the queue, that of the task, and those of their groups. The state of
-- a queue's limit is in the lane. `queue` is the full name of the queue, `tokens` what a job takes of the rate, `place` the order
-- in which the limit to close is chosen. `is_sound`: no failure has been counted since the last success.
create or replace function :"schema"._rs_limits_of_job(lane int, task int)
returns table (
  lane_id int, limit_id int, name text, queue text, tokens int, has_rate boolean, has_breaker boolean, is_sound boolean, place int
) language sql stable as $$
  with own as (
    select
      lanes.id as lane_id, null::int as limit_id, limits.name, 'queue:' || lanes.queue_name as queue, limits.group_id, limits.cost,
      limits.rate is not null as has_rate, limits.trip is not null as has_breaker,
      lanes.failures = 0 and lanes.tripped_at is null as is_sound, 1 as place
    from _rs_lanes as lanes join _rs_limits as limits on limits.id = lanes.limit_id
    where lanes.id = $1
    union all
    select
      null, limits.id, limits.name, null, limits.group_id, limits.cost, limits.rate is not null, limits.trip is not null,
      limits.failures = 0 and limits.tripped_at is null, 2
    from _rs_limits as limits
    where limits.task_id = $2 and not limits.is_dropped
  )
  select own.lane_id, own.limit_id, own.name, own.queue, 1, own.has_rate, own.has_breaker, own.is_sound, own.place from own
  union all
  select
    null, groups.id, groups.name, null, members.cost, groups.rate is not null, groups.trip is not null,
    groups.failures = 0 and groups.tripped_at is null, 3
  from (select own.group_id, sum(own.cost)::int as cost from own where own.group_id is not null group by own.group_id) as members
  join _rs_limits as groups on groups.id = members.group_id
$$;

-- The concurrency of a task's or a group's limit while its breaker is half-open, as a negative number for `_rs_room`. In a group,
-- it is the highest cost that a job can have.
create or replace function :"schema"._rs_probe(id int)
returns int language sql stable
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select -greatest(
    coalesce(max(members.cost) filter (where members.task_id is null), 0)
      + coalesce(max(members.cost) filter (where members.task_id is not null), 0),
    1
  )
  from _rs_limits as members where members.group_id = $1
$$;

-- Notes the outcomes that count for limits, before the report changes the rows of the jobs. `have_failed` tells which of the
-- jobs given back have failed. `closed_for` is for how many seconds a job closes a limit, null if it was not rate limited.
-- `closes` is the name of that limit; null means the limit of its queue, or else of its task. `completed_…` are jobs whose handlers
-- have deleted their rows. Locks the jobs whose outcomes count with `skip locked`, as the report does.
create or replace function :"schema"._rs_note_outcomes(
  worker text, done_ids bigint[], done_at timestamptz[], back_ids bigint[], back_at timestamptz[],
  have_failed boolean[], closed_for float8[], closes text[],
  completed_lanes int[], completed_tasks text[], completed_at timestamptz[]
) returns void language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  have_breakers boolean := exists (select from _rs_limits where trip is not null);
begin
  if not have_breakers and not exists (select from unnest(closed_for) as seconds where seconds is not null) then
    return;
  end if;
  with reported as (
    select done.id, done.locked_at, true as has_succeeded, false as has_failed, null::float8 as seconds, null::text as closes
    from unnest(done_ids, done_at) as done (id, locked_at)
    where have_breakers
    union all
    select back.id, back.locked_at, false, back.has_failed, back.seconds, back.closes
    from unnest(back_ids, back_at, have_failed, closed_for, closes) as back (id, locked_at, has_failed, seconds, closes)
    where back.has_failed and have_breakers or back.seconds is not null
  ), held as materialized (
    select
      reported.id, jobs.job_queue_id as lane, jobs.task_id as task,
      -- The lock of a job that runs for a long time is moved by whole hours.
      least(jobs.locked_at, reported.locked_at) as claimed_at, reported.has_succeeded,
      reported.has_failed and not _rs_is_cancelled(jobs.locked_at, jobs.run_at, jobs.last_error) as has_failed,
      reported.seconds, reported.closes
    from reported
    join _private_jobs as jobs on jobs.id = any (array[reported.id])
    where jobs.locked_by = worker and _rs_is_same_claim(jobs.locked_at, reported.locked_at)
    for update of jobs skip locked
  ), ended as (
    select held.* from held
    union all
    select -completed.nth, completed.lane, tasks.id, completed.claimed_at, true, false, null, null
    from unnest(completed_lanes, completed_tasks, completed_at) with ordinality as completed (lane, task, claimed_at, nth)
    left join _private_tasks as tasks on tasks.identifier = completed.task
  ), counted as (
    select
      limits.*, ended.claimed_at, ended.has_succeeded, ended.has_failed, ended.seconds,
      case
        when bool_or(ended.closes in (limits.name, limits.queue)) over (partition by ended.id)
          then ended.closes in (limits.name, limits.queue)
        else limits.place = min(limits.place) over (partition by ended.id)
      end as is_closed
    from ended cross join lateral _rs_limits_of_job(ended.lane, ended.task) as limits
  ), outcomes as (
    select
      counted.lane_id, counted.limit_id, counted.claimed_at, bool_and(counted.is_sound) as is_sound,
      bool_or(counted.has_succeeded and counted.has_breaker) as has_succeeded,
      (count(*) filter (where counted.has_failed and counted.has_breaker))::int as failures,
      coalesce(sum(counted.tokens) filter (where counted.seconds is not null and counted.has_rate), 0)::int as tokens,
      now() + max(counted.seconds) filter (where counted.is_closed) * interval '1 second' as closed_until
    from counted
    group by counted.lane_id, counted.limit_id, counted.claimed_at
  )
  insert into _rs_limit_outcomes (lane_id, limit_id, claimed_at, has_succeeded, failures, tokens, closed_until)
  select
    outcomes.lane_id, outcomes.limit_id, outcomes.claimed_at, outcomes.has_succeeded, outcomes.failures, outcomes.tokens, outcomes.closed_until
  from outcomes
  where outcomes.failures > 0 or outcomes.tokens > 0 or outcomes.closed_until is not null
    -- While no failure is counted, a success changes nothing and is not written.
    or outcomes.has_succeeded and (
      not outcomes.is_sound
      or exists (select from _rs_limit_outcomes as earlier where earlier.lane_id = outcomes.lane_id)
      or exists (select from _rs_limit_outcomes as earlier where earlier.limit_id = outcomes.limit_id)
      or exists (
        select from outcomes as beside
        where beside.failures > 0
          and (beside.lane_id, beside.limit_id) is not distinct from (outcomes.lane_id, outcomes.limit_id)
      )
    )
  -- A success in between keeps the failures before and after it from being in a row.
  order by outcomes.claimed_at;
  perform _rs_apply_outcomes();
end
$$;

-- Applies the outcomes that reports have noted. Locks rows of `_rs_lanes`, then of `_rs_limits`, with `skip locked`: if another
-- session has locked a row, that session or the next one applies its outcomes.
create or replace function :"schema"._rs_apply_outcomes()
returns void language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  known record;
  new record;
  has_closed boolean := false;
  has_opened boolean := false;
begin
  if not exists (select from _rs_limit_outcomes) then
    return;
  end if;
  for known in
    select lanes.*, limits.trip, limits.trip_for, limits.per / limits.rate::float8 as step
    from _rs_lanes as lanes
    left join _rs_limits as limits on limits.id = any (array[lanes.limit_id])
    where lanes.id = any (array(select lane_id from _rs_limit_outcomes where lane_id is not null))
    order by lanes.id
    for no key update of lanes skip locked
  loop
    select state.* into new from _rs_state_after_outcomes(
      known.id, null, known.step, known.trip, known.trip_for, known.started_at,
      known.tat, known.closed_until, known.failures, known.tripped_at, known.counted_from
    ) as state;
    update _rs_lanes as lanes
    set
      tat = new.tat, closed_until = new.closed_until, failures = new.failures, tripped_at = new.tripped_at, counted_from = new.counted_from
    where lanes.id = known.id;
    insert into _rs_lane_calls (lane_id) values (known.id);
    has_closed := has_closed or new.closed_until is distinct from known.closed_until;
    has_opened := has_opened or known.tripped_at is not null and new.tripped_at is null;
  end loop;
  for known in
    select limits.*, limits.per / limits.rate::float8 as step
    from _rs_limits as limits
    where limits.id = any (array(select limit_id from _rs_limit_outcomes where limit_id is not null))
    order by limits.id
    for no key update skip locked
  loop
    select state.* into new from _rs_state_after_outcomes(
      null, known.id, known.step, known.trip, known.trip_for, known.started_at,
      known.tat, known.closed_until, known.failures, known.tripped_at, known.counted_from
    ) as state;
    update _rs_limits as limits
    set
      tat = new.tat, closed_until = new.closed_until, failures = new.failures, tripped_at = new.tripped_at, counted_from = new.counted_from
    where limits.id = known.id;
    has_closed := has_closed or new.closed_until is distinct from known.closed_until;
    has_opened := has_opened or known.tripped_at is not null and new.tripped_at is null;
  end loop;
  if has_closed or has_opened then
    perform _rs_notify_limits();
  end if;
  if has_opened then
    perform _rs_notify_jobs(1);
  end if;
end
$$;

-- Deletes the outcomes of a lane or a limit, and returns its state after them. The caller has locked it.
create or replace function :"schema"._rs_state_after_outcomes(
  lane int, shared int, step interval, trip int, trip_for interval, started_at timestamptz,
  inout tat timestamptz, inout closed_until timestamptz, inout failures int, inout tripped_at timestamptz,
  inout counted_from timestamptz
) language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
#variable_conflict use_variable
declare
  outcome record;
begin
  for outcome in
    with taken as (
      delete from _rs_limit_outcomes as outcomes
      where outcomes.lane_id = lane or outcomes.limit_id = shared
      returning outcomes.*
    )
    select taken.* from taken order by taken.id
  loop
    -- If other jobs have started since, it is unknown how much of the token is left, so the token is lost.
    if outcome.claimed_at >= started_at then
      tat := tat - outcome.tokens::float8 * step;
    end if;
    closed_until := greatest(closed_until, outcome.closed_until);
    -- A job that was claimed before the breaker tripped tells nothing about the service after that.
    continue when outcome.claimed_at <= counted_from;
    if trip is null or outcome.has_succeeded then
      failures := 0;
      tripped_at := null;
    elsif outcome.failures > 0 then
      failures := failures + outcome.failures;
      if tripped_at is not null or failures >= trip then
        tripped_at := coalesce(tripped_at, now());
        counted_from := now();
        closed_until := greatest(closed_until, now() + trip_for);
      end if;
    end if;
  end loop;
end
$$;
