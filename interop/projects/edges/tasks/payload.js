const note = require("../lib/note.cjs");
const kind = require("../lib/kind.cjs");

// JSON once more inside of JSON: the database must not tidy it up.
module.exports = (payload, helpers) =>
  note(helpers, "payload", { text: JSON.stringify(payload), kind: kind(payload), same: payload === helpers.job.payload });
