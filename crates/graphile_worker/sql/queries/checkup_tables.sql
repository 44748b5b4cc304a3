-- What the statistics and the catalogue say of the tables of the schema, and what this role may do with them, a row each.
-- `expected_bytes` is what the live rows would take with no room between them; null where nothing is known of their width.
-- Locks nothing that others want; reads no table.
select
  class.relname::text as name,
  pg_relation_size(class.oid) as bytes, pg_total_relation_size(class.oid) as total_bytes,
  coalesce(stats.n_live_tup, 0) as live_rows, coalesce(stats.n_dead_tup, 0) as dead_rows,
  greatest(stats.last_vacuum, stats.last_autovacuum) as last_vacuum_at,
  (
    select (sum(columns.avg_width * (1 - columns.null_frac)) + 32) * stats.n_live_tup
    from pg_stats as columns where columns.schemaname = :'schema' and columns.tablename = class.relname
  )::float8 as expected_bytes,
  array(
    select privilege from unnest('{select,insert,update,delete}'::text[]) as privilege
    where not has_table_privilege(class.oid, privilege)
  ) as missing_rights,
  row_security_active(class.oid) as hides_rows
from pg_class as class
left join pg_stat_all_tables as stats on stats.relid = class.oid
where class.relnamespace = (select oid from pg_namespace where nspname = :'schema') and class.relkind = 'r'
order by class.relname;
