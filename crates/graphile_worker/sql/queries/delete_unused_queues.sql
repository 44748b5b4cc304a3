-- Deletes queues that are free and that no job belongs to. Run after lock_jobs.sql in one transaction.
delete from :"schema"._private_job_queues as job_queues
where job_queues.locked_at is null
  and not exists (select from :"schema"._private_jobs as jobs where jobs.job_queue_id = job_queues.id);
