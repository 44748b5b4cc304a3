import note from "../lib/note.cjs";

const WAYS = {
  exit: () => process.exit(3),
  abort: () => process.abort(),
  "uncaught error": () => setTimeout(() => { throw new Error("nobody catches me"); }),
  "unhandled rejection": () => void Promise.reject(new Error("nobody waits for me")),
};

// Ends its process at the first attempt, and is done at the second.
export default async ({ by }, helpers) => {
  const { attempts } = helpers.job;
  await note(helpers, "exits", { by, attempts });
  if (attempts > 1) return;
  WAYS[by]();
  await new Promise(() => setInterval(() => {}, 1000));
};
