-- Worker $1 has left and holds nothing any more.
delete from :"schema"._rs_workers where worker_id = $1;
