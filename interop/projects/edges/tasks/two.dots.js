module.exports = (_, helpers) => require("../lib/note.cjs")(helpers, "loaded", "two.dots");
