"""Saves in `save_dir()`, a directory of each node's own, a file for each rank and one of rank 0; then a rank is killed.

It says what it resumes from, and which files are there. At the end rank 0 saves a last file. Argument: the rank that is killed,
or "node": then the agent of the last rank; or "disk": then this node's directory goes, too, once another node has its part. What
is in the way of the last save in `checkpoint_dir` stays there until then: so it is not copied before.
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

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
weight = torch.nn.Parameter(torch.ones(4))
weight.grad = torch.ones(4)
optimizer = torch.optim.AdamW([weight])
MIRRORED = "local/.elastic_ext/mirrored/*/record"  # of a node
IN_THE_WAY = Path(os.environ["ELASTIC_EXT_CHECKPOINT_DIR"]) / "step_6" / "model.pt"
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
    if sys.argv[1] == "disk":
        shutil.rmtree(IN_THE_WAY, ignore_errors=True)
        save("step_9", 9)
        shutil.rmtree(directory / "step_6", ignore_errors=True)
    if rank == 0:
        torch.save({"model": {"w": weight.data}}, directory / "final.pt")
else:
    optimizer.step()
    save("step_3", 3)
    if sys.argv[1] == "disk":
        (IN_THE_WAY / "file").mkdir(parents=True, exist_ok=True)
    save("step_6", 6)
    if rank == world - 1:
        if sys.argv[1] == "disk":
            others = [each for each in Path.cwd().parent.iterdir() if each != Path.cwd()]
            train_until(lambda: any(b"step_6" in path.read_bytes() for each in others for path in each.glob(MIRRORED)))
            directory.rename(directory.with_name("lost"))
        os.kill(os.getpid() if sys.argv[1].isdigit() else os.getppid(), signal.SIGKILL)
    signal.pause()
