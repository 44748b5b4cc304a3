-- Makes the crontab items $1 known as of $2. Returns those that were known before, and since when their ticks count: what
-- was missed before that is not made up for. Locks nothing that is there already.
with new as (
  insert into :"schema"._private_known_crontabs (identifier, known_since)
  select unnest($1::text[]), $2
  on conflict do nothing
)
select identifier, coalesce(last_execution, known_since) as since
from :"schema"._private_known_crontabs
where identifier = any ($1);
