// What TypeScript makes of `export default`.
"use strict";
Object.defineProperty(exports, "__esModule", { value: true });
exports.default = (_, helpers) => require("../lib/note.cjs")(helpers, "loaded", "compiled");
