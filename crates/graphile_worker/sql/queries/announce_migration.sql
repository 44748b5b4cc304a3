-- Notifies running workers of the breaking migration $1 of Node's ledger. Workers of other schemas get it, too: ours
-- check the name.
select pg_notify(
  'worker:migrate', pg_catalog.json_build_object('migrationNumber', $1::int, 'breaking', true, 'schema', :'schema')::text
);
