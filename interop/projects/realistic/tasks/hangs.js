const note = require("../lib/note.cjs");

// Does nothing until it is told to stop, and then what its payload says.
module.exports = async (payload, helpers) => {
  await note(helpers, "hangs", { began: payload.then });
  const reason = await helpers.abortPromise.catch((error) => error);
  const { aborted, reason: ofSignal } = helpers.abortSignal;
  await note(helpers, "hangs", { told: payload.then, aborted, name: reason.name, same: reason === ofSignal });
  if (payload.then === "throws") throw new Error("had to stop");
  if (payload.then === "stays") await new Promise(() => setInterval(() => {}, 1000));
};
