import note from "../lib/note.cjs";
import type { Server } from "node:http";

type Helpers = { query: (text: string, values: unknown[]) => Promise<unknown> };

export default (_: unknown, helpers: Helpers, server?: Server) => note(helpers, "loaded", `typed ${typeof server}`);
