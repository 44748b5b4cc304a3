-- In a database without an encoding (SQL_ASCII), lets this session read text with any bytes: otherwise one text that
-- is not UTF-8 makes every statement fail that returns it. No effect in other databases.
select pg_catalog.set_config('client_encoding', 'SQL_ASCII', false)
where pg_catalog.getdatabaseencoding() operator(pg_catalog.=) 'SQL_ASCII';
