-- Keeps worker $1's locks on the jobs $2 and the queues $3 fresh, because others take a lock of 4 hours for that of a dead
-- worker. A job's lock moves by whole hours: it is still recognised by who knows when the job was claimed, whatever is on
-- its way meanwhile. `skip locked`: what somebody else is just changing has its turn the next time.
with jobs as (
  select id from :"schema"._private_jobs
  where id = any ($2::bigint[]) and locked_by = $1 and locked_at < now() - interval '1 hour'
  for update skip locked
), kept as (
  update :"schema"._private_jobs as held
  set locked_at = held.locked_at + floor(extract(epoch from now() - held.locked_at) / 3600) * interval '1 hour'
  from jobs where held.id = jobs.id
), queues as (
  select id from :"schema"._private_job_queues
  where id = any ($3::int[]) and locked_by = $1 and locked_at < now() - interval '1 hour'
  for update skip locked
)
update :"schema"._private_job_queues as held
set locked_at = now()
from queues where held.id = queues.id;
