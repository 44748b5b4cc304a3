-- Keeps worker $1's locks on the jobs $2 and the queues $3 fresh, because others take a lock of 4 hours for that of a dead
-- worker. A job's lock moves by whole hours: it is still recognised by who knows when the job was claimed, whatever is on
-- its way meanwhile.
with jobs as (
  update :"schema"._private_jobs
  set locked_at = locked_at + floor(extract(epoch from now() - locked_at) / 3600) * interval '1 hour'
  where id = any ($2::bigint[]) and locked_by = $1 and locked_at < now() - interval '1 hour'
)
update :"schema"._private_job_queues
set locked_at = now()
where id = any ($3::int[]) and locked_by = $1 and locked_at < now() - interval '1 hour';
