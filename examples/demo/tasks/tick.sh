#!/bin/sh
echo "tick, due at $GRAPHILE_WORKER_JOB_RUN_AT"
