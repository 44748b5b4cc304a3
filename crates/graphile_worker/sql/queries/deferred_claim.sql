-- Claims jobs of repeatable tasks for worker $1, in a transaction that stays open while they run. A job that nothing has
-- touched since it was added is only locked: its row is not written (`is_written` is false). `deferred_end.sql` deletes
-- or writes the row in the same transaction. If that transaction is rolled back, the job is free again.
--
-- Every other job is claimed with a write, and may start once the transaction has committed (`is_written` is true). It
-- may have killed a worker: a lock leaves its transaction in `xmax` of the row, also if the transaction was rolled back.
-- So a job runs at most once without a written claim. Or it has run before, or it has a key: adding a job with its key
-- would wait for the lock.
--
-- A claim that starts behind a job ($10 to $12) reads on from there, and passes over rows that anything has locked, by
-- `xmax` alone: to try to lock the row of another batch asks the lock manager twice, which takes ten times as long as to
-- read it, and each batch keeps a thousand rows locked. A claim from the head tries to lock them, because the lock may be gone.
--
-- Locks: the claimed rows with `skip locked`, and the registration of the worker if a claim is written, so that no sweep
-- can declare the worker dead meanwhile. Reads, by the index _rs_jobs_unqueued, as many rows as it claims, and those in
-- front of them that are locked or that other tasks have.
--
--  $2 ids of the repeatable tasks   $3 how many jobs it wants   $4 flags it must not run, or null
--  $5 flags of which a job must have one, or null   $6 an object of the flags that a job may have, or null
--  $7 what time it is, or null for the database's   $8 how many seconds old its heartbeat may be, null if it has none
--  $9 how many bytes of payloads it may take, about, besides the last one
--  $10 $11 $12 the job behind which the claim starts: priority, run_at and id, all null for the head (`claim_start.rs`)
--
-- Returns the jobs as they look with a written claim, and one last row without an id: the time of the claim (`clock`);
-- and, if it started at the head and got fewer than it wanted, whether it left due jobs because others had locked them or
-- because they did not fit (`contended`), and the seconds until the next job is due (`next_due`; null if there is none).
with recursive clock as (
  select coalesce($7::timestamptz, now()) as now
),
-- The first job of each priority, from the start of the claim on: one index probe each.
first_jobs as (
  (
    select priority, run_at, id from :"schema"._private_jobs
    where is_available = true and job_queue_id is null and $3::int > 0
      and (priority, run_at, id) > (
        coalesce($10::smallint, '-32768'::smallint),
        coalesce($11::timestamptz, '-infinity'::timestamptz),
        coalesce($12::bigint, '-9223372036854775808'::bigint)
      )
      and ($8::float8 is null or exists (
        select from :"schema"._rs_workers as workers
        where workers.worker_id = $1::text
          and workers.last_heartbeat_at > clock_timestamp() - make_interval(secs => $8)
      ))
    order by priority, run_at, id limit 1
  )
  union all
  select next.priority, next.run_at, next.id
  from first_jobs as known, lateral (
    select jobs.priority, jobs.run_at, jobs.id from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.job_queue_id is null and jobs.priority > known.priority
    order by jobs.priority, jobs.run_at, jobs.id limit 1
  ) as next
), due as materialized (
  select due.*
  from first_jobs as first, clock, lateral (
    select
      jobs.id, jobs.task_id, jobs.payload, jobs.priority, jobs.run_at, jobs.attempts, jobs.max_attempts,
      jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key, jobs.revision, jobs.flags,
      -- Computed before the row is locked.
      jobs.xmax = '0'::xid and jobs.attempts = 0 and jobs.last_error is null and jobs.key is null as is_fresh,
      case
        when pg_catalog.pg_column_size(jobs.payload) between 400 and 1899 then octet_length(jobs.payload::text)
        else pg_catalog.pg_column_size(jobs.payload)
      end as size
    from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id is null
      and jobs.priority = first.priority
      and (jobs.run_at, jobs.id) >= (first.run_at, first.id)
      and jobs.run_at <= clock.now
      and jobs.task_id = any ($2::int[])
      -- With `or`, the planner expects so few rows that it sorts those of another index.
      and case when $10 is not null then jobs.xmax = '0'::xid else true end
      and ($4::text[] is null or (jobs.flags ?| $4) is not true)
      and case when $5::text[] is not null then jobs.flags ?| $5 else true end
      and case when $6::jsonb is not null then (jobs.flags <@ $6) is not false else true end
    order by jobs.run_at, jobs.id
    limit $3
    for update skip locked
  ) as due
  limit $3
), room as (
  -- Most claims are far from full, and are not summed up job by job.
  select coalesce(max(size) < 1900 and sum(size) < $9::int, true) as fits_all from due
), sized as (
  select id, size, payload, sum(size) over (rows unbounded preceding) as stored
  from due where not (select fits_all from room)
), misfits as (
  -- The jobs before which there is no room for more payload. PostgreSQL may have compressed a large one, to a hundredth at
  -- best: from the first hundredth of the room on, such a payload is read for its length (see exchange.sql).
  select id from (
    select id,
      stored - size < $9 and coalesce(
        sum(case
          when size < 1900 or stored < $9 / 100 or stored - size >= $9 then size
          else octet_length(payload::text)
        end) over (rows between unbounded preceding and 1 preceding),
        0
      ) < $9 as fits
    from sized
  ) as measured where not fits
),
alive as (
  select workers.worker_id from :"schema"._rs_workers as workers
  where workers.worker_id = $1::text and workers.last_heartbeat_at > clock_timestamp() - make_interval(secs => $8)
  for key share skip locked
), written as (
  update :"schema"._private_jobs as jobs
  set locked_at = now(), locked_by = $1::text, attempts = jobs.attempts + 1
  where jobs.id = any (array(
    select id from due
    where not is_fresh and id not in (select id from misfits)
      and ($8 is null or exists (select from alive where due.id is not null))
  ))
  returning
    jobs.id, jobs.task_id, jobs.payload, jobs.priority, jobs.run_at, jobs.attempts, jobs.max_attempts, jobs.last_error,
    jobs.created_at, jobs.updated_at, jobs.key, jobs.revision, jobs.flags
)
select
  id, null::int as job_queue_id, task_id, payload::text as payload, priority, run_at, attempts + 1::int2 as attempts,
  max_attempts, last_error, created_at, updated_at, key, now() as locked_at, revision, flags, false as is_written,
  null::timestamptz as clock, null::boolean as contended, null::float8 as next_due
