-- The jobs with a queue of each task, in the order in which they run: for workers that limit a task, whose jobs may be in front
-- of all others, each in a queue of its own (160 ms a claim for 300,000 of them, without it). Only a query that says
-- `(job_queue_id > 0)::int = 1` can use it: see 123. (`:concurrently`: see 120.)
create index :concurrently if not exists _rs_jobs_in_queues_by_task on :"schema"._private_jobs
  (task_id, priority, run_at, id) include (job_queue_id)
  where is_available = true and (job_queue_id > 0)::int = 1;
