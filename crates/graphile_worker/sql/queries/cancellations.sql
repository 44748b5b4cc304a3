-- The jobs of worker $1 that were asked to stop: a worker reads them when it hears of a cancellation, or at intervals if it
-- cannot listen. Includes jobs whose claim this worker does not know of yet. Reads the few rows of the table, and their jobs by
-- their primary key; locks nothing.
select cancellations.job_id, cancellations.force, jobs.locked_at
from :"schema"._rs_cancellations as cancellations
join :"schema"._private_jobs as jobs on jobs.id = any (array[cancellations.job_id])
where jobs.locked_by = $1 and :"schema"._rs_is_removed(jobs.locked_at, jobs.run_at);
