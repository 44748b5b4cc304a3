-- The exchange of jobs under limits: how much room a limit has, reporting ended jobs, and claiming others. For setting limits, see
-- 116-limit-functions.sql. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- How many more jobs a limit allows now, and if none, when that changes with time. A negative concurrency is that of a half-open
-- breaker: its absolute value is allowed, and only if nothing runs.
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
      case
        when $1 < 0 then case when $2 > 0 then 0::float8 else -$1::float8 end
        when $1 is not null then greatest($1::float8 - coalesce($2, 0)::float8, 0::float8)
      end as slots,
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

-- The use of the limits: the claimed jobs in lanes by lane, task and worker, and the slots that they take. If a worker has more jobs
-- in a lane than slots, only as many jobs as slots count: it has claimed the others ahead. `of_lane` is the number of slots in the
-- lane, in the first row of a worker; `of_task` is how many of them the jobs of the task can take.
create or replace function :"schema"._rs_slots_in_use()
returns table (lane_id int, task_id int, worker_id text, jobs bigint, of_lane bigint, of_task bigint)
language sql stable rows 100
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select
    counted.lane_id, counted.task_id, counted.worker_id, counted.jobs,
    case when counted.nth = 1 then least(counted.of_worker, held.slots) else 0 end,
    least(counted.jobs, held.slots)
  from (
    select
      job_queue_id as lane_id, task_id, locked_by as worker_id, count(*) as jobs,
      sum(count(*)) over (partition by job_queue_id, locked_by)::bigint as of_worker,
      row_number() over (partition by job_queue_id, locked_by order by task_id) as nth
    from _private_jobs where locked_at is not null and job_queue_id < 0
    group by job_queue_id, task_id, locked_by
  ) as counted
  left join _rs_slots as held on held.lane_id = counted.lane_id and held.worker_id = counted.worker_id
$$;

-- Reports ended jobs of lanes, by the same rules as exchange.sql, which explains them. `have_failed`, `closed_for` and `closes`
-- belong to `back_ids`: see `_rs_note_outcomes`. `completed_…` are the jobs whose handlers have deleted their rows. Returns the
-- lanes in which jobs have ended, the jobs that other transactions have locked, and those that the worker no longer holds.
create or replace function :"schema"._rs_report_of_lanes(
  worker text, done_ids bigint[], done_at timestamptz[],
  back_ids bigint[], back_at timestamptz[], errors text[], seconds float8[], run_ats timestamptz[], attempts_by int[],
  payloads text[], keys text[], attempts_before_claim int[], local_time timestamptz,
  have_failed boolean[], closed_for float8[], closes text[],
  completed_lanes int[], completed_tasks text[], completed_at timestamptz[]
) returns table (ended_lanes int[], blocked_jobs bigint[], rejected_jobs bigint[]) language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  done_now bigint[];
  back_now bigint[];
begin
  perform _rs_note_outcomes(
    worker, done_ids, done_at, back_ids, back_at, have_failed, closed_for, closes, completed_lanes, completed_tasks, completed_at
  );
  if cardinality(done_ids) + cardinality(back_ids) = 0 then
    return query select completed_lanes, '{}'::bigint[], '{}'::bigint[];
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
  ended_lanes := ended_lanes || completed_lanes;
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

-- Whether a lock belongs to a claim: it has the time of the claim, or is whole hours later, as `keep_locks_fresh.sql` leaves it.
create or replace function :"schema"._rs_is_same_claim(locked_at timestamptz, claimed_at timestamptz)
returns boolean language sql immutable as $$
  select locked_at = claimed_at or case
    when isfinite(locked_at) then extract(epoch from locked_at - claimed_at)::numeric % 3600::numeric = 0::numeric
  end
$$;

