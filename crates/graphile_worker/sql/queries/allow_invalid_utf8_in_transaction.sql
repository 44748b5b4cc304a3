-- The same as allow_invalid_utf8.sql for this transaction: behind a pooler, the session is not ours.
select pg_catalog.set_config('client_encoding', 'SQL_ASCII', true)
where pg_catalog.getdatabaseencoding() operator(pg_catalog.=) 'SQL_ASCII';
