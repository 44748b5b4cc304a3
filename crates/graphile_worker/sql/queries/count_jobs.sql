-- All jobs there are. Reads the whole table: only for reports after a move.
select count(*) from :"schema"._private_jobs;
