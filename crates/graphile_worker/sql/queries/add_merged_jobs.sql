-- Adds jobs without keys that several callers want to add at the same moment: an array for each field, flags as the text
-- of a JSON array each. Only those whose task and queue exist, so that it waits for nobody who is just making one; says
-- by `position` which. Does not notify: NOTIFY would make all commits of all sessions wait for each other.
-- The names come from a function, which holds them before it looks them up: a join would see this statement's snapshot.
with names as materialized (
  select * from :"schema"._rs_known_names($1::text[], $3::text[])
), known as materialized (
  select spec.*, tasks.id as task_id, job_queues.id as job_queue_id, :"schema"._rs_next_job_id() as id
  from
    unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::int2[], $6::int2[], $7::text[]) with ordinality
      as spec (identifier, payload, queue_name, run_at, max_attempts, priority, flags, position)
    join names as tasks on tasks.kind = 'task' and tasks.name = spec.identifier
    left join names as job_queues on job_queues.kind = 'queue' and job_queues.name = spec.queue_name
  where spec.queue_name is null or job_queues.id is not null
), added as (
  insert into :"schema"._private_jobs
    (id, job_queue_id, task_id, payload, priority, run_at, max_attempts, flags)
    overriding system value
  select
    id, job_queue_id, task_id, payload::json, coalesce(priority, 0), coalesce(run_at, now()), coalesce(max_attempts, 25),
    case when flags is not null then :"schema"._rs_flags_object(array(select json_array_elements_text(flags::json))) end
  from known
  returning *
)
select
  known.position, added.id, added.job_queue_id, known.identifier as task_identifier, added.payload::text as payload,
  added.priority, added.run_at, added.attempts, added.max_attempts,
  added.last_error, added.created_at, added.updated_at, added.key, added.locked_at, added.revision,
  added.flags
from added join known using (id);
