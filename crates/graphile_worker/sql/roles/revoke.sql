-- Revokes all rights of the role on the schema, and drops the policies that came with them.
drop policy if exists :"read_policy" on :"schema"._private_jobs;
drop policy if exists :"read_policy" on :"schema"._private_job_queues;
drop policy if exists :"read_policy" on :"schema"._private_tasks;
drop policy if exists :"read_policy" on :"schema"._private_known_crontabs;
drop policy if exists :"read_policy" on :"schema"._rs_workers;
drop policy if exists :"read_policy" on :"schema"._rs_recoveries;
drop policy if exists :"read_policy" on :"schema"._rs_crontab_items;
drop policy if exists :"run_policy" on :"schema"._private_jobs;
drop policy if exists :"run_policy" on :"schema"._private_job_queues;
drop policy if exists :"run_policy" on :"schema"._private_tasks;
drop policy if exists :"run_policy" on :"schema"._private_known_crontabs;
drop policy if exists :"run_policy" on :"schema"._rs_workers;
drop policy if exists :"run_policy" on :"schema"._rs_recoveries;
drop policy if exists :"run_policy" on :"schema"._rs_crontab_items;
revoke all on all tables in schema :"schema" from :"role";
revoke all on all functions in schema :"schema" from :"role";
revoke all on schema :"schema" from :"role";
