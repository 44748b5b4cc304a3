const note = require("../lib/note.cjs");

const CALLS = {
  "unknown mode": ({ addJob }) => addJob("nobodys", {}, { jobKey: "k", jobKeyMode: "sometimes" }),
  "long name": ({ addJob }) => addJob("n".repeat(129)),
  "long queue": ({ addJob }) => addJob("nobodys", {}, { queueName: "q".repeat(129) }),
  "long key": ({ addJob }) => addJob("nobodys", {}, { jobKey: "k".repeat(513) }),
  "no attempts": ({ addJob }) => addJob("nobodys", {}, { maxAttempts: -1 }),
  circle: ({ addJob }) => { const circle = {}; circle.circle = circle; return addJob("nobodys", circle); },
  "big integer": ({ addJob }) => addJob("nobodys", { n: 1n }),
  "no date": ({ addJob }) => addJob("nobodys", {}, { runAt: new Date("nonsense") }),
  "too much": ({ addJob }) => addJob("nobodys", {}, { priority: 1e9 }),
  "no list": ({ addJobs }) => addJobs(),
  "one of many": ({ addJobs }) => addJobs([{ identifier: "nobodys" }, { identifier: "nobodys", maxAttempts: -1 }]),
};

module.exports = async (payload, helpers) => {
  for (const [what, call] of Object.entries(CALLS)) {
    let error;
    try {
      await call(helpers);
    } catch (thrown) {
      error = thrown;
    }
    await note(helpers, "adds_wrongly", { what, failed: error instanceof Error, code: error?.code, message: error?.message });
  }
};
