-- Adds many jobs: one array per field. Flags are the text of a JSON array, because arrays of arrays must be
-- rectangular. Tasks are not looked up: the caller knows them, and rows are returned in the order given.
select
  jobs.id, jobs.job_queue_id, '' as task_identifier, jobs.payload::pg_catalog.text as payload, jobs.priority,
  jobs.run_at, jobs.attempts, jobs.max_attempts, jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key,
  jobs.locked_at, jobs.revision, jobs.flags
from :"schema".add_jobs(
  array(
    select
      (
        identifier, payload::pg_catalog.json, queue_name, run_at, max_attempts, job_key, priority,
        case when flags is not null then array(select pg_catalog.json_array_elements_text(flags::pg_catalog.json)) end
      ):::"schema".job_spec
    from unnest($1::pg_catalog.text[], $2::pg_catalog.text[], $3::pg_catalog.text[], $4::pg_catalog.timestamptz[], $5::pg_catalog.int2[], $6::pg_catalog.text[], $7::pg_catalog.int2[], $8::pg_catalog.text[])
      as spec (identifier, payload, queue_name, run_at, max_attempts, job_key, priority, flags)
  ),
  $9
) as jobs;
