"""A gloo job that trains until it is killed. Ranks print `trains: ATTEMPT RANK PID` after the first all_reduce in a round."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
shown = False
while True:
    value = torch.ones(1)
    dist.all_reduce(value)
    if not shown:
        sys.stdout.write(f"trains: {os.environ['TORCHELASTIC_RESTART_COUNT']} {dist.get_rank()} {os.getpid()}\n")
        sys.stdout.flush()
        shown = True
    time.sleep(0.02)
