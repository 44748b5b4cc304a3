module.exports = async (payload, helpers) => {
  const { name } = payload;
  helpers.logger.info(`Hello, ${name}`);
  await helpers.query("insert into noted (task, value) values ('hello', $1)", [JSON.stringify({ name })]);
};
