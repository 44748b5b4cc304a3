// What a task can see of its job: values where they do not depend on the worker, kinds where they do.
const kind = (value) => (value instanceof Date ? "date" : value === null ? "null" : typeof value);

module.exports = async (payload, { job, query, getQueueName, abortSignal, abortPromise }) => {
  const fields = ["id", "payload", "priority", "run_at", "attempts", "max_attempts", "last_error", "created_at", "updated_at", "key", "revision", "locked_at", "locked_by", "flags", "task_identifier", "job_queue_id"];
  const kinds = Object.fromEntries(fields.map((field) => [field, kind(job[field])]));
  const { priority, attempts, max_attempts, key, flags } = job;
  const value = { kinds, priority, attempts, max_attempts, key, flags, queue: await getQueueName(), aborted: abortSignal.aborted, promise: typeof abortPromise.then };
  await query("insert into noted (task, value) values ('described', $1)", [JSON.stringify(value)]);
};
