-- Copies the rows of an old layout into the tables of 010 with their ids, and drops the old tables. Old tables used
-- `int` where the contract has `smallint`: values out of range become the nearest valid value. Clears stale locks (4
-- hours); with other locks, the migration stops before this step (see migrate.rs).
set local search_path = :"schema", pg_catalog, pg_temp;

insert into _private_tasks (identifier)
select distinct task_identifier from _old_jobs_read order by 1;

insert into _private_job_queues (queue_name)
select distinct queue_name from _old_jobs_read where queue_name is not null order by 1;

insert into _private_jobs (
  id, job_queue_id, task_id, payload, priority, run_at, attempts, max_attempts, last_error,
  created_at, updated_at, key, revision, flags
) overriding system value
select
  old.id, job_queues.id, tasks.id, old.payload,
  least(greatest(old.priority, -32768), 32767),
  old.run_at,
  least(greatest(old.attempts, 0), 32767),
  least(greatest(old.max_attempts, 1), 32767),
  old.last_error, old.created_at, old.updated_at, old.key, old.revision, old.flags
from _old_jobs_read as old
join _private_tasks as tasks on tasks.identifier = old.task_identifier
left join _private_job_queues as job_queues on job_queues.queue_name = old.queue_name;

insert into _private_known_crontabs (identifier, known_since, last_execution)
select identifier, known_since, last_execution from _old_known_crontabs;

-- An id that was ever assigned is not assigned again, even if its job is long gone.
select setval(
  pg_get_serial_sequence('_private_jobs', 'id'),
  nextval(pg_get_serial_sequence('_old_jobs', 'id')),
  false
);

do $$
begin
  if (select count(*) from _old_jobs) <> (select count(*) from _private_jobs) then
    raise exception 'not every job of the old tables has arrived in the new ones: nothing is changed';
  end if;
end
$$;

drop view _old_jobs_read;
drop table _old_jobs, _old_job_queues, _old_known_crontabs;
drop table if exists _old_tasks;
drop function if exists
  jobs__decrease_job_queue_count(), jobs__increase_job_queue_count(),
  tg__update_timestamp(), tg_jobs__notify_new_jobs(), tg_jobs__after_insert();
