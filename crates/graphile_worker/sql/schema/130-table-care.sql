-- How vacuum treats the tables whose rows come and go. Every job leaves two dead rows behind, and a claim has to walk
-- past those that vacuum has not taken away. Measured in bench/RESULTS.md ("Churn"); once set, yours to change.
--
-- No pauses: with PostgreSQL's default of 2 ms after every few pages autovacuum is slower than a busy worker, and the
-- table grew 16-fold in a minute; without, it stays as it is.
-- No truncating: giving the empty end of a table back to the system takes a lock that keeps every worker out, only to
-- ask for the same pages again a moment later. `vacuum (truncate)` does it when you want it.
alter table :"schema"._private_jobs set (autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
-- Room on the pages of queues: a queue's row changes with every claim, and without a place beside it each change would
-- also have to be written into its two indexes.
alter table :"schema"._private_job_queues
  set (autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off, fillfactor = 70);
