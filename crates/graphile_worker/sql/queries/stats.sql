-- Number of jobs in each state, one row per task, and when the oldest due job became due. Locks nothing. Reads the
-- whole table once: 0.2 s for a million jobs.
select
  tasks.identifier as task_identifier, counted.*, extract(epoch from now() - counted.oldest_due_at)::float8 as lag_seconds
from (
  select
    task_id,
    count(*) filter (where locked_at is null and attempts < max_attempts and run_at <= now()) as ready,
    count(*) filter (where locked_at is null and attempts < max_attempts and run_at > now() and attempts <= 0)
      as scheduled,
    count(*) filter (where locked_at is not null) as running,
    count(*) filter (where locked_at is null and attempts < max_attempts and run_at > now() and attempts > 0)
      as retrying,
    count(*) filter (where locked_at is null and attempts >= max_attempts) as failed,
    min(greatest(run_at, '0001-01-01Z')) filter (where locked_at is null and attempts < max_attempts and run_at <= now())
      as oldest_due_at
  from :"schema"._private_jobs
  group by task_id
) as counted
join :"schema"._private_tasks as tasks on tasks.id = counted.task_id
order by tasks.identifier;
