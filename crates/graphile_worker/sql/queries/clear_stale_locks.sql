-- Releases jobs and queues whose locks are older than 4 hours: Node's worker and ours treat such a lock as that of a
-- dead worker. Reads the whole table; `skip locked`, so that it never waits.
with stale_jobs as (
  select id from :"schema"._private_jobs where locked_at < now() - interval '4 hours' for update skip locked
), jobs as (
  update :"schema"._private_jobs as jobs
  set locked_at = null, locked_by = null, run_at = greatest(jobs.run_at, now())
  from stale_jobs where jobs.id = stale_jobs.id
  returning jobs.id, jobs.job_queue_id
), called as (
  insert into :"schema"._rs_lane_calls (lane_id) select distinct job_queue_id from jobs where job_queue_id < 0
), stale_queues as (
  select id from :"schema"._private_job_queues where locked_at < now() - interval '4 hours' for update skip locked
), queues as (
  update :"schema"._private_job_queues as job_queues
  set locked_at = null, locked_by = null
  from stale_queues where job_queues.id = stale_queues.id
  returning job_queues.id
)
select (select count(*) from jobs) as jobs, (select count(*) from queues) as queues;
