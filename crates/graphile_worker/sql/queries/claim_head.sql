-- The claim of an idle worker, which is woken for a job or two: claims some of the first jobs without a queue. It takes half
-- as long as a claim by `exchange_unqueued.sql` (bench/RESULTS.md, "Latency: the claim of a lone job").
--
-- Used if there is nothing to report and no task has a limit. It reads five index entries. Either they show that no other
-- job is due (`is_conclusive`), or another statement has to claim the rest. Takes nothing if a job with a queue is due, and
-- only the first job if one of them is large, so that the order is kept.
--
-- Locks the rows that it claims, at most four, in the order of the primary key, and waits for none of them.
--
--  $1 worker   $2 ids of the tasks whose jobs it may take   $3 how many jobs it wants
--  $4 what time it is, or null for the database's   $5 how many seconds old its heartbeat may be, null if it has none
--  $6 $7 $8 forbidden, accepted and allowed flags, or null
--
-- Returns the claimed jobs and one last row without an id, about the claim. `contended`: others had locked some of the
-- jobs. `nothing_waits`: no job is left, not even one that is due later.
with head as materialized (
  select
    jobs.id, jobs.priority,
    jobs.run_at <= coalesce($4::timestamptz, now()) as is_due,
    jobs.run_at <= coalesce($4::timestamptz, now())
      and jobs.task_id = any ($2::int[])
      and ($6::text[] is null or (jobs.flags ?| $6) is not true)
      and case when $7::text[] is not null then jobs.flags ?| $7 else true end
      and case when $8::jsonb is not null then (jobs.flags <@ $8) is not false else true end as is_wanted,
    pg_catalog.pg_column_size(jobs.payload) > 100000 as is_large
  from :"schema"._private_jobs as jobs
  where jobs.is_available = true and jobs.job_queue_id is null
  order by jobs.priority, jobs.run_at, jobs.id limit 4
), queued as materialized (
  select jobs.priority, jobs.run_at <= coalesce($4::timestamptz, now()) as is_due
  from :"schema"._private_jobs as jobs
  where jobs.is_available = true and jobs.job_queue_id > 0
  order by jobs.priority, jobs.run_at, jobs.id limit 1
), summary as materialized (
  select
    count(*) as read,
    count(*) filter (where head.is_wanted) as wanted,
    bool_or(head.is_due) as is_due,
    bool_or(head.is_due and not head.is_wanted) is true as has_others,
    min(head.priority) as priority,
    case when exists (
      select from queued
      where queued.is_due or exists (
        select from :"schema"._private_jobs as jobs
        where jobs.is_available = true and jobs.job_queue_id > 0 and jobs.priority > queued.priority
      )
    ) then 0 when bool_or(head.is_large) then least($3, 1) else $3 end as most
  from head
), alive as (
  select workers.worker_id from :"schema"._rs_workers as workers
  where workers.worker_id = $1 and workers.last_heartbeat_at > now() - make_interval(secs => $5::float8)
  for key share skip locked
), chosen as (
  -- All conditions again, because a row may have changed since; in `case`, so that only the primary key can find it.
  select jobs.id
  from :"schema"._private_jobs as jobs
  where jobs.id = any (array(select id from head where is_wanted limit (select most from summary)))
    and case when jobs.is_available and jobs.job_queue_id is null and jobs.run_at <= coalesce($4::timestamptz, now()) then
      jobs.task_id = any ($2::int[])
      and ($6::text[] is null or (jobs.flags ?| $6) is not true)
      and case when $7::text[] is not null then jobs.flags ?| $7 else true end
      and case when $8::jsonb is not null then (jobs.flags <@ $8) is not false else true end
    end
  for update of jobs skip locked
), claimed as (
  update :"schema"._private_jobs as jobs
  set locked_at = now(), locked_by = $1, attempts = jobs.attempts + 1
  where jobs.id = any (array(
    select id from chosen where $5 is null or exists (select from alive where chosen.id is not null)
  ))
  returning
    id, job_queue_id, task_id, payload::text as payload, priority, run_at, attempts, max_attempts, last_error,
    created_at, updated_at, key, locked_at, revision, flags
)
select
  claimed.*, null::timestamptz as clock, null::boolean as contended, null::boolean as is_conclusive,
  null::boolean as nothing_waits
from claimed
union all
select
  null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
  coalesce($4::timestamptz, now()),
  least(summary.wanted, summary.most) > (select count(*) from claimed),
  summary.most > 0
  and summary.most >= least(summary.wanted, $3)
  and (summary.wanted <= summary.most or (select count(*) from claimed) = summary.most)
  and case
    when summary.read < 4 then not summary.has_others
    else not summary.is_due and not exists (
      select from :"schema"._private_jobs as jobs
      where jobs.is_available = true and jobs.job_queue_id is null and jobs.priority > summary.priority
    )
  end,
  summary.read = (select count(*) from claimed) and not exists (select from queued)
from summary;
