-- Worker $1 has left, and has written what became of everything it held.
delete from :"schema"._rs_workers where worker_id = $1;
