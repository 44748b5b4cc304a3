import note from "../lib/note.cjs";

export const other = () => { throw new Error("not this one"); };
export default (_, helpers) => note(helpers, "loaded", "named_too");
