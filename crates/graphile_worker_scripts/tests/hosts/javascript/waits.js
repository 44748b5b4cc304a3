module.exports = async (_, { abortPromise, logger }) => {
  logger.info("waiting");
  await abortPromise.catch(() => {});
};
