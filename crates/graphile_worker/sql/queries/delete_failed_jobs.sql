-- Deletes permanently failed jobs that are not running. Skips rows that another session has locked, so that it never
-- waits.
delete from :"schema"._private_jobs
where id = any (array(
  select id from :"schema"._private_jobs
  where attempts >= max_attempts and locked_at is null
  order by id
  for update skip locked
));
