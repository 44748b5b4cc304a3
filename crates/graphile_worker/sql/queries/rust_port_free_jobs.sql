-- Releases the jobs that workers of the Rust port hold, registered or not: their ids begin with graphile_worker_.
-- Refunds the attempt, unless the job was replaced by its key. Locks these jobs.
update :"schema"._private_jobs as jobs
set
  locked_at = null,
  locked_by = null,
  attempts = case
    when exists (select from :"schema"._private_job_retirements as retired where retired.id = jobs.id) then jobs.attempts
    else greatest(jobs.attempts - 1, 0)
  end,
  last_error = 'Job recovered after worker interruption',
  updated_at = now()
where jobs.locked_by like 'graphile\_worker\_%'
  or jobs.locked_by in (select workers.id from :"schema"._private_workers as workers);
