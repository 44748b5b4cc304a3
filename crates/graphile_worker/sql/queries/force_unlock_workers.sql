-- Releases everything that the workers $1 have locked. Returns one row without columns.
select from :"schema".force_unlock_workers($1);
