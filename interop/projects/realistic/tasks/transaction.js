module.exports = (payload, { withPgClient }) =>
  withPgClient(async (client) => {
    await client.query("begin");
    try {
      await client.query("insert into noted (task, value) values ('transaction', $1)", [JSON.stringify(payload)]);
      if (payload.fails) throw new Error("rolled back");
      await client.query("commit");
    } catch (error) {
      await client.query("rollback");
      throw error;
    }
  });
