-- Adds a chunk of a large batch without keys: one array per field, flags as the text of a JSON array, tasks and
-- queues by the ids that job_names.sql returned in the same transaction. Returns ids in the order given.
insert into :"schema"._private_jobs (job_queue_id, task_id, payload, priority, run_at, max_attempts, flags)
select
  job_queue_id, task_id, payload::pg_catalog.json, coalesce(priority, 0), coalesce(run_at, pg_catalog.now()), coalesce(max_attempts, 25),
  case when flags is not null then :"schema"._rs_flags_object(array(select pg_catalog.json_array_elements_text(flags::pg_catalog.json))) end
from unnest($1::int[], $2::int[], $3::pg_catalog.text[], $4::pg_catalog.timestamptz[], $5::pg_catalog.int2[], $6::pg_catalog.int2[], $7::pg_catalog.text[])
  as spec (task_id, job_queue_id, payload, run_at, max_attempts, priority, flags)
returning id as number;
