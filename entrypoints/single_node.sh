#!/bin/sh
# A job on this machine alone: no id, no endpoint, no backend. Its processes start again after failures.
#
#     TRAINERS_PER_NODE=4 NUM_ALLOWED_FAILURES=3 single_node.sh train.py --arg1 value1
#
# `torchrun --standalone` would run torchrun's own agent, whatever else is on its command line.
set -eu
exec python -m elastic_ext.agent --standalone \
    --nproc-per-node="${TRAINERS_PER_NODE:?processes, as a rule one for each GPU}" \
    --max-restarts="${NUM_ALLOWED_FAILURES:-3}" \
    "$@"
