-- The exchange of most workers most of the time: reports completed jobs without a queue and claims jobs without a queue, in
-- one statement. `exchange.sql` can do everything, and has the explanations of what both do. This one has a third of its
-- plan, which matters when an exchange carries few jobs (see bench/RESULTS.md).
--
-- Used if all reported jobs are completed and have no queue, no task has a limit, and the last exchange found no due job
-- with a queue.
--
-- Several claims at a time do not meet: each takes the first free turn, and the one with turn n begins n claims behind the
-- first job. So several workers share the jobs of one priority not strictly in their order. A claim that meets the rows
-- of another one would ask the lock manager twice about each (bench/RESULTS.md, "Fleets").
--
--  $1 worker   $2 $3 completed jobs: ids, locked_at   $4 ids of the tasks whose jobs it may take
--  $5 how many jobs it wants
--  $6 $7 $8 where the claim starts: priority, run_at and id of a job, all null for the head (`claim_start.rs`)
--  $9 how many bytes of payloads it may take, about   $10 what time it is, or null for the database's
--  $11 how many seconds old its heartbeat may be, null if it has none
--  $12 $13 $14 forbidden, accepted and allowed flags, or null   $15 ids of all tasks it runs
--  $16 $17 $18 completed jobs whose places are known: ids, locked_at, and an array of the places, as text
--
-- Returns the claimed jobs with their places, and one last row without an id, like `exchange.sql`. That row also says whether
-- there are due jobs with a queue, or it has not read far enough (`queued_wait`), where the first job without a queue was
-- (`first_…`), and which of $16 were not found free at their places (`missed_jobs`): the worker reports those again, in $2.
with recursive clock as (
  select coalesce($10::timestamptz, now()) as now
),
-- The place of a job is the ctid of the row that its claim wrote. Found there, it needs neither an index nor a lock before it is
-- deleted (bench/RESULTS.md). A row that has moved is not found, and another job may have its place: hence the fence, with the id.
-- A delete waits for a row that another transaction has locked. `xmax` shows such a lock, and also locks of the past; a
-- claim leaves its own there. (`case`: the only way to the rows is their place.)
finished_at_places as (
  delete from :"schema"._private_jobs as jobs
  using unnest($16::bigint[], $17::timestamptz[], $18::text::tid[]) as outcome (id, locked_at, place)
  where jobs.ctid = outcome.place
    and case when jobs.id = outcome.id and jobs.locked_by = $1 and (jobs.xmax = '0' or jobs.xmax = jobs.xmin) then
      jobs.locked_at = outcome.locked_at
      or case when isfinite(jobs.locked_at) then
        extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600::numeric = 0::numeric
      end
    end
  returning jobs.id
), done as materialized (
  select jobs.id, jobs.ctid as place
  from unnest($2::bigint[], $3::timestamptz[]) as outcome (id, locked_at)
  join :"schema"._private_jobs as jobs on jobs.id = any (array[outcome.id])
  where case when jobs.locked_by = $1 then
    jobs.locked_at = outcome.locked_at
    or case when isfinite(jobs.locked_at) then
      extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600::numeric = 0::numeric
    end
  end
  for update of jobs skip locked
), finished as (
  delete from :"schema"._private_jobs as jobs
  where jobs.ctid = any (array(select place from done))
  returning jobs.id
), short as (
  select (select count(*) from done) < pg_catalog.cardinality($2) as is_short
), blocked as (
  select outcome.id
  from unnest($2::bigint[], $3::timestamptz[]) as outcome (id, locked_at)
  join :"schema"._private_jobs as jobs on jobs.id = any (array[outcome.id])
  where (select is_short from short)
    and outcome.id not in (select id from done)
    and case when jobs.locked_by = $1 then
      jobs.locked_at = outcome.locked_at
      or case when isfinite(jobs.locked_at) then
        extract(epoch from jobs.locked_at - outcome.locked_at)::numeric % 3600::numeric = 0::numeric
      end
    end
),
-- The first job of each priority, from the start of the claim on: one index probe each.
first_jobs as (
  (
    select priority, run_at, id, tableoid::bigint as jobs_table from :"schema"._private_jobs
    where is_available = true and job_queue_id is null and $5 > 0 and pg_catalog.cardinality($4::int[]) > 0
      and (priority, run_at, id) >= (
        coalesce($6::smallint, '-32768'::smallint),
        coalesce($7::timestamptz, '-infinity'::timestamptz),
        coalesce($8::bigint, '-9223372036854775808'::bigint)
      )
    order by priority, run_at, id limit 1
  )
  union all
  select next.priority, next.run_at, next.id, null
  from first_jobs as known, lateral (
    select jobs.priority, jobs.run_at, jobs.id from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.job_queue_id is null and jobs.priority > known.priority
    order by jobs.priority, jobs.run_at, jobs.id limit 1
  ) as next
), turn as materialized (
  select turns.n
  from first_jobs as first, clock, generate_series(0, 15) as turns (n)
  where first.jobs_table is not null
    and first.run_at <= clock.now
    and pg_try_advisory_xact_lock(first.jobs_table * 65536 + turns.n)
  limit 1
), begins as (
  select
    first.priority, coalesce(later.run_at, first.run_at) as run_at, coalesce(later.id, first.id) as id,
    first.jobs_table is not null as is_first
  from first_jobs as first
  left join lateral (
    select jobs.run_at, jobs.id from :"schema"._private_jobs as jobs, clock
    where (select n from turn) > 0
      and first.jobs_table is not null
      and jobs.is_available = true
      and jobs.job_queue_id is null
      and jobs.priority = first.priority
      and (jobs.run_at, jobs.id) >= (first.run_at, first.id)
      and jobs.run_at <= clock.now
    order by jobs.run_at, jobs.id
    offset (select n from turn) * $5 limit 1
  ) as later on true
),
-- How far the claim reads: past half as many due jobs again as it wants. Behind that place, `exchange.sql` goes by kind of job. Null
-- if there are fewer due jobs. Computed only if the first span has fewer jobs than the claim wants.
walk_end as (
  select due.priority, due.run_at, due.id
  from begins, clock, lateral (
    select jobs.priority, jobs.run_at, jobs.id from :"schema"._private_jobs as jobs
    where jobs.is_available = true
      and jobs.job_queue_id is null
      and jobs.priority = begins.priority
      and (jobs.run_at, jobs.id) >= (begins.run_at, begins.id)
      and jobs.run_at <= clock.now
    order by jobs.run_at, jobs.id
    limit 51 + $5 + $5 / 4
  ) as due
  offset 50 + $5 + $5 / 4 limit 1
), candidates as (
  select due.*
  from clock
  cross join begins
  -- A span is a range of ids at one time, or a range of times. With one condition for both, the scan would not stop at the end. The
  -- first span has jobs that were added together, no more than it has ids.
  cross join lateral (
    select
      begins.run_at as at, begins.id as first_id, begins.id + 50 + $5 + $5 / 4 as last_id,
      null::timestamptz as after, null::timestamptz as before
    where begins.is_first and begins.run_at <= clock.now and begins.id < 9000000000000000000
    union all
    select
      begins.run_at,
      case
        when begins.is_first and begins.id < 9000000000000000000 then begins.id + 51 + $5 + $5 / 4
        else begins.id
      end,
      case
        when (walk_end.priority, walk_end.run_at) = (begins.priority, begins.run_at) then walk_end.id
        else 9223372036854775807
      end,
      null, null
    from (select) as one left join walk_end on true
    where begins.run_at <= clock.now and (walk_end.id is null or begins.priority <= walk_end.priority)
    union all
    select
      null, null, null, begins.run_at,
      case when begins.priority = walk_end.priority then walk_end.run_at else clock.now + interval '1 microsecond' end
    from (select) as one left join walk_end on true
    where begins.run_at <= clock.now and (walk_end.id is null or begins.priority <= walk_end.priority)
    union all
    select walk_end.run_at, '-9223372036854775808'::bigint, walk_end.id, null, null
    from walk_end where walk_end.priority = begins.priority and walk_end.run_at > begins.run_at
  ) as span
  cross join lateral (
    select * from (
      select
        jobs.priority, jobs.run_at, jobs.id, jobs.ctid as place,
        case
          when pg_catalog.pg_column_size(jobs.payload) between 400 and 1899 then octet_length(jobs.payload::text)
          else pg_catalog.pg_column_size(jobs.payload)
        end as size
      from :"schema"._private_jobs as jobs
      where span.at is not null
        and jobs.is_available = true
        and jobs.job_queue_id is null
        and jobs.priority = begins.priority
        -- The time twice: to the planner, the primary key looks equally good otherwise.
        and jobs.run_at = span.at and jobs.run_at between span.at and span.at
        and jobs.id between span.first_id and span.last_id
        and jobs.task_id = any ($4::int[])
        and ($12::text[] is null or (jobs.flags ?| $12) is not true)
        and case when $13::text[] is not null then jobs.flags ?| $13 else true end
        and case when $14::jsonb is not null then (jobs.flags <@ $14) is not false else true end
      order by jobs.id
      limit $5
      for update skip locked
    ) as at_one_time
    union all
    select * from (
      select
        jobs.priority, jobs.run_at, jobs.id, jobs.ctid as place,
        case
          when pg_catalog.pg_column_size(jobs.payload) between 400 and 1899 then octet_length(jobs.payload::text)
          else pg_catalog.pg_column_size(jobs.payload)
        end as size
      from :"schema"._private_jobs as jobs
      where span.at is null
        and jobs.is_available = true
        and jobs.job_queue_id is null
        and jobs.priority = begins.priority
        and jobs.run_at > span.after and jobs.run_at < span.before
        and jobs.task_id = any ($4::int[])
        and ($12::text[] is null or (jobs.flags ?| $12) is not true)
        and case when $13::text[] is not null then jobs.flags ?| $13 else true end
        and case when $14::jsonb is not null then (jobs.flags <@ $14) is not false else true end
      order by jobs.run_at, jobs.id
      limit $5
      for update skip locked
    ) as between_times
  ) as due
  limit $5
),
-- If the payloads have less than a hundredth of their room, all of them fit (see `ranked` in `exchange.sql`).
few_bytes as (
  select coalesce(sum(size), 0) < $9 / 100 as is_true from candidates
), sized as (
  select *, sum(size) over (order by priority, run_at, id rows unbounded preceding) as stored
  from candidates where not (select is_true from few_bytes) order by priority, run_at, id limit $5
), ranked as (
  select id, place, true as fits from candidates where (select is_true from few_bytes)
  union all
  select
    id, place,
    stored - size < $9::int and coalesce(
      sum(case
        when size < 1900 or stored < $9 / 100 or stored - size >= $9 then size
        else (
          select octet_length(jobs.payload::text) from :"schema"._private_jobs as jobs where jobs.id = any (array[sized.id])
        )
      end) over (order by priority, run_at, id rows between unbounded preceding and 1 preceding),
      0
    ) < $9 as fits
  from sized
), alive as (
  select workers.worker_id from :"schema"._rs_workers as workers
  where workers.worker_id = $1 and workers.last_heartbeat_at > now() - make_interval(secs => $11::float8)
  for key share skip locked
), chosen as (
  select id, place from ranked
  where fits and ($11 is null or exists (select from alive where ranked.id is not null))
), claimed as (
  update :"schema"._private_jobs as jobs
  set locked_at = now(), locked_by = $1, attempts = jobs.attempts + 1
  -- By place, which is faster than by id. A job that changed after this statement began is not found there. It waits for the
  -- next claim (`contended`).
  where jobs.ctid = any (array(select place from chosen))
  returning
    id, job_queue_id, task_id, payload::text as payload, priority, run_at, attempts, max_attempts, last_error,
    created_at, updated_at, key, locked_at, revision, flags, pg_catalog.tidsend(ctid) as place
),
queued_priorities as (
  (
    select priority from :"schema"._private_jobs
    where is_available = true and job_queue_id > 0 and $5 > 0
    order by priority, run_at, id limit 1
  )
  union all
  select (
    select jobs.priority from :"schema"._private_jobs as jobs
    where jobs.is_available = true and jobs.job_queue_id > 0 and jobs.priority > known.priority
    order by jobs.priority, jobs.run_at, jobs.id limit 1
  )
  from queued_priorities as known where known.priority is not null
)
select
  claimed.*, null::timestamptz as clock, null::bigint[] as blocked_jobs, null::int[] as blocked_queues,
  null::boolean as contended, null::bigint[] as rejected_jobs, null::boolean as queued_wait, null::smallint as first_priority,
  null::timestamptz as first_run_at, null::bigint as first_id, null::bigint[] as missed_jobs
