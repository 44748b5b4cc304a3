-- The jobs that have a queue, in the order in which they run. Only a query that says `job_queue_id >= '-2147483648'`, which
-- every queue's id is, can use it: to a planner without statistics it looks as good as the next one for finding the jobs of
-- one queue. (`:concurrently`: see 120.)
create index :concurrently if not exists _rs_jobs_queued on :"schema"._private_jobs
  (priority, run_at, id) include (job_queue_id, task_id)
  where is_available = true and job_queue_id >= '-2147483648';
