-- The SQL API: add_job, add_jobs, remove_job, complete_jobs, permanently_fail_jobs, reschedule_jobs,
-- force_unlock_workers, and their helpers, whose names begin with `_rs_` like everything that is only ours.
--
-- Each public function sets its own search_path, so that the caller's cannot redirect it; helpers run under the path
-- of the calling function. To prevent deadlocks between calls, all functions lock tasks before queues, names and keys
-- in alphabetical order, and jobs in the order of their ids. Runs in a transaction (by hand: `psql -1`).
set local search_path = pg_catalog, :"schema", pg_temp;

-- Returns what is wrong with a job as 'CODE message', or null. A single expression, so that the planner inlines it
-- (which is also why it is `stable`: text || int is).
create or replace function :"schema"._rs_job_problem(
  identifier text, queue_name text, max_attempts int, job_key text, priority int, flags text[]
) returns text language sql stable as $$
  select case
    when identifier is null or identifier = '' then
      'GWBID Task identifier is empty, expected 1 to 128 characters.'
    when length(identifier) > 128 then
      'GWBID Task identifier is too long (max length: 128), this one has ' || length(identifier)::text || '.'
    when queue_name = '' then
      'GWBQN Job queue name is empty, expected 1 to 128 characters, or null for no queue.'
    when length(queue_name) > 128 then
      'GWBQN Job queue name is too long (max length: 128), this one has ' || length(queue_name)::text || '.'
    when job_key = '' then
      'GWBJK Job key is empty, expected 1 to 512 characters, or null for no key.'
    when length(job_key) > 512 then
      'GWBJK Job key is too long (max length: 512), this one has ' || length(job_key)::text || '.'
    when max_attempts < 1 then
      'GWBMA Job maximum attempts must be at least 1, found ' || max_attempts::text || '.'
    when max_attempts > 32767 then
      'GWBMA Job maximum attempts must be at most 32767, found ' || max_attempts::text || '.'
    when priority not between -32768 and 32767 then
      '22003 Job priority must be between -32768 and 32767, found ' || priority::text || '.'
    when pg_catalog.array_position(flags, null) is not null then
      '22004 Job flags must not contain null.'
  end
$$;

create or replace function :"schema"._rs_flags_object(flags text[])
returns jsonb language sql immutable as $$
  select pg_catalog.jsonb_object_agg(flag, true) from pg_catalog.unnest(flags) as flag
$$;

-- Ends a loop that another session can cause to repeat once or twice, but not a thousand times: there is a row that
-- this role cannot see.
create or replace function :"schema"._rs_give_up(what text)
returns void language plpgsql as $$
begin
  raise exception using
    errcode = '42501',
    message = format('The %s exists, but this role can neither see nor change it.', what),
    hint = 'Call the function as the owner of the schema, or through a function that is security definer.';
end
$$;

-- The id of a new job. Runs as the owner: inserting a job does not require rights on its sequence.
create or replace function :"schema"._rs_next_job_id()
returns bigint language sql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select nextval(pg_get_serial_sequence('_private_jobs', 'id'))
$$;

-- The ids of `count` new jobs, in ascending order, for callers that write rows in another order than that of their ids.
create or replace function :"schema"._rs_next_job_ids(count int)
returns bigint[] language sql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
  select array(
    select nextval(sequence.name)
    from (select pg_get_serial_sequence('_private_jobs', 'id')::regclass as name offset 0) as sequence,
      generate_series(1, count)
  )
$$;

-- Keeps a task ('task') or queue ('queue') from being deleted until this transaction ends, whether it exists or not.
-- Called before the name is looked up: an id that was read earlier may be gone. See 160-used-names.sql. Always true,
-- and a single expression, so that `is_held boolean := …` needs no query: that takes 2 µs, `perform` takes 4.
create or replace function :"schema"._rs_hold_name(kind text, name text)
returns boolean language sql as $$
  select pg_advisory_xact_lock_shared('_private_jobs'::regclass::oid::int, _rs_name_bucket(kind, name)) is not null
$$;

-- For transactions above read committed: their snapshot may be older than the lock of `_rs_hold_name`, and contain a
-- name that has been deleted since. Then this fails with 40001. Rolls its row lock back at once, because Node's
-- worker skips queues that are locked; such a lock does not wait for updates of the row. Runs as the owner: adding a
-- job does not require the right to update names.
create or replace function :"schema"._rs_verify_name(kind text, name_id int)
returns void language plpgsql security definer
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  if kind = 'task' then
    perform from _private_tasks where id = name_id for key share;
  else
    perform from _private_job_queues where id = name_id for key share;
  end if;
  raise exception 'unlock' using errcode = 'GWOUT';
exception when sqlstate 'GWOUT' then
  null;
end
$$;

-- The id of a task; creates it if needed. Reads before it inserts: an identity value is an int, and `on conflict`
-- alone would use one up with every job.
create or replace function :"schema"._rs_task_id(name text)
returns int language plpgsql as $$
declare
  is_held boolean := _rs_hold_name('task', name);
  task_id int;
