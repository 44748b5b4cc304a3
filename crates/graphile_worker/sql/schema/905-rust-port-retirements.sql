-- A table of the Rust port since its migration 22: jobs that were replaced by their key. Created here if an older
-- release of the port lacks it.
create table if not exists :"schema"._private_job_retirements (id bigint primary key);
