-- Asks running workers to finish before the breaking migration $1 of Node's ledger. Node's workers obey the
-- notification. Ours read our ledger, which contains the migration under its negative number, because any role can
-- notify. Valid for $2 seconds; the migration is applied in $3 seconds at the latest.
with wanted as (
  insert into :"schema"._rs_additions (id, breaking, ts, wanted_until)
  values (-$1::int, true, now() + make_interval(secs => $3::float8), now() + make_interval(secs => $2::float8))
  on conflict (id) do update set ts = excluded.ts, wanted_until = excluded.wanted_until
  returning -id as id
)
select pg_notify(
  'worker:migrate', pg_catalog.json_build_object('migrationNumber', id, 'breaking', true, 'schema', :'schema')::text
)
from wanted;
