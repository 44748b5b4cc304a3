-- The locks on jobs and queues of an old layout, after 900 has renamed its tables (and so locked out all other
-- sessions): their number, and the workers. A lock of 4 hours is stale and does not count.
select count(*) as held, coalesce(string_agg(distinct locked_by, ', '), '') as workers
from (
  select locked_at, locked_by from :"schema"._old_jobs
  union all
  select locked_at, locked_by from :"schema"._old_job_queues
) as locks
where locked_at > now() - interval '4 hours';
