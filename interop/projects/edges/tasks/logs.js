module.exports = async (payload, { logger, debug }) => {
  logger.error("an error is told");
  logger.warn("a warning is told");
  logger.info("what happens is told", { with: "meta" });
  logger.debug("details are told");
  logger.info(`half of ${"🦀".slice(1)} is told`);
  logger.scope({ step: 2 }).info("a part of it is told");
  await null;
  console.error("console.error is heard");
  console.warn("console.warn is heard");
  console.log("console.log is %s", "heard");
  console.info("console.info is heard");
  console.debug("console.debug is heard");
  process.stdout.write("stdout is heard\n");
  process.stderr.write("stderr is heard\n");
};
