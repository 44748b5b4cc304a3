-- Takes the right to build the indexes, for this session; false if another session has it.
select pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('graphile_worker indexes ' operator(pg_catalog.||) :'schema', 0::bigint));
