-- Deletes the tasks or queues ($1: 'task' or 'queue') that no job uses; says how many, and whether some were busy. Waits for
-- no other session. The transaction must be read committed.
select deleted, is_busy from :"schema"._rs_delete_unused_names($1);
