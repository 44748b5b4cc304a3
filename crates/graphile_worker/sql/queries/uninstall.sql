-- Drops the schema with everything in it or depending on it. Waits for sessions that use its tables.
drop schema :"schema" cascade;
