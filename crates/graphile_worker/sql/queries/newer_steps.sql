-- The breaking steps that a release does not support: of Node's ledger above $1, of ours above $2; and a step that a
-- newer release is waiting to apply (a migration of Node's by its negative number), with the maximum number of
-- seconds until then.
select
  array(select id from :"schema".migrations where breaking and id > $1::int order by id) as migrations,
  array(
    select id from :"schema"._rs_additions where breaking and id > $2::int and wanted_until is null order by id
  ) as additions,
  wanted.id as wanted,
  extract(epoch from least(greatest(wanted.ts, '0001-01-01Z'), '9999-12-31Z') - now())::float8 as taken_in
from (select) as one
left join lateral (
  select id, ts from :"schema"._rs_additions
  where (id > $2::int or id < -$1::int) and wanted_until > now()
  order by ts desc limit 1
) as wanted on true;
