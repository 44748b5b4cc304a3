module.exports = async (_, { logger }) => logger.info("hello");
