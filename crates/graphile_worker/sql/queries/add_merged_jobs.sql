-- Adds jobs without keys of several concurrent callers: one array per field, flags as the text of a JSON array. Only
-- adds jobs whose task and queue exist, so that it never waits for a session that creates one; `position` says which
-- jobs were added. Does not notify: NOTIFY would make the commits of all sessions wait for each other. The names come
-- from a function, which locks them before it looks them up: a join would see this statement's snapshot.
with names as materialized (
  select * from :"schema"._rs_known_names($1::pg_catalog.text[], $3::pg_catalog.text[])
), known as materialized (
  select spec.*, tasks.id as task_id, job_queues.id as job_queue_id
  from
    unnest(
      $1::pg_catalog.text[], $2::pg_catalog.text[], $3::pg_catalog.text[], $4::pg_catalog.timestamptz[], $5::pg_catalog.int2[], $6::pg_catalog.int2[], $7::pg_catalog.text[],
      :"schema"._rs_next_job_ids(pg_catalog.cardinality($1::pg_catalog.text[]))
    ) with ordinality as spec (identifier, payload, queue_name, run_at, max_attempts, priority, flags, id, position)
    join names as tasks on tasks.kind operator(pg_catalog.=) 'task' and tasks.name operator(pg_catalog.=) spec.identifier
    left join names as job_queues on job_queues.kind operator(pg_catalog.=) 'queue'
      and job_queues.name operator(pg_catalog.=) spec.queue_name
  where spec.queue_name is null or job_queues.id is not null
), added as (
  insert into :"schema"._private_jobs
    (id, job_queue_id, task_id, payload, priority, run_at, max_attempts, flags)
    overriding system value
  select
    id, job_queue_id, task_id, payload::pg_catalog.json, coalesce(priority, 0), coalesce(run_at, pg_catalog.now()), coalesce(max_attempts, 25),
    case when flags is not null then :"schema"._rs_flags_object(array(select pg_catalog.json_array_elements_text(flags::pg_catalog.json))) end
  from known
  returning *
)
select
  known.position, added.id, added.job_queue_id, known.identifier as task_identifier, added.payload::pg_catalog.text as payload,
  added.priority, added.run_at, added.attempts, added.max_attempts,
  added.last_error, added.created_at, added.updated_at, added.key, added.locked_at, added.revision,
  added.flags
from added join known on known.id operator(pg_catalog.=) added.id;
