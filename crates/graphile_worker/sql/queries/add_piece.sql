-- Adds a piece of a large batch, none of whose jobs has a key: an array for each field, flags as the text of a JSON array
-- each, tasks and queues by the ids that job_names.sql has given in the same transaction. Ids come in the order given.
insert into :"schema"._private_jobs (job_queue_id, task_id, payload, priority, run_at, max_attempts, flags)
select
  job_queue_id, task_id, payload::json, coalesce(priority, 0), coalesce(run_at, now()), coalesce(max_attempts, 25),
  case when flags is not null then :"schema"._rs_flags_object(array(select json_array_elements_text(flags::json))) end
from unnest($1::int[], $2::int[], $3::text[], $4::timestamptz[], $5::int2[], $6::int2[], $7::text[])
  as spec (task_id, job_queue_id, payload, run_at, max_attempts, priority, flags)
returning id as number;
