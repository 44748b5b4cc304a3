-- The limit's way to say that jobs ($1) are done.
delete from graphile_worker._private_jobs where id = any ($1::bigint[]);
