-- The limit's claim ($1 worker, $2 tasks, $3 number): unqueued jobs by jobs_no_queue_index in its order, `skip
-- locked`, written by ctid.
update graphile_worker._private_jobs
set locked_at = now(), locked_by = $1, attempts = attempts + 1
where ctid = any (array(
  select ctid
  from graphile_worker._private_jobs
  where is_available = true and job_queue_id is null and task_id = any ($2::int[]) and run_at <= now()
  order by priority, run_at
  limit $3
  for update skip locked
))
returning id, task_id, payload::text as payload;
