#!/usr/bin/env python3
"""Fails the first time. The worker tries again after about three seconds."""
import os
import sys

attempt = int(os.environ["GRAPHILE_WORKER_JOB_ATTEMPTS"])
if attempt == 1:
    sys.exit("the service is not available")
print(f"worked at attempt {attempt}")
