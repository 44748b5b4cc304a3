-- The jobs without a queue of each kind, in the order in which they run. A kind is a task, a priority and a set of flags. For
-- claims in front of which many jobs wait that the worker cannot take: of tasks that it does not run or that are at their
-- limit, or with flags that it must not run. Flags can be too long for an index, so it has a hash of 64 bits of them, 0 if
-- there are none.
--
-- Only a query with `(job_queue_id is null)::int = 1` can use it, and that query can use no other index: to a planner that
-- knows only one task, `_rs_jobs_unqueued` looks equally good. (`:concurrently`: see 120.)
create index :concurrently if not exists _rs_jobs_by_kind on :"schema"._private_jobs
  (task_id, priority, coalesce(pg_catalog.jsonb_hash_extended(flags, 0), 0), run_at, id)
  where is_available operator(pg_catalog.=) true and (job_queue_id is null)::int operator(pg_catalog.=) 1;
