-- Number of jobs ever added and deleted, from the table's statistics. Reads no table.
select now() as at, n_tup_ins as added, n_tup_del as removed
from pg_stat_all_tables
where relid = to_regclass(pg_catalog.format('%I._private_jobs', :'schema'))::oid;
