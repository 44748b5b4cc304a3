-- Signs that workers of the Rust port (the graphile_worker of crates.io) are alive, in one row: its workers with a heartbeat in the
-- last 5 minutes (its own rule); sessions of this database that look like its own, by the statements that they ran last; how
-- many sessions do not show theirs to this role; and the jobs that its workers hold. Its ids begin with graphile_worker_.
-- Without recovery, which is its default, it sends no heartbeats. Locks nothing.
with live as (
  select workers.id, workers.last_heartbeat_at
  from :"schema"._private_workers as workers
  where workers.last_heartbeat_at > now() - interval '5 minutes'
), held as (
  select jobs.id, tasks.identifier as task, jobs.locked_by as worker, jobs.locked_at
  from :"schema"._private_jobs as jobs
  join :"schema"._private_tasks as tasks on tasks.id = jobs.task_id
  where jobs.locked_by like 'graphile\_worker\_%'
    or jobs.locked_by in (select workers.id from :"schema"._private_workers as workers)
), others as (
  select sessions.pid, sessions.query
  from pg_stat_activity as sessions
  where sessions.datname = current_database() and sessions.pid <> pg_backend_pid()
    and sessions.usename is not null and sessions.application_name not like 'graphile\_worker %'
), sessions as (
  select others.pid
  from others
  -- Node's worker listens to a second channel in the same statement.
  where others.query = 'LISTEN "jobs:insert"'
    -- Its claim is indented by four spaces; Node's, of the same words, by two.
    or others.query ~ '^with j(_raw)? as \(\n {4}select jobs\.job_queue_id, jobs\.priority, jobs\.run_at, jobs\.id\n'
)
select
  array(select live.id::text from live order by live.id) as workers,
  coalesce((select extract(epoch from now() - max(live.last_heartbeat_at)) from live), 0)::float8 as seconds,
  array(select sessions.pid from sessions order by sessions.pid)::int[] as sessions,
  (select count(*) from others where others.query = '<insufficient privilege>') as hidden_sessions,
  array(select held.id from held order by held.id limit 10)::int8[] as job_ids,
  (select count(*) from held) as jobs,
  array(select distinct held.worker from held order by 1)::text[] as holders,
  (select extract(epoch from now() - max(held.locked_at)) from held)::float8 as newest_lock_seconds;
