-- The role may read everything, including payloads, and change nothing: for list, show, why, stats, queues, workers,
-- top and doctor. It cannot see the activity of other roles' sessions: a superuser can grant it pg_read_all_stats.
grant usage on schema :"schema" to :"role";
grant select on
  :"schema".jobs, :"schema".migrations, :"schema"._private_jobs, :"schema"._private_job_queues,
  :"schema"._private_tasks, :"schema"._private_known_crontabs, :"schema"._rs_additions, :"schema"._rs_workers,
  :"schema"._rs_recoveries, :"schema"._rs_crontab_items, :"schema"._rs_limits, :"schema"._rs_lanes,
  :"schema"._rs_lane_calls, :"schema"._rs_slots, :"schema"._rs_limit_outcomes, :"schema"._rs_cancellations, :"schema"._rs_expiries,
  :"schema"._rs_throttles, :"schema"._rs_successors
to :"role";
drop policy if exists :"read_policy" on :"schema"._private_jobs;
drop policy if exists :"read_policy" on :"schema"._private_job_queues;
drop policy if exists :"read_policy" on :"schema"._private_tasks;
drop policy if exists :"read_policy" on :"schema"._private_known_crontabs;
drop policy if exists :"read_policy" on :"schema"._rs_workers;
drop policy if exists :"read_policy" on :"schema"._rs_recoveries;
drop policy if exists :"read_policy" on :"schema"._rs_crontab_items;
drop policy if exists :"read_policy" on :"schema"._rs_limits;
drop policy if exists :"read_policy" on :"schema"._rs_lanes;
drop policy if exists :"read_policy" on :"schema"._rs_lane_calls;
drop policy if exists :"read_policy" on :"schema"._rs_slots;
drop policy if exists :"read_policy" on :"schema"._rs_limit_outcomes;
drop policy if exists :"read_policy" on :"schema"._rs_cancellations;
drop policy if exists :"read_policy" on :"schema"._rs_expiries;
drop policy if exists :"read_policy" on :"schema"._rs_throttles;
drop policy if exists :"read_policy" on :"schema"._rs_successors;
create policy :"read_policy" on :"schema"._private_jobs for select to :"role" using (true);
create policy :"read_policy" on :"schema"._private_job_queues for select to :"role" using (true);
create policy :"read_policy" on :"schema"._private_tasks for select to :"role" using (true);
create policy :"read_policy" on :"schema"._private_known_crontabs for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_workers for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_recoveries for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_crontab_items for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_limits for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_lanes for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_lane_calls for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_slots for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_limit_outcomes for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_cancellations for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_expiries for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_throttles for select to :"role" using (true);
create policy :"read_policy" on :"schema"._rs_successors for select to :"role" using (true);
