-- Number of jobs, and of running jobs, in any layout. Reads the whole table.
select count(*) as jobs, count(*) filter (where locked_at is not null) as running from :"schema".jobs;
