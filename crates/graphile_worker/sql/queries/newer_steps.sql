-- The breaking steps beyond what a release knows: of Node's ledger beyond $1, of ours beyond $2, and those beyond $2 that
-- somebody is waiting to take.
select
  array(select id from :"schema".migrations where breaking and id > $1 order by id) as migrations,
  array(
    select id from :"schema"._rs_additions where breaking and id > $2 and wanted_until is null order by id
  ) as additions,
  (select max(id) from :"schema"._rs_additions where id > $2 and wanted_until > now()) as wanted;
