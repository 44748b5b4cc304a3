// JavaScript: runs in a Node that stays warm. `helpers` are those of Node's own worker.
module.exports = async (payload, { addJob, logger }) => {
  logger.info(`welcoming ${payload.name}`);
  await addJob("send_email", { to: payload.email });
};
