-- Ends the pause of $1; false if it is not paused. Locks the row of the limit; see `_rs_resume`.
select :"schema"._rs_resume($1::text);
