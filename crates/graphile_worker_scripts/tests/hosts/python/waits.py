def task(payload, helpers):
    helpers.logger.info("waiting")
    helpers.abort_event.wait()
