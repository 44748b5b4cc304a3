-- Publishes the definitions $2 of the crontab items $1, and returns the definitions of other workers that differ.
with others as (
  select said.identifier, said.item
  from unnest($1::text[], $2::text[]) as mine (identifier, item)
  join :"schema"._rs_crontab_items as said on said.identifier = mine.identifier and said.item <> mine.item
), mine as (
  insert into :"schema"._rs_crontab_items as said (identifier, item)
  select * from unnest($1, $2)
  on conflict (identifier) do update set item = excluded.item, since = now() where said.item <> excluded.item
)
select identifier, item from others;
