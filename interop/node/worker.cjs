// A worker of the given release. Its tasks write down what they ran into the table `ran`.
//   node worker.cjs PACKAGE URL SCHEMA            runs what there is, then stops
//   node worker.cjs PACKAGE URL SCHEMA N CRONTAB  stops after N jobs
const [, , packageName, connectionString, schema, stopAfter, crontab] = process.argv;
const { run, runOnce, Logger } = require(packageName);

const note = (state) => async (payload, helpers) => {
  await helpers.query(
    "insert into public.ran (task, payload, state, queue) values ($1, $2, $3, $4)",
    [helpers.job.task_identifier, JSON.stringify(payload), state, helpers.job.job_queue_id ?? null],
  );
};

const taskList = {
  note: note("done"),
  tick: note("done"),
  slow: async (payload, helpers) => {
    await note("start")(payload, helpers);
    await new Promise((resolve) => setTimeout(resolve, 30));
    await note("end")(payload, helpers);
  },
  // Runs until there is a row in the table `gate`.
  until_open: async (payload, helpers) => {
    await note("start")(payload, helpers);
    while ((await helpers.query("select from public.gate")).rowCount === 0) {
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
    await note("end")(payload, helpers);
  },
  fail: async () => {
    throw new Error("this task always fails");
  },
};

const options = {
  connectionString,
  schema,
  taskList,
  concurrency: 4,
  pollInterval: 50,
  noHandleSignals: true,
  logger: new Logger(() => () => {}),
};

async function main() {
  if (!stopAfter) {
    await runOnce(options);
    return;
  }
  let completed = 0;
  const runner = await run({ ...options, crontab });
  await new Promise((resolve) => {
    runner.events.on("job:complete", () => {
      if (++completed >= Number(stopAfter)) resolve();
    });
  });
  await runner.stop();
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
