-- The workers that hold jobs or queues. A lock of 4 hours is stale and does not count. Reads the whole table.
select distinct locked_by
from (
  select locked_at, locked_by from :"schema"._private_jobs
  union all
  select locked_at, locked_by from :"schema"._private_job_queues
) as locks
where locked_at > now() - interval '4 hours'
order by locked_by;
