-- How many jobs there are, and how many of them run; in any layout. Reads the whole table.
select count(*) as jobs, count(*) filter (where locked_at is not null) as running from :"schema".jobs;
