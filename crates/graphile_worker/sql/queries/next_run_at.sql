-- The number of seconds until a job of the tasks $1 is due, 0 if one is due now: how long an idle worker may sleep.
-- Counts only jobs with a run_at of $2 or later, or all jobs if $2 is null. After a claim, $2 is the moment after that
-- claim. The claim has seen all earlier jobs; if the worker cannot run them (their queue is locked, or their task is at
-- its limit), it must not claim again because of them. $3 is the current time, null for the database's clock. Probes
-- the index once per priority, and reads further only past jobs of other tasks.
with recursive priorities as (
  (select priority from :"schema"._private_jobs where is_available = true order by priority limit 1)
  union all
  select (
    select jobs.priority from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.priority > priorities.priority
    order by jobs.priority limit 1
  )
  from priorities where priorities.priority is not null
)
select extract(epoch from min(greatest(next.run_at, coalesce($3::timestamptz, now()))) - coalesce($3::timestamptz, now()))::float8 as seconds
from priorities, lateral (
  select jobs.run_at from :"schema"._private_jobs as jobs
  where jobs.is_available = true
    and jobs.priority = priorities.priority
    and jobs.run_at >= coalesce($2::timestamptz, '-infinity'::timestamptz)
    and jobs.run_at < 'infinity'
    and jobs.task_id = any ($1::int[])
  order by jobs.run_at limit 1
) as next;
