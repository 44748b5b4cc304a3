-- Drops the schema with all that is in it or rests on it. Waits for whoever uses its tables.
drop schema :"schema" cascade;
