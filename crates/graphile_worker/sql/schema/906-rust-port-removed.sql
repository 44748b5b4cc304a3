-- Removes what only the Rust port (the graphile_worker of crates.io) uses: its queue locks, functions and tables, and
-- its entries in the ledger of Node's worker, which would make Node skip its own migrations with these numbers. Its
-- versions of the shared functions have been replaced before. Locks the table of jobs briefly, because of the foreign
-- key.
update :"schema"._private_job_queues as job_queues
set locked_at = null, locked_by = null
where job_queues.locked_by like 'graphile\_worker\_%'
  or job_queues.locked_by in (select workers.id from :"schema"._private_workers as workers);
drop function if exists
  :"schema".worker_heartbeat, :"schema".worker_deregister, :"schema".list_stale_workers,
  :"schema".list_orphan_locked_workers, :"schema".recover_dead_worker_jobs, :"schema".delete_stale_workers,
  :"schema"._private_return_jobs;
drop table :"schema"._private_job_retirements, :"schema"._private_workers;
delete from :"schema".migrations where id in (21, 22);
