def task(payload, helpers):
    helpers.query("insert into noted select 'psycopg', ssl from pg_stat_ssl where pid = pg_backend_pid()")
