-- Inserts jobs as that many adds would, in the order of their numbers.
--
--  $1 task                $2 how many jobs       $3 seconds from now until the last of them is due
--  $4 priority            $5 attempts (25: failed for good)
--  $6 over how many named queues they are spread, one after the other; 0 for none
--  $7 how many bytes a payload has besides; they are all the same, so that PostgreSQL compresses them as well as it can
--  $8 a flag of each job, or null
--  $9 over how many new tasks they are spread, one after the other, named `$1 0`, `$1 1` and so on; 0 for the task $1
with named as (
  insert into graphile_worker._private_job_queues (queue_name)
  select 'queue ' || n from generate_series(1, $6::int) as n
  returning id
), queues as (
  select array(select id from named order by id) as ids
), new_tasks as (
  insert into graphile_worker._private_tasks (identifier)
  select $1 || ' ' || n from generate_series(0, $9::int - 1) as n
  returning id
), tasks as (
  select case
    when $9::int > 0 then array(select id from new_tasks order by id)
    else array(select id from graphile_worker._private_tasks where identifier = $1)
  end as ids
)
insert into graphile_worker._private_jobs (task_id, payload, run_at, priority, attempts, job_queue_id, flags)
select
  tasks.ids[1 + n % cardinality(tasks.ids)],
  case
    when $6::int > 0 then json_build_object('id', n, 'queue', n % $6::int)
    when $7::int > 0 then json_build_object('id', n, 'text', repeat('x', $7::int))
    else json_build_object('id', n)
  end,
  -- One after the other: not every peer breaks ties by id.
  now() + make_interval(secs => $3::float8) - ($2::int - n) * interval '1 microsecond',
  $4::int,
  $5::int,
  case when $6::int > 0 then queues.ids[1 + n % $6::int] end,
  case when $8::text is not null then jsonb_build_object($8::text, true) end
from generate_series(1, $2::int) as n, queues, tasks;
