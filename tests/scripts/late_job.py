"""Data-parallel training of which some ranks are late: they sleep longer in each step. It ends when the file STOP is there.

    late_job.py STOP STEP_S LATE_S WHO...

Every rank sleeps STEP_S in each step, and the given ranks, or all ranks on the given hosts, LATE_S more. It saves when asked.
"""

import os
import sys
import time
from pathlib import Path

import torch
from lines import say
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import elastic_ext

stop, step_s, late_s, late = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
distributed.init_process_group("gloo")
rank, host = distributed.get_rank(), os.environ["ELASTIC_EXT_NODE_NAME"]
mine_s = step_s + (late_s if str(rank) in late or host in late else 0.0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
say(f"rank {rank} is process {os.getpid()} on {host}")
over, steps = torch.zeros(1), 0
while not over.item():
    time.sleep(mine_s)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    steps += 1
    if elastic_ext.save_requested():
        elastic_ext.report_saved(steps, 0.001)
    over.fill_(stop.exists())
    distributed.all_reduce(over)
say(f"rank {rank} is done")
distributed.destroy_process_group()
