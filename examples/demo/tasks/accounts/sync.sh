#!/bin/sh
# Jobs of one queue never overlap, even with several workers. If they did, mkdir would fail.
mkdir .syncing || exit 1
trap 'rmdir .syncing' EXIT
echo "job $GRAPHILE_WORKER_JOB_ID has the account to itself"
sleep 0.3
