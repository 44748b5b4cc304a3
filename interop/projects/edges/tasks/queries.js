const note = require("../lib/note.cjs");
const kind = require("../lib/kind.cjs");

module.exports = async (payload, helpers) => {
  const { query, withPgClient } = helpers;
  const { rows, rowCount, command, fields } = await query(
    "select 1 as int, 2::bigint as bigint, 1.5::numeric as numeric, true as bool, null as nothing, now() as time, '{\"a\": 1}'::json as json, array[1, 2] as list, $1::text as given",
    ["given"],
  );
  const error = await query("select 1 / 0").catch((error) => error);
  const result = await withPgClient(async (client) => {
    const { rows: [row] } = await client.query("select 1 as one");
    return { row, emits: typeof client.on, releases: typeof client.release };
  });
  const inTransaction = await withPgClient(async (client) => {
    await client.query("begin");
    await client.query("create temporary table t on commit drop as select 1 as n");
    const { rows: [{ count }] } = await client.query("select count(*) from t");
    await client.query("commit");
    return count;
  });
  const [where] = (await query("select current_setting('search_path') as path, current_schema() as schema, current_user = session_user as self")).rows;
  await note(helpers, "queries", {
    kinds: kind(rows[0]), given: rows[0].given, rowCount, command, names: fields.map((field) => field.name),
    error: [error.code, error.message, error.name], result, inTransaction, where,
    named: (await query({ text: "select $1::int as n", values: [3] })).rows,
    together: (await Promise.all([1, 2, 3].map((n) => query("select $1::int as n", [n])))).map(({ rows }) => rows[0].n),
  });
};
