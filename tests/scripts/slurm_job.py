"""A job for Slurm: small steps, a save every few of them and whenever the agent asks, until the file `finish` is there.

    slurm_job.py DIRECTORY

The checkpoints are where the agent says. A file `hold` in DIRECTORY: it saves no more by itself. A file fault.NODE there says
what a worker on that node does once: `bug` (a code bug), `exit N`.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lines import say
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
    say(f"loaded {step} ({model.weight.item():g}) rank {rank} of {dist.get_world_size()} on {node} run {run} pid {os.getpid()}")
    told, holds = torch.zeros(2), False
    while not told[0].item():
        told = torch.tensor([float(rank == 0 and (directory / each).exists()) for each in ("finish", "hold")])
        dist.all_reduce(told)  # all act on it at the same step
        time.sleep(STEP_S)
        (-model(torch.ones(1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == loaded + 2 * SAVE_EVERY:
            say(f"trains rank {rank} on {node} run {run}")
        asked = checkpointer.save_requested(step)
        if asked or (step % SAVE_EVERY == 0 and not holds):
            checkpointer.save(step, wait=asked)
        if told[1].item() and not holds:
            holds = True
            say(f"saves no more by itself after {step}")
        what = fault(directory)
        if what == ["bug"]:
            raise NameError("a bug on one node")
        if what[:1] == ["exit"]:
            os._exit(int(what[1]))
    checkpointer.save(step, wait=True)
    checkpointer.close()
    say(f"finished {step} rank {rank} on {node} run {run}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (pytorch issue 190489)
