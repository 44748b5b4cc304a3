-- Finds the next jobs of a queue, and which queues have any, without reading past the jobs of the others:
-- with the contract's indexes a claim reads every job behind a locked queue (205 ms for a million of them).
-- Costs a queued insert about a quarter, an unqueued one nothing. Building it locks out writers: a second for
-- a million jobs.
create index if not exists _rs_jobs_by_queue on :"schema"._private_jobs
  (job_queue_id, priority, run_at, id) include (task_id)
  where is_available = true and job_queue_id is not null;
