-- Drops what Node's migrations 17 and 18 drop: if a migration was interrupted at 16 or 17, these are still there, and
-- every add would notify the workers twice.
drop trigger if exists _900_after_insert on :"schema"._private_jobs;
drop function if exists
  :"schema".tg_jobs__after_insert(), :"schema".tg__update_timestamp(),
  :"schema".jobs__decrease_job_queue_count(), :"schema".jobs__increase_job_queue_count();
