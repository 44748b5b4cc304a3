module.exports = async (payload, helpers) => {
  helpers.logger.debug(`Received ${JSON.stringify(payload)}`);
};
