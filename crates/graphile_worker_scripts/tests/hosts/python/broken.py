def task(payload, helpers
