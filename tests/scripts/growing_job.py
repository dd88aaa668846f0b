"""A gloo job that trains until it is killed: with small messages, and once the file LARGE is there, with large ones."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
shown, large = False, Path(os.environ["LARGE"])
while True:
    size = torch.tensor([100_000 if large.exists() else 1])
    dist.all_reduce(size, dist.ReduceOp.MAX)
    dist.all_reduce(torch.ones(int(size)))
    if not shown:
        sys.stdout.write(f"trains: {os.environ['TORCHELASTIC_RESTART_COUNT']} {dist.get_rank()} {os.getpid()}\n")
        sys.stdout.flush()
        shown = True
    time.sleep(0.02)
