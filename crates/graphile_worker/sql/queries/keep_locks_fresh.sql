-- Refreshes worker $1's locks on the jobs $2 and the queues $3, because other workers treat a lock of 4 hours as that
-- of a dead worker. A job's lock moves by whole hours, so that it still matches the time of the claim in all messages
-- that are under way. `skip locked`: rows that another session is changing are refreshed the next time.
with jobs as (
  select id from :"schema"._private_jobs
  where id = any ($2::bigint[]) and locked_by = $1 and locked_at < now() - interval '1 hour' and isfinite(locked_at)
  for update skip locked
), kept as (
  update :"schema"._private_jobs as held
  set locked_at = held.locked_at + floor(extract(epoch from now() - held.locked_at)::float8 / 3600::float8) * interval '1 hour'
  from jobs where held.id = jobs.id
), queues as (
  select id from :"schema"._private_job_queues
  where id = any ($3::int[]) and locked_by = $1 and locked_at < now() - interval '1 hour'
  for update skip locked
)
update :"schema"._private_job_queues as held
set locked_at = now()
from queues where held.id = queues.id;
