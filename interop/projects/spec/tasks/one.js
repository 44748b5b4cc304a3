const note = require("../lib/note.cjs");

module.exports = async (_, helpers) => {
  const { withPgClient } = helpers;
  const { rows: [row] } = await withPgClient((pgClient) => pgClient.query("select 1 as one"));
  await note(helpers, "one", row);
};
