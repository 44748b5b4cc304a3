-- How many workers are connected to this database under the application name of ours. Locks nothing.
select count(*) as workers
from (
  select distinct split_part(application_name, ' ', 2)
  from pg_stat_activity
  where datname = current_database() and application_name like 'graphile\_worker %'
) as connected;
