"""Trains one weight towards the mean of the ranks' targets, until $STOP is there; its value after N steps is known beforehand.

drained_job.py FOLDER asks|saves|deaf   asks: saves when the agent asks; saves: every 40 steps by itself, and reports nothing;
                                        deaf: never. FOLDER/checkpoints gets the checkpoints, FOLDER/steps one line per step
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from lines import say

import elastic_ext

folder, how = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
world = dist.get_world_size()
weight, step = torch.zeros(1, dtype=torch.float64), 0
if (path := elastic_ext.resume_from()) is not None:
    found = torch.load(path)
    weight, step = found["weight"], found["step"]


def save() -> None:
    if rank == 0:
        torch.save({"weight": weight, "step": step}, f"{folder}/new")
        os.replace(f"{folder}/new", f"{folder}/checkpoints/model_{step}.pt")
    dist.barrier()


say(f"rank {rank} of {world} attempt {attempt} from step {step}")
while True:
    time.sleep(0.005)
    sums = torch.cat([weight - (rank + 1), torch.tensor([float(os.path.exists(os.environ["STOP"]))], dtype=torch.float64)])
    dist.all_reduce(sums)
    weight, step = weight - 0.01 * sums[:1] / world, step + 1
    elastic_ext.report_progress()
    if rank == 0:
        with open(f"{folder}/steps", "a") as file:
            file.write(f"{attempt} {world} {step} {weight.item():.12f}\n")
    if how in ("asks", "asks0") and elastic_ext.save_requested():
        begin = time.monotonic()
        save()
        if how == "asks" or rank == 0:
            elastic_ext.report_saved(step, time.monotonic() - begin)
    elif how == "saves" and step % 40 == 0:
        save()
    if sums[1]:
        break
dist.destroy_process_group()
