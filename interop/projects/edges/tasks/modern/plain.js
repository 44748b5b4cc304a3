import note from "../../lib/note.cjs";

export default (_, helpers) => note(helpers, "loaded", `modern/plain of ${new URL(".", import.meta.url).pathname.split("/").at(-2)}`);
