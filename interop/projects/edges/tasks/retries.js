const note = require("../lib/note.cjs");

const failing = (code, times) => {
  let calls = 0;
  const callback = async (client) => {
    calls++;
    if (calls <= times) await client.query(`do $$ begin raise 'try again' using errcode = '${code}'; end $$`);
    return calls;
  };
  return callback;
};

// Errors that go away by themselves are tried again, others are not.
module.exports = async (payload, helpers) => {
  const { withRetries } = helpers.withPgClient;
  const attempt = (code, times) => withRetries(failing(code, times)).catch((error) => [error.code, error.message]);
  await note(helpers, "retries", {
    never: await attempt("40001", 0),
    serialization: await attempt("40001", 2),
    deadlock: await attempt("40P01", 1),
    other: await attempt("22012", 1),
  });
};
