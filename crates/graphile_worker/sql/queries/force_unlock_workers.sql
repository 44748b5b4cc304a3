-- Frees what the workers $1 hold. One row without columns.
select from :"schema".force_unlock_workers($1);
