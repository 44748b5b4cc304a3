const { default: note } = await import("../lib/note.cjs");

export default (_, helpers) => note(helpers, "loaded", "waits_to_load");
