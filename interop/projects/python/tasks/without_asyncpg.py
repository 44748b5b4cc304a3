"""An `async def` where there is no asyncpg: helpers.query is psycopg's, as in a `def`, and awaited."""


async def task(payload, helpers):
    [row] = await helpers.query("select %s::int + 1 as n", [payload["n"]])
    sql = "insert into noted (task, value) values ('without_asyncpg', %s::text::jsonb)"
    await helpers.query(sql, [row["n"]])
    if payload["leaves_open"]:
        await helpers.with_connection(lambda connection: connection.execute("begin"))
    elif payload["fails"]:
        await helpers.query("select nothing")
