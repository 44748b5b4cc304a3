-- Levels 1 to 10: a job names its task and its queue.
create view :"schema"._old_jobs_read as
  select jobs.* from :"schema"._old_jobs as jobs;
