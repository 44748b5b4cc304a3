-- Releases the lock that lock_indexes.sql has taken.
select pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('graphile_worker indexes ' operator(pg_catalog.||) :'schema', 0::bigint));
