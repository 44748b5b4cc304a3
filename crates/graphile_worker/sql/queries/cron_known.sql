-- Registers the crontab items $1 as known since $2. Returns those that were registered before, with their last
-- execution, or with the time of their registration if they never fired. Earlier ticks are not backfilled. Locks no
-- existing rows.
with new as (
  insert into :"schema"._private_known_crontabs (identifier, known_since)
  select pg_catalog.unnest($1::text[]), $2
  on conflict do nothing
)
select identifier, coalesce(last_execution, known_since) as since
from :"schema"._private_known_crontabs
where identifier = any ($1);
