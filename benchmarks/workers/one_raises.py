"""Three ranks with collectives. After some, rank 1 raises NameError, and the others fail because it closes its connections.

    one_raises.py STAMPS

STAMPS: see faulty_job.py; the only event is "raise".
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()  # it trains: before its first step, one more try is made
value = torch.ones(1)
for step in range(10**9):
    dist.all_reduce(value)
    if step == 20 and dist.get_rank() == 1:
        with open(sys.argv[1], "a") as stamps:
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            stamps.write(json.dumps({"attempt": attempt, "rank": 1, "event": "raise", "ns": time.monotonic_ns()}) + "\n")
        raise NameError("name 'rate' is not defined")
