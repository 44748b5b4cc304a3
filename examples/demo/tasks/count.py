# A Python file without the run bit. A Python process that stays alive runs many of its jobs at once.
async def task(payload, helpers):
    letters = len(payload["text"])
    helpers.logger.info(f"{letters} letters")
