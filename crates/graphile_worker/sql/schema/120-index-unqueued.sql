-- The jobs without a queue, in the order in which they run. The contract's index has no id, and jobs that were added
-- together have the same run_at: finding the first would sort a million of them.
--
-- `:concurrently` is empty for new tables. If there are jobs already, it is `concurrently`, which does not block
-- other sessions, and cannot run in a transaction.
create index :concurrently if not exists _rs_jobs_unqueued on :"schema"._private_jobs
  (priority, run_at, id) include (task_id)
  where is_available operator(pg_catalog.=) true and job_queue_id is null;
