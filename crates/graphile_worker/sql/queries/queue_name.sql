-- The name of the queue $1, or of the queue whose lane is $1. Reads one row by a primary key; locks nothing.
select queue_name from :"schema"._private_job_queues where id = $1::int
union all
select queue_name from :"schema"._rs_lanes where id = $1::int and queue_name is not null;
