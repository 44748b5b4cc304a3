#!/usr/bin/env python3
"""Fails on its first attempt. The worker retries it after about three seconds."""
import os
import sys

attempt = int(os.environ["GRAPHILE_WORKER_JOB_ATTEMPTS"])
if attempt == 1:
    sys.exit("the service is not available")
print(f"succeeded on attempt {attempt}")
