-- The limit's completion of jobs ($1).
delete from graphile_worker._private_jobs where id = any ($1::bigint[]);
