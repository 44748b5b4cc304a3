-- Takes the sweep lock until the transaction ends. PostgreSQL ends the transaction if the sweeping worker is silent for
-- a minute. In a SQL_ASCII database, the transaction can read texts that are not UTF-8: see allow_invalid_utf8.sql.
select
  :"schema"._rs_sweep_lock() as is_ours, set_config('idle_in_transaction_session_timeout', '60s', true),
  set_config(
    'client_encoding',
    case when getdatabaseencoding() = 'SQL_ASCII' then 'SQL_ASCII' else current_setting('client_encoding') end,
    true
  );