from due where is_fresh and id not in (select id from misfits)
union all
select
  id, null, task_id, payload::text, priority, run_at, attempts,
  max_attempts, last_error, created_at, updated_at, key, now(), revision, flags, true,
  null, null, null
from written
union all
select
  null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
  clock.now,
  case when $10 is null and $3 > 0 and $3 > (
    select count(*) from due where is_fresh and id not in (select id from misfits)
  ) + (select count(*) from written) then
    exists (select from misfits)
    or exists (
      -- Only the first ones: a due job that another transaction has locked is among them.
      select from first_jobs as first, lateral (
        select jobs.id, jobs.task_id, jobs.flags from :"schema"._private_jobs as jobs
        where jobs.is_available = true
          and jobs.job_queue_id is null
          and jobs.priority = first.priority
          and jobs.run_at <= clock.now
        order by jobs.run_at, jobs.id
        limit 100 + $3
      ) as waiting
      where waiting.task_id = any ($2)
        and ($4::text[] is null or (waiting.flags ?| $4) is not true)
        and case when $5::text[] is not null then waiting.flags ?| $5 else true end
        and case when $6::jsonb is not null then (waiting.flags <@ $6) is not false else true end
        and waiting.id not in (select id from due where is_fresh and id not in (select id from misfits))
        and waiting.id not in (select id from written)
    )
  else false end,
  case when $10 is null and (select count(*) from due) < $3 then (
    select extract(epoch from min(next.run_at) - clock.now)::float8
    from first_jobs as first, lateral (
      select jobs.run_at from :"schema"._private_jobs as jobs
      where jobs.is_available = true
        and jobs.job_queue_id is null
        and jobs.priority = first.priority
        and jobs.run_at > clock.now
        and jobs.run_at < 'infinity'
        and jobs.task_id = any ($2)
      order by jobs.run_at, jobs.id limit 1
    ) as next
  ) end
from clock;
