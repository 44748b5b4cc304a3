-- One exchange of worker $1: reports outcomes, frees queues and claims jobs, in one statement.
--
-- Fence: an outcome is written only if this worker still holds the job under the same claim: locked_by is the worker,
-- and locked_at is the time of the claim, or whole hours later, as `keep_locks_fresh.sql` leaves it. (`isfinite`,
-- because infinite times cannot be subtracted. One `case`, because a planner that sees locked_by alone may read the
-- whole table to find the few rows of this worker.)
--
-- Locks: every row with `skip locked`, so that an exchange does not wait for a row while it holds others (with one
-- exception: see `LOCK_TIMEOUT` in exchange.rs). Rows that another transaction has locked are not written. The last row
-- of the result lists them, and the worker reports them again. Such a lock may belong to the application, or last only
-- a moment: a claim with an older snapshot locks a row before it sees that the row is taken. A queue stays locked while
-- this worker has jobs of it, and is not freed between two of them.
--
-- PostgreSQL rechecks the conditions of a row if the row changed after this statement began. It cannot do that if the
-- conditions refer to a CTE that writes. So the rows to lock or write depend only on CTEs that read or lock, through
-- `array(…)`.
--
-- The plan is made once, perhaps while the table is empty, and must still be good when the table is full. So no bad
-- plan may look cheap for an empty table: rows are found by `id = any (array[…])`, which leaves only one access path,
-- and a condition is not repeated if that would allow a full scan of one of the contract's indexes.
--
-- Claims in the order (priority, run_at, id), by the indexes _rs_jobs_unqueued, _rs_jobs_by_kind, _rs_jobs_in_queues,
-- _rs_jobs_in_queues_by_task and _rs_jobs_by_queue, and reads about as many rows as it claims, whatever else is in the table.
--
--  $1 worker            $2 $3 finished jobs: ids, locked_at
--  $4 $5 jobs given back: ids, locked_at   $6 error, null keeps the last   $7 seconds to wait, null for the
--     standard back-off   $8 run_at, null for $7   $9 attempts: -1 refund, 0 keep, 1 use up   $10 payload or null
--     $16 key when it was claimed: a job that has lost it was replaced or removed after it began, and gets no refund
--     $19 null for a job that began; otherwise its attempts before the claim, to which it returns, with its old run_at
--  $11 queues to free: this worker holds them, has no jobs of them any more, and gives none back in this exchange
--  $12 ids of the tasks it runs, $17 how many jobs of each it may take (null: any number)   $13 how many jobs it wants
--  $14 flags it must not run, or null   $15 what time it is, or null for the database's
--  $18 how many seconds old its heartbeat may be, null if it has none: a worker that may have been declared dead claims
--      nothing
--  $20 how many bytes of payloads it may take, about, besides the last one: they wait in the worker's memory
--  $21 flags of which a job must have one, or null   $22 an object of the flags that a job may have, or null (both in a `case`:
--      the planner takes `is null or …?|…` for a condition that few jobs meet)
--  $23 ids of the tasks whose jobs without a queue it may take: those of $12 that `deferred_claim.sql` does not claim
--
-- Returns the claimed jobs, and one last row without an id: the time of the claim (`clock`); the reported jobs and
-- queues that other transactions have locked (`blocked_jobs`, `blocked_queues`); whether some due jobs were not claimed
-- because others had locked them or because they did not fit (`contended`); the reported jobs that this worker no
-- longer holds, whose outcomes were not written (`rejected_jobs`); whether due jobs with a queue wait, or the claim went by kind
-- (`queued_wait`): if not, the next exchange may be the short one (`exchange_unqueued.sql`); and whether it stopped in the
-- middle of the kinds with fewer jobs than it wants (`is_partial`).
with recursive clock as (
  select coalesce($15::timestamptz, now()) as now
), done as materialized (
  select jobs.id, jobs.ctid as place, jobs.job_queue_id
  from unnest($2::bigint[], $3::timestamptz[]) as outcome (id, locked_at)
  join :"schema"._private_jobs as jobs on jobs.id = any (array[outcome.id])
  where case when jobs.locked_by = $1 then
    jobs.locked_at = outcome.locked_at
    or case when isfinite(jobs.locked_at) then
      extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600::numeric = 0::numeric
    end
  end
  for update of jobs skip locked
), finished as (
  -- By ctid, which saves an index lookup. A row that changed after this statement began has a new ctid and is not
  -- deleted: it counts as blocked (`left_over`).
  delete from :"schema"._private_jobs as jobs
  where jobs.ctid = any (array(select place from done where job_queue_id is null))
  returning jobs.id
), finished_of_queues as (
  delete from :"schema"._private_jobs as jobs
  where jobs.id = any (array(select id from done where job_queue_id is not null))
), back as materialized (
  select
    jobs.id, outcome.error, outcome.seconds, outcome.run_at, outcome.attempts, outcome.payload, outcome.key,
    outcome.attempts_before_claim, jobs.job_queue_id,
    :"schema"._rs_is_removed(jobs.locked_at, jobs.run_at) as is_removed,
    :"schema"._rs_is_cancelled(jobs.locked_at, jobs.run_at, jobs.last_error) as is_cancelled
  from unnest(
    $4::bigint[], $5::timestamptz[], $6::text[], $7::float8[], $8::timestamptz[], $9::int[], $10::text[], $16::text[],
    $19::int[]
  ) as outcome (id, locked_at, error, seconds, run_at, attempts, payload, key, attempts_before_claim)
  join :"schema"._private_jobs as jobs on jobs.id = any (array[outcome.id])
  where case when jobs.locked_by = $1 then
    jobs.locked_at = outcome.locked_at
    or case when isfinite(jobs.locked_at) then
      extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600::numeric = 0::numeric
    end
  end
  for update of jobs skip locked
), withdrawn as (
  -- Removed before it started.
  delete from :"schema"._private_jobs as jobs
  using back
  where jobs.id = any (array[back.id]) and back.is_removed and not back.is_cancelled and back.attempts_before_claim is not null
), unlocked as (
  -- A job that was cancelled meanwhile stays, with the reason in `last_error`, and never runs again.
  update :"schema"._private_jobs as jobs
  set
    locked_at = null,
    locked_by = null,
    last_error = case when back.is_cancelled then jobs.last_error else coalesce(back.error, jobs.last_error) end,
    run_at = case
      when back.is_cancelled then clock.now
      when back.attempts_before_claim is not null then jobs.run_at
      else coalesce(
        back.run_at,
        greatest(clock.now, case when not back.is_removed then jobs.run_at end)
          + coalesce(back.seconds, exp(least(jobs.attempts, 10)::float8)) * interval '1 second'
      )
    end,
    attempts = case
      when back.is_cancelled then jobs.max_attempts
      when back.attempts_before_claim is not null then back.attempts_before_claim
      when back.attempts = -1 and not back.is_removed and jobs.key is not distinct from back.key
        then greatest(jobs.attempts - 1, 0)
      when back.attempts = 1 then jobs.max_attempts
      else jobs.attempts
    end,
    payload = coalesce(back.payload::json, jobs.payload),
    updated_at = now()
  from clock, back
  where jobs.id = any (array[back.id])
    and (back.is_cancelled or not (back.is_removed and back.attempts_before_claim is not null))
),
-- Whether fewer rows were locked than reported. Only then are the missing ones looked up.
short as (
  select (select count(*) from done) + (select count(*) from back)
    < pg_catalog.cardinality($2) + pg_catalog.cardinality($4) as is_short
),
-- Reported jobs that this worker still holds, and that other transactions have locked.
blocked as (
  select outcome.id, jobs.job_queue_id
  from unnest(
    $2::bigint[] operator(pg_catalog.||) $4::bigint[], $3::timestamptz[] operator(pg_catalog.||) $5::timestamptz[]
  ) as outcome (id, locked_at)
  join :"schema"._private_jobs as jobs on jobs.id = any (array[outcome.id])
  where (select is_short from short)
    and outcome.id not in (select id from done)
    and outcome.id not in (select id from back)
    and case when jobs.locked_by = $1 then
      jobs.locked_at = outcome.locked_at
      or case when isfinite(jobs.locked_at) then
        extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600::numeric = 0::numeric
      end
    end
),
-- A queue stays locked while one of its jobs is blocked.
free_queues as (
  select job_queues.id from :"schema"._private_job_queues as job_queues
  where job_queues.id = any ($11::int[])
    and job_queues.locked_by = $1
    and job_queues.id <> all (array(select job_queue_id from blocked where job_queue_id is not null))
  for no key update skip locked
),
-- The distinct priorities of jobs without a queue: one index probe each. Within a priority, due jobs come first, so
-- future jobs are never read.
unqueued_priorities as (
  (
    select priority from :"schema"._private_jobs
    where is_available = true and job_queue_id is null and $13 > 0 and pg_catalog.cardinality($23::int[]) > 0
    order by priority, run_at, id limit 1
  )
  union all
  select (
    select jobs.priority from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.job_queue_id is null and jobs.priority > known.priority
    order by jobs.priority, jobs.run_at, jobs.id limit 1
  )
  from unqueued_priorities as known where known.priority is not null
),
-- How far the claim reads: past half as many due jobs again as it wants. Behind that place, it goes by kind. Null if there are fewer
-- due jobs.
walk_end as materialized (
  select due.priority, due.run_at, due.id
  from unqueued_priorities as known, clock, lateral (
    select jobs.priority, jobs.run_at, jobs.id from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id is null
      and jobs.priority = known.priority
      and jobs.run_at <= clock.now
    order by jobs.run_at, jobs.id
    limit 51 + $13 + $13 / 4
  ) as due
  where $17::int[] is null
  offset 50 + $13 + $13 / 4 limit 1
),
-- Two spans a priority: the jobs that are due before the last one that it reads, and those that are due at the same time. With one
-- condition for both, the scan would not stop.
spans as (
  select known.priority, span.*
  from clock
  cross join unqueued_priorities as known
  left join walk_end on true
  cross join lateral (
    select
      null::timestamptz as at, null::bigint as last_id,
      case when known.priority = walk_end.priority then walk_end.run_at else clock.now + interval '1 microsecond' end as before
    union all
    select walk_end.run_at, walk_end.id, null where known.priority = walk_end.priority
  ) as span
  where $17::int[] is null and (walk_end.priority is null or known.priority <= walk_end.priority)
), unqueued as (
  select due.*
  from spans, lateral (
    select * from (
      select
        jobs.job_queue_id, jobs.task_id, jobs.priority, jobs.run_at, jobs.id,
        case
          when pg_catalog.pg_column_size(jobs.payload) between 400 and 1899 then octet_length(jobs.payload::text)
          else pg_catalog.pg_column_size(jobs.payload)
        end as size
      from :"schema"._private_jobs as jobs
      where spans.at is null
        and jobs.is_available = true
        and jobs.job_queue_id is null
        and jobs.priority = spans.priority
        and jobs.run_at < spans.before
        and jobs.task_id = any ($23::int[])
        and ($14::text[] is null or (jobs.flags ?| $14) is not true)
        and case when $21::text[] is not null then jobs.flags ?| $21 else true end
        and case when $22::jsonb is not null then (jobs.flags <@ $22) is not false else true end
      order by jobs.run_at, jobs.id
      limit $13
      for update skip locked
    ) as before
    union all
    select * from (
      select
        jobs.job_queue_id, jobs.task_id, jobs.priority, jobs.run_at, jobs.id,
        case
          when pg_catalog.pg_column_size(jobs.payload) between 400 and 1899 then octet_length(jobs.payload::text)
          else pg_catalog.pg_column_size(jobs.payload)
        end as size
      from :"schema"._private_jobs as jobs
      where spans.at is not null
        and jobs.is_available = true
        and jobs.job_queue_id is null
        and jobs.priority = spans.priority
        -- The time twice: to the planner, the primary key looks equally good otherwise.
        and jobs.run_at = spans.at and jobs.run_at between spans.at and spans.at
        and jobs.id <= spans.last_id
        and jobs.task_id = any ($23::int[])
        and ($14::text[] is null or (jobs.flags ?| $14) is not true)
        and case when $21::text[] is not null then jobs.flags ?| $21 else true end
        and case when $22::jsonb is not null then (jobs.flags <@ $22) is not false else true end
      order by jobs.id
      limit $13
      for update skip locked
    ) as at_end
  ) as due
  limit $13
),
-- Whether the claim goes by kind: if some tasks have limits, because a task at its limit may have a million jobs in front of the
-- others; and if the walk ended before it found enough jobs, because those in front of the others may be of tasks that this worker
-- does not run, or have flags that it must not run.
by_kind as materialized (
  select
    $13 > 0 and pg_catalog.cardinality($23::int[]) > 0 and (
      $17::int[] is not null
      or (exists (select from walk_end) and (select count(*) from unqueued) < $13)
    ) as is_needed
),
-- The kinds that are in the index, one probe each. Tasks that this worker does not run are skipped. Begins at a random place and
-- comes round, so that with more than a thousand kinds, each gets its turn.
own_tasks as materialized (
  select array(select id from pg_catalog.unnest($23::int[]) as own (id) order by id) as ids where (select is_needed from by_kind)
), kinds_start as materialized (
  select
    own_tasks.ids[1 + floor(random() * pg_catalog.cardinality(own_tasks.ids)::float8)::int] as task_id,
    (select priority from unqueued_priorities where priority is not null order by random() limit 1) as priority,
    floor((random() - 0.5::float8) * 1.8e19::float8)::bigint as flags_hash
  from own_tasks
), kinds as (
  select
    0 as step, false as came_round, task_id, priority, flags_hash,
    null::timestamptz as run_at, null::bigint as id, null::jsonb as flags, false as is_own
  from kinds_start where priority is not null
  union all
  select
    known.step + 1, known.came_round or next.task_id is null,
    coalesce(next.task_id, '-2147483648'::int), coalesce(next.priority, '-32768'::smallint), coalesce(next.flags_hash, 0),
    next.run_at, next.id, next.flags,
    next.task_id = own_tasks.ids[pg_catalog.width_bucket(next.task_id, own_tasks.ids)]
  from kinds as known
  cross join own_tasks
  cross join kinds_start as start
  left join lateral (
    select
      jobs.task_id, jobs.priority, coalesce(pg_catalog.jsonb_hash_extended(jobs.flags, 0), 0) as flags_hash,
      jobs.run_at, jobs.id, jobs.flags
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and (jobs.job_queue_id is null)::int = 1
      and (jobs.task_id, jobs.priority, coalesce(pg_catalog.jsonb_hash_extended(jobs.flags, 0), 0)) > (
        case
          when known.is_own or known.step = 0 then known.task_id
          else own_tasks.ids[pg_catalog.width_bucket(known.task_id, own_tasks.ids) + 1]
        end,
        case when known.is_own or known.step = 0 then known.priority else '-32768'::smallint end,
        case when known.is_own or known.step = 0 then known.flags_hash else '-9223372036854775808'::bigint end
      )
    order by
      jobs.task_id, jobs.priority, coalesce(pg_catalog.jsonb_hash_extended(jobs.flags, 0), 0), jobs.run_at, jobs.id
    limit 1
  ) as next on true
  where known.step < 1000
    and not (known.came_round and (
      next.task_id is null
      or (next.task_id, next.priority, next.flags_hash) > (start.task_id, start.priority, start.flags_hash)
    ))
),
-- Of the kinds that the worker may run and that have due jobs, those that come first.
due_kinds as materialized (
  select
    kinds.*, row_number() over (order by kinds.priority, kinds.run_at, kinds.id) as nth, count(*) over () as found
  from (
    select kinds.task_id, kinds.priority, kinds.flags_hash, kinds.run_at, kinds.id
    from kinds, clock
    where kinds.is_own
      and kinds.run_at <= clock.now
      and ($14::text[] is null or (kinds.flags ?| $14) is not true)
      and case when $21::text[] is not null then kinds.flags ?| $21 else true end
      and case when $22::jsonb is not null then (kinds.flags <@ $22) is not false else true end
    order by kinds.priority, kinds.run_at, kinds.id
    limit 51 + $13 / 4
  ) as kinds
),
-- The first jobs of each. Takes no locks: rows that are locked but not claimed would look claimed to other workers.
first_of_kinds as materialized (
  select
    due.*, kinds.nth, due.nth_of_kind = kinds.room and kinds.room < least($13, kinds.allowed) as is_cut
  from (
    select *,
      least($13, 20 + 4 * $13 / found) as room,
      coalesce($17[pg_catalog.array_position($12, task_id)], $13) as allowed
    from due_kinds where nth <= 50 + $13 / 4
  ) as kinds
  cross join clock
  cross join lateral (
    select first.*, row_number() over () as nth_of_kind
    from (
      select
        jobs.job_queue_id, jobs.task_id, jobs.priority, jobs.run_at, jobs.id,
        case
          when pg_catalog.pg_column_size(jobs.payload) between 400 and 1899 then octet_length(jobs.payload::text)
          else pg_catalog.pg_column_size(jobs.payload)
        end as size
      from :"schema"._private_jobs as jobs
      where jobs.is_available = true
        and (jobs.job_queue_id is null)::int = 1
        and jobs.task_id = kinds.task_id
        and jobs.priority = kinds.priority
        and coalesce(pg_catalog.jsonb_hash_extended(jobs.flags, 0), 0) = kinds.flags_hash
        and jobs.run_at <= clock.now
      order by jobs.run_at, jobs.id
      limit least(kinds.room, kinds.allowed)
    ) as first
  ) as due
),
-- Behind the last job that was read of a kind, others of that kind may come before those of other kinds.
kinds_end as (
  select priority, run_at, id from (
    select priority, run_at, id from first_of_kinds where is_cut
    union all
    select priority, run_at, id from due_kinds where nth > 50 + $13 / 4
  ) as ends
  order by priority, run_at, id limit 1
), unqueued_by_kind as (
  select first.job_queue_id, first.task_id, first.priority, first.run_at, first.id, first.size
  from first_of_kinds as first
  left join kinds_end on true
  where (kinds_end.id is null or (first.priority, first.run_at, first.id) <= (kinds_end.priority, kinds_end.run_at, kinds_end.id))
    and first.id not in (select id from unqueued)
  order by first.priority, first.run_at, first.id
  limit $13 - (select count(*) from unqueued)
),
-- The first jobs with a queue: their queues are tried first. Other workers may hold all these queues, so the number of
-- jobs read is limited.
queued_priorities as (
  (
    select priority from :"schema"._private_jobs
    where is_available = true and job_queue_id > 0 and $13 > 0
    order by priority, run_at, id limit 1
  )
  union all
  select (
    select jobs.priority from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.job_queue_id > 0 and jobs.priority > known.priority
    order by jobs.priority, jobs.run_at, jobs.id limit 1
  )
  from queued_priorities as known where known.priority is not null
),
-- If tasks are limited, each task's own, as above: a task at its limit may have jobs in a million queues.
waiting_queued_tasks as (
  (
    select task_id from :"schema"._private_jobs
    where is_available = true and (job_queue_id > 0)::int = 1 and $13 > 0 and $17::int[] is not null
    order by task_id, priority, run_at, id limit 1
  )
  union all
  select (
    select jobs.task_id from :"schema"._private_jobs as jobs
    where jobs.is_available = true and (jobs.job_queue_id > 0)::int = 1 and jobs.task_id > known.task_id
    order by jobs.task_id, jobs.priority, jobs.run_at, jobs.id limit 1
  )
  from waiting_queued_tasks as known where known.task_id is not null
), first_queued_by_task as (
  select due.job_queue_id
  from queued_priorities as known, clock, lateral (
    select first.job_queue_id
    from waiting_queued_tasks as waiting, lateral (
      select jobs.job_queue_id, jobs.run_at, jobs.id
      from :"schema"._private_jobs as jobs
      where jobs.is_available = true
        and (jobs.job_queue_id > 0)::int = 1
        and jobs.task_id = waiting.task_id
        and jobs.priority = known.priority
        and jobs.run_at <= clock.now
        and ($14::text[] is null or (jobs.flags ?| $14) is not true)
        and case when $21::text[] is not null then jobs.flags ?| $21 else true end
        and case when $22::jsonb is not null then (jobs.flags <@ $22) is not false else true end
      order by jobs.run_at, jobs.id
      limit 50 + 2 * $13
    ) as first
    where waiting.task_id = any ($12::int[])
    order by first.run_at, first.id
    limit 50 + 2 * $13
  ) as due
  where $17 is not null
  limit 50 + 2 * $13
), first_queued_of_any_task as (
  select due.job_queue_id
  from queued_priorities as known, clock, lateral (
    select jobs.job_queue_id
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id > 0
      and jobs.priority = known.priority
      and jobs.run_at <= clock.now
      and jobs.task_id = any ($12::int[])
      and ($14::text[] is null or (jobs.flags ?| $14) is not true)
      and case when $21::text[] is not null then jobs.flags ?| $21 else true end
      and case when $22::jsonb is not null then (jobs.flags <@ $22) is not false else true end
    order by jobs.run_at, jobs.id
    limit 50 + 2 * $13
  ) as due
  where $17 is null
  limit 50 + 2 * $13
), first_queued as (
  select job_queue_id, row_number() over () as nth
  from (
    select job_queue_id from first_queued_of_any_task union all select job_queue_id from first_queued_by_task
  ) as first
), first_queues as (
  select job_queues.id
  from (select job_queue_id as id, min(nth) as nth from first_queued group by job_queue_id order by nth) as first
  cross join lateral (
    select job_queues.id
    from :"schema"._private_job_queues as job_queues
    where job_queues.id = first.id
      and (job_queues.is_available or job_queues.id = any (array(select id from free_queues)))
    limit 1
    for update skip locked
  ) as job_queues
  limit $13
),
-- If those queues were not enough: all queues with waiting jobs, one index probe each, up to 1,000. Starts at a random
-- queue, so that with more queues than that, each gets its turn.
some_queue as materialized (
  select floor(random() * last.job_queue_id::float8)::int as id
  from (
    select job_queue_id from :"schema"._private_jobs
    where is_available = true and job_queue_id is not null
    order by job_queue_id desc limit 1
  ) as last
  where (select count(*) from first_queued) = 50 + 2 * $13 and (select count(*) from first_queues) < $13
), other_queues as (
  select some_queue.id, some_queue.id as began, false as came_round, 0 as steps from some_queue
  union all
  select coalesce(next.id, -1), known.began, known.came_round or next.id is null, known.steps + 1
  from other_queues as known
  left join lateral (
    select jobs.job_queue_id as id from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.job_queue_id > known.id
    order by jobs.job_queue_id limit 1
  ) as next on true
  where known.steps < 1000 and not (known.came_round and (next.id is null or next.id > known.began))
),
-- Of these, the queues whose first job comes first. It comes after the jobs of `first_queues`, which the first pass
-- found.
heads as (
  select job_queues.id
  from other_queues
  join :"schema"._private_job_queues as job_queues on job_queues.id = any (array[other_queues.id])
  cross join clock
  cross join lateral (
    select jobs.priority, jobs.run_at, jobs.id
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id = job_queues.id
      and jobs.run_at <= clock.now
      and jobs.task_id = any ($12::int[])
      and ($14::text[] is null or (jobs.flags ?| $14) is not true)
      and case when $21::text[] is not null then jobs.flags ?| $21 else true end
      and case when $22::jsonb is not null then (jobs.flags <@ $22) is not false else true end
    order by jobs.priority, jobs.run_at, jobs.id
    limit 1
  ) as head
  where (job_queues.is_available or job_queues.id = any (array(select id from free_queues)))
    and job_queues.id not in (select id from first_queues)
  order by head.priority, head.run_at, head.id
  limit $13
), other_won_queues as (
  select job_queues.id
  from :"schema"._private_job_queues as job_queues
  where job_queues.id = any (array(select id from heads))
    and (job_queues.is_available or job_queues.id = any (array(select id from free_queues)))
  for update skip locked
), won_queues as (
  select id from first_queues union all select id from other_won_queues
), queued as (
  select due.*
  from won_queues, clock, lateral (
    select
      jobs.job_queue_id, jobs.task_id, jobs.priority, jobs.run_at, jobs.id,
      case
        when pg_catalog.pg_column_size(jobs.payload) between 400 and 1899 then octet_length(jobs.payload::text)
        else pg_catalog.pg_column_size(jobs.payload)
      end as size
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id = won_queues.id
      and jobs.run_at <= clock.now
      and jobs.task_id = any ($12::int[])
      and ($14::text[] is null or (jobs.flags ?| $14) is not true)
      and case when $21::text[] is not null then jobs.flags ?| $21 else true end
      and case when $22::jsonb is not null then (jobs.flags <@ $22) is not false else true end
    order by jobs.priority, jobs.run_at, jobs.id
    -- Only the first job of a queue can run now. Each further one saves a round trip, if there is room for it.
    limit (select greatest($13 / greatest(count(*), 1), 1) from won_queues)
    for update skip locked
  ) as due
), candidates as (
  select * from unqueued union all select * from unqueued_by_kind union all select * from queued
), within_limits as (
  select * from candidates where $17::int[] is null
  union all
  select job_queue_id, task_id, priority, run_at, id, size
  from (
    select *, row_number() over (partition by task_id order by priority, run_at, id) as nth_of_task
    from candidates where $17 is not null
  ) as numbered
  where nth_of_task <= coalesce($17[pg_catalog.array_position($12, task_id)], 2147483647)
), sized as (
  select *, sum(size) over (order by priority, run_at, id rows unbounded preceding) as stored
  from within_limits order by priority, run_at, id limit $13
), ranked as (
  -- Jobs before which the payloads have all the bytes that there is room for are left. PostgreSQL may have compressed a
  -- payload, to a hundredth at best, so it does not do to ask how much it takes. `size` is the length of a payload that takes
  -- 400 to 1,900 bytes, which is quickly found out. One that takes more is read for it only here: from the first hundredth
  -- of the room on, and if there is room for it even as it is stored.
  select
    id, job_queue_id,
    stored - size < $20::int and coalesce(
      sum(case
        when size < 1900 or stored < $20 / 100 or stored - size >= $20 then size
        else (
          select octet_length(jobs.payload::text) from :"schema"._private_jobs as jobs where jobs.id = any (array[sized.id])
        )
      end) over (order by priority, run_at, id rows between unbounded preceding and 1 preceding),
      0
    ) < $20 as fits
  from sized
), locked_late as (
  select jobs.id from :"schema"._private_jobs as jobs
  where jobs.id = any (array(select id from ranked where (select is_needed from by_kind) and job_queue_id is null and fits and id not in (select id from unqueued)))
    -- The same as is_available, written so that the planner cannot use another index.
    and jobs.locked_at is null and jobs.attempts < jobs.max_attempts
  for update skip locked
),
-- The worker's registration, locked so that no sweep can declare it dead meanwhile. Read only if there are jobs to
-- claim.
alive as (
  select workers.worker_id from :"schema"._rs_workers as workers
  where workers.worker_id = $1 and workers.last_heartbeat_at > now() - make_interval(secs => $18::float8)
  for key share skip locked
), chosen as (
  select id, job_queue_id from ranked
  where fits
    and (
      (select not is_needed from by_kind)
      or job_queue_id is not null
      or id in (select id from unqueued)
      or id in (select id from locked_late)
    )
    and ($18 is null or exists (select from alive where ranked.id is not null))
), touched_queues as (
  select id, bool_or(kept) as kept
  from (
    select job_queue_id as id, true as kept from chosen where job_queue_id is not null
    union all
    select id, false from free_queues
  ) as any_of
  group by id
), queue_locks as (
  update :"schema"._private_job_queues as job_queues
  set
    locked_at = case when touched.kept then now() end,
    locked_by = case when touched.kept then $1 end
  from touched_queues as touched
  where job_queues.id = any (array[touched.id]) and (job_queues.is_available or job_queues.locked_by = $1)
), claimed as (
  update :"schema"._private_jobs as jobs
  set locked_at = now(), locked_by = $1, attempts = jobs.attempts + 1
  -- By id, although ctid is a little faster: a row that changed after this statement began has a new ctid, and would be
  -- skipped here although its queue is locked above.
  where jobs.id = any (array(select id from chosen))
  returning
    id, job_queue_id, task_id, payload::text as payload, priority, run_at, attempts, max_attempts, last_error,
    created_at, updated_at, key, locked_at, revision, flags
),
left_over as (
  select id from done
  where job_queue_id is null
    and (select count(*) from finished) < (select count(*) from done where job_queue_id is null)
    and id not in (select id from finished)
),
-- Work for other workers: jobs that were released before they started, and due jobs of queues that this exchange frees.
for_others as (
  select from back where back.attempts_before_claim is not null and not back.is_removed and back.job_queue_id is null
  union all
  select from touched_queues as touched, clock, lateral (
    select from :"schema"._private_jobs as jobs
    where not touched.kept
      and jobs.is_available = true
      and jobs.job_queue_id = touched.id
      and jobs.run_at <= clock.now
    order by jobs.priority, jobs.run_at, jobs.id
    limit 1
  ) as due
)
select
  claimed.*, null::timestamptz as clock, null::bigint[] as blocked_jobs, null::int[] as blocked_queues,
  null::boolean as contended, null::bigint[] as rejected_jobs, null::boolean as queued_wait, null::boolean as is_partial
