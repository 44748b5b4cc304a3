const note = require("../lib/note.cjs");
const kind = require("../lib/kind.cjs");

const RUN_AT = new Date("2035-01-02T03:04:05.678Z");
const fields = ({ payload, priority, attempts, max_attempts, key, revision, flags, run_at, task_identifier, last_error, locked_at, locked_by, is_available }) => ({
  payload, priority, attempts, max_attempts, key, revision, flags, task_identifier, last_error, locked_at, locked_by, is_available,
  run_at: run_at > new Date("2030-01-01") ? run_at.toISOString() : "soon",
});

module.exports = async (payload, helpers) => {
  const { addJob, addJobs } = helpers;
  const added = {
    bare: await addJob("nobodys"),
    "payload of null": await addJob("nobodys", null),
    "payload of text": await addJob("nobodys", "text"),
    "payload of false": await addJob("nobodys", false),
    "payload with dates": await addJob("nobodys", { at: RUN_AT, gone: undefined, nan: NaN }),
    all: await addJob("nobodys", { n: 1 }, { queueName: "q", runAt: RUN_AT, maxAttempts: 3, jobKey: "all", priority: 5, flags: ["a", "b"] }),
    empty: await addJob("nobodys", {}, { queueName: "", maxAttempts: 0, jobKey: "", priority: 0, flags: [] }),
    nulls: await addJob("nobodys", {}, { queueName: null, runAt: null, maxAttempts: null, jobKey: null, jobKeyMode: null, priority: null, flags: null }),
    half: await addJob("nobodys", {}, { jobKey: "🦀".slice(1) }),
    first: await addJob("nobodys", [1], { jobKey: "k", runAt: RUN_AT }),
    preserved: await addJob("nobodys", [2], { jobKey: "k", jobKeyMode: "preserve_run_at" }),
    deduped: await addJob("other", { unused: true }, { jobKey: "k", jobKeyMode: "unsafe_dedupe" }),
    replaced: await addJob("nobodys", { n: 3 }, { jobKey: "k", jobKeyMode: "replace", priority: -7 }),
  };
  for (const [what, job] of Object.entries(added)) await note(helpers, "adds", { what, kind: kind({ ...job, payload: {}, flags: {} }), ...fields(job) });
  const many = await addJobs([
    { identifier: "nobodys", payload: { n: 1 } },
    { identifier: "nobodys", payload: null },
    { identifier: "nobodys" },
    { identifier: "nobodys", payload: "text", queueName: "q", runAt: RUN_AT, maxAttempts: 4, jobKey: "many", priority: 6, flags: ["c"] },
  ]);
  await note(helpers, "adds", { many: many.map(fields), list: Array.isArray(many) });
  const later = new Date(RUN_AT.getTime() + 1000);
  const kept = await addJobs([{ identifier: "nobodys", payload: [2], jobKey: "many", runAt: later }], true);
  const moved = await addJobs([{ identifier: "nobodys", payload: [3], jobKey: "many", runAt: later }], false);
  await note(helpers, "adds", { kept: kept.map(fields), moved: moved.map(fields) });
  const odd = await addJobs([{ identifier: "nobodys", payload: [4], jobKey: "many", jobKeyMode: "unsafe_dedupe" }]);
  await note(helpers, "adds", { odd: odd.map(fields), none: await addJobs([]) });
};
