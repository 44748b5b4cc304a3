-- All queues that worker $1 has locked. After a failover, a queue that the worker had freed may be locked again.
-- Reads the whole table: nothing indexes locked_by.
select id from :"schema"._private_job_queues where locked_by = $1;
