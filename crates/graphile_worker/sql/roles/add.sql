-- The role may add jobs with add_job and add_jobs, nothing else: it cannot read the tables of jobs, and no payload
-- but its own. With a job key it can replace the waiting job with this key: that is part of adding.
grant usage on schema :"schema" to :"role";
grant select on :"schema".migrations, :"schema"._rs_additions to :"role";
grant execute on function
  :"schema".add_job(text, json, text, timestamptz, int, text, int, text[], text),
  :"schema".add_jobs(:"schema".job_spec[], boolean),
  :"schema"._rs_job_problem(text, text, int, text, int, text[]),
  :"schema"._rs_job_names(text[], text[], int2[]),
  :"schema"._rs_adds_as_owner(),
  :"schema"._rs_add_job_as_owner(text, json, text, timestamptz, int, text, int, text[], text),
  :"schema"._rs_add_jobs_as_owner(:"schema".job_spec[], boolean),
  :"schema"._rs_expire_job(bigint, timestamptz),
  :"schema"._rs_expire_jobs(bigint[], timestamptz[]),
  :"schema"._rs_expire_own_jobs(bigint[], timestamptz[]),
  :"schema"._rs_debounce(text, json, text, interval, interval, text),
  :"schema"._rs_debounce_as_owner(text, json, text, interval, interval, text),
  :"schema"._rs_throttle(text, json, text, interval, text),
  :"schema"._rs_throttle_as_owner(text, json, text, interval, text),
  :"schema"._rs_replace_job(text, json, text, text, timestamptz, int, int, text[], text, boolean),
  :"schema"._rs_replace_job_as_owner(text, json, text, text, timestamptz, int, int, text[], text, boolean)
to :"role";
