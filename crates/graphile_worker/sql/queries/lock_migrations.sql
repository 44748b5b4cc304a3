-- Blocks other migrations of ours until this transaction ends; waits for one that is running.
select pg_advisory_xact_lock(hashtextextended('graphile_worker migrate ' || :'schema', 0::bigint));
