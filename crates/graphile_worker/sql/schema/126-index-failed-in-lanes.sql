-- The permanently failed jobs in lanes. They keep their lane, and are few. (`:concurrently`: see 120.)
create index :concurrently if not exists _rs_jobs_failed_in_lanes on :"schema"._private_jobs
  (job_queue_id)
  where is_available operator(pg_catalog.=) false and locked_at is null and job_queue_id operator(pg_catalog.<) 0;