begin
  for attempt in 1..1000 loop
    select id into task_id from _private_tasks where identifier = name;
    if found then
      if current_setting('transaction_isolation') <> 'read committed' then
        perform _rs_verify_name('task', task_id);
      end if;
      return task_id;
    end if;
    insert into _private_tasks (identifier) values (name) on conflict do nothing returning id into task_id;
    if found then
      return task_id;
    end if;
  end loop;
  perform _rs_give_up('task ' || quote_literal(name));
end
$$;

-- The id of a queue; creates it if needed. Null for no queue.
create or replace function :"schema"._rs_job_queue_id(name text)
returns int language plpgsql strict as $$
declare
  is_held boolean := _rs_hold_name('queue', name);
  job_queue_id int;
begin
  for attempt in 1..1000 loop
    select id into job_queue_id from _private_job_queues where queue_name = name;
    if found then
      if current_setting('transaction_isolation') <> 'read committed' then
        perform _rs_verify_name('queue', job_queue_id);
      end if;
      return job_queue_id;
    end if;
    insert into _private_job_queues (queue_name) values (name) on conflict do nothing
      returning id into job_queue_id;
    if found then
      return job_queue_id;
    end if;
  end loop;
  perform _rs_give_up('queue ' || quote_literal(name));
end
$$;

-- The ids of many tasks, by name; creates those that are missing, in alphabetical order. The names must be distinct.
create or replace function :"schema"._rs_task_ids(names text[])
returns jsonb language plpgsql as $$
declare
  ids jsonb;
  known bigint;
begin
  perform pg_advisory_xact_lock_shared('_private_jobs'::regclass::oid::int, buckets.bucket)
  from (select distinct _rs_name_bucket('task', name) as bucket from unnest(names) as name) as buckets;
  for attempt in 1..1000 loop
    select jsonb_object_agg(tasks.identifier, tasks.id), count(*) into ids, known
    from _private_tasks as tasks where tasks.identifier = any (names);
    if known = cardinality(names) then
      if current_setting('transaction_isolation') <> 'read committed' then
        perform _rs_verify_name('task', tasks.id) from _private_tasks as tasks where tasks.identifier = any (names);
      end if;
      return ids;
    end if;
    insert into _private_tasks (identifier)
    select name from unnest(names) as name where ids is null or not ids ? name order by name
    on conflict do nothing;
  end loop;
  perform _rs_give_up('task ' || quote_literal(name)) from unnest(names) as name where ids is null or not ids ? name;
end
$$;

-- The ids of many queues, by name, in the same way. Null for no queues.
create or replace function :"schema"._rs_job_queue_ids(names text[])
returns jsonb language plpgsql strict as $$
declare
  ids jsonb;
  known bigint;
begin
  perform pg_advisory_xact_lock_shared('_private_jobs'::regclass::oid::int, buckets.bucket)
  from (select distinct _rs_name_bucket('queue', name) as bucket from unnest(names) as name) as buckets;
  for attempt in 1..1000 loop
    select jsonb_object_agg(job_queues.queue_name, job_queues.id), count(*) into ids, known
    from _private_job_queues as job_queues where job_queues.queue_name = any (names);
    if known = cardinality(names) then
      if current_setting('transaction_isolation') <> 'read committed' then
        perform _rs_verify_name('queue', job_queues.id)
        from _private_job_queues as job_queues where job_queues.queue_name = any (names);
      end if;
      return ids;
    end if;
    insert into _private_job_queues (queue_name)
    select name from unnest(names) as name where ids is null or not ids ? name order by name
    on conflict do nothing;
  end loop;
  perform _rs_give_up('queue ' || quote_literal(name)) from unnest(names) as name where ids is null or not ids ? name;
end
$$;

-- The ids of those of the tasks and queues that exist and have no limit. No session deletes these names until this transaction ends.
create or replace function :"schema"._rs_known_names(identifiers text[], queue_names text[])
returns table (kind text, name text, id int) language plpgsql rows 10
set search_path = pg_catalog, :"schema", pg_temp
as $$
begin
  perform pg_advisory_xact_lock_shared('_private_jobs'::regclass::oid::int, buckets.bucket)
  from (
    select _rs_name_bucket('task', wanted) as bucket from unnest(identifiers) as wanted
    union
    select _rs_name_bucket('queue', wanted) from unnest(queue_names) as wanted
  ) as buckets;
  return query
    select 'task', tasks.identifier, tasks.id from _private_tasks as tasks
    where tasks.identifier = any (identifiers)
      and not exists (select from _rs_limits as limits where limits.task_id = tasks.id)
    union all
    select 'queue', job_queues.queue_name, job_queues.id
    from _private_job_queues as job_queues where job_queues.queue_name = any (queue_names);
  if current_setting('transaction_isolation') <> 'read committed' then
    perform _rs_verify_name('task', tasks.id)
    from _private_tasks as tasks where tasks.identifier = any (identifiers);
    perform _rs_verify_name('queue', job_queues.id)
    from _private_job_queues as job_queues where job_queues.queue_name = any (queue_names);
  end if;
