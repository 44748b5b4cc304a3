-- What decides whether the job $1 runs, in one row; nulls if it does not exist. Locks nothing; reads the table once
-- for the locks of workers.
--
-- A row that an open transaction has locked or changed names that transaction in `xmax`; as long as it is open, it holds a
-- lock on its own number, which `pg_locks` shows to every role. If several transactions share the lock, `xmax` is the number of
-- a multixact, which lists them. Nothing shows which of the two it is, and an old `xmax` may equal the number of a multixact
-- of other rows; so only its transactions that have locked rows of the same table count.
--
-- A worker's row is read as JSON, because before a migration some of its columns do not exist.
with job as (
  select jobs.*, jobs.xmax as locker, jobs.tableoid as relation, tasks.identifier as task_identifier
  from :"schema"._private_jobs as jobs
  join :"schema"._private_tasks as tasks on tasks.id = jobs.task_id
  where jobs.id = $1::bigint
), lane as (
  select lanes.* from :"schema"._rs_lanes as lanes
  where lanes.id = (select job_queue_id from job) or lanes.old_queue_id = (select job_queue_id from job)
), queue as (
  -- That of the job, or that which its lane replaces.
  select job_queues.*, job_queues.xmax as locker, job_queues.tableoid as relation
  from :"schema"._private_job_queues as job_queues
  where job_queues.id = coalesce((select old_queue_id from lane), (select job_queue_id from job))
), own_limits as (
  select limits.* from :"schema"._rs_limits as limits
  where not limits.is_dropped and (
    limits.name = 'all'
    or limits.task_id = (select task_id from job)
    or limits.id = coalesce(
      (select limit_id from lane),
      :"schema"._rs_limit_of_queue(coalesce((select queue_name from lane), (select queue_name from queue)))
    )
  )
), in_use as materialized (
  select slots.* from :"schema"._rs_slots_in_use() as slots where exists (select from job)
), counted as (
  -- Counted as a claim counts: see `_rs_claim_from_lanes`.
  select
    limits.name, limits.concurrency, limits.rate, limits.per, limits.burst, limits.tat,
    limits.paused_at, limits.paused_until, limits.paused_by, limits.closed_until, limits.tripped_at, limits.failures,
    1 as cost, (select sum(in_use.of_task) from in_use where in_use.task_id = limits.task_id) as in_use
  from own_limits as limits where limits.name not like 'queue:%'
  union all
  -- A queue without a limit is serial.
  select
    coalesce(limits.name, 'queue:' || lane.queue_name), coalesce(limits.concurrency, 1), limits.rate, limits.per, limits.burst,
    lane.tat, limits.paused_at, limits.paused_until, limits.paused_by, lane.closed_until, lane.tripped_at, lane.failures, 1,
    (select sum(in_use.of_lane) from in_use where in_use.lane_id = lane.id)
  from lane left join own_limits as limits on limits.id = lane.limit_id
  where lane.queue_name is not null
  union all
  -- No worker has moved the job into a lane yet.
  select
    limits.name, limits.concurrency, null, null, null, null, limits.paused_at, limits.paused_until, limits.paused_by,
    null, null, null, 1, null
  from own_limits as limits where limits.name like 'queue:%' and not exists (select from lane)
  union all
  select
    groups.name, groups.concurrency, groups.rate, groups.per, groups.burst, groups.tat,
    groups.paused_at, groups.paused_until, groups.paused_by, groups.closed_until, groups.tripped_at, groups.failures,
    (select sum(limits.cost) from own_limits as limits where limits.group_id = groups.id)::int,
    (
      select sum(members.cost * case when members.task_id is null then in_use.of_lane else in_use.of_task end)
      from :"schema"._rs_limits as members
      left join :"schema"._rs_lanes as lanes on lanes.limit_id = members.id
      join in_use on in_use.task_id = members.task_id or in_use.lane_id = lanes.id
      where members.group_id = groups.id
    )
  from :"schema"._rs_limits as groups
  where groups.id in (select limits.group_id from own_limits as limits where limits.group_id is not null)
), transactions as (
  select
    locks.transactionid, locks.virtualtransaction,
    pg_catalog.json_build_object(
      'pid', locks.pid, 'application_name', activity.application_name, 'role', activity.usename,
      'state', activity.state, 'seconds', extract(epoch from clock_timestamp() - activity.xact_start)::float8,
      'prepared', prepared.gid
    ) as about
  from pg_locks as locks
  left join pg_stat_activity as activity on activity.pid = locks.pid
  left join pg_prepared_xacts as prepared on locks.pid is null and prepared.transaction = locks.transactionid
  where locks.locktype = 'transactionid' and locks.mode = 'ExclusiveLock' and locks.granted
), lockers as (
  select 'job' as what, job.locker as transactionid, null::oid as relation from job
  union all
  select 'queue', queue.locker, null from queue
  union all
  select found.what, members.xid, found.relation
  from (
    select 'job' as what, job.locker, job.relation from job
    union all
    select 'queue', queue.locker, queue.relation from queue
  ) as found
  -- It fails for a number that is no multixact, yet or any more.
  cross join lateral pg_get_multixact_members(case
    when mxid_age(found.locker) between 1 and (select max(mxid_age(datminmxid)) from pg_database) then found.locker
  end) as members
), row_locks as (
  select
    lockers.what,
    -- The oldest first.
    pg_catalog.json_agg(transactions.about order by age(transactions.transactionid) desc) as holders
  from lockers
  join transactions on transactions.transactionid = lockers.transactionid
  where lockers.relation is null or exists (
    select from pg_locks as locks
    where locks.locktype = 'relation' and locks.relation = lockers.relation and locks.granted
      and locks.virtualtransaction = transactions.virtualtransaction
  )
  group by lockers.what
), held as (
  select
    locked_by as worker_id, count(*) as jobs,
    count(*) filter (where task_id = (select task_id from job)) as jobs_of_task, max(locked_at) as last_locked_at
  from :"schema"._private_jobs where locked_by is not null group by locked_by
), registered as (
  select workers.worker_id, workers.last_heartbeat_at, workers.heartbeat_interval, pg_catalog.to_jsonb(workers) as about
  from :"schema"._rs_workers as workers
), connected as (
  -- A worker that registers, but not here, works in another schema.
  select distinct named.worker_id
  from pg_stat_activity, split_part(application_name, ' ', 2) as named (worker_id)
  where datname = current_database() and application_name like 'graphile\_worker %'
    and (
      named.worker_id not like 'rs-live-%'
      or exists (select from registered where registered.worker_id = named.worker_id)
    )
), ids as (
  select worker_id from registered
  union select worker_id from connected
  union select worker_id from held where last_locked_at > now() - interval '4 hours'
  union select locked_by from job where locked_by is not null
  union select locked_by from queue where locked_by is not null
)
select
  now() as now,
  job.id, job.task_identifier, coalesce(lane.queue_name, queue.queue_name) as queue_name, job.priority,
  case
    when job.locked_at is not null then 'running'
    when job.attempts >= job.max_attempts then
      case when job.last_error = 'Cancelled' or starts_with(job.last_error, 'Cancelled: '::text) then 'cancelled' else 'failed' end
    when job.run_at <= now() then 'ready'
    when job.attempts > 0 then 'retrying'
    else 'scheduled'
  end as state,
  coalesce(successor.run_at, job.run_at) as run_at, job.attempts, job.max_attempts, job.last_error,
  job.created_at, job.updated_at, job.key, job.locked_at, job.locked_by, job.revision,
  case when jsonb_typeof(job.flags) = 'object' then array(select jsonb_object_keys(job.flags)) else '{}' end
    as flags,
  coalesce(successor.predecessor_ids, '{}') as replaces,
  -- Those of them that still run. Jobs that their workers cannot stop come first.
  (
    select coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
      'job_id', running.id, 'worker_id', running.locked_by,
      'can_stop', :"schema"._rs_can_cancel(running.locked_by)
    ) order by :"schema"._rs_can_cancel(running.locked_by), running.id), '[]')::text
    from :"schema"._private_jobs as running
    where running.id = any (successor.predecessor_ids) and running.locked_at is not null
  ) as replaced,
  queue.locked_at as queue_locked_at, queue.locked_by as queue_locked_by,
  case when queue.locked_at is not null then (
    select min(running.id) from :"schema"._private_jobs as running
    where running.job_queue_id = queue.id and running.locked_at is not null
  ) end as queue_job_id,
  -- `_rs_is_cancelled`, which does not exist before a migration.
  coalesce(job.locked_at is not null and job.run_at = 'infinity' and starts_with(job.last_error, 'Cancelled'::text), false)
    as is_being_cancelled,
  (select holders::text from row_locks where what = 'job') as row_lock,
  (select holders::text from row_locks where what = 'queue') as queue_row_lock,
  (
    select coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
      'worker_id', ids.worker_id,
      'is_registered', registered.worker_id is not null,
      -- Null behind a pooler, where connections have no name.
      'is_connected', case
        when connected.worker_id is not null then true
        when registered.about -> 'settings'::text -> 'pooled'::text = 'true'::jsonb then null
        else false
      end,
      'heartbeat_seconds', case when isfinite(registered.last_heartbeat_at) then
        extract(epoch from now() - registered.last_heartbeat_at)::float8
      end,
      'interval_seconds', extract(epoch from registered.heartbeat_interval)::float8,
      'host', registered.about -> 'host'::text,
      'pid', registered.about -> 'pid'::text,
      'slots', registered.about -> 'slots'::text,
      'tasks', registered.about -> 'tasks'::text,
      'settings', registered.about -> 'settings'::text,
      'jobs', coalesce(held.jobs, 0),
      'jobs_of_task', coalesce(held.jobs_of_task, 0)
    ) order by ids.worker_id), '[]')::text
    from ids
    left join registered using (worker_id)
    left join connected using (worker_id)
    left join held using (worker_id)
  ) as workers,
  coalesce(job.job_queue_id < 0, false) as is_in_lane,
  (
    select coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
      'name', counted.name, 'concurrency', counted.concurrency, 'in_use', coalesce(counted.in_use, 0), 'cost', counted.cost,
      'rate', counted.rate, 'per_seconds', extract(epoch from counted.per)::float8, 'room', room.n,
      'next_seconds', extract(epoch from room.next_at - now())::float8,
      'paused_seconds', case when counted.paused_until > now() then
        extract(epoch from now() - counted.paused_at)::float8
      end,
      'resumed_seconds', case when counted.paused_until > now() and counted.paused_until < 'infinity' then
        extract(epoch from counted.paused_until - now())::float8
      end,
      'paused_by', counted.paused_by,
      'closed_seconds', case when counted.closed_until > now() then
        extract(epoch from counted.closed_until - now())::float8
      end,
      'tripped_seconds', extract(epoch from now() - counted.tripped_at)::float8,
      'failures', counted.failures
    ) order by counted.name), '[]')::text
    from counted
    cross join lateral :"schema"._rs_room(
      case when counted.tripped_at is null then counted.concurrency else -counted.cost end, counted.in_use::bigint, counted.rate, counted.per, counted.burst, counted.tat, null
    ) as room
  ) as limits,
  -- Node's workers, and all other sessions that listen for jobs in this database.
  (
    select count(*) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid() and query ilike 'listen "jobs:insert"%'
  ) as listeners,
  (select max(registered.last_heartbeat_at) from registered) as last_heartbeat_at
from (select) as one
left join job on true
left join lane on true
left join queue on true
left join :"schema"._rs_successors as successor on successor.job_id = job.id;
