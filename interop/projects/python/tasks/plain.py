"""A `def`: helpers.query is psycopg's."""

import json
from datetime import timezone


def task(payload, helpers):
    DO[payload["do"]](payload, helpers)


def note(helpers, value):
    helpers.query("insert into noted (task, value) values ('plain', %s)", [json.dumps(value, default=str)])


def parameters(payload, helpers):
    rows = helpers.query("select n, %s as text, '100%%' as percent from generate_series(1, %s) as n", ["it's", 2])
    rows += helpers.query("select %(n)s + 1 as n", {"n": 2})
    rows += helpers.query("select '100%' as n")
    note(helpers, [rows, helpers.query("create temporary table t (n int)"), helpers.query("insert into t values (1)")])


def types(payload, helpers):
    [row] = helpers.query(payload["sql"])
    row["time"] = row["time"].astimezone(timezone.utc)
    note(helpers, {name: [type(value).__name__, str(value)] for name, value in row.items()})


def transaction(payload, helpers):
    def both(connection):
        with connection.transaction():
            connection.execute("insert into noted (task, value) values ('plain', '\"in a transaction\"')")
            if payload["fails"]:
                raise ValueError("rolled back")

    helpers.with_connection(both)


def leaves_open(payload, helpers):
    helpers.with_connection(lambda connection: connection.execute("begin; insert into noted (task, value) values ('plain', '0')"))


def is_wrong(payload, helpers):
    helpers.query("select nothing")


def ends_its_connection(payload, helpers):
    helpers.query("select pg_terminate_backend(pg_backend_pid())")


def who(payload, helpers):
    [row] = helpers.query("select pg_backend_pid() as pid, pg_sleep(%s)", [payload.get("seconds", 0)])
    note(helpers, row["pid"])


def adds(payload, helpers):
    rows = helpers.query("select n, n / 4.0 as quarters from generate_series(1, 2) as n")
    job = helpers.add_job("added", rows, queue_name="by plain", max_attempts=3)
    note(helpers, [job.task_identifier, job.id == helpers.query("select max(id) as id from graphile_worker.jobs")[0]["id"]])


functions = [parameters, types, transaction, leaves_open, is_wrong, ends_its_connection, who, adds]
DO = {function.__name__: function for function in functions}
