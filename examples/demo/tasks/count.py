# Python without the run bit: runs in a Python that stays warm, many jobs at once.
async def task(payload, helpers):
    letters = len(payload["text"])
    helpers.logger.info(f"{letters} letters")
