-- Releases the jobs $2 of the dead workers $1, each by its decision: $3 decisions, $4 run_at, $5 attempts. $6 is the
-- delay in seconds. From the $7th recovery of a job on, its attempt counts.
select job_id, quarantined
from :"schema"._rs_recover_jobs(
  $1::text[], $2::bigint[], $3::text[], $4::timestamptz[], $5::int[], make_interval(secs => $6::float8), $7::int
);
