-- Terminates earlier connections of the worker, with the application names $1; returns how many there are. Until this
-- is 0, they may claim jobs that the worker never receives.
select pg_catalog.count(pg_terminate_backend(pid)) from pg_stat_activity
where application_name = any ($1::text[]) and datname = current_database() and pid <> pg_backend_pid();
