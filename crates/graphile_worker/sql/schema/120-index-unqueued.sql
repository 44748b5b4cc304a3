-- The jobs without a queue, in the order in which they run. The contract's index has no id, and jobs that were added
-- together have the same run_at: sorting a million of them is no way to find the first.
--
-- `:concurrently` is empty for tables that were just made. Where there are jobs already it is `concurrently`, which locks
-- nobody out, and cannot be part of a transaction.
create index :concurrently if not exists _rs_jobs_unqueued on :"schema"._private_jobs
  (priority, run_at, id) include (task_id)
  where is_available = true and job_queue_id is null;
