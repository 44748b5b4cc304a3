-- The session that blocks all workers on the tables of jobs or queues: it holds a lock that conflicts with writing,
-- or waits for an exclusive lock, and all other sessions wait behind it. No row if there is none. Reads no table of
-- the schema: that could wait for the same lock.
select
  classes.relname::text as relation, locks.mode, locks.granted, locks.pid, activity.application_name,
  activity.usename::text as role, activity.state,
  extract(epoch from clock_timestamp() - activity.xact_start)::float8 as seconds,
  prepared.gid,
  case when not locks.granted then (pg_blocking_pids(locks.pid))[1] end as waits_for
from pg_locks as locks
join pg_class as classes on classes.oid = locks.relation
left join pg_stat_activity as activity on activity.pid = locks.pid
left join pg_locks as own
  on own.locktype = 'transactionid' and own.virtualtransaction = locks.virtualtransaction and own.granted
left join pg_prepared_xacts as prepared on locks.pid is null and prepared.transaction = own.transactionid
where locks.locktype = 'relation'
  and locks.database = (select oid from pg_database where datname = current_database())
  and classes.relnamespace = (select oid from pg_namespace where nspname = :'schema')
  and classes.relname in ('_private_jobs', '_private_job_queues')
  and (
    locks.granted and locks.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
    or not locks.granted and locks.mode = 'AccessExclusiveLock'
  )
order by locks.granted desc, classes.relname desc
limit 1;
