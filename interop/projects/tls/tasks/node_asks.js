module.exports = async (payload, helpers) => {
  await helpers.query(
    "insert into noted select 'node-pg', ssl from pg_stat_ssl where pid = pg_backend_pid()",
  );
};
