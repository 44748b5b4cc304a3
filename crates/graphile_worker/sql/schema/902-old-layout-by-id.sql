-- Levels 11 to 15: jobs contain the ids of their task and queue. There was no foreign key on the task: if it was
-- deleted, the job is kept under a name that says so.
create view :"schema"._old_jobs_read as
  select
    jobs.*,
    coalesce(tasks.identifier, 'deleted task ' || jobs.task_id) as task_identifier,
    coalesce(job_queues.queue_name, 'deleted queue ' || jobs.job_queue_id) as queue_name
  from :"schema"._old_jobs as jobs
  left join :"schema"._old_tasks as tasks on tasks.id = jobs.task_id
  left join :"schema"._old_job_queues as job_queues on job_queues.id = jobs.job_queue_id;
