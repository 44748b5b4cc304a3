-- Lets jobs start if the jobs that they replace have ended. Returns how many, and whether others still wait. Waits for no row. While
-- no running job is being replaced, it reads an empty table.
select released, others_wait from :"schema"._rs_release_successors();