-- Claims jobs from lanes, after the report of the same exchange. Each statement of this function has its own snapshot, and that
-- is why the limits are exact: the function first locks the row of each lane, and of each limit that several lanes share, and only
-- then counts the claimed jobs. Every other claim under these limits has either committed, and is counted, or has not begun.
-- Meanwhile, the count can only become lower. Nothing is stored that could drift.
--
-- Locks: rows of `_rs_lanes`, then of `_rs_limits`, then of jobs, all with `skip locked`: it waits for no other session. It skips
-- lanes and limits that another claim has locked (`contended`).
--
-- Which lanes: those in which jobs have ended, those that were called, those whose time has come, those that wait for a limit
-- that has room again, and the open ones in the order of their turns. It does not read lanes that are full, paused, empty or out of
-- tokens. It takes jobs of different lanes by turn: each job advances its lane's turn by the mean time of a job of the lane, divided
-- by its weight, so lanes share the time of the workers. A lane that wakes up begins at the turn of the others.
--
-- Jobs ahead of slots: a worker may claim more jobs of a lane than it has slots in it, so that a slot does not wait for the
-- database between two short jobs. `_rs_slots` then stores how many slots the worker has; without a row, each claimed job has one.
-- The worker starts no more jobs of the lane than it has slots. Only the worker lowers their number (`kept_lanes`, `kept_slots`).
-- Only a claim that has locked the lane raises it, up to `most_slots`. A worker claims ahead as many jobs as run within `ahead_ms`:
-- that depends on how long a job of the lane takes, and on how long its running jobs have taken so far (`kept_ms`). If the lane has
-- a rate or a breaker, is in a group, or is closed, no job is claimed ahead: each claimed job counts.
--
-- `task_rooms` is how many more jobs of each task the worker may take, null for any number. `run_lanes` and `run_ms` are how long
-- the reported jobs took. Returns the claimed jobs, and a last row without an id: the time of the claim, whether it was contended,
-- when to repeat it if no event arrives before, and how many slots the worker has in lanes of which it holds jobs.
create or replace function :"schema"._rs_claim_from_lanes(
  worker text, ended_lanes int[], run_lanes int[], run_ms float8[], task_ids int[], task_rooms int[], wanted int,
  forbidden text[], accepted text[], allowed jsonb, local_time timestamptz, freshness float8, max_bytes int,
  kept_lanes int[], kept_slots int[], kept_ms float8[], most_slots int, ahead_ms float8
) returns table (
  id bigint, job_queue_id int, task_id int, payload text, priority smallint, run_at timestamptz, attempts smallint,
  max_attempts smallint, last_error text, created_at timestamptz, updated_at timestamptz, key text,
  locked_at timestamptz, revision int, flags jsonb, clock timestamptz, contended boolean, next_at timestamptz,
  lanes_with_slots int[], slots int[]
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
  has_groups boolean := exists (select from _rs_limits as limits where limits.group_id is not null);
begin
  -- From now on, the worker uses no more slots than it reports.
  if cardinality(kept_lanes) > 0 then
    update _rs_slots as held set slots = kept.slots from unnest(kept_lanes, kept_slots) as kept (lane_id, slots)
    where held.lane_id = any (array[kept.lane_id]) and held.worker_id = worker and held.slots > kept.slots;
  end if;
  if wanted <= 0 then
    if cardinality(ended_lanes) > 0 then
      perform _rs_call_lanes(ended_lanes);
      perform _rs_notify_jobs(1);
    end if;
    return query select
      null::bigint, null::int, null::int, null::text, null::smallint, null::timestamptz, null::smallint, null::smallint, null::text,
      null::timestamptz, null::timestamptz, null::text, null::timestamptz, null::int, null::jsonb, at_time, false, null::timestamptz,
      '{}'::int[], '{}'::int[];
    return;
  end if;
  -- The limits that lanes wait for and that have room again.
  with recursive waited as (
    (select waits_for from _rs_lanes where waits_for is not null order by waits_for limit 1)
    union all
    select (
      select lanes.waits_for from _rs_lanes as lanes
      where lanes.waits_for > known.waits_for order by lanes.waits_for limit 1
    )
    from waited as known where known.waits_for is not null
  ), in_use as materialized (
    select in_use.* from _rs_slots_in_use() as in_use where exists (select from waited where waits_for is not null)
  ), groups_in_use as (
    select limits.group_id, sum(limits.cost * case when limits.task_id is null then in_use.of_lane else in_use.of_task end) as slots
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
      case when limits.tripped_at is null then limits.concurrency else _rs_probe(limits.id) end,
      case
        when limits.task_id is not null then (select sum(of_task) from in_use where in_use.task_id = limits.task_id)
        else (select slots from groups_in_use where groups_in_use.group_id = limits.id)
      end::bigint,
      limits.rate, limits.per, limits.burst, limits.tat, greatest(limits.paused_until, limits.closed_until)
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
      limit 20 + greatest(wanted / 16, cardinality(ended_lanes))
      for no key update of lanes skip locked
    );
  end if;
  if not ended_lanes <@ won then
    -- Another claim has locked it, but may not see that jobs have ended.
    perform _rs_call_lanes(array(select lane_id from unnest(ended_lanes) as lane_id where lane_id <> all (won)));
  end if;
  if cardinality(won) > 0 then
    delete from _rs_lane_calls where lane_id = any (won);
    -- A limit may have been set or dropped while the lane was created: see `_rs_check_new_lanes`.
    if exists (select from _rs_lanes where is_new) then
      update _rs_lanes as lanes set limit_id = _rs_limit_of_queue(lanes.queue_name)
      where lanes.id = any (won) and lanes.is_new and lanes.limit_id is distinct from _rs_limit_of_queue(lanes.queue_name);
    end if;
    -- How many jobs to read of each lane. If the other lanes have fewer, the worker claims again.
    share := least(wanted, greatest(5, 2 * wanted / cardinality(won)));
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
    perform _rs_apply_outcomes();
    return query
      with recursive in_use as materialized (
        select * from _rs_slots_in_use()
      ), lanes_in_use as materialized (
        select
          in_use.lane_id, sum(in_use.of_lane)::bigint as slots,
          sum(case when in_use.worker_id = worker then in_use.jobs else 0 end)::int as own_jobs,
          sum(case when in_use.worker_id = worker then in_use.of_lane else 0 end)::int as own_slots
        from in_use group by in_use.lane_id
      ), groups_in_use as materialized (
        select
          limits.group_id,
          sum(limits.cost * case when limits.task_id is null then in_use.of_lane else in_use.of_task end)::bigint as slots
        from in_use
        left join _rs_lanes as lanes on lanes.id = any (array[in_use.lane_id])
        join _rs_limits as limits on limits.id = any (array[lanes.limit_id]) or limits.task_id = any (array[in_use.task_id])
        where limits.group_id is not null and exists (select from _rs_limits as any_limit where any_limit.group_id is not null)
        group by limits.group_id
      ), shared_use as materialized (
        select
          limits.id,
          case
            when limits.task_id is not null then (select sum(in_use.of_task) from in_use where in_use.task_id = limits.task_id)
            else (select groups_in_use.slots from groups_in_use where groups_in_use.group_id = limits.id)
          end::bigint as slots
        from _rs_limits as limits where limits.id = any (shared)
      ), shared_rooms as materialized (
        select
          limits.id, limits.task_id, limits.group_id, limits.cost, limits.rate, limits.per, limits.burst, limits.tat, room.n, room.next_at,
          greatest(shared_use.slots - limits.concurrency, 0) as excess,
          limits.trip is null and coalesce(greatest(limits.paused_until, limits.closed_until) <= now(), true) as is_open
        from shared_use
        join _rs_limits as limits on limits.id = any (array[shared_use.id])
        cross join lateral _rs_room(
          case
            when limits.tripped_at is null then limits.concurrency
            -- The outcome of the last probe decides whether there is another one.
            when exists (select from _rs_limit_outcomes as outcomes where outcomes.limit_id = limits.id) then 0
            else _rs_probe(limits.id)
          end,
          shared_use.slots, limits.rate, limits.per, limits.burst, limits.tat, greatest(limits.paused_until, limits.closed_until)
        ) as room
      ), base as (
        select coalesce((select turn from _rs_lanes where ready_at = '-infinity' order by turn limit 1), 0) as turn
      ), rooms as materialized (
        select
          lanes.id, lanes.task_id, lanes.tat, lanes.ready_at, lanes.waits_for, lanes.old_queue_id,
          coalesce(0.8 * lanes.mean_ms + 0.2 * runs.ms, lanes.mean_ms) as mean_ms,
          greatest(lanes.mean_ms, runs.ms, kept.ms, 0.001::float8) as slow_ms,
          greatest(lanes.turn, base.turn) as turn,
          limits.group_id, limits.cost, limits.rate, limits.per, limits.burst, coalesce(limits.weight, 1) as weight,
          coalesce(lanes_in_use.own_jobs, 0) as own_jobs, coalesce(lanes_in_use.own_slots, 0) as own_slots,
          case
            when lanes.task_id is null then greatest(lanes_in_use.slots - coalesce(limits.concurrency, 1), 0)
            else shared_rooms.excess
          end as excess,
          -- Whether the jobs of the lane need only a slot of it. Then a worker may claim more jobs than it has slots.
          case
            when lanes.old_queue_id is not null then false
            when lanes.task_id is null then
              limits.rate is null and limits.group_id is null and limits.trip is null
              and coalesce(greatest(limits.paused_until, lanes.closed_until) <= now(), true)
            when shared_rooms.id is null then true
            else shared_rooms.rate is null and shared_rooms.group_id is null and shared_rooms.is_open
          end as is_plain,
          -- False if another claim has locked the limit, so that its room is unknown.
          lanes.task_id is null or shared_rooms.id is not null as is_known,
          case
            when lanes.old_queue_id is not null or lanes.task_id is not null and shared_rooms.id is null then 0
            else least(room.n, shared_rooms.n)
          end as room,
          case when lanes.old_queue_id is not null then at_time + interval '100 milliseconds' else room.next_at end as next_at
        from base cross join _rs_lanes as lanes
        left join _rs_limits as limits on limits.id = any (array[lanes.limit_id])
        left join shared_rooms on shared_rooms.task_id = lanes.task_id
        left join lanes_in_use on lanes_in_use.lane_id = lanes.id
        left join (
          select run.lane_id, avg(run.ms) as ms from unnest(run_lanes, run_ms) as run (lane_id, ms) group by run.lane_id
        ) as runs on runs.lane_id = lanes.id
        left join unnest(kept_lanes, kept_ms) as kept (lane_id, ms) on kept.lane_id = lanes.id
        cross join lateral _rs_room(
          case
            when lanes.task_id is not null then null
            when lanes.tripped_at is null then coalesce(limits.concurrency, 1)
            when exists (select from _rs_limit_outcomes as outcomes where outcomes.lane_id = lanes.id) then 0
            else -1
          end,
          coalesce(lanes_in_use.slots, 0), limits.rate, limits.per, limits.burst, lanes.tat, greatest(limits.paused_until, lanes.closed_until)
        ) as room
        -- The second condition is always true, but the planner expects few rows to meet it. Otherwise it would multiply many
        -- unknown numbers, expect billions of rows, and prepare a hash for each join.
        where lanes.id = any (won) and nullif(lanes.id, lanes.id) is null
      ), own as materialized (
        select
          rooms.*,
          -- How many more slots the worker may take, and how many more jobs it may claim.
          slots.n as free,
          case
            when not rooms.is_known then 0
            when rooms.is_plain and rooms.own_slots + slots.n > 0 then greatest(least(
              share,
              rooms.own_slots + slots.n - rooms.own_jobs
                + floor(least((rooms.own_slots + slots.n) * ahead_ms / rooms.slow_ms, 1000::float8))::int
            ), 0)
            -- The worker first releases the jobs that it claimed ahead while that was allowed.
            when rooms.own_jobs > rooms.own_slots then 0
            else least(share, slots.n)
          end as n
        from rooms
        cross join lateral (
          select least(rooms.room, case when rooms.is_plain then greatest(most_slots - rooms.own_slots, 0) else 1000000 end) as n
        ) as slots
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
          select jobs.id, jobs.ctid as place, jobs.task_id, jobs.priority, jobs.run_at
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
          due.id, due.place, due.lane_id, due.priority, due.run_at, due.nth, due.task_id,
          own.turn + (due.nth - 1) * own.mean_ms / own.weight as turn, own.own_slots, own.is_plain,
          -- The first jobs take the free slots. The others run after them, in the same slots.
          (due.nth <= own.free)::int as takes_slot,
          task_limits.id as task_limit, case when task_limits.id is not null then coalesce(task_rooms.n, 0) end as task_room,
          own.group_id as queue_group, case when own.group_id is not null then coalesce(queue_groups.n, 0) end as queue_group_room,
          coalesce(own.cost, 0) + case when task_limits.group_id = own.group_id then task_limits.cost else 0 end as queue_cost,
          nullif(task_limits.group_id, own.group_id) as task_group,
          case when nullif(task_limits.group_id, own.group_id) is not null then coalesce(task_groups.n, 0) end as task_group_room,
          task_limits.cost as task_cost
        from due
        join own on own.id = due.lane_id
        left join _rs_limits as task_limits on task_limits.task_id = any (array[due.task_id])
        left join (
          select due.lane_id, min(due.nth) as nth
          from due where due.task_id = any (array(select limits.task_id from _rs_limits as limits where limits.task_id is not null))
          group by due.lane_id
        ) as first_limited on first_limited.lane_id = due.lane_id
        left join shared_rooms as task_rooms on task_rooms.id = task_limits.id
        left join shared_rooms as queue_groups on queue_groups.id = own.group_id
        left join shared_rooms as task_groups on task_groups.id = task_limits.group_id
        where due.nth <= due.n
          -- A job in a queue may also need a slot of its task. It needs both slots, and the jobs after it wait.
          and (due.nth <= own.free or own.task_id is not null or due.nth < coalesce(first_limited.nth, due.nth + 1))
      ), within_tasks as (
        select
          *, row_number() over (partition by task_limit, task_id order by turn, priority, run_at, id) as nth_of_task,
          sum(takes_slot) over (partition by task_limit, task_id order by turn, priority, run_at, id rows unbounded preceding) as slots_of_task
        from candidates
      ), within_rooms as materialized (
        select within_tasks.* from within_tasks
        where (task_limit is null or takes_slot = 0 or slots_of_task <= task_room)
          and nth_of_task <= coalesce(task_rooms[pg_catalog.array_position(task_ids, task_id)], 2147483647)
      ), within_queue_groups as (
        select *, sum(queue_cost) over (partition by queue_group order by turn, priority, run_at, id rows unbounded preceding) as queue_group_use
        from within_rooms where has_groups
      ), within_task_groups as (
        select *, sum(task_cost) over (partition by task_group order by turn, priority, run_at, id rows unbounded preceding) as task_group_use
        from within_queue_groups
        where queue_group is null or queue_group_use <= queue_group_room
      ), within_limits as (
        select id, place, lane_id, turn, priority, run_at, takes_slot, own_slots from within_rooms where not has_groups
        union all
        select id, place, lane_id, turn, priority, run_at, takes_slot, own_slots from within_task_groups
        where task_group is null or task_group_use <= task_group_room
      ), allowed_jobs as materialized (
        select id, place, lane_id, turn, priority, run_at, takes_slot from within_limits
        -- A job that takes no slot needs one that the worker has, or that another job takes.
        where own_slots > 0 or takes_slot = 1
          or lane_id in (select others.lane_id from within_rooms as others where others.takes_slot = 1)
        order by turn, priority, run_at, id limit wanted
      ), locked as materialized (
        select allowed_jobs.*, size.size
        from allowed_jobs cross join lateral (
          select case
            when pg_catalog.pg_column_size(jobs.payload) < 400 then pg_catalog.pg_column_size(jobs.payload)
            else octet_length(jobs.payload::text)
          end as size
          from _private_jobs as jobs
          where jobs.ctid = any (array[allowed_jobs.place]) and jobs.id = allowed_jobs.id and jobs.is_available = true
          for update skip locked
        ) as size
      ), sized as (
        select
          locked.id, locked.place, locked.lane_id,
          sum(size) over (order by turn, priority, run_at, id rows unbounded preceding) - size as before
        from locked where (select sum(every.size) from locked as every) >= max_bytes
        union all
        select locked.id, locked.place, locked.lane_id, 0
        from locked where (select sum(every.size) from locked as every) < max_bytes
      ), alive as (
        select workers.worker_id from _rs_workers as workers
        where workers.worker_id = worker and workers.last_heartbeat_at > now() - make_interval(secs => freshness)
        for key share skip locked
      ), chosen as materialized (
        select id, place, lane_id from sized
        where before < max_bytes and (freshness is null or exists (select from alive))
      ), claimed as (
        update _private_jobs as jobs
        set locked_at = now(), locked_by = worker, attempts = jobs.attempts + 1
        where jobs.ctid = any (array(select place from chosen))
        returning
          jobs.id, jobs.job_queue_id, jobs.task_id, jobs.payload::text as payload, jobs.priority, jobs.run_at, jobs.attempts, jobs.max_attempts,
          jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key, jobs.locked_at, jobs.revision, jobs.flags
      ), due_counts as materialized (
        select lane_id, count(*) as jobs from due group by lane_id
      ), taken as materialized (
        select chosen.lane_id, count(*)::int as jobs, least(count(*), min(given.slots))::int as slots
        from chosen
        join (select lane_id, sum(takes_slot) as slots from allowed_jobs group by lane_id) as given on given.lane_id = chosen.lane_id
        group by chosen.lane_id
      ),
      -- Why the first job of a lane that was not taken has to wait.
      stopped as materialized (
        select distinct on (c.lane_id)
          c.lane_id,
          case
            when c.task_limit is not null and c.takes_slot = 1 and t.slots_of_task > c.task_room then c.task_limit
            when c.queue_group is not null and c.id <> all (array(select w.id from within_task_groups as w)) then c.queue_group
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
            when own.task_id is not null and own.room <= 0 and not exists (select from shared_rooms where shared_rooms.task_id = own.task_id) then '-infinity'
            when own.task_id is not null and own.room <= 0 then 'infinity'
            when own.room <= 0 then coalesce(own.next_at, 'infinity')
            when coalesce(taken.slots, 0) >= own.room and own.task_id is not null then 'infinity'
            when coalesce(taken.slots, 0) >= own.room then
              case when own.rate is not null and own.task_id is null
                then greatest(own.tat, now()) + (taken.jobs - own.burst) * (own.per / own.rate) else 'infinity' end
            when coalesce(taken.jobs, 0) < coalesce(due_counts.jobs, 0) then
              case when stopped.limit_id = any (shared) then 'infinity' else '-infinity' end::timestamptz
            when waiting.is_due and coalesce(taken.jobs, 0) = 0 then '-infinity'
            else coalesce(waiting.next_run_at, 'infinity')
          end as ready_at,
          case
            when own.task_id is not null and (own.room <= 0 or coalesce(taken.slots, 0) >= own.room) then
              (select shared_rooms.id from shared_rooms where shared_rooms.task_id = own.task_id)
            when own.room > 0 and coalesce(taken.jobs, 0) < coalesce(due_counts.jobs, 0) and stopped.limit_id = any (shared) then stopped.limit_id
          end as waits_for
        from own
        left join taken on taken.lane_id = own.id
        left join due_counts on due_counts.lane_id = own.id
        left join waiting on waiting.lane_id = own.id
        left join stopped on stopped.lane_id = own.id
      ), written as (
        update _rs_lanes as lanes
        set
          tat = states.tat, turn = states.turn, mean_ms = states.mean_ms, ready_at = states.ready_at, waits_for = states.waits_for,
          started_at = case when lanes.tat is distinct from states.tat then now() else lanes.started_at end,
          idle_since = case when states.ready_at = 'infinity' and states.waits_for is null then now() end
        from states where lanes.id = any (array[states.id])
          and (lanes.tat, lanes.turn, lanes.ready_at, lanes.waits_for) is distinct from (states.tat, states.turn, states.ready_at, states.waits_for)
      ), slots as materialized (
        select
          own.id as lane_id, own.own_slots + coalesce(taken.slots, 0) as slots, own.own_jobs + coalesce(taken.jobs, 0) as jobs,
          case
            when own.own_jobs > own.own_slots and not own.is_plain then 0
            else greatest(own.own_slots + coalesce(taken.slots, 0) - coalesce(own.excess, 0), 0)
          end::int as usable
        from own left join taken on taken.lane_id = own.id
      ), held as (
        insert into _rs_slots as held (lane_id, worker_id, slots)
        select slots.lane_id, worker, slots.slots from slots where slots.jobs > slots.slots
        on conflict on constraint _rs_slots_pkey do update set slots = excluded.slots where held.slots <> excluded.slots
      ), not_held as (
        delete from _rs_slots as held using slots
        where held.lane_id = any (array[slots.lane_id]) and held.worker_id = worker and slots.jobs <= slots.slots
      ), used as (
        select limit_id, sum(cost) as cost from (
          select c.task_limit as limit_id, 1 as cost from chosen join candidates as c on c.id = chosen.id
          union all select c.queue_group, c.queue_cost from chosen join candidates as c on c.id = chosen.id
          union all select c.task_group, c.task_cost from chosen join candidates as c on c.id = chosen.id
        ) as costs where limit_id is not null group by limit_id
      ), rated as (
        update _rs_limits as limits
        set tat = greatest(limits.tat, now()) + used.cost * (limits.per / limits.rate), started_at = now()
        from used where limits.id = any (array[used.limit_id]) and limits.rate is not null
      ),
      -- Lanes that have become open, but have jobs of tasks that this worker does not run. It leaves them to other workers.
      for_others as (
        select from states
        join own on own.id = states.id
        left join taken on taken.lane_id = states.id
        where states.ready_at = '-infinity' and own.ready_at <> '-infinity' and taken.lane_id is null
        limit 1
      )
      select claimed.*, null::timestamptz, null::boolean, null::timestamptz, null::int[], null::int[] from claimed
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
        ),
        array(select slots.lane_id from slots where slots.jobs > 0 order by slots.lane_id),
        array(select slots.usable from slots where slots.jobs > 0 order by slots.lane_id)
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
      )), '{}'::int[], '{}'::int[];
  end if;
end
$$;
