def task(payload, helpers):
    pass