end
$$;

-- What many jobs have in common, for a caller that writes their rows in the same transaction: the time in
-- microseconds, the ids of the tasks, the ids of the queues. Returns nothing if a name or a number of attempts is
-- invalid: `add_jobs` reports what is wrong. Also returns nothing for a role that may only add jobs with `add_jobs`, and if
-- a task or queue has a limit: `add_jobs` finds the lanes.
-- No session deletes these names until this transaction ends.
create or replace function :"schema"._rs_job_names(identifiers text[], queue_names text[], attempts int2[])
returns setof bigint language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  task_ids jsonb;
  job_queue_ids jsonb;
begin
  if exists (select from unnest(identifiers) as name where _rs_job_problem(name, null, null, null, null, null) is not null)
    or exists (select from unnest(queue_names) as name where _rs_job_problem('any', name, null, null, null, null) is not null)
    or exists (select from unnest(attempts) as n where _rs_job_problem('any', null, n, null, null, null) is not null)
  then
    return;
  end if;
  if row_security_active('_private_jobs'::regclass::oid) then
    if _rs_adds_as_owner() then
      return;
    end if;
  end if;
  if exists (select from _rs_limits) or exists (select from _rs_lanes) then
    if exists (
      select from _private_tasks as tasks join _rs_limits as limits on limits.task_id = tasks.id
      where tasks.identifier = any (identifiers)
    ) or exists (
      select from (select distinct name from unnest(queue_names) as name where name is not null) as named
      where _rs_limit_of_queue(named.name) is not null or exists (select from _rs_lanes where queue_name = named.name)
    ) then
      return;
    end if;
  end if;
  task_ids := _rs_task_ids(array(select distinct name from unnest(identifiers) as name));
  job_queue_ids := _rs_job_queue_ids(array(select distinct name from unnest(queue_names) as name where name is not null));
  return next extract(epoch from now()) * 1000000;
  return query
    select (task_ids ->> named.name)::bigint
    from unnest(identifiers) with ordinality as named (name, position)
    order by named.position;
  return query
    select (job_queue_ids ->> named.name)::bigint
    from unnest(queue_names) with ordinality as named (name, position)
    where named.name is not null
    order by named.position;
end
$$;

-- Concatenates two JSON arrays, with each element unchanged (a jsonb round trip would reorder keys and reject a NUL
-- escape).
create or replace function :"schema"._rs_json_arrays_joined(first json, second json)
returns json language sql immutable as $$
  select case
    when json_array_length(first) = 0 then second
    when json_array_length(second) = 0 then first
    else (
      left(btrim(first::text, E' \t\r\n'), -1) || ',' || substr(btrim(second::text, E' \t\r\n'), 2)
    )::json
  end
$$;

-- Notifies the workers that `count` jobs have become available.
create or replace function :"schema"._rs_notify_jobs(count bigint)
returns void language sql as $$
  select pg_notify('jobs:insert', '{"r":' || random()::text || ',"count":' || count::text || '}')
$$;

-- Whether a job was removed while a worker held it: the mark that remove_job leaves. A claimed job was due, and no
-- other function changes the run_at of a claimed job, so only that mark can be `infinity`. Node's workers respect it,
-- too: the job is never due again, whatever they do with its attempts.
create or replace function :"schema"._rs_is_removed(locked_at timestamptz, run_at timestamptz)
returns boolean language sql immutable as $$
  select locked_at is not null and run_at = 'infinity'
$$;

-- Whether a job was cancelled while a worker held it: the mark that `_rs_cancel_jobs` leaves. It is the mark of a removed job,
-- and the reason in `last_error`: such a job stays visible, with this reason, whatever becomes of the run. In the row and
-- not in a table, because a report that has waited for the row sees what the row says then.
create or replace function :"schema"._rs_is_cancelled(locked_at timestamptz, run_at timestamptz, last_error text)
returns boolean language sql immutable as $$
  select locked_at is not null and run_at = 'infinity' and coalesce(starts_with(last_error, 'Cancelled'::text), false)
$$;

-- Writes a job that has a key: a new row, or new contents for the row with the key. Claiming, replacing and finishing
-- a job lock the same row, so that the second session sees what the first one did: this always returns a job, and
-- that job always contains the new event.
--
-- A caller that has locked other jobs must not wait for this one, which could deadlock: it gets the error GWAIT if
-- another transaction has locked the row.
create or replace function :"schema"._rs_put_keyed_job(
  id bigint, job_queue_id int, task_id int, payload json, priority int, run_at timestamptz,
  max_attempts int, job_key text, flags text[], preserve_run_at boolean, holds_others boolean
) returns :"schema"._private_jobs language plpgsql as $$
declare
  job _private_jobs;
