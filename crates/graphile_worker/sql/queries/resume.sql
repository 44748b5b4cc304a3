-- Ends the pause of $1; 0 if it is not paused. Locks the row of the limit; see `_rs_resume`.
select (case when :"schema"._rs_resume($1::pg_catalog.text) then 1 else 0 end)::pg_catalog.int8 as number;
