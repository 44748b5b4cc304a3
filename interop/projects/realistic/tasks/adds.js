module.exports = async (payload, { addJob, addJobs }) => {
  await addJob("unknown", { z: 1, a: payload }, { jobKey: "a key", priority: 3, queueName: "a queue", maxAttempts: 4, flags: ["f"], runAt: new Date("2035-01-01") });
  await addJobs([{ identifier: "unknown", payload: { many: 1 } }, { identifier: "unknown", jobKey: "another", priority: 1 }]);
};
