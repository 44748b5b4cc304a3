-- Worker $1 still lives, and runs the tasks $2, if they are others than before. No row is changed where it was declared dead.
update :"schema"._rs_workers set last_heartbeat_at = now(), tasks = coalesce($2::text[], tasks) where worker_id = $1;
