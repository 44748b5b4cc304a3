-- The jobs with a queue, in the order in which they run. Only a query with `job_queue_id > 0`, which
-- holds for every queue (not for lanes, see 180), can use it: otherwise a planner without statistics would also use it to find the jobs of one
-- queue. (`:concurrently`: see 120.)
create index :concurrently if not exists _rs_jobs_in_queues on :"schema"._private_jobs
  (priority, run_at, id) include (job_queue_id, task_id)
  where is_available operator(pg_catalog.=) true and job_queue_id operator(pg_catalog.>) 0;