begin
  for attempt in 1..1000 loop
    if holds_others then
      -- An insert would wait for a transaction that is deleting the job with this key.
      perform from _private_jobs where key = job_key for update skip locked;
      if not found and exists (select from _private_jobs where key = job_key) then
        raise sqlstate 'GWAIT';
      end if;
      insert into _private_jobs (id, job_queue_id, task_id, payload, priority, run_at, max_attempts, key, flags)
        overriding system value
      values (
        id,
        job_queue_id,
        task_id,
        coalesce(payload, '{}'),
        coalesce(priority, 0),
        coalesce(run_at, now()),
        coalesce(max_attempts, 25),
        job_key,
        case when flags is not null then _rs_flags_object(flags) end
      )
      on conflict (key) do nothing
      returning * into job;
      if found then
        return job;
      end if;
      perform from _private_jobs where key = job_key for update skip locked;
      if not found then
        raise sqlstate 'GWAIT';
      end if;
    end if;
    insert into _private_jobs as jobs
      (id, job_queue_id, task_id, payload, priority, run_at, max_attempts, key, flags)
      overriding system value
    values (
      id,
      job_queue_id,
      task_id,
      coalesce(payload, '{}'),
      coalesce(priority, 0),
      coalesce(run_at, now()),
      coalesce(max_attempts, 25),
      job_key,
      case when flags is not null then _rs_flags_object(flags) end
    )
    on conflict (key) do update set
      job_queue_id = excluded.job_queue_id,
      task_id = excluded.task_id,
      payload = case
        when json_typeof(jobs.payload) = 'array' and json_typeof(excluded.payload) = 'array'
          then _rs_json_arrays_joined(jobs.payload, excluded.payload)
        else excluded.payload
      end,
      priority = excluded.priority,
      run_at = case
        when preserve_run_at and jobs.attempts = 0 then jobs.run_at
        when jobs.run_at = 'infinity' and exists (select from _rs_successors where job_id = jobs.id) then jobs.run_at
        else excluded.run_at
      end,
      attempts = 0,
      max_attempts = excluded.max_attempts,
      last_error = null,
      updated_at = now(),
      revision = jobs.revision + 1,
      flags = excluded.flags
    where jobs.is_available
    returning * into job;
    if found then
      if job.run_at = 'infinity' and not preserve_run_at then
        -- It still waits for the running job that it replaces.
        update _rs_successors as successors set run_at = coalesce(_rs_put_keyed_job.run_at, now()) where successors.job_id = job.id;
      end if;
      return job;
    end if;

    -- Claimed, or failed for good: it keeps its payload, gives the key up and is not retried. If its worker has not begun
    -- it, and releases it or dies, it runs all the same: its event is in no other job.
    update _private_jobs as jobs
    set key = null, attempts = jobs.max_attempts, updated_at = now()
    where jobs.key = job_key and not jobs.is_available;
  end loop;
  perform _rs_give_up('job with key ' || quote_literal(job_key));
end
$$;

create or replace function :"schema".add_job(
  identifier text,
  payload json default null,
  queue_name text default null,
  run_at timestamptz default null,
  max_attempts int default null,
  job_key text default null,
  priority int default null,
  flags text[] default null,
  job_key_mode text default 'replace'
) returns :"schema"._private_jobs
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  problem text := _rs_job_problem(identifier, queue_name, max_attempts, job_key, priority, flags);
  task_id int;
  job_queue_id int;
  job _private_jobs;
begin
  -- A role that may only add jobs: see 112-role-functions.sql.
  if row_security_active('_private_jobs'::regclass::oid) then
    if _rs_adds_as_owner() then
      return _rs_add_job_as_owner(
        identifier, payload, queue_name, run_at, max_attempts, job_key, priority, flags, job_key_mode
      );
    end if;
  end if;
  if problem is not null then
    raise exception using errcode = left(problem, 5), message = substr(problem, 7);
  end if;
  if job_key_mode not in ('replace', 'preserve_run_at', 'unsafe_dedupe') then
    raise exception using errcode = 'GWBKM', message = format(
      'Invalid job_key_mode value %L, expected ''replace'', ''preserve_run_at'' or ''unsafe_dedupe''.',
      job_key_mode
    );
  end if;

  if job_key is not null and job_key_mode = 'unsafe_dedupe' then
    update _private_jobs as jobs
    set revision = jobs.revision + 1, updated_at = now()
    where jobs.key = job_key
    returning * into job;
    if found then
      return job;
    end if;
  end if;

  task_id := _rs_task_id(identifier);
  if exists (select from _rs_limits) or exists (select from _rs_lanes) then
    job_queue_id := _rs_lane(task_id, queue_name);
  end if;
  if job_queue_id is null then
    job_queue_id := _rs_job_queue_id(queue_name);
  else
    perform _rs_call_lanes(array[job_queue_id]);
  end if;
  if job_key is null then
    insert into _private_jobs (job_queue_id, task_id, payload, priority, run_at, max_attempts, flags)
    values (
      job_queue_id,
      task_id,
      coalesce(payload, '{}'),
      coalesce(priority, 0),
      coalesce(run_at, now()),
      coalesce(max_attempts, 25),
      case when flags is not null then _rs_flags_object(flags) end
    )
    returning * into job;

  elsif job_key_mode = 'unsafe_dedupe' then
    for attempt in 1..1000 loop
      insert into _private_jobs (job_queue_id, task_id, payload, priority, run_at, max_attempts, key, flags)
      values (
        job_queue_id,
        task_id,
        coalesce(payload, '{}'),
        coalesce(priority, 0),
        coalesce(run_at, now()),
        coalesce(max_attempts, 25),
        job_key,
        case when flags is not null then _rs_flags_object(flags) end
      )
      on conflict (key) do nothing
      returning * into job;
      exit when found;

      -- Somebody else added it since we looked.
      update _private_jobs as jobs
      set revision = jobs.revision + 1, updated_at = now()
      where jobs.key = job_key
      returning * into job;
      if found then
        return job;
      end if;
    end loop;
    if job.id is null then
      perform _rs_give_up('job with key ' || quote_literal(job_key));
    end if;

  else
    job := _rs_put_keyed_job(
      _rs_next_job_id(), job_queue_id, task_id, payload, priority, run_at, max_attempts, job_key, flags,
      job_key_mode = 'preserve_run_at', false
    );
  end if;

  perform _rs_notify_jobs(1);
  return job;
