// A worker of Node's graphile-worker beside ours. Its tasks write the same lines as `worker.rs` does.
//   node node_worker.cjs PACKAGE URL JOURNAL [FORBIDDEN_FLAG]
// Stops when its standard input is closed, so that it never outlives the process that started it.
const fs = require("fs");
const { EventEmitter } = require("events");
const [, , packagePath, connectionString, journal, forbiddenFlag] = process.argv;
const { run } = require(packagePath);

const file = fs.openSync(journal, "a");
// CLOCK_MONOTONIC, as in `record.rs`. It is less than 2^53 for the first 104 days after a boot.
const now = () => Number(process.hrtime.bigint());
const write = (line) => fs.writeSync(file, JSON.stringify(line) + "\n");
let runs = 0;

const task = (name) => async (payload, helpers) => {
  const { job } = helpers;
  const run = runs++;
  write({
    what: "begin",
    at: now(),
    run,
    worker: job.locked_by,
    task: name,
    job: Number(job.id),
    attempt: job.attempts,
    last_error: job.last_error ?? null,
    queue: payload.queue ?? null,
    queue_id: job.job_queue_id ?? null,
    seq: payload.seq ?? null,
    events: Array.isArray(payload) ? payload : [],
    tick: null,
    flag: payload.flag ?? null,
  });
  const wait = payload.work_ms ?? Number(job.id) % 50;
  if (wait > 0) await new Promise((resolve) => setTimeout(resolve, wait));
  write({ what: "end", at: now(), run, outcome: "ok" });
};

async function main() {
  // Not the tasks that fail or snooze: Node's back-off takes seconds, and it has no snooze. The last two tasks are under limits,
  // so their jobs may run here only while the limits are dropped.
  const names = ["plain", "queued", "slow", "keyed", "operated", "capped", "lined"];
  const taskList = Object.fromEntries(names.map((name) => [name, task(name)]));
  // The id under which it will lock jobs and queues, for the time after a kill.
  const events = new EventEmitter().on("pool:create", ({ workerPool }) => write({ what: "node_id", worker: workerPool.id }));
  const forbiddenFlags = forbiddenFlag ? [forbiddenFlag] : undefined;
  const options = { connectionString, taskList, concurrency: 3, pollInterval: 500, noHandleSignals: true };
  let running;
  let stopping = false;
  // Before the start: it may claim jobs before `run` returns.
  const stop = async () => {
    if (stopping) return;
    stopping = true;
    const runner = await running;
    await runner.stop().catch(() => {});
    process.exit(0);
  };
  process.on("SIGTERM", stop);
  process.stdin.on("end", stop).resume();
  running = run({ ...options, events, forbiddenFlags });
  await (await running).promise;
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
