-- When each of the crontab items $1 was first registered, and when it last fired. Items that no worker has registered
-- are missing from the result. Locks nothing.
select identifier, known_since, last_execution
from :"schema"._private_known_crontabs
where identifier = any ($1::text[])
order by identifier;
