"""Saves a part of each rank, waits until that is recorded, and is killed within the next save; then it says what it resumes from.

Arguments: WAY DIRECTORY. WAY is `new` (each save has its name), or `in_place` (the second one is written over twice).
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

way, directory = sys.argv[1], Path(sys.argv[2])
rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
weight = torch.nn.Parameter(torch.ones(4))
weight.grad = torch.ones(4)
optimizer = torch.optim.AdamW([weight])


def await_file(pattern: str) -> None:
    """Train on until there is such a file."""
    while not list(directory.glob(pattern)):
        optimizer.step()
        time.sleep(0.02)


def save(name: str, value: float) -> None:
    (directory / name).mkdir(exist_ok=True)
    torch.save({"model": {"w": torch.full((4,), value)}}, directory / name / f"model_{rank}.pt")
    torch.save({"optimizer": optimizer.state_dict()}, directory / name / f"optim_{rank}.pt")


optimizer.step()
if attempt == 0:
    save("step_3", 3.0)
    await_file(".elastic_ext/saves/*.step_3")
    name = "step_6"
    if way == "in_place":
        name = "last"
        save(name, 6.0)
        await_file(".elastic_ext/saves/*.last")
    if rank == 0:
        (directory / name).mkdir(exist_ok=True)
        torch.save({"model": {"w": torch.full((4,), 9.0)}}, directory / name / "model_0.pt")
        (directory / "killed").touch()
    await_file("killed")
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
print("RESUMES", os.path.basename(os.environ["ELASTIC_EXT_RESUME_FROM"]), flush=True)
