-- The state of the server in one row, as far as a queue depends on it. Reads nothing of the schema; locks nothing.
-- For a role that may not see them, transactions of other roles have no start; `hidden_sessions` is their number.
select
  current_setting('server_version') as version, current_setting('server_version_num')::int as version_number,
  current_user::text as role, current_database()::text as database, pg_is_in_recovery() as is_standby,
  case when current_setting('transaction_read_only')::bool then (
    select source from pg_settings where name = 'default_transaction_read_only'
  ) end as read_only_by,
  current_setting('autovacuum')::bool and current_setting('track_counts')::bool as autovacuum,
  (select count(*) from pg_stat_activity where backend_type = 'client backend') as connections,
  current_setting('max_connections')::bigint as max_connections,
  -- Limits do not apply to superusers; -1 means no limit.
  (select case when rolsuper then -1 else rolconnlimit end from pg_roles where rolname = session_user)::bigint as role_limit,
  (select count(*) from pg_stat_activity where usename = session_user) as role_connections,
  (
    select case when rolsuper then -1 else datconnlimit end
    from pg_database, pg_roles where datname = current_database() and rolname = session_user
  )::bigint as database_limit,
  (select count(*) from pg_stat_activity where datname = current_database() and usename is not null)
    as database_connections,
  pg_notification_queue_usage() as notification_queue_usage,
  (select count(*) from pg_prepared_xacts) as prepared_transactions,
  coalesce((select extract(epoch from now() - min(prepared)) from pg_prepared_xacts), 0)::float8 as oldest_prepared_seconds,
  (
    select count(*) from pg_stat_activity
    where backend_type is null or (backend_type = 'client backend' and state is null)
  ) as hidden_sessions,
  (
    select coalesce(pg_catalog.json_agg(pg_catalog.row_to_json(longest) order by longest.seconds desc), '[]')::text
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
    select coalesce(pg_catalog.json_agg(pg_catalog.json_build_object('name', slot_name, 'xmin_age', age(xmin)) order by slot_name), '[]')::text
    from pg_replication_slots where xmin is not null
  ) as slots;
