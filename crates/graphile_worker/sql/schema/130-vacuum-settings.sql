-- Vacuum settings of the tables whose rows come and go. Every job leaves two dead rows, and a claim reads past all
-- that vacuum has not removed. Measured in bench/RESULTS.md ("Churn"). Set once; you can change them.
--
-- No pauses: with PostgreSQL's default of 2 ms after every few pages, autovacuum is slower than a busy worker, and
-- the table grew 16-fold in a minute; without pauses, it does not grow. No truncation: returning the empty end of a
-- table to the system takes a lock that blocks every worker, and the same pages are needed again a moment later.
-- `vacuum (truncate)` does it when you want it.
alter table :"schema"._private_jobs set (autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
-- Free space on the pages of queues: a queue's row changes with every claim, and without space on its page each
-- change would also be written to its two indexes.
alter table :"schema"._private_job_queues
  set (autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off, fillfactor = 70);
