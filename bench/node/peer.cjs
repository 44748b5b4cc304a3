// Node's graphile-worker as a contestant: the same commands, and the same lines on stdin and stdout, as the others
// (see bench/src/child.rs). The package is the one that interop/ pins.
//   node peer.cjs VARIANT COMMAND URL [NUMBER]
// VARIANT is `default`, `tuned`, `one` (one job at a time), or `sql` (adds only: the SQL function, without the package's own addJob).
const path = require("node:path");
const readline = require("node:readline");
const { createRequire } = require("node:module");

const pinned = createRequire(path.join(__dirname, "../../interop/package.json"));
const { run, runOnce, runMigrations, makeWorkerUtils, Logger } = pinned("graphile-worker");
const { Pool } = pinned("pg");

const [, , variant, command, connectionString, numberText] = process.argv;
const number = Number(numberText ?? 0);

// From 1,000 to 200,000 at a time made no difference beyond the noise (58,000 to 65,000 jobs/s).
const CHUNK = 10_000;
const CLIENTS = 32;
const NO_POLLS_MS = 3_600_000;
// How long workers that wait for jobs may take to connect, listen, and look for jobs once.
const SETTLING_MS = 500;

const unixSeconds = () => (performance.timeOrigin + performance.now()) / 1000;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const say = (line) => process.stdout.write(`${line}\n`);
// Spread over 5 to 25 ms, the same for every contestant.
const pause = (sample) => sleep(5 + ((sample * 7919) % 21));

const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const ready = async () => {
  say("ready");
  await lines.next();
};

const ran = { jobs: 0, last: 0, latencies: [], out_of_order: 0, at_once: 0 };
const queues = new Map();
let started = () => {};

const ended = () => {
  ran.jobs += 1;
  ran.last = unixSeconds();
};

const taskList = {
  trivial: () => ended(),
  timed: (payload) => {
    ran.latencies.push(unixSeconds() - payload.at);
    ended();
    say(`at ${ran.jobs}`);
    started();
  },
  ordered: async ({ id, queue }) => {
    const state = queues.get(queue) ?? { last: 0, running: 0 };
    queues.set(queue, state);
    if (id <= state.last) ran.out_of_order += 1;
    state.last = id;
    state.running += 1;
    ran.at_once = Math.max(ran.at_once, state.running);
    await new Promise(setImmediate);
    state.running -= 1;
    ended();
  },
};

const tuned = { localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 };
const options = {
  connectionString,
  taskList,
  concurrency: variant === "one" ? 1 : 24,
  noHandleSignals: true,
  logger: new Logger(() => () => {}),
  ...(variant === "tuned" ? { preset: { worker: tuned } } : {}),
};

async function runUntilTold() {
  await ready();
  return reportUntilTold(await run(options));
}

async function reportUntilTold(runner) {
  let reported = 0;
  const ticks = setInterval(() => {
    if (ran.jobs !== reported) say(`at ${(reported = ran.jobs)}`);
  }, 20);
  await lines.next();
  clearInterval(ticks);
  // Some of it is measured, its way of stopping is not.
  await Promise.race([runner.stop(), sleep(10_000)]);
  return ran;
}

const commands = {
  async install() {
    await runMigrations(options);
    await ready();
    return {};
  },
  async bulk_add() {
    const utils = await makeWorkerUtils(options);
    const specs = Array.from({ length: number }, (_, n) => ({ identifier: "trivial", payload: { id: n + 1 } }));
    await ready();
    for (let at = 0; at < number; at += CHUNK) await utils.addJobs(specs.slice(at, at + CHUNK));
    return { jobs: number, last: unixSeconds() };
  },
  async drain() {
    await ready();
    await runOnce(options);
    return ran;
  },
  async latency() {
    const runner = await run(options);
    await sleep(SETTLING_MS);
    await ready();
    for (let sample = 0; sample < number; sample += 1) {
      const start = new Promise((resolve) => (started = resolve));
      await runner.addJob("timed", { at: unixSeconds() });
      await start;
      await pause(sample);
    }
    await Promise.race([runner.stop(), sleep(10_000)]);
    return ran;
  },
  // A worker that is idle before the clock starts.
  async fleet() {
    const runner = await run(options);
    await sleep(SETTLING_MS);
    await ready();
    return reportUntilTold(runner);
  },
  // As many workers as `number` says, which do not poll.
  async idle() {
    const runners = [];
    const preset = { ...options.preset, worker: { ...options.preset?.worker, pollInterval: NO_POLLS_MS } };
    for (let nth = 0; nth < number; nth += 1) runners.push(await run({ ...options, preset }));
    await sleep(SETTLING_MS);
    await ready();
    await lines.next();
    await Promise.race([Promise.all(runners.map((runner) => runner.stop())), sleep(10_000)]);
    return ran;
  },
  latency_sql: runUntilTold,
  queues: runUntilTold,
  async start_stop() {
    await ready();
    const seconds = [];
    for (let sample = 0; sample < number; sample += 1) {
      const began = performance.now();
      await runOnce(options);
      seconds.push((performance.now() - began) / 1000);
    }
    return { seconds };
  },
  async adds() {
    const pool = new Pool({ connectionString, max: CLIENTS });
    // Without a listener, the package prints a warning that would confuse readers of stderr.
    pool.on("error", console.error);
    pool.on("connect", (client) => client.on("error", console.error));
    const utils = await makeWorkerUtils({ ...options, connectionString: undefined, pgPool: pool });
    const byFunction = () => pool.query({ name: "add", text: "select graphile_worker.add_job('trivial', '{}')" });
    const add = variant === "sql" ? byFunction : () => utils.addJob("trivial", {});
    await Promise.all(Array.from({ length: CLIENTS }, () => pool.query("select pg_sleep(0.1)")));
    await ready();
    let left = number;
    const client = async () => {
      while (left-- > 0) await add();
    };
    await Promise.all(Array.from({ length: CLIENTS }, client));
    return { jobs: number, last: unixSeconds() };
  },
};

async function main() {
  const figures = await commands[command]();
  say(JSON.stringify(figures));
  // The controller reads what this process has used before it lets go.
  while (!(await lines.next()).done);
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
