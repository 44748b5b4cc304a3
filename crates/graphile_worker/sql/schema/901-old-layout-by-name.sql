-- Levels 1 to 10: jobs contain the names of their task and queue.
create view :"schema"._old_jobs_read as
  select jobs.* from :"schema"._old_jobs as jobs;
