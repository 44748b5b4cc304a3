-- The jobs without a queue of each task, in the order in which they run: for workers that limit a task whose jobs may
-- come before all others. Only a query with `(job_queue_id is null)::int = 1` can use it, and that query can use no
-- other index: to a planner that knows only one task, `_rs_jobs_unqueued` looks equally good. (`:concurrently`: see
-- 120.)
create index :concurrently if not exists _rs_jobs_by_task on :"schema"._private_jobs
  (task_id, priority, run_at, id)
  where is_available operator(pg_catalog.=) true and (job_queue_id is null)::int operator(pg_catalog.=) 1;
