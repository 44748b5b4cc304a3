-- Wakes the workers: $1 jobs have been added. As `_rs_notify_jobs` does, which PostgreSQL would inline here, under the path of
-- the application's connection.
select 0::bigint as number
from pg_catalog.pg_notify(
  'jobs:insert', pg_catalog.concat('{"r":', pg_catalog.random(), ',"count":', $1::int, '}')
);
