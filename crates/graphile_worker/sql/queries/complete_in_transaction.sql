-- Completes job $1 inside the caller's transaction, if it is still what worker $2 claimed at $3. Locks that job.
-- The queue it belongs to stays with the worker, who passes it on.
-- (Or whole hours after $3: see keep_locks_fresh.sql.)
delete from :"schema"._private_jobs
where id = $1 and locked_by = $2 and extract(epoch from locked_at - $3::timestamptz)::numeric % 3600 = 0
returning id;
