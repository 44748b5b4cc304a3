-- Returns 1 if this transaction began at $1, otherwise 0: on a connection without an open transaction each statement has a
-- transaction of its own.
select (pg_catalog.now() operator(pg_catalog.=) $1)::int::bigint as number;
