#!/bin/sh
# A job that nodes join and leave while it trains, from MIN_SIZE to MAX_SIZE of them. On each node, at any time:
#
#     export MIN_SIZE=2 MAX_SIZE=4 TRAINERS_PER_NODE=4 NUM_ALLOWED_FAILURES_OR_MEMBERSHIP_CHANGES=5
#     export JOB_ID=job_elastic HOST_NODE_ADDR=node1.example.com:29400
#     elastic.sh train.py --arg1 value1
#
# Nodes that come and go cost nothing of the restarts that are allowed. But a host that joins the running job more than 20 times
# within an hour may not come back for an hour, as all nodes start again each time; its agent exits with 69.
# HOST_NODE_ADDR is one of the nodes; its port is 29400 if none is given. RDZV_BACKEND=ext_etcd: the servers of etcd.
set -eu
exec torchrun \
    --nnodes="${MIN_SIZE:?the least number of nodes}:${MAX_SIZE:?the largest number of nodes}" \
    --nproc-per-node="${TRAINERS_PER_NODE:?processes on each node, as a rule one for each GPU}" \
    --max-restarts="${NUM_ALLOWED_FAILURES_OR_MEMBERSHIP_CHANGES:-3}" \
    --rdzv-id="${JOB_ID:?a name that no other job has}" \
    --rdzv-backend="${RDZV_BACKEND:-ext_c10d}" \
    --rdzv-endpoint="${HOST_NODE_ADDR:?HOST:PORT}" \
    "$@"
