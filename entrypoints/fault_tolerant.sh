#!/bin/sh
# A job of NUM_NODES nodes that starts again after failures, and waits for another node where one is lost. On each node:
#
#     export NUM_NODES=2 TRAINERS_PER_NODE=4 NUM_ALLOWED_FAILURES=3 JOB_ID=job123 HOST_NODE_ADDR=node1.example.com:29400
#     fault_tolerant.sh train.py --arg1 value1 --arg2 value2
#
# HOST_NODE_ADDR is one of the nodes; its port is 29400 if none is given. RDZV_BACKEND=ext_etcd: the servers of etcd.
set -eu
exec torchrun \
    --nnodes="${NUM_NODES:?the number of nodes}" \
    --nproc-per-node="${TRAINERS_PER_NODE:?processes on each node, as a rule one for each GPU}" \
    --max-restarts="${NUM_ALLOWED_FAILURES:-3}" \
    --rdzv-id="${JOB_ID:?a name that no other job has}" \
    --rdzv-backend="${RDZV_BACKEND:-ext_c10d}" \
    --rdzv-endpoint="${HOST_NODE_ADDR:?HOST:PORT}" \
    "$@"
