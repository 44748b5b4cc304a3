-- The jobs in lanes that are claimed: what the limits count. (`:concurrently`: see 120.)
create index :concurrently if not exists _rs_jobs_in_use on :"schema"._private_jobs
  (job_queue_id) include (task_id)
  where locked_at is not null and job_queue_id operator(pg_catalog.<) 0;
