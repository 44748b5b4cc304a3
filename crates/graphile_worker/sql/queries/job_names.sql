-- Gets ready for many jobs: the time of this transaction in microseconds, the ids of the tasks $1, the ids of the queues
-- $2. Nothing where a name, or one of the $3 maximum attempts, is not legal.
select number from :"schema"._rs_job_names($1::pg_catalog.text[], $2::pg_catalog.text[], $3::pg_catalog.int2[]) as number;
