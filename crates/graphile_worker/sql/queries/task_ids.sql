-- The ids of the tasks named $1, and whether any job is waiting at all.
select
  identifier, id, exists (select from :"schema"._private_jobs where is_available = true) as jobs_wait
from :"schema"._private_tasks
where identifier = any ($1::text[]);