end
$$;

-- Writes the jobs of a batch whose keys are distinct, and returns them in the order given. The caller has locked the
-- jobs that have these keys, if any (`keys_exist`), so that no other session can change them. `unavailable_ids` are those
-- of them that are claimed, or have failed for good.
--
-- Fails instead of losing or doubling an event if another session has written one of the keys since then: with GWAIT,
-- unique_violation or lock_not_available. It inserts in the order of the ids, because six indexes then grow at their end
-- (in the order of the keys: 2 to 4 us a job more). So two batches could wait for each other; `lock_timeout` is below the
-- deadlock timeout, as in an exchange.
create or replace function :"schema"._rs_put_keyed_jobs(
  specs :"schema".job_spec[], task_ids jsonb, job_queue_ids jsonb, task_lanes jsonb, preserve_run_at boolean,
  keys_exist boolean, unavailable_ids bigint[]
) returns setof :"schema"._private_jobs language plpgsql
set lock_timeout = '100ms'
as $$
declare
  written bigint;
begin
  if not keys_exist then
    -- Without `on conflict`, which would cost 3 to 5 us a job.
    return query
      insert into _private_jobs (job_queue_id, task_id, payload, priority, run_at, max_attempts, key, flags)
      select
        coalesce((job_queue_ids ->> queue_name)::int, (task_lanes ->> identifier)::int),
        (task_ids ->> identifier)::int,
        coalesce(payload, '{}'),
        coalesce(priority, 0),
        coalesce(run_at, now()),
        coalesce(max_attempts, 25),
        job_key,
        case when flags is not null then _rs_flags_object(flags) end
      from unnest(specs) as spec
      returning *;
    return;
  end if;

  -- Both statements: see _rs_put_keyed_job.
  update _private_jobs as jobs
  set key = null, attempts = jobs.max_attempts, updated_at = now()
  where jobs.id = any (unavailable_ids);
  return query
    insert into _private_jobs as jobs (job_queue_id, task_id, payload, priority, run_at, max_attempts, key, flags)
    select
      coalesce((job_queue_ids ->> queue_name)::int, (task_lanes ->> identifier)::int),
      (task_ids ->> identifier)::int,
      coalesce(payload, '{}'),
      coalesce(priority, 0),
      coalesce(run_at, now()),
      coalesce(max_attempts, 25),
      job_key,
      case when flags is not null then _rs_flags_object(flags) end
    from unnest(specs) as spec
    on conflict (key) do update set
      job_queue_id = excluded.job_queue_id,
      task_id = excluded.task_id,
      payload = case
        when json_typeof(jobs.payload) = 'array' and json_typeof(excluded.payload) = 'array'
          then _rs_json_arrays_joined(jobs.payload, excluded.payload)
        else excluded.payload
      end,
      priority = excluded.priority,
      run_at = case
        when preserve_run_at and jobs.attempts = 0 then jobs.run_at
        when jobs.run_at = 'infinity' and exists (select from _rs_successors where job_id = jobs.id) then jobs.run_at
        else excluded.run_at
      end,
      attempts = 0,
      max_attempts = excluded.max_attempts,
      last_error = null,
      updated_at = now(),
      revision = jobs.revision + 1,
      flags = excluded.flags
    where jobs.is_available
    returning *;
  get diagnostics written = row_count;
  if written < cardinality(specs) then
    raise sqlstate 'GWAIT';
  end if;
  if not preserve_run_at and exists (select from _rs_successors) then
    -- Those that still wait for running jobs that they replace.
    update _rs_successors as successors set run_at = coalesce(spec.run_at, now())
    from unnest(specs) as spec
    join _private_jobs as jobs on jobs.key = spec.job_key
    where successors.job_id = jobs.id;
  end if;
end
$$;

