"""Saves a part of each rank, waits until that is recorded, and is killed within the next save; then it says what it resumes from.

Arguments: WAY DIRECTORY. WAY is `new` (each save has its name), or `in_place` (the second one is written over twice).
DIRECTORY is a path or a URL.
"""

import os
import signal
import sys
import time

import fsspec
import torch

way, directory = sys.argv[1:]
filesystem, root = fsspec.core.url_to_fs(directory)
rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
weight = torch.nn.Parameter(torch.ones(4))
weight.grad = torch.ones(4)
optimizer = torch.optim.AdamW([weight])


def await_file(pattern: str) -> None:
    """Train on until there is such a file."""
    while not filesystem.glob(f"{root}/{pattern}"):
        filesystem.invalidate_cache()
        optimizer.step()
        time.sleep(0.02)


def put(name: str, value: object) -> None:
    filesystem.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
    with filesystem.open(f"{root}/{name}", "wb") as file:
        torch.save(value, file)


def save(name: str, value: float) -> None:
    put(f"{name}/model_{rank}.pt", {"model": {"w": torch.full((4,), value)}})
    put(f"{name}/optim_{rank}.pt", {"optimizer": optimizer.state_dict()})


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
        put(f"{name}/model_0.pt", {"model": {"w": torch.full((4,), 9.0)}})
        put("killed", 0)
    await_file("killed")
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
print("RESUMES", os.path.basename(os.environ["ELASTIC_EXT_RESUME_FROM"]), flush=True)
