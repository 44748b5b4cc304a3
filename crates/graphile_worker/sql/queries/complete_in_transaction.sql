-- Completes job $1 in the caller's transaction, if worker $2 still holds the claim of $3 (or of whole hours after $3:
-- see keep_locks_fresh.sql). Locks that job. Its queue stays locked by the worker, which releases it.
delete from :"schema"._private_jobs
where id operator(pg_catalog.=) $1 and locked_by operator(pg_catalog.=) $2
  and case when pg_catalog.isfinite(locked_at) then
    (extract(epoch from locked_at operator(pg_catalog.-) $3::pg_catalog.timestamptz)::numeric operator(pg_catalog.%) 3600::numeric)
      operator(pg_catalog.=) 0::numeric
  end
returning id;
