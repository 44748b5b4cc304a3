-- What time it is.
select clock_timestamp() as now;
