"""Three ranks with collectives; after the first ones rank 1 has a bug, and the others die of the connections that it closes.

one_raises.py STAMPS      gets one JSON line: when rank 1 raised, CLOCK_MONOTONIC
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
for step in range(10**9):
    dist.all_reduce(value)
    if step == 20 and dist.get_rank() == 1:
        with open(sys.argv[1], "a") as stamps:
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            stamps.write(json.dumps({"attempt": attempt, "rank": 1, "event": "raise", "ns": time.monotonic_ns()}) + "\n")
        {}["missing"]
