-- Sets or replaces a limit: $1 name   $2 concurrency   $3 rate   $4 period in seconds   $5 burst   $6 weight   $7 cost   $8 group
-- $9 failures in a row that trip its breaker   $10 for how many seconds nothing starts then; null for a setting that the limit does
-- not have. Locks the row of the limit; see `_rs_set_limit`.
select name from :"schema"._rs_set_limit(
  $1::text, $2::int, $3::int, make_interval(secs => $4::float8), $5::int, $6::float8, $7::int, $8::text,
  $9::int, make_interval(secs => $10::float8)
);
