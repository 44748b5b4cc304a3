-- Asks the workers of older releases to finish before the breaking step $1: with a row in our ledger that is valid
-- for $2 seconds, and a notification to read it. `ts` is when the step is applied at the latest, in $3 seconds. No
-- effect if the step has been applied meanwhile.
with wanted as (
  insert into :"schema"._rs_additions as additions (id, breaking, ts, wanted_until)
  values ($1, true, now() + make_interval(secs => $3::float8), now() + make_interval(secs => $2::float8))
  on conflict (id) do update set ts = excluded.ts, wanted_until = excluded.wanted_until
    where additions.wanted_until is not null
  returning id
)
select pg_notify('worker:migrate', pg_catalog.json_build_object('breaking', false, 'schema', :'schema', 'addition', id)::text)
from wanted;
