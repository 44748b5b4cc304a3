const note = require("../lib/note.cjs");
const kind = require("../lib/kind.cjs");

// All that a task finds around it: values where they do not depend on the worker, kinds where they do.
module.exports = async function (payload, helpers) {
  const { job, getQueueName, abortSignal, abortPromise, logger, withPgClient, query } = helpers;
  const { priority, attempts, max_attempts, key, flags, revision, last_error, is_available, task_identifier } = job;
  await note(helpers, "describes", {
    helpers: kind({ ...helpers, job: {}, abortSignal: {}, abortPromise: {}, logger: {} }),
    job: kind(job),
    values: { priority, attempts, max_attempts, key, flags, revision, last_error, is_available, task_identifier },
    queue: await getQueueName(),
    noQueue: (await getQueueName(null)) ?? null,
    signal: [abortSignal instanceof AbortSignal, abortSignal.aborted, abortPromise instanceof Promise],
    logger: ["error", "warn", "info", "debug", "scope"].map((method) => typeof logger[method]),
    retries: typeof withPgClient.withRetries,
    arguments: arguments.length,
    self: this === undefined,
    folder: process.cwd().endsWith("edges"),
    idIsText: /^[0-9]+$/.test(job.id) && typeof job.id === "string",
    lockedBy: (await query("select locked_by = $1 as mine from graphile_worker.jobs where id = $2", [job.locked_by, job.id])).rows[0].mine,
    lockedFor: job.locked_at >= job.created_at,
  });
};
