"""Data-parallel training of which some ranks are late: they sleep before each step. It ends when the file STOP is there.

    late_job.py STOP STEP_S LATE_S RANK...

Every rank sleeps STEP_S in each step, and the given ranks LATE_S more.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

stop, step_s, late_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
distributed.init_process_group("gloo")
rank = distributed.get_rank()
mine_s = step_s + (late_s if rank in map(int, sys.argv[4:]) else 0.0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print(f"rank {rank} is process {os.getpid()}", flush=True)
over = torch.zeros(1)
while not over.item():
    time.sleep(mine_s)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    over.fill_(stop.exists())
    distributed.all_reduce(over)
print(f"rank {rank} is done", flush=True)
distributed.destroy_process_group()
