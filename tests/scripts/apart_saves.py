"""Saves in `save_dir()`, a directory of each node's own, a file for each rank and one of rank 0; then a rank is killed.

It says what it resumes from, and which files are there. At the end rank 0 saves a last file. Argument: the rank that is killed,
or "node": then the agent of the last rank.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import elastic_ext

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
weight = torch.nn.Parameter(torch.ones(4))
weight.grad = torch.ones(4)
optimizer = torch.optim.AdamW([weight])
directory, resumed = Path(elastic_ext.save_dir()), elastic_ext.resume_from()


def train_until(seen: Callable[[], bool]) -> None:
    while not seen():
        optimizer.step()
        time.sleep(0.02)


def save(name: str, step: int) -> None:
    (directory / name).mkdir(parents=True, exist_ok=True)
    if rank == 0:
        torch.save({"model": {"w": weight.data}, "step": step}, directory / name / "model.pt")
    torch.save({"optimizer": optimizer.state_dict(), "rank": rank}, directory / name / f"optim_{rank}.pt")
    train_until(lambda: any((directory / ".elastic_ext" / "saves").glob(f"*.{name}")))


print(f"{rank} SAVES IN {directory}", flush=True)
if resumed:
    files = sorted(each.name for each in Path(resumed).iterdir())
    step = torch.load(Path(resumed) / "model.pt")["step"]
    print(f"{rank} RESUMES {step} FROM {resumed} WITH {' '.join(files)}", flush=True)
    for _ in range(40):  # all have loaded then, and what was fetched goes
        optimizer.step()
    train_until(lambda: not any((directory / ".elastic_ext" / "of_nodes").glob("[0-9]*")))
    if rank == 0:
        torch.save({"model": {"w": weight.data}}, directory / "final.pt")
else:
    optimizer.step()
    save("step_3", 3)
    save("step_6", 6)
    if rank == world - 1:
        os.kill(os.getppid() if sys.argv[1] == "node" else os.getpid(), signal.SIGKILL)
    signal.pause()
