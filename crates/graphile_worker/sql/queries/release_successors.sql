-- Lets jobs start whose replaced jobs have ended. Says how many, and whether others wait. Waits for no row. As long as no running
-- job is being replaced, it reads an empty table.
select released, others_wait from :"schema"._rs_release_successors();
