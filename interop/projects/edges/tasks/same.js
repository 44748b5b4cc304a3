module.exports = (_, helpers) => require("../lib/note.cjs")(helpers, "loaded", "same.js");
