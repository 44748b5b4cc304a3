// A worker that adds the jobs of a crontab and runs none, by a clock that stands still until it is set.
//   node cron.cjs PACKAGE URL SCHEMA CRONTAB NOW
// Each line that it reads is the time that it is now. It repeats the line once everything due by then is added, and so it
// does with NOW when it has started. It stops when there is nothing more to read.
const [, , packageName, connectionString, schema, crontab, start] = process.argv;

let now = Date.parse(start);
// The time that is still to be repeated.
let asked = start;
// What the worker's clock does next: when, and what.
let armed = null;

const RealDate = Date;
globalThis.Date = class extends RealDate {
  constructor(...parts) {
    super(...(parts.length ? parts : [now]));
  }
  static now() {
    return now;
  }
};

// Only what recurs waits for simulated time; the driver and the rest of the worker keep to the real one.
const { setTimeout: realSetTimeout, clearTimeout: realClearTimeout } = globalThis;
globalThis.setTimeout = (callback, delay, ...rest) => {
  const caller = new Error().stack.split("\n")[2];
  if (!/[\\/]dist[\\/]cron\.js:/.test(caller)) return realSetTimeout(callback, delay, ...rest);
  armed = { at: now + delay, callback };
  look();
  return armed;
};
globalThis.clearTimeout = (timer) => (timer && timer === armed ? (armed = null) : realClearTimeout(timer));

function look() {
  if (!armed) return;
  // It waits a millisecond longer than until the minute begins, and so it does for one that is past.
  if (armed.at <= now + 1) {
    const { callback } = armed;
    armed = null;
    setImmediate(callback);
  } else if (asked) {
    process.stdout.write(asked + "\n");
    asked = null;
  }
}

const { run, Logger } = require(packageName);

function fail(error) {
  console.error(error);
  process.exit(1);
}

// It would try again later, and the test would not hear of it.
const logger = new Logger(() => (level, message) => level === "error" && fail(message));

async function main() {
  const runner = await run({
    connectionString,
    schema,
    crontab,
    taskList: { no_item_names_it: async () => {} },
    concurrency: 1,
    noHandleSignals: true,
    logger,
  });
  for await (const line of require("readline").createInterface({ input: process.stdin })) {
    asked = line;
    now = Date.parse(line);
    look();
  }
  await runner.stop();
  process.exit(0);
}

main().catch(fail);
