-- Deletes the tasks or queues ($1: 'task' or 'queue') that no job uses; returns how many, and whether it skipped some
-- that are in use. Never waits for another session. The transaction must be read committed.
select deleted, is_busy from :"schema"._rs_delete_unused_names($1);
