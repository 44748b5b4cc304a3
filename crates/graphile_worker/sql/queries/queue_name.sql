-- The name of the queue $1. Reads one row by its primary key; locks nothing.
select queue_name from :"schema"._private_job_queues where id = $1::int;
