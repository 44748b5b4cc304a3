// The task `scripted`: writes the same lines as `worker.rs` does, to the journal of the worker that runs its host.
const fs = require("fs");

const file = fs.openSync(process.env.TORTURE_JOURNAL, "a");
// CLOCK_MONOTONIC, as in `record.rs`. Also a number for a run that no other run of the worker has.
const now = () => Number(process.hrtime.bigint());
const write = (line) => fs.writeSync(file, JSON.stringify(line) + "\n");

module.exports = async (payload, { job }) => {
  const run = now();
  write({
    what: "begin",
    at: run,
    run,
    worker: job.locked_by ?? "",
    host: process.pid,
    task: "scripted",
    job: Number(job.id),
    attempt: job.attempts,
    last_error: job.last_error ?? null,
    queue: payload.queue ?? null,
    queue_id: job.job_queue_id ?? null,
    seq: null,
    events: [],
    tick: null,
    flag: payload.flag ?? null,
  });
  await new Promise((resolve) => setTimeout(resolve, payload.work_ms ?? 5));
  write({ what: "end", at: now(), run, outcome: "ok" });
};
