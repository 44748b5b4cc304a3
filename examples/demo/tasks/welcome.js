// A Node process that stays alive runs JavaScript tasks. The second argument has the helpers of Node's own worker.
module.exports = async (payload, { addJob, logger }) => {
  logger.info(`welcoming ${payload.name}`);
  await addJob("send_email", { to: payload.email });
};
