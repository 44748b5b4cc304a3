-- The settings of the limits named $1. Locks nothing; finds them by their names.
select
  limits.name, limits.concurrency, limits.rate, extract(epoch from limits.per)::float8 as per_seconds,
  limits.burst, limits.weight, limits.cost, groups.name as group_name,
  limits.trip, extract(epoch from limits.trip_for)::float8 as trip_seconds
from :"schema"._rs_limits as limits
left join :"schema"._rs_limits as groups on groups.id = limits.group_id
where limits.name = any ($1::text[]) and not limits.is_dropped;
