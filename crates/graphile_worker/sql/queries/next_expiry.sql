-- The number of seconds until an expiry has to be looked at next; null if there is none. One index probe.
select extract(epoch from (
  select check_at from :"schema"._rs_expiries where check_at < 'infinity' order by check_at limit 1
) - now())::float8 as seconds;
