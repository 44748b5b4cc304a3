-- The breaking steps beyond what a release knows: of Node's ledger beyond $1, of ours beyond $2; and one that somebody is
-- waiting to take, a migration of Node's by its negative number, with the seconds until it is taken at the latest.
select
  array(select id from :"schema".migrations where breaking and id > $1::int order by id) as migrations,
  array(
    select id from :"schema"._rs_additions where breaking and id > $2::int and wanted_until is null order by id
  ) as additions,
  wanted.id as wanted,
  extract(epoch from wanted.ts - now())::float8 as taken_in
from (select) as one
left join lateral (
  select id, ts from :"schema"._rs_additions
  where (id > $2::int or id < -$1::int) and wanted_until > now()
  order by ts desc limit 1
) as wanted on true;
