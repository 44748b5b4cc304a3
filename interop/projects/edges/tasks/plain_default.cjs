exports.default = (_, helpers) => require("../lib/note.cjs")(helpers, "loaded", "plain_default");
