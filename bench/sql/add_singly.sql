-- The same jobs as add_batch.sql, with the same parameters, but one call of add_job for each.
select count(*)
from generate_series($1::int, $2::int) as n
cross join lateral graphile_worker.add_job(
  'trivial',
  json_build_object('id', n),
  queue_name := case when $3::int > 0 then 'queue ' || n % $3::int end,
  job_key := $4::text || n
);
