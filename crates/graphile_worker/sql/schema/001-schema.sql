-- The schema itself. Run only where it is missing: a role that may not create schemas
-- can still install into one that a DBA made, and `if not exists` would ask for the right anyway.
create schema :"schema";
