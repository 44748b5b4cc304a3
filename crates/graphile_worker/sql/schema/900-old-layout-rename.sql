-- Levels 1 to 15 stored jobs in tables of another layout. This renames them, 901 or 902 reads them, and 910 copies
-- the rows into the tables of 010, all in one transaction. Locks the old tables exclusively: a worker of an old
-- release waits, then finds them gone.
set local search_path = :"schema", pg_catalog, pg_temp;

lock table jobs, job_queues in access exclusive mode;

-- Functions of the SQL API return rows of the old table, so they are dropped first. Only names that a release has
-- used: a user's own objects stay, and if they depend on these, PostgreSQL fails and nothing is changed.
do $$
declare
  old_function regprocedure;
  old_index regclass;
begin
  for old_function in
    select oid from pg_proc
    where pronamespace = current_schema()::regnamespace and proname in (
      'add_job', 'add_jobs', 'complete_job', 'complete_jobs', 'fail_job', 'force_unlock_workers',
      'get_job', 'permanently_fail_jobs', 'remove_job', 'reschedule_jobs'
    )
  loop
    execute format('drop function %s', old_function);
  end loop;

  -- Their names are wanted for the new tables.
  for old_index in
    select indexrelid from pg_index
    where indrelid in (to_regclass('jobs'), to_regclass('job_queues'), to_regclass('tasks'), to_regclass('known_crontabs'))
  loop
    execute format('alter index %s rename to %I', old_index, '_old_index_' || old_index::oid);
  end loop;
end
$$;

drop type if exists job_spec;
alter table jobs rename to _old_jobs;
alter table job_queues rename to _old_job_queues;
alter table if exists tasks rename to _old_tasks;
alter table if exists known_crontabs rename to _old_known_crontabs;

-- The first releases had fewer columns and no crontab.
alter table _old_jobs
  add column if not exists key text,
  add column if not exists locked_at timestamptz,
  add column if not exists locked_by text,
  add column if not exists revision int not null default 0,
  add column if not exists flags jsonb;
create table if not exists _old_known_crontabs (
  identifier text, known_since timestamptz, last_execution timestamptz
);
