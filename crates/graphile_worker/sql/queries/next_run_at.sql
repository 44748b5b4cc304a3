-- When the next waiting job of the tasks $1 is due: how long an idle worker may sleep. Probes the index once for
-- each priority that occurs, and reads on only past jobs of other tasks. Jobs that became due
-- in the last $3 seconds count: the claim that went before may not have seen them.
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
select extract(epoch from min(next.run_at) - coalesce($2::timestamptz, now()))::float8 as seconds
from priorities, lateral (
  select jobs.run_at from :"schema"._private_jobs as jobs
  where jobs.is_available = true
    and jobs.priority = priorities.priority
    and jobs.run_at > coalesce($2::timestamptz, now()) - $3::float8 * interval '1 second'
    and jobs.run_at < 'infinity'
    and jobs.task_id = any ($1::int[])
  order by jobs.run_at limit 1
) as next;
