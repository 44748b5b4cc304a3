-- Adds the jobs with the numbers $1 to $2 in one call, as a caller in SQL does.
--
--  $3 over how many named queues they are spread; 0 for none
--  $4 what their keys begin with; null for none
select count(*)
from graphile_worker.add_jobs(array(
  select (
    'trivial',
    json_build_object('id', n),
    case when $3::int > 0 then 'queue ' || n % $3::int end,
    null, null,
    $4::text || n,
    null, null
  )::graphile_worker.job_spec
  from generate_series($1::int, $2::int) as n
));
