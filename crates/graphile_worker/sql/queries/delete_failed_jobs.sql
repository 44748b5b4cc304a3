-- Deletes jobs that have failed for good and do not run. Skips rows that another session has locked, so it waits for none.
delete from :"schema"._private_jobs
where id = any (array(
  select id from :"schema"._private_jobs
  where attempts >= max_attempts and locked_at is null
  order by id
  for update skip locked
));
