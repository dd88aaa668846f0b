"""Saves in `save_dir()` in its own way, removes its older save, and is killed. Then it says what it resumes from.

At the end it saves a last file. Argument: the local directory. What the copier has noted there shows when a save has arrived.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import elastic_ext

local = Path(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
weight = torch.nn.Parameter(torch.ones(4))
weight.grad = torch.ones(4)
optimizer = torch.optim.AdamW([weight])
directory, resumed = Path(elastic_ext.save_dir()), elastic_ext.resume_from()


def train_until(seen: Callable[[], bool]) -> None:
    while not seen():
        optimizer.step()
        time.sleep(0.02)


def save(name: str) -> None:
    (directory / name).mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"w": weight.data}}, directory / name / f"model_{rank}.pt")
    torch.save({"optimizer": optimizer.state_dict()}, directory / name / f"optim_{rank}.pt")
    train_until(lambda: any((directory / ".elastic_ext" / "saves").glob(f"*.{name}")))


optimizer.step()
print("SAVES IN", directory, flush=True)
if resumed:
    print("RESUMES", resumed, flush=True)
    if rank == 0:
        torch.save({"model": {"w": weight.data}}, directory / "final.pt")
else:
    save("step_3")
    if directory == local:
        train_until(lambda: (local / ".elastic_ext" / "copied" / "step_3").exists())
    save("step_6")
    if rank == 0:
        shutil.rmtree(directory / "step_3")
        (local / "removed").touch()
    train_until(lambda: (local / "removed").exists())
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
