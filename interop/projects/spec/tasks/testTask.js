const note = require("../lib/note.cjs");

module.exports = (payload, helpers) => note(helpers, "testTask", payload);
