-- Ends what an earlier connection of the worker with application name $1 is still doing; says how many there are. Before
-- this is 0, it may yet claim jobs that nobody will hear of.
select count(pg_terminate_backend(pid)) from pg_stat_activity
where application_name = $1 and datname = current_database() and pid <> pg_backend_pid();
