-- Locks jobs of a batch again whose connection was lost before its commit was confirmed, in a new transaction: those that
-- are free and unchanged. `deferred_end.sql` then records what became of them. Others were recorded by the lost commit,
-- or other workers have them: they run twice.
--
--  $1 ids   $2 updated_at when they were claimed   $3 attempts after the claim
--
-- Locks every row with `skip locked`. Finds rows by their primary key.
select jobs.id
from unnest($1::bigint[], $2::timestamptz[], $3::int[]) as claimed (id, updated_at, attempts)
join :"schema"._private_jobs as jobs on jobs.id = any (array[claimed.id])
where jobs.locked_at is null and jobs.updated_at = claimed.updated_at and jobs.attempts + 1 = claimed.attempts
for update of jobs skip locked;
