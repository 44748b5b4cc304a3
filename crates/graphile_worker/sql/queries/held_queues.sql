-- All queues that worker $1 has locked: a failover may give back a queue that the worker had freed.
-- Reads the whole table: nothing indexes locked_by.
select id from :"schema"._private_job_queues where locked_by = $1;
