-- Number of all jobs. Reads the whole table: only for the report of a migration.
select count(*) from :"schema"._private_jobs;
