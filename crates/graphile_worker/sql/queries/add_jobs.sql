-- Adds many jobs: an array for each field. Flags come as the text of a JSON array each, because arrays of
-- arrays must be rectangular. Tasks are not looked up: the caller knows them, and the rows come in the order given.
select
  jobs.id, jobs.job_queue_id, '' as task_identifier, jobs.payload::text as payload, jobs.priority,
  jobs.run_at, jobs.attempts, jobs.max_attempts, jobs.last_error, jobs.created_at, jobs.updated_at, jobs.key,
  jobs.locked_at, jobs.revision, jobs.flags
from :"schema".add_jobs(
  array(
    select
      (
        identifier, payload::json, queue_name, run_at, max_attempts, job_key, priority,
        case when flags is not null then array(select json_array_elements_text(flags::json)) end
      ):::"schema".job_spec
    from unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::int2[], $6::text[], $7::int2[], $8::text[])
      as spec (identifier, payload, queue_name, run_at, max_attempts, job_key, priority, flags)
  ),
  $9
) as jobs;
