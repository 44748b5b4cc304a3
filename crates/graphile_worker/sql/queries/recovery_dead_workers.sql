-- The dead workers: no heartbeat for $1 seconds, or for $2 times that if they hold a job with one of the flags $3.
select worker_id from :"schema"._rs_dead_workers(make_interval(secs => $1::float8), $2::int, $3::text[]) as worker_id;
