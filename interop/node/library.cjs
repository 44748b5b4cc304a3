// The examples that use Node's worker as a library, of the given release.
//   node library.cjs PACKAGE URL adds  adds what they add, by every way there is, and runs none of it
//   node library.cjs PACKAGE URL runs  runs the task hello itself until its job is done; prints each line of its log as JSON
const [, , packageName, connectionString, what] = process.argv;
const { Logger, makeWorkerUtils, quickAddJob, run } = require(packageName);

const quiet = new Logger(() => () => {});

async function adds() {
  const utils = await makeWorkerUtils({ connectionString, logger: quiet });
  try {
    await utils.migrate();
    await utils.addJob("calculate-life-meaning", { value: 42 });
    const runAt = new Date("2035-01-01T00:00:00Z");
    await utils.addJob("task_2", { foo: "all of a TaskSpec" }, { queueName: "q", runAt, priority: 1, maxAttempts: 2, jobKey: "k", jobKeyMode: "preserve_run_at", flags: ["f"] });
  } finally {
    await utils.release();
  }
  await quickAddJob({ connectionString, logger: quiet }, "calculate-life-meaning", { value: 42 });
  await quickAddJob({ connectionString, logger: quiet }, "hello", { name: "Bobby Tables" });
  // It has a task that no job is for.
  const runner = await run({ connectionString, logger: quiet, noHandleSignals: true, taskList: { idle: () => {} } });
  await runner.addJob("testTask", { thisIsThePayload: true });
  await runner.stop();
}

async function runs() {
  const logger = new Logger((scope) => (level, message, meta) => console.log(JSON.stringify({ level, message, scope })));
  const taskList = { hello: async ({ name }, helpers) => helpers.logger.info(`Hello, ${name}`) };
  const runner = await run({ connectionString, logger, concurrency: 5, pollInterval: 1000, noHandleSignals: true, taskList });
  const succeeded = new Promise((resolve) => runner.events.on("job:success", resolve));
  await quickAddJob({ connectionString, logger: quiet }, "hello", { name: "Bobby Tables" });
  const { worker, job } = await succeeded;
  console.log(JSON.stringify({ level: "info", message: `${worker.workerId ? "a worker" : "nobody"} has done job ${job.id}`, scope: {} }));
  await runner.stop();
}

({ adds, runs })[what]().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
