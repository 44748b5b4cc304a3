-- The attributes of the session for target_session_attrs. Reads no table; locks nothing. Has no parameters and
-- returns text, because it is sent as a simple query.
select
  pg_catalog.pg_is_in_recovery() as is_standby,
  pg_catalog.pg_is_in_recovery() or pg_catalog.current_setting('transaction_read_only')::pg_catalog.bool as is_read_only;
