-- Those of the jobs $1 whose rows an open transaction has locked, so that whoever writes them would have to wait.
-- Its own locks go at once.
with free as (
  select id from :"schema"._private_jobs where id = any ($1::bigint[]) for update skip locked
)
select id from :"schema"._private_jobs
where id = any ($1::bigint[]) and id <> all (array(select id from free));
