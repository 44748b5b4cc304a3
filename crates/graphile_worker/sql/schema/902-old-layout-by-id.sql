-- Levels 11 to 14: a job points at its task and its queue.
create view :"schema"._old_jobs_read as
  select jobs.*, tasks.identifier as task_identifier, job_queues.queue_name
  from :"schema"._old_jobs as jobs
  join :"schema"._old_tasks as tasks on tasks.id = jobs.task_id
  left join :"schema"._old_job_queues as job_queues on job_queues.id = jobs.job_queue_id;
