-- Frees what the workers $1 hold.
select :"schema".force_unlock_workers($1);
