def task(payload, helpers):
    helpers.logger.info("hello")
