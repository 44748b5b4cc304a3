-- How many jobs have ever been added and deleted, as the statistics of the table say. Reads no table.
select now() as at, n_tup_ins as added, n_tup_del as removed
from pg_stat_all_tables
where relid = to_regclass(format('%I._private_jobs', :'schema'));
