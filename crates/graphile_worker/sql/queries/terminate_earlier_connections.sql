-- Ends what earlier connections of the worker, with the application names $1, are still doing; says how many there are.
-- Before this is 0, they may yet claim jobs that nobody will hear of.
select count(pg_terminate_backend(pid)) from pg_stat_activity
where application_name = any ($1::text[]) and datname = current_database() and pid <> pg_backend_pid();
