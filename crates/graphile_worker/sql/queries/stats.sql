-- Number of jobs in each state, one row per task, and when the oldest due job became due. Locks nothing. Reads the
-- whole table once: 0.2 s for a million jobs.
--
-- A worker that runs a job of a repeatable task may only have locked its row: `xmax` then names the open transaction of one of
-- its deferred lanes.
select
  tasks.identifier as task_identifier, counted.*, extract(epoch from now() - counted.oldest_due_at)::float8 as lag_seconds
from (
  select
    task_id,
    count(*) filter (where locked_at is null and attempts < max_attempts and run_at <= now() and not is_in_batch) as ready,
    count(*) filter (where locked_at is null and attempts < max_attempts and run_at > now() and attempts <= 0)
      as scheduled,
    count(*) filter (where locked_at is not null or is_in_batch) as running,
    count(*) filter (where locked_at is null and attempts < max_attempts and run_at > now() and attempts > 0)
      as retrying,
    count(*) filter (where locked_at is null and attempts >= max_attempts and is_cancelled is not true) as failed,
    count(*) filter (where locked_at is null and attempts >= max_attempts and is_cancelled) as cancelled,
    min(greatest(run_at, '0001-01-01Z')) filter (where locked_at is null and attempts < max_attempts and run_at <= now() and not is_in_batch)
      as oldest_due_at
  from (
    select
      *,
      last_error = 'Cancelled' or starts_with(last_error, 'Cancelled: '::text) as is_cancelled,
      case
        when xmax <> '0'::xid then xmax = any (array(
          select locks.transactionid
          from pg_locks as locks
          join pg_stat_activity as activity on activity.pid = locks.pid
          where locks.locktype = 'transactionid' and locks.mode = 'ExclusiveLock' and locks.granted
            and activity.application_name like 'graphile\_worker % deferred _'
        ))
        else false
      end as is_in_batch
    from :"schema"._private_jobs
  ) as jobs
  group by task_id
) as counted
join :"schema"._private_tasks as tasks on tasks.id = counted.task_id
order by tasks.identifier;