-- Adds many jobs and returns them in the order given, one row per element of `specs`. Elements with the same key are
-- added one after the other; each of them returns the job as the last one left it.
--
-- Names become ids by looking them up in an object, not by a join, which may change the order of the rows, nor by a
-- subselect, which costs 1 to 2 us a job.
create or replace function :"schema".add_jobs(
  specs :"schema".job_spec[],
  job_key_preserve_run_at boolean default false
) returns setof :"schema"._private_jobs
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
set enable_seqscan = off
-- A table without an index for a query then seems expensive, and PostgreSQL would compile each query: 100 ms for a new limited
-- queue.
set jit = off
as $$
declare
  batch record;
  problem text;
  task_ids jsonb;
  job_queue_ids jsonb;
  queue_lanes jsonb;
  task_lanes jsonb;
  job_keys text[];
  keys_exist boolean;
  unavailable_ids bigint[];
  one_by_one boolean;
  ids bigint[];
  item record;
begin
  if coalesce(cardinality(specs), 0) = 0 then
    return;
  end if;
  if row_security_active('_private_jobs'::regclass::oid) then
    if _rs_adds_as_owner() then
      return query select * from _rs_add_jobs_as_owner(specs, job_key_preserve_run_at);
      return;
    end if;
  end if;

  select
    min(pair.invalid) as invalid,
    sum(pair.keys) as keys,
    array_agg(distinct pair.identifier) as identifiers,
    array_agg(distinct pair.queue_name) filter (where pair.queue_name is not null) as queue_names
  into batch
  from (
    select
      spec.identifier,
      spec.queue_name,
      count(spec.job_key) as keys,
      min(spec.ordinality) filter (where _rs_job_problem(
        spec.identifier, spec.queue_name, spec.max_attempts, spec.job_key, spec.priority, spec.flags
      ) is not null) as invalid
    from unnest(specs) with ordinality as spec
    group by spec.identifier, spec.queue_name
  ) as pair;
  if batch.invalid is not null then
    select _rs_job_problem(
      spec.identifier, spec.queue_name, spec.max_attempts, spec.job_key, spec.priority, spec.flags
    ) into problem
    from unnest(specs) with ordinality as spec
    where spec.ordinality = batch.invalid;
    raise exception using
      errcode = left(problem, 5),
      message = format('Job %s of %s: %s', batch.invalid, cardinality(specs), substr(problem, 7));
  end if;

  task_ids := _rs_task_ids(batch.identifiers);
  if exists (select from _rs_limits) or exists (select from _rs_lanes) then
    select
      jsonb_object_agg(pair.queue_name, pair.lane) filter (where pair.queue_name is not null),
      jsonb_object_agg(pair.identifier, pair.lane) filter (where pair.queue_name is null)
    into queue_lanes, task_lanes
    from (
      select distinct_pair.*, _rs_lane((task_ids ->> distinct_pair.identifier)::int, distinct_pair.queue_name) as lane
      from (select distinct identifier, queue_name from unnest(specs) order by queue_name, identifier) as distinct_pair
    ) as pair
    where pair.lane is not null;
    insert into _rs_lane_calls (lane_id)
    select lane.value::int from jsonb_each_text(queue_lanes) as lane
    union
    select lane.value::int from jsonb_each_text(task_lanes) as lane;
  end if;
  job_queue_ids := _rs_job_queue_ids(
    case when queue_lanes is null then batch.queue_names
      else array(select name from unnest(batch.queue_names) as name where not queue_lanes ? name) end
  );
  if queue_lanes is not null then
    job_queue_ids := coalesce(job_queue_ids, '{}') || queue_lanes;
  end if;
  perform _rs_notify_jobs(cardinality(specs));

  if batch.keys = 0 then
    return query
      insert into _private_jobs (job_queue_id, task_id, payload, priority, run_at, max_attempts, flags)
      select
        coalesce((job_queue_ids ->> queue_name)::int, (task_lanes ->> identifier)::int),
        (task_ids ->> identifier)::int,
        coalesce(payload, '{}'),
        coalesce(priority, 0),
        coalesce(run_at, now()),
        coalesce(max_attempts, 25),
        case when flags is not null then _rs_flags_object(flags) end
      from unnest(specs) as spec
      returning *;
    return;
  end if;

  select array_agg(job_key), count(distinct job_key collate "C") < batch.keys into job_keys, one_by_one
  from unnest(specs) where job_key is not null;
  for attempt in 1..1000 loop
    begin
      -- Jobs that exist are locked in the order of their ids, as by every function.
      select count(*) > 0, array_agg(id) filter (where not is_available) into keys_exist, unavailable_ids
      from (
        select id, is_available from _private_jobs where key = any (job_keys) order by id for update
      ) as existing;
      if not one_by_one then
        return query
          select * from _rs_put_keyed_jobs(
            specs, task_ids, job_queue_ids, task_lanes, job_key_preserve_run_at, keys_exist, unavailable_ids
          );
        return;
      end if;

      -- New keys are written in alphabetical order. Ids follow the order of the specs, because that is the order in
      -- which jobs of equal priority and run_at run.
      ids := _rs_next_job_ids(cardinality(specs));
      for item in select spec.* from unnest(specs) with ordinality as spec order by job_key, ordinality loop
        perform _rs_put_keyed_job(
          ids[item.ordinality],
          coalesce((job_queue_ids ->> item.queue_name)::int, (task_lanes ->> item.identifier)::int),
          (task_ids ->> item.identifier)::int,
          item.payload, item.priority, item.run_at, item.max_attempts, item.job_key, item.flags,
          job_key_preserve_run_at, item.job_key is not null
        );
      end loop;
      exit;
    exception
      when unique_violation or lock_not_available then
        -- Another transaction writes jobs with the same keys at the same time: from now on one by one, in its order.
        if one_by_one or keys_exist is null then
          raise;
        end if;
        one_by_one := true;
      when sqlstate 'GWAIT' or deadlock_detected then
        -- Another transaction has locked a job that did not have the key a moment ago. To wait for it while we hold others
        -- could be a deadlock, so this undoes what was written, lets all rows go, and waits in the right order.
        if attempt = 1000 then
          raise;
        end if;
        one_by_one := true;
    end;
  end loop;

  return query
    select job.*
    from unnest(specs) with ordinality as spec
    cross join lateral (
      select * from _private_jobs where key = spec.job_key
      union all
      select * from _private_jobs where spec.job_key is null and id = ids[spec.ordinality]
    ) as job
    order by spec.ordinality;
