"""A job for Slurm: small steps, a save every few of them and whenever the agent asks, until the file `finish` is there.

    slurm_job.py DIRECTORY

The checkpoints are where the agent says. A file fault.NODE in DIRECTORY says what a worker on that node does once: `bug` (a code
bug), `exit N`, `wait` (it saves no more by itself, so that only a save on demand moves the checkpoint on).
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from elastic_ext import Checkpointer

SAVE_EVERY = 5
STEP_S = 0.02  # of work


def fault(directory: Path) -> list[str]:
    asked, taken = directory / f"fault.{os.uname().nodename}", directory / f"fault.{os.uname().nodename}.taken"
    try:
        asked.rename(taken)
    except FileNotFoundError:
        return []
    return taken.read_text().split()


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank, node, run = dist.get_rank(), os.uname().nodename, os.environ.get("SLURM_RESTART_COUNT", "0")
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    step = loaded = checkpointer.load().step
    print(f"loaded {step} ({model.weight.item():g}) rank {rank} of {dist.get_world_size()} on {node} run {run} pid {os.getpid()}")
    over, saves = torch.zeros(1), True
    while not over.item():
        over.fill_(rank == 0 and (directory / "finish").exists())
        dist.all_reduce(over)
        time.sleep(STEP_S)
        (-model(torch.ones(1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == loaded + 2 * SAVE_EVERY:
            print(f"trains rank {rank} on {node} run {run}", flush=True)
        asked = checkpointer.save_requested(step)
        if asked or (step % SAVE_EVERY == 0 and saves):
            checkpointer.save(step, wait=asked)
        if asked:
            print(f"saved on demand {step} rank {rank} on {node} run {run}", flush=True)
        for each in [fault(directory)]:
            if each == ["bug"]:
                raise NameError("a bug on one node")
            if each == ["wait"]:
                saves = False
            if each[:1] == ["exit"]:
                os._exit(int(each[1]))
    checkpointer.save(step, wait=True)
    checkpointer.close()
    print(f"finished {step} rank {rank} on {node} run {run}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (pytorch issue 190489)
