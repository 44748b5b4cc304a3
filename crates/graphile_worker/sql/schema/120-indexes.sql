-- What a claim goes by, whatever is in the table. Each job is in one or two of them while it waits. Building them
-- locks out writers: seconds for a million jobs.

-- The jobs without a queue, in the order in which they run. The contract's index has no id, and jobs that were added
-- together have the same run_at: sorting a million of them is no way to find the first.
create index if not exists _rs_jobs_unqueued on :"schema"._private_jobs
  (priority, run_at, id) include (task_id)
  where is_available = true and job_queue_id is null;

-- The same for the jobs that have a queue. Only a query that says `job_queue_id >= '-2147483648'`, which every queue's
-- id is, can use it: to a planner without statistics it looks as good as the next one for finding the jobs of one queue.
create index if not exists _rs_jobs_queued on :"schema"._private_jobs
  (priority, run_at, id) include (job_queue_id, task_id)
  where is_available = true and job_queue_id >= '-2147483648';

-- The next jobs of a queue, and which queues have any, without reading past the jobs of the others: with the
-- contract's indexes a claim reads every job behind a locked queue (205 ms for a million of them).
create index if not exists _rs_jobs_by_queue on :"schema"._private_jobs
  (job_queue_id, priority, run_at, id) include (task_id)
  where is_available = true and job_queue_id is not null;
