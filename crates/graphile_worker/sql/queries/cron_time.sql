-- The current time of the database.
select clock_timestamp() as now;
