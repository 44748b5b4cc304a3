#!/bin/sh
# Jobs of one queue never overlap, over all workers: this would fail where they did.
mkdir .syncing || exit 1
trap 'rmdir .syncing' EXIT
echo "job $GRAPHILE_WORKER_JOB_ID has the account for itself"
sleep 0.3
