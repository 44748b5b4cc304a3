-- Deletes tasks that no job belongs to. Run after lock_jobs.sql in one transaction: a job that is just being added
-- keeps its task.
delete from :"schema"._private_tasks as tasks
where not exists (select from :"schema"._private_jobs as jobs where jobs.task_id = tasks.id);
