-- The role may do everything that a worker does: claim, finish and add jobs, run crontabs, recover the jobs of dead
-- workers; and everything that an operator does with jobs. It cannot change the schema: the owner runs `migrate`.
grant usage on schema :"schema" to :"role";
grant select on :"schema".jobs, :"schema".migrations, :"schema"._rs_additions to :"role";
grant select, insert, update, delete on
  :"schema"._private_jobs, :"schema"._private_job_queues, :"schema"._private_tasks,
  :"schema"._private_known_crontabs, :"schema"._rs_workers, :"schema"._rs_recoveries,
  :"schema"._rs_crontab_items, :"schema"._rs_limits, :"schema"._rs_lanes, :"schema"._rs_lane_calls, :"schema"._rs_slots,
  :"schema"._rs_limit_outcomes, :"schema"._rs_cancellations, :"schema"._rs_expiries, :"schema"._rs_throttles, :"schema"._rs_successors
to :"role";
grant execute on all functions in schema :"schema" to :"role";
-- It adds jobs as itself.
revoke execute on function
  :"schema"._rs_add_job_as_owner(text, json, text, timestamptz, int, text, int, text[], text),
  :"schema"._rs_add_jobs_as_owner(:"schema".job_spec[], boolean),
  :"schema"._rs_expire_own_jobs(bigint[], timestamptz[]),
  :"schema"._rs_debounce_as_owner(text, json, text, interval, interval, text),
  :"schema"._rs_throttle_as_owner(text, json, text, interval, text),
  :"schema"._rs_replace_job_as_owner(text, json, text, text, timestamptz, int, int, text[], text, boolean)
from :"role";
drop policy if exists :"run_policy" on :"schema"._private_jobs;
drop policy if exists :"run_policy" on :"schema"._private_job_queues;
drop policy if exists :"run_policy" on :"schema"._private_tasks;
drop policy if exists :"run_policy" on :"schema"._private_known_crontabs;
drop policy if exists :"run_policy" on :"schema"._rs_workers;
drop policy if exists :"run_policy" on :"schema"._rs_recoveries;
drop policy if exists :"run_policy" on :"schema"._rs_crontab_items;
drop policy if exists :"run_policy" on :"schema"._rs_limits;
drop policy if exists :"run_policy" on :"schema"._rs_lanes;
drop policy if exists :"run_policy" on :"schema"._rs_lane_calls;
drop policy if exists :"run_policy" on :"schema"._rs_slots;
drop policy if exists :"run_policy" on :"schema"._rs_limit_outcomes;
drop policy if exists :"run_policy" on :"schema"._rs_cancellations;
drop policy if exists :"run_policy" on :"schema"._rs_expiries;
drop policy if exists :"run_policy" on :"schema"._rs_throttles;
drop policy if exists :"run_policy" on :"schema"._rs_successors;
create policy :"run_policy" on :"schema"._private_jobs to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._private_job_queues to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._private_tasks to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._private_known_crontabs to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_workers to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_recoveries to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_crontab_items to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_limits to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_lanes to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_lane_calls to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_slots to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_limit_outcomes to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_cancellations to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_expiries to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_throttles to :"role" using (true) with check (true);
create policy :"run_policy" on :"schema"._rs_successors to :"role" using (true) with check (true);
