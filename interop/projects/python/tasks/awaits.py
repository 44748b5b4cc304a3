"""An `async def`: helpers.query is asyncpg's."""

import json
from datetime import timezone


async def task(payload, helpers):
    await DO[payload["do"]](payload, helpers)


async def note(helpers, value):
    await helpers.query("insert into noted (task, value) values ('awaits', $1)", [json.dumps(value, default=str)])


async def parameters(payload, helpers):
    rows = await helpers.query("select n, $1::text as text, '100%' as percent from generate_series(1, $2) as n", ["it's", 2])
    rows += await helpers.query("select $1 + 1 as n", [2])
    rows += await helpers.query("select '100%' as n")
    nothing = [await helpers.query("create table if not exists t (n int)"), await helpers.query("insert into t values (1)")]
    await note(helpers, [rows, *nothing])


async def types(payload, helpers):
    [row] = await helpers.query(payload["sql"])
    row["time"] = row["time"].astimezone(timezone.utc)
    await note(helpers, {name: [type(value).__name__, str(value)] for name, value in row.items()})


async def transaction(payload, helpers):
    async def both(connection):
        async with connection.transaction():
            await connection.execute("insert into noted (task, value) values ('awaits', '\"in a transaction\"')")
            if payload["fails"]:
                raise ValueError("rolled back")

    await helpers.with_connection(both)


async def leaves_open(payload, helpers):
    await helpers.with_connection(lambda connection: connection.execute("begin; insert into noted (task, value) values ('awaits', '0')"))


async def is_wrong(payload, helpers):
    await helpers.query("select nothing")


async def ends_its_connection(payload, helpers):
    await helpers.query("select pg_terminate_backend(pg_backend_pid())")


async def who(payload, helpers):
    [row] = await helpers.query("select pg_backend_pid() as pid, pg_sleep($1)", [payload.get("seconds", 0)])
    await note(helpers, row["pid"])


async def adds(payload, helpers):
    rows = await helpers.query("select n, n / 4.0 as quarters from generate_series(1, 2) as n")
    job = await helpers.add_job("added", rows, queue_name="by awaits", max_attempts=3)
    [newest] = await helpers.query("select max(id) as id from graphile_worker.jobs")
    await note(helpers, [job.task_identifier, job.id == newest["id"]])


functions = [parameters, types, transaction, leaves_open, is_wrong, ends_its_connection, who, adds]
DO = {function.__name__: function for function in functions}
