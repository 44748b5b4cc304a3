-- Creates the schema. Only run if it does not exist: a role that may not create schemas can still install into one
-- that a DBA created, and `if not exists` would require the right anyway.
create schema :"schema";
