-- Wakes the workers: $1 jobs have been added.
select 0::bigint as number from :"schema"._rs_notify_jobs($1::int);
