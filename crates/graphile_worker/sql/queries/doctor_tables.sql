-- The tables of the schema, one row each, from the statistics and the catalogue, and what this role may do with them.
-- `expected_bytes` is the size of the live rows without free space; null if their width is unknown. Takes no lock
-- that another session waits for; reads no table.
select
  class.relname::text as name,
  pg_relation_size(class.oid::regclass) as bytes, pg_total_relation_size(class.oid::regclass) as total_bytes,
  coalesce(stats.n_live_tup, 0) as live_rows, coalesce(stats.n_dead_tup, 0) as dead_rows,
  greatest(stats.last_vacuum, stats.last_autovacuum) as last_vacuum_at,
  (
    select (sum(columns.avg_width::float8 * (1::float8 - columns.null_frac::float8)) + 32::float8) * stats.n_live_tup::float8
    from pg_stats as columns where columns.schemaname = :'schema' and columns.tablename = class.relname
  ) as expected_bytes,
  array(
    select privilege from pg_catalog.unnest('{select,insert,update,delete}'::text[]) as privilege
    where not has_table_privilege(class.oid, privilege)
  ) as missing_rights,
  -- Rights that row security withholds: it rejects everything that no policy for this role allows.
  array(
    select commands.privilege
    from (values ('select', 'r'), ('insert', 'a'), ('update', 'w'), ('delete', 'd')) as commands (privilege, code)
    where row_security_active(class.oid) and not exists (
      select from pg_policy
      where polrelid = class.oid and polpermissive and polcmd in ('*'::"char", commands.code::"char")
        and exists (select from pg_catalog.unnest(polroles) as allowed where allowed = 0::oid or pg_has_role(allowed, 'usage'))
    )
  ) as hidden_rights
from pg_class as class
left join pg_stat_all_tables as stats on stats.relid = class.oid
where class.relnamespace = (select oid from pg_namespace where nspname = :'schema') and class.relkind = 'r'
order by class.relname;
