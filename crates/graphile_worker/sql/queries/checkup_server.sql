-- How the server is, as far as it matters to a queue, in one row. Touches nothing of the schema; locks nothing.
-- Others' transactions have no start for a role that may not see them; `hidden_sessions` says how many those are.
select
  current_setting('server_version') as version, current_setting('server_version_num')::int as version_number,
  current_user::text as role, pg_is_in_recovery() as is_standby,
  current_setting('autovacuum')::bool and current_setting('track_counts')::bool as autovacuum,
  (select count(*) from pg_stat_activity where backend_type = 'client backend') as connections,
  current_setting('max_connections')::bigint as max_connections,
  pg_notification_queue_usage() as notification_queue_usage,
  (select count(*) from pg_prepared_xacts) as prepared_transactions,
  coalesce((select extract(epoch from now() - min(prepared)) from pg_prepared_xacts), 0)::float8 as oldest_prepared_seconds,
  (
    select count(*) from pg_stat_activity
    where backend_type is null or (backend_type = 'client backend' and state is null)
  ) as hidden_sessions,
  (
    select coalesce(json_agg(row_to_json(longest) order by longest.seconds desc), '[]')::text
    from (
      select
        pid, usename::text as role, application_name, coalesce(state, '') as state,
        extract(epoch from now() - xact_start)::float8 as seconds,
        extract(epoch from now() - query_start)::float8 as query_seconds,
        coalesce(age(backend_xmin), 0) as xmin_age
      from pg_stat_activity
      where xact_start is not null and pid <> pg_backend_pid() and backend_type in ('client backend', 'walsender')
        and (datname = current_database() or backend_type = 'walsender')
        and (backend_xmin is not null or backend_xid is not null or state like 'idle in transaction%')
      order by xact_start
      limit 5
    ) as longest
  ) as transactions,
  (
    select coalesce(json_agg(json_build_object('name', slot_name, 'xmin_age', age(xmin)) order by slot_name), '[]')::text
    from pg_replication_slots where xmin is not null
  ) as slots;
