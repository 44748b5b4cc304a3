-- Asks the workers of older releases to finish, because the breaking step $1 is about to be taken: those that run by a
-- notification, those that would start by a note in our ledger, which holds for $2 seconds. $3 says for how many seconds
-- they are waited for. Where the step has been taken meanwhile, nobody is asked.
with wanted as (
  insert into :"schema"._rs_additions as additions (id, breaking, wanted_until)
  values ($1, true, now() + make_interval(secs => $2))
  on conflict (id) do update set wanted_until = excluded.wanted_until where additions.wanted_until is not null
  returning id
)
select pg_notify(
  'worker:migrate',
  json_build_object('breaking', false, 'schema', :'schema', 'addition', id, 'waits', $3::float8)::text
)
from wanted;
