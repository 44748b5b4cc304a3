-- One exchange of worker $1: it reports jobs, frees queues and claims jobs, in one statement.
--
-- Fence: an outcome is written only if the job is still this worker's, with the same locked_by and locked_at as when it
-- was claimed, or whole hours later, as `keep_locks_fresh.sql` leaves it. (It is one `case`, because a planner that sees
-- locked_by alone may prefer to read the whole table for the few rows of this worker.)
--
-- Locks: every row with `skip locked`, so that an exchange does not wait for a row while it holds others (but for one case,
-- see `LOCK_TIMEOUT` in exchange.rs). Rows that
-- another transaction has locked are not written; the last row of the result names them, and the worker reports them
-- again. Such a lock may be an application's, or last only a moment: a claim with an older snapshot locks a row before it
-- sees that the row is taken. A queue stays locked while this worker has jobs of it, and passes from one of its jobs to
-- the next without being free in between.
--
-- PostgreSQL checks the conditions of a row again if it changed after this statement began, and cannot do that if they lead
-- to a CTE that writes. So what is locked or written depends only on CTEs that read or lock, and through `array(…)`.
--
-- The plan is made once, perhaps while the table is empty, and has to serve when it is full. So nothing may look cheap
-- then only: rows are found by `id = any (array[…])`, which leaves one way to begin, and if an index of the contract
-- could be read from end to end because its condition holds, the condition is not repeated.
--
-- Claims in the order (priority, run_at, id), by the indexes _rs_jobs_unqueued, _rs_jobs_queued and
-- _rs_jobs_by_queue, and reads about as many rows as it claims, whatever else is in the table.
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
--
-- Returns the claimed jobs and, last, one row without an id: the time of the claim (`clock`), reported jobs and queues that
-- others have locked (`blocked_jobs`, `blocked_queues`), and whether there are due jobs that others have locked
-- (`contended`).
with recursive clock as (
  select coalesce($15::timestamptz, now()) as now
), done as materialized (
  select jobs.id, jobs.ctid as place, jobs.job_queue_id
  from unnest($2::bigint[], $3::timestamptz[]) as outcome (id, locked_at)
  join :"schema"._private_jobs as jobs on jobs.id = any (array[outcome.id])
  where case when jobs.locked_by = $1 then
    jobs.locked_at = outcome.locked_at
    or extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600 = 0
  end
  for update of jobs skip locked
), finished as (
  -- By ctid, which saves a look into the index. A row that changed after this statement began has another one then, and is
  -- left: it counts as blocked (`left_over`).
  delete from :"schema"._private_jobs as jobs
  where jobs.ctid = any (array(select place from done where job_queue_id is null))
  returning jobs.id
), finished_of_queues as (
  delete from :"schema"._private_jobs as jobs
  where jobs.id = any (array(select id from done where job_queue_id is not null))
), back as materialized (
  select
    jobs.id, outcome.error, outcome.seconds, outcome.run_at, outcome.attempts, outcome.payload, outcome.key,
    outcome.unbegun, jobs.job_queue_id,
    :"schema"._rs_is_removed(jobs.locked_at, jobs.run_at) as is_removed
  from unnest(
    $4::bigint[], $5::timestamptz[], $6::text[], $7::float8[], $8::timestamptz[], $9::int[], $10::text[], $16::text[],
    $19::int[]
  ) as outcome (id, locked_at, error, seconds, run_at, attempts, payload, key, unbegun)
  join :"schema"._private_jobs as jobs on jobs.id = any (array[outcome.id])
  where case when jobs.locked_by = $1 then
    jobs.locked_at = outcome.locked_at
    or extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600 = 0
  end
  for update of jobs skip locked
), withdrawn as (
  -- Removed before it began.
  delete from :"schema"._private_jobs as jobs
  using back where jobs.id = any (array[back.id]) and back.is_removed and back.unbegun is not null
), given_back as (
  update :"schema"._private_jobs as jobs
  set
    locked_at = null,
    locked_by = null,
    last_error = coalesce(back.error, jobs.last_error),
    run_at = case
      when back.unbegun is not null then jobs.run_at
      else coalesce(
        back.run_at,
        greatest(clock.now, case when not back.is_removed then jobs.run_at end)
          + coalesce(back.seconds, exp(least(jobs.attempts, 10))) * interval '1 second'
      )
    end,
    attempts = case
      when back.unbegun is not null then back.unbegun
      when back.attempts = -1 and not back.is_removed and jobs.key is not distinct from back.key
        then greatest(jobs.attempts - 1, 0)
      when back.attempts = 1 then jobs.max_attempts
      else jobs.attempts
    end,
    payload = coalesce(back.payload::json, jobs.payload),
    updated_at = now()
  from clock, back
  where jobs.id = any (array[back.id]) and not (back.is_removed and back.unbegun is not null)
),
-- Reported, still this worker's, and locked by others. Looked for only if fewer rows were locked than reported.
blocked as (
  select outcome.id, jobs.job_queue_id
  from unnest($2::bigint[] || $4::bigint[], $3::timestamptz[] || $5::timestamptz[]) as outcome (id, locked_at)
  join :"schema"._private_jobs as jobs on jobs.id = any (array[outcome.id])
  where (select count(*) from done) + (select count(*) from back) < cardinality($2) + cardinality($4)
    and outcome.id not in (select id from done)
    and outcome.id not in (select id from back)
    and case when jobs.locked_by = $1 then
      jobs.locked_at = outcome.locked_at
      or extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600 = 0
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
-- The priorities that occur among jobs without a queue: one index probe each. Within one, due jobs come first, so
-- that jobs of the future are never read.
unqueued_priorities as (
  (
    select priority from :"schema"._private_jobs
    where is_available = true and job_queue_id is null and $13 > 0
    order by priority, run_at, id limit 1
  )
  union all
  select (
    select jobs.priority from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.job_queue_id is null and jobs.priority > known.priority
    order by jobs.priority, jobs.run_at, jobs.id limit 1
  )
  from unqueued_priorities as known where known.priority is not null
), unqueued as (
  select due.*
  from unqueued_priorities as known, clock, lateral (
    select jobs.job_queue_id, jobs.task_id, jobs.priority, jobs.run_at, jobs.id
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id is null
      and jobs.priority = known.priority
      and jobs.run_at <= clock.now
      and jobs.task_id = any ($12::int[])
      and $17::int[] is null
      and ($14::text[] is null or (jobs.flags ?| $14) is not true)
    order by jobs.run_at, jobs.id
    limit $13
    for update skip locked
  ) as due
  limit $13
),
-- The same if tasks are limited, without locks: rows that are locked and then not taken would look taken to others.
unqueued_seen as (
  select due.*
  from unqueued_priorities as known, clock, lateral (
    select jobs.job_queue_id, jobs.task_id, jobs.priority, jobs.run_at, jobs.id
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id is null
      and jobs.priority = known.priority
      and jobs.run_at <= clock.now
      and jobs.task_id = any ($12::int[])
      and $17::int[] is not null
      and ($14::text[] is null or (jobs.flags ?| $14) is not true)
    order by jobs.run_at, jobs.id
    limit $13
  ) as due
  limit $13
),
-- The jobs with a queue that come first: their queues are those to try. They may all be of queues that somebody
-- holds, so this reads only so far.
queued_priorities as (
  (
    select priority from :"schema"._private_jobs
    where is_available = true and job_queue_id >= '-2147483648' and $13 > 0
    order by priority, run_at, id limit 1
  )
  union all
  select (
    select jobs.priority from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.job_queue_id >= '-2147483648' and jobs.priority > known.priority
    order by jobs.priority, jobs.run_at, jobs.id limit 1
  )
  from queued_priorities as known where known.priority is not null
), first_queued as (
  select due.job_queue_id, row_number() over () as nth
  from queued_priorities as known, clock, lateral (
    select jobs.job_queue_id
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id >= '-2147483648'
      and jobs.priority = known.priority
      and jobs.run_at <= clock.now
      and jobs.task_id = any ($12::int[])
      and ($14::text[] is null or (jobs.flags ?| $14) is not true)
    order by jobs.run_at, jobs.id
    limit 50 + 2 * $13
  ) as due
  limit 50 + 2 * $13
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
-- Where those were not enough: all queues that have waiting jobs, one index probe each, up to a thousand, beginning
-- anywhere, so that where there are more, each has its turn.
some_queue as materialized (
  select floor(random() * last.job_queue_id)::int as id
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
-- Of these, those whose first job comes first. It comes after those of the queues above, which the walk met.
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
    select jobs.job_queue_id, jobs.task_id, jobs.priority, jobs.run_at, jobs.id
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id = won_queues.id
      and jobs.run_at <= clock.now
      and jobs.task_id = any ($12::int[])
      and ($14::text[] is null or (jobs.flags ?| $14) is not true)
    order by jobs.priority, jobs.run_at, jobs.id
    -- Only the first of a queue can run now; the others spare a round trip each, if there is room for them.
    limit (select greatest($13 / greatest(count(*), 1), 1) from won_queues)
    for update skip locked
  ) as due
), candidates as (
  select * from unqueued union all select * from unqueued_seen union all select * from queued
), within_limits as (
  select * from candidates where $17::int[] is null
  union all
  select job_queue_id, task_id, priority, run_at, id
  from (
    select *, row_number() over (partition by task_id order by priority, run_at, id) as nth_of_task
    from candidates where $17 is not null
  ) as numbered
  where nth_of_task <= coalesce($17[array_position($12, task_id)], 2147483647)
), ranked as (
  select id, job_queue_id from within_limits order by priority, run_at, id limit $13
), locked_late as (
  select jobs.id from :"schema"._private_jobs as jobs
  where jobs.id = any (array(select id from ranked where job_queue_id is null and $17 is not null))
    -- is_available, in words that lead to no other index.
    and jobs.locked_at is null and jobs.attempts < jobs.max_attempts
  for update skip locked
),
-- Locked against a sweep that declares it dead; looked at only if there is something to claim.
alive as (
  select workers.worker_id from :"schema"._rs_workers as workers
  where workers.worker_id = $1 and workers.last_heartbeat_at > now() - make_interval(secs => $18::float8)
  for key share skip locked
), chosen as (
  select id, job_queue_id from ranked
  where ($17 is null or job_queue_id is not null or id in (select id from locked_late))
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
  -- By id, although ctid is a little faster: a row that was changed since this statement began has another ctid, and would
  -- be left out here while its queue is locked above.
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
-- What other workers can do now: jobs that go back unbegun, and due jobs of a queue that is free.
for_others as (
  select from back where back.unbegun is not null and not back.is_removed and back.job_queue_id is null
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
  null::boolean as contended
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
      -- Only the first: a job that others have locked is one of them.
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
      where due.task_id = any ($12::int[])
        and ($14::text[] is null or (due.flags ?| $14) is not true)
        and due.id not in (select id from chosen)
    )
    or exists (
      select from first_queued
      join :"schema"._private_job_queues as job_queues on job_queues.id = any (array[first_queued.job_queue_id])
      where job_queues.is_available and job_queues.id not in (select id from won_queues)
    )
  )
from clock
-- The notification is a part of the exchange: nobody hears of jobs that were not given back after all.
left join lateral (
  select pg_notify('jobs:insert', '{"r":' || random() || ',"count":1,"worker":' || to_json($1::text) || '}')
  from (select from for_others limit 1) as any_job
) as notified on true;
