-- What the active sessions of this database wait for at this moment, and how many of them: a sample.
select
  coalesce(wait_event_type || ': ' || wait_event, 'on CPU') as waits_for,
  count(*)::int as sessions
from pg_stat_activity
where datname = current_database()
  and backend_type = 'client backend'
  and state = 'active'
  and pid <> pg_backend_pid()
group by 1;
