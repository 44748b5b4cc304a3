-- The next jobs of a queue, and the queues that have any, without reading the jobs of other queues: with the
-- contract's indexes, a claim reads every job behind a locked queue (205 ms for a million of them). (`:concurrently`:
-- see 120.)
create index :concurrently if not exists _rs_jobs_by_queue on :"schema"._private_jobs
  (job_queue_id, priority, run_at, id) include (task_id)
  where is_available operator(pg_catalog.=) true and job_queue_id is not null;
