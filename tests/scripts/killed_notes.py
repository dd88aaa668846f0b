"""What a job of killed_job.py notes for the campaign, in a directory outside that of its checkpoints.

starts       a JSON line for each start of a rank: what it resumes from, and the steps that it found in there
ledger       lines `begin RANK STEP NAME`, `end RANK STEP NAME`: a rank has begun or ended to write this entry;
             `done STEP NAME`: all ranks have, and have made a step since; `remove RANK STEP NAME`: a rank is about to remove it
go-RUN-ATTEMPT, stop      made by the campaign: the ranks may train, they end
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PACE_S = float(os.environ.get("KILLS_PACE_S", "0.015"))  # a step takes at least this long
Evidence = list[tuple[str, int]]  # what, and the step in it


def pause(most_s: float = 0.04) -> None:
    """Between two files, as if they were larger."""
    threading.Event().wait(random.uniform(0, most_s))


class Notes:
    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._key = [int(os.environ["KILLS_RUN"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
        self._names: dict[int, list[str]] = {}  # by step: entries of it

    def start(self, resumes: str | None, load: Callable[[str], Evidence]) -> int:
        """Note the start, wait until this rank may train, and return the step to go on from."""
        found: Evidence = []
        error = ""
        try:
            found = load(resumes) if resumes else []
        except Exception:  # noqa: BLE001  (whatever it is, it is a result)
            error = traceback.format_exc()
        said = {"rank": RANK, "pid": os.getpid(), "key": self._key, "resumes": resumes, "found": found, "error": error}
        self._append("starts", json.dumps(said))
        go = self._folder / "-".join(map(str, ("go", *self._key)))
        while not go.exists():
            threading.Event().wait(0.005)
        if error:
            raise RuntimeError(f"the checkpoint {resumes} cannot be loaded:\n{error}")
        return max((step for _, step in found), default=0)

    @contextlib.contextmanager
    def saving(self, name: str, step: int) -> Iterator[None]:
        """Around the writing of one entry."""
        self._append("ledger", f"begin {RANK} {step} {name}")
        yield
        self._append("ledger", f"end {RANK} {step} {name}")
        names = self._names.setdefault(step, [])
        names += [name] if name not in names else []

    def removing(self, name: str, step: int) -> None:
        """Before this rank removes an entry."""
        self._append("ledger", f"remove {RANK} {step} {name}")

    def agree(self) -> None:
        """Let all ranks of several nodes give their start the same, later number: agents count restarts on their own."""
        number = torch.tensor([time.time_ns() // 1_000_000])
        dist.broadcast(number, 0)
        self._key = [int(number), 0]

    def done(self, step: int) -> None:
        for name in self._names.get(step, ()):
            self._append("ledger", f"done {step} {name}")

    @property
    def ends(self) -> bool:
        return (self._folder / "stop").exists()

    def _append(self, name: str, line: str) -> None:
        file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{line}\n".encode())
        os.close(file)


class Pace:
    """Keeps the ranks together, and knows which saves are done on all of them."""

    def __init__(self, notes: Notes) -> None:
        self._notes, self._noted = notes, 0
        self.ends = False

    def stepped(self, saved: int) -> None:
        """This rank has made an optimizer step. saved: the step of its last save that is over."""
        agreed = torch.tensor([saved, -int(self._notes.ends)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        done, ends = agreed.tolist()
        if RANK == 0 and done > self._noted:
            self._notes.done(done)
            self._noted = done
        self.ends = ends < 0
        threading.Event().wait(PACE_S)


def steps_in(what: str, value: object) -> Evidence:
    """Return the steps that a tensor, or all tensors in it, are filled with; one for each value that differs."""
    if isinstance(value, torch.Tensor):
        return [(what, int(each)) for each in value.unique().tolist()]
    if isinstance(value, dict):
        return [each for key, of in value.items() for each in steps_in(f"{what}.{key}", of)]
    return []


def states_in(what: str, optimizer: dict[str, object]) -> Evidence:
    """The same of the state of an optimizer."""
    found = steps_in(what, optimizer["state"])
    return found or [(f"{what} is empty", -1)]
