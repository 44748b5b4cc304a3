-- When the next job of the tasks $1 is due that was not due yet at $2, the time of the last claim: how long an idle worker
-- may sleep. Jobs that were due then are not counted: the claim has seen them, and a worker that cannot run them, because
-- their queue is held or their task is at its limit, must not look again because of them. $3 is the time now, null for the
-- database's. Probes the index once for each priority that occurs, and reads on only past jobs of other tasks.
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
select extract(epoch from min(next.run_at) - coalesce($3::timestamptz, now()))::float8 as seconds
from priorities, lateral (
  select jobs.run_at from :"schema"._private_jobs as jobs
  where jobs.is_available = true
    and jobs.priority = priorities.priority
    and jobs.run_at > $2::timestamptz
    and jobs.run_at < 'infinity'
    and jobs.task_id = any ($1::int[])
  order by jobs.run_at limit 1
) as next;
