async def task(payload, helpers):
    await helpers.query("insert into noted select 'asyncpg', ssl from pg_stat_ssl where pid = pg_backend_pid()")
