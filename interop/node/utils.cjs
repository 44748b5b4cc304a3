// Everything that Node's WorkerUtils can ask of the schema; prints what it got as one JSON object.
//   node utils.cjs PACKAGE URL SCHEMA
const [, , packageName, connectionString, schema] = process.argv;
const { makeWorkerUtils, Logger } = require(packageName);

async function main() {
  const utils = await makeWorkerUtils({ connectionString, schema, logger: new Logger(() => () => {}) });
  const result = {};
  try {
    await utils.migrate();
    const runAt = new Date("2030-01-01T00:00:00Z");
    result.added = await utils.addJob(
      "note",
      { a: 1 },
      { queueName: "q", runAt, maxAttempts: 3, jobKey: "k", priority: 2, flags: ["f"] },
    );
    result.replaced = await utils.addJob("note", { a: 2 }, { jobKey: "k" });
    result.deduped = await utils.addJob("note", { a: 3 }, { jobKey: "k", jobKeyMode: "unsafe_dedupe" });
    result.batch = await utils.addJobs([
      { identifier: "note", payload: { n: 1 } },
      { identifier: "other", payload: { n: 2 }, queueName: "q2", jobKey: "k2" },
      { identifier: "note", payload: { n: 3 } },
    ]);
    const [first, second, third] = result.batch.map((job) => job.id);
    result.rescheduled = await utils.rescheduleJobs([first], { runAt, priority: 5, attempts: 1, maxAttempts: 9 });
    result.failed = await utils.permanentlyFailJobs([second], "no more");
    result.completed = await utils.completeJobs([third]);
    await utils.withPgClient((client) =>
      client.query(`update ${client.escapeIdentifier(schema)}._private_jobs set locked_at = now(), locked_by = 'w' where id = $1`, [first]),
    );
    await utils.forceUnlockWorkers(["w"]);
    await utils.cleanup();
  } finally {
    await utils.release();
  }
  console.log(JSON.stringify(result));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
