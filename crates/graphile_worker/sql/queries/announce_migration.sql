-- Tells running workers of the breaking migration $1 of Node's ledger. Workers of other schemas hear it, too: ours go by the
-- name.
select pg_notify(
  'worker:migrate', json_build_object('migrationNumber', $1::int, 'breaking', true, 'schema', :'schema')::text
);
