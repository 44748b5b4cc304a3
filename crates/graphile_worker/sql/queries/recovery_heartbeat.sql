-- Worker $1 still lives. No row is changed where it was declared dead.
update :"schema"._rs_workers set last_heartbeat_at = now() where worker_id = $1;
