-- Keeps the names of tasks and queues that a job uses from being deleted, by our cleanup, Node's cleanup or an
-- operator.
--
-- A job contains the ids of its task and its queue, without a foreign key. So a session that adds a job takes a
-- shared advisory lock on the bucket of each name before it looks the name up (`_rs_hold_name`), and holds it until
-- its transaction ends. A session that deletes a name tries to take the same lock exclusively, and keeps the name if
-- the bucket is in use. Deleting never waits, so these locks cannot deadlock, and buckets may be locked in any order.
--
-- Why buckets: one lock per name would exhaust shared memory if a batch has 100,000 queues. Why not row locks: Node's
-- worker skips a queue whose row is locked.
--
-- Creating a trigger waits for transactions that have changed the table, and all other sessions wait behind it. So it
-- waits at most a second; then the migration retries. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;
set local lock_timeout = '1s';

-- The bucket of a name; `kind` is 'task' or 'queue'.
create or replace function :"schema"._rs_name_bucket(kind text, name text)
returns int language sql immutable as $$
  select hashtext(kind || ' ' || name) & 63
$$;

-- Each statement of these functions has its own snapshot: the jobs are read after the lock was granted. Above read
-- committed this does not hold, and the name is kept.
--
-- They run as the owner, because row security would hide the jobs from other roles. `_rs_delete_unused_names` checks
-- all names in one query, and turns these triggers off for its transaction (`graphile_worker.names_are_unused`).
-- Another session can do the same, but only gains the deletion of names, for which it needs the right anyway.

-- One sequential scan of the jobs per task: there are few tasks.
create or replace function :"schema"._rs_keep_used_task()
returns trigger language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
    return null;
  end if;
  if not pg_try_advisory_xact_lock('_private_jobs'::regclass::oid::int, _rs_name_bucket('task', old.identifier)) then
    return null;
  end if;
  if exists (select from _private_jobs where task_id = old.id) or exists (select from _rs_limits where task_id = old.id) then
    return null;
  end if;
  return old;
end
$$;

-- There may be 100,000 queues, so this reads the index _rs_jobs_by_queue, which contains the available jobs. A
-- running job has a locked queue. One case remains: the queue of a permanently failed job, if the job was added, run
-- and failed after Node's statement started. That statement itself sees all older jobs.
create or replace function :"schema"._rs_keep_used_queue()
returns trigger language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  if old.locked_at is not null
    or current_setting('transaction_isolation') in ('repeatable read', 'serializable')
  then
    return null;
  end if;
  if not pg_try_advisory_xact_lock('_private_jobs'::regclass::oid::int, _rs_name_bucket('queue', old.queue_name)) then
    return null;
  end if;
  if exists (select from _private_jobs where is_available = true and job_queue_id = old.id) then
    return null;
  end if;
  return old;
end
$$;

-- Notifies workers that ids of tasks are gone: a worker reads the ids of its tasks once and caches them.
create or replace function :"schema"._rs_notify_deleted_tasks()
returns trigger language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  if exists (select from deleted) then
    perform pg_notify('worker:tasks', tg_table_schema);
  end if;
  return null;
end
$$;

drop trigger if exists _rs_keep_used_task on :"schema"._private_tasks;
create trigger _rs_keep_used_task before delete on :"schema"._private_tasks
  for each row
  when (current_setting('graphile_worker.names_are_unused', true) is distinct from 'on')
  execute function :"schema"._rs_keep_used_task();

drop trigger if exists _rs_notify_deleted_tasks on :"schema"._private_tasks;
create trigger _rs_notify_deleted_tasks after delete on :"schema"._private_tasks
  referencing old table as deleted
  for each statement execute function :"schema"._rs_notify_deleted_tasks();

drop trigger if exists _rs_keep_used_queue on :"schema"._private_job_queues;
create trigger _rs_keep_used_queue before delete on :"schema"._private_job_queues
  for each row
  when (current_setting('graphile_worker.names_are_unused', true) is distinct from 'on')
  execute function :"schema"._rs_keep_used_queue();

set local lock_timeout to default;
