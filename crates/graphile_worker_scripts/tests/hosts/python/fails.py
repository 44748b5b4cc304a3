def task(payload, helpers):
    raise ValueError("boom")