end
$$;

-- Removes the job with the key. A running job stays until it ends, but loses its key and never runs again. Null if no
-- job has the key.
create or replace function :"schema".remove_job(job_key text)
returns :"schema"._private_jobs
language plpgsql strict
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  held _private_jobs;
begin
  for attempt in 1..1000 loop
    select * into held from _private_jobs where key = job_key for update;
    exit when found;
    -- The row we waited for is gone; while we waited, the key may have passed to a new one.
    if not exists (select from _private_jobs where key = job_key) then
      return null;
    end if;
  end loop;
  if held.id is null then
    perform _rs_give_up('job with key ' || quote_literal(job_key));
  end if;

  if _rs_may_administer(held.locked_at) then
    delete from _private_jobs where id = held.id;
    if held.job_queue_id < 0 then
      perform _rs_call_lanes(array[held.job_queue_id]);
    end if;
  else
    -- run_at is the mark of _rs_is_removed. An earlier error that looks like the mark of _rs_is_cancelled goes.
    update _private_jobs
    set
      key = null, attempts = max_attempts, run_at = 'infinity', updated_at = now(),
      last_error = case when not starts_with(last_error, 'Cancelled'::text) then last_error end
    where id = held.id
    returning * into held;
  end if;
  return held;
end
$$;

-- A job that is not locked, or whose lock is stale (4 hours, in Node's worker and in ours).
create or replace function :"schema"._rs_may_administer(locked_at timestamptz)
returns boolean language sql stable as $$
  select locked_at is null or locked_at < now() - interval '4 hours'
$$;

create or replace function :"schema".complete_jobs(job_ids bigint[])
returns setof :"schema"._private_jobs
language sql
set search_path = pg_catalog, :"schema", pg_temp
as $$
  with chosen as (
    select id from _private_jobs
    where id = any (job_ids) and _rs_may_administer(locked_at)
    order by id
    for update
  ), deleted as (
    -- All are locked before the first is deleted.
    delete from _private_jobs as jobs where jobs.id = any (array(select id from chosen))
    returning jobs.*
  ), called as (
    insert into _rs_lane_calls (lane_id) select distinct job_queue_id from deleted where job_queue_id < 0
  )
  select * from deleted
$$;

create or replace function :"schema".permanently_fail_jobs(job_ids bigint[], error_message text default null)
returns setof :"schema"._private_jobs
language sql
set search_path = pg_catalog, :"schema", pg_temp
as $$
  with chosen as (
    select id from _private_jobs
    where id = any (job_ids) and _rs_may_administer(locked_at)
    order by id
    for update
  ), failed as (
    update _private_jobs as jobs
    set
      attempts = jobs.max_attempts,
      last_error = coalesce(error_message, 'Manually marked as failed'),
      locked_at = null,
      locked_by = null,
      updated_at = now()
    from chosen
    where jobs.id = chosen.id
    returning jobs.*
  ), called as (
    insert into _rs_lane_calls (lane_id) select distinct job_queue_id from failed where job_queue_id < 0
  )
  select * from failed
$$;

-- Changes the given values; null keeps a value. Clears a stale lock, so that the job can run.
create or replace function :"schema".reschedule_jobs(
  job_ids bigint[],
  run_at timestamptz default null,
  priority int default null,
  attempts int default null,
  max_attempts int default null
) returns setof :"schema"._private_jobs
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  problem text := _rs_job_problem('any', null, max_attempts, null, priority, null);
begin
  if attempts not between 0 and 32767 then
    problem := '22003 Job attempts must be between 0 and 32767, found ' || attempts || '.';
  end if;
  if problem is not null then
    raise exception using errcode = left(problem, 5), message = substr(problem, 7);
  end if;

  return query
    with chosen as (
      select jobs.id from _private_jobs as jobs
      where jobs.id = any (job_ids) and _rs_may_administer(jobs.locked_at)
      order by jobs.id
      for update
    ), rescheduled as (
      update _private_jobs as jobs
      set
        run_at = case
          when jobs.run_at = 'infinity' and exists (select from _rs_successors where job_id = jobs.id) then jobs.run_at
          else coalesce(reschedule_jobs.run_at, jobs.run_at)
        end,
        priority = coalesce(reschedule_jobs.priority, jobs.priority),
        attempts = coalesce(reschedule_jobs.attempts, jobs.attempts),
        max_attempts = coalesce(reschedule_jobs.max_attempts, jobs.max_attempts),
        locked_at = null,
        locked_by = null,
        updated_at = now()
      from chosen
      where jobs.id = chosen.id
      returning jobs.*
    ), called as (
      insert into _rs_lane_calls (lane_id) select distinct job_queue_id from rescheduled where job_queue_id < 0
    )
    select * from rescheduled;
  if found then
    perform _rs_notify_jobs(cardinality(job_ids));
  end if;
  if reschedule_jobs.run_at is not null and exists (select from _rs_successors) then
    -- Those that still wait for running jobs that they replace.
    update _rs_successors as successors set run_at = reschedule_jobs.run_at where successors.job_id = any (job_ids);
  end if;
end
$$;

-- Releases everything that these workers have locked. Only for dead workers: the jobs of a live one would run twice.
create or replace function :"schema".force_unlock_workers(worker_ids text[])
returns void
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  freed bigint;
begin
  with chosen as (
    select id from _private_jobs where locked_by = any (worker_ids) order by id for update
  ), unlocked as (
    update _private_jobs as jobs
    set locked_at = null, locked_by = null, updated_at = now()
    from chosen
    where jobs.id = chosen.id
    returning jobs.job_queue_id
  ), called as (
    insert into _rs_lane_calls (lane_id) select distinct job_queue_id from unlocked where job_queue_id < 0
  )
  select count(*) into freed from unlocked;

  with chosen as (
    select id from _private_job_queues where locked_by = any (worker_ids) order by id for update
  )
  update _private_job_queues as job_queues
  set locked_at = null, locked_by = null
  from chosen
  where job_queues.id = chosen.id;

  if freed > 0 then
    perform _rs_notify_jobs(freed);
  end if;
end
$$;

-- Deletes tasks ('task') or unlocked queues ('queue') that no job uses. Never waits: skips names that a transaction
-- holds (`_rs_hold_name`) and rows that are locked; `is_busy` says whether it skipped a bucket. Locks only the
-- buckets in which it found an unused name, then checks again: a job that was added in between is visible to the next
-- statement, which has its own snapshot. Sessions that add jobs with names in these buckets wait until this
-- transaction ends.
create or replace function :"schema"._rs_delete_unused_names(kind text)
returns table (deleted bigint, is_busy boolean)
language plpgsql
set search_path = pg_catalog, :"schema", pg_temp
as $$
declare
  wanted int[];
  locked int[];
begin
  if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
    raise exception using errcode = '25001', message = format(
      'Names can only be deleted in a transaction with isolation level read committed, this one has %s.',
      current_setting('transaction_isolation')
    );
  end if;
  if kind = 'task' then
    wanted := array(
      select distinct _rs_name_bucket('task', tasks.identifier) from _private_tasks as tasks
      where not exists (select from _private_jobs as jobs where jobs.task_id = tasks.id)
        and not exists (select from _rs_limits as limits where limits.task_id = tasks.id)
    );
  else
    wanted := array(
      select distinct _rs_name_bucket('queue', job_queues.queue_name) from _private_job_queues as job_queues
      where job_queues.locked_at is null
        and not exists (select from _private_jobs as jobs where jobs.job_queue_id = job_queues.id)
    );
  end if;
  locked := array(
    select bucket from unnest(wanted) as bucket
    where pg_try_advisory_xact_lock('_private_jobs'::regclass::oid::int, bucket)
  );
  deleted := 0;
  is_busy := cardinality(locked) < cardinality(wanted);
  if cardinality(locked) > 0 then
    perform set_config('graphile_worker.names_are_unused', 'on', true);
    if kind = 'task' then
      delete from _private_tasks where id = any (array(
        select tasks.id from _private_tasks as tasks
        where _rs_name_bucket('task', tasks.identifier) = any (locked)
          and not exists (select from _private_jobs as jobs where jobs.task_id = tasks.id)
          and not exists (select from _rs_limits as limits where limits.task_id = tasks.id)
        for update of tasks skip locked
      ));
    else
      delete from _private_job_queues where id = any (array(
        select job_queues.id from _private_job_queues as job_queues
        where job_queues.locked_at is null
          and _rs_name_bucket('queue', job_queues.queue_name) = any (locked)
          and not exists (select from _private_jobs as jobs where jobs.job_queue_id = job_queues.id)
        for update of job_queues skip locked
      ));
    end if;
    get diagnostics deleted = row_count;
    perform set_config('graphile_worker.names_are_unused', '', true);
  end if;
  return next;
end
$$;
