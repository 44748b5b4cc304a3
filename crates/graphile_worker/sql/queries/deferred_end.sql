-- Ends a batch of worker $1: records what became of the jobs that `deferred_claim.sql` or `deferred_resume.sql` has
-- locked in this transaction. Must be the last statement before its commit. All rows are locked by this transaction, so it
-- waits for none of them, and all of them are as they were when they were locked.
--
--  $2 finished jobs: their rows are deleted
--  $3 jobs that stay: ids   $4 error, null keeps the last   $5 seconds to wait, null for the standard back-off
--     $6 run_at, null for $5   $7 attempts: -1 does not count, 0 counts, 1 uses up all of them   $8 payload or null
--     $9 true for a job that is released: it keeps its run_at, and the attempt does not count
--  $10 jobs that still run: their claim is written, as of $11, the time of the batch
--  $12 what time it is, or null for the database's   $13 how many seconds old the worker's heartbeat may be, null if it has
--      none: a worker that may have been declared dead claims nothing
--  $14 whether due jobs become free for other workers
--
-- Locks, besides: the registration of the worker if a claim is written. Finds rows by their primary key. Returns the jobs
-- whose claim was written.
with clock as (
  -- `now()` is the time at which the batch began.
  select coalesce($12::timestamptz, clock_timestamp()) as now
), finished as (
  delete from :"schema"._private_jobs as jobs where jobs.id = any ($2::bigint[])
), back as (
  select *
  from unnest($3::bigint[], $4::text[], $5::float8[], $6::timestamptz[], $7::int[], $8::text[], $9::bool[])
    as outcome (id, error, seconds, run_at, attempts, payload, is_released)
), unlocked as (
  update :"schema"._private_jobs as jobs
  set
    last_error = coalesce(back.error, jobs.last_error),
    run_at = case
      when back.is_released then jobs.run_at
      else coalesce(
        back.run_at,
        greatest(clock.now, jobs.run_at)
          + coalesce(back.seconds, exp(least(jobs.attempts + 1, 10)::float8)) * interval '1 second'
      )
    end,
    attempts = case
      when back.is_released or back.attempts = -1 then jobs.attempts
      when back.attempts = 1 then jobs.max_attempts
      else jobs.attempts + 1::int2
    end,
    payload = coalesce(back.payload::json, jobs.payload),
    updated_at = clock_timestamp()
  from clock, back
  where jobs.id = any (array[back.id])
), alive as (
  select workers.worker_id from :"schema"._rs_workers as workers
  where workers.worker_id = $1::text
    and workers.last_heartbeat_at > clock_timestamp() - make_interval(secs => $13::float8)
  for key share skip locked
), running as (
  update :"schema"._private_jobs as jobs
  set locked_at = $11::timestamptz, locked_by = $1, attempts = jobs.attempts + 1
  where jobs.id = any (array(
    select running.id from pg_catalog.unnest($10::bigint[]) as running (id)
    where $13 is null or exists (select from alive where running.id is not null)
  ))
  returning jobs.id
)
select running.id
from running
full join (select pg_notify('jobs:insert', '{"r":' || random()::text || ',"count":1,"worker":' || pg_catalog.to_json($1::text)::text || '}') where $14::bool)
  as notified on false;
