module.exports = async ({ name }, { logger }) => {
  logger.info(`Hello, ${name}`);
};