from claimed
union all
select
  null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
  clock.now,
  array(select id from blocked union all select id from left_over),
  array(
    select job_queues.id from :"schema"._private_job_queues as job_queues
    where job_queues.id = any ($11::int[]) and job_queues.locked_by = $1
      and job_queues.id not in (select id from free_queues)
  ),
  $13 > 0 and (select count(*) from chosen) < $13 and (
    exists (select from ranked where ranked.id not in (select id from chosen))
    or exists (
      -- Only the first ones: a due job that another transaction has locked is among them.
      select from unqueued_priorities as known, lateral (
        select jobs.id, jobs.task_id, jobs.flags from :"schema"._private_jobs as jobs
        where $17 is null
          and jobs.is_available = true
          and jobs.job_queue_id is null
          and jobs.priority = known.priority
          and jobs.run_at <= clock.now
        order by jobs.run_at, jobs.id
        limit 100 + $13
      ) as due
      where due.task_id = any ($23::int[])
        and ($14::text[] is null or (due.flags ?| $14) is not true)
        and case when $21::text[] is not null then due.flags ?| $21 else true end
        and case when $22::jsonb is not null then (due.flags <@ $22) is not false else true end
        and due.id not in (select id from chosen)
    )
    or exists (select from kinds where step = 1000)
    or exists (
      select from first_queued
      join :"schema"._private_job_queues as job_queues on job_queues.id = any (array[first_queued.job_queue_id])
      where job_queues.is_available and job_queues.id not in (select id from won_queues)
    )
  ),
  array(
    select reported.id from pg_catalog.unnest($2::bigint[] operator(pg_catalog.||) $4::bigint[]) as reported (id)
    where (select is_short from short)
      and reported.id not in (select id from done)
      and reported.id not in (select id from back)
      and reported.id not in (select id from blocked)
  ),
  exists (select from first_queued) or (select is_needed from by_kind),
  (select count(*) from chosen) between 1 and $13 - 1 and exists (select from kinds_end)
from clock
-- The notification is part of the exchange, so it is sent only if the release commits.
left join lateral (
  select pg_notify('jobs:insert', '{"r":' || random()::text || ',"count":1,"worker":' || pg_catalog.to_json($1::text)::text || '}')
  from (select from for_others limit 1) as any_job
) as notified on true;
