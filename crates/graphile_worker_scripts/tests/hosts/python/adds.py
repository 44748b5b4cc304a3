async def task(payload, helpers):
    await helpers.add_job("added", payload)
