// Holds so many connections at once: with fewer in its pool it would wait for ever.
module.exports = async ({ times }, { withPgClient }) => {
  let open;
  const allAreThere = new Promise((resolve) => (open = resolve));
  let there = 0;
  await Promise.all(
    Array.from({ length: times }, () =>
      withPgClient(async () => {
        if (++there === times) open();
        await allAreThere;
      }),
    ),
  );
};
