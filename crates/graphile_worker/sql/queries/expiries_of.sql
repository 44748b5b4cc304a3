-- When those of the claimed jobs $1 expire that do, and in how many seconds. A worker asks only if an expiry is near. Reads by the
-- primary key; locks nothing.
select job_id, expires_at, extract(epoch from expires_at - clock_timestamp())::float8 as seconds
from :"schema"._rs_expiries
where job_id = any ($1::bigint[]) and isfinite(expires_at);
