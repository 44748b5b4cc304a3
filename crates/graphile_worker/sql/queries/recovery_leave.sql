-- Deletes the registration of worker $1, which has stopped and holds no jobs.
delete from :"schema"._rs_workers where worker_id = $1;