from claimed
union all
select
  null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
  clock.now,
  array(
    select id from blocked
    union all
    select id from done
    where (select count(*) from finished) < (select count(*) from done) and id not in (select id from finished)
  ),
  '{}'::int[],
  $5 > 0 and (select count(*) from claimed) < $5 and (
    (select count(*) from claimed) < (select count(*) from chosen)
    or exists (select from ranked where ranked.id not in (select id from chosen))
    or exists (
      select from first_jobs as first, lateral (
        select jobs.id, jobs.task_id, jobs.flags from :"schema"._private_jobs as jobs
        where jobs.is_available = true
          and jobs.job_queue_id is null
          and jobs.priority = first.priority
          and (jobs.run_at, jobs.id) >= (first.run_at, first.id)
          and jobs.run_at <= clock.now
        order by jobs.run_at, jobs.id
        limit 100 + $5
      ) as due
      where due.task_id = any ($4::int[])
        and ($12::text[] is null or (due.flags ?| $12) is not true)
        and case when $13::text[] is not null then due.flags ?| $13 else true end
        and case when $14::jsonb is not null then (due.flags <@ $14) is not false else true end
        and due.id not in (select id from chosen)
    )
  ),
  array(
    select reported.id from pg_catalog.unnest($2::bigint[]) as reported (id)
    where (select is_short from short)
      and reported.id not in (select id from done)
      and reported.id not in (select id from blocked)
  ),
  -- Only the first ones of each priority: if all of those are of other workers, `exchange.sql` reads further.
  exists (
    select from queued_priorities as known, lateral (
      select count(*) as read, bool_or(
        first.task_id = any ($15::int[])
        and ($12::text[] is null or (first.flags ?| $12) is not true)
        and case when $13::text[] is not null then first.flags ?| $13 else true end
        and case when $14::jsonb is not null then (first.flags <@ $14) is not false else true end
      ) as is_any_ours
      from (
        select jobs.task_id, jobs.flags from :"schema"._private_jobs as jobs
        where jobs.is_available = true
          and jobs.job_queue_id > 0
          and jobs.priority = known.priority
          and jobs.run_at <= clock.now
        order by jobs.run_at, jobs.id
        limit 50
      ) as first
    ) as waiting
    where waiting.is_any_ours or waiting.read = 50
  ) or ((select count(*) from candidates) < $5 and exists (select from walk_end)),
  first.priority, first.run_at, first.id,
  array(
    select reported.id from pg_catalog.unnest($16::bigint[]) as reported (id)
    where (select count(*) from finished_at_places) < pg_catalog.cardinality($16)
      and reported.id not in (select id from finished_at_places)
  )
from clock
left join first_jobs as first on first.jobs_table is not null;
