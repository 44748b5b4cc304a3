-- Sets or replaces a limit: $1 name   $2 concurrency   $3 rate   $4 period in seconds   $5 burst   $6 weight   $7 cost   $8 group
-- $9 failures in a row that trip its breaker   $10 for how many seconds no job starts then. Null means that the limit does not have
-- the setting. Locks the row of the limit; see `_rs_set_limit`.
select 1::pg_catalog.int8 as number from :"schema"._rs_set_limit(
  $1::pg_catalog.text, $2::pg_catalog.int4, $3::pg_catalog.int4, pg_catalog.make_interval(secs => $4::pg_catalog.float8),
  $5::pg_catalog.int4, $6::pg_catalog.float8, $7::pg_catalog.int4, $8::pg_catalog.text, $9::pg_catalog.int4,
  pg_catalog.make_interval(secs => $10::pg_catalog.float8)
);
